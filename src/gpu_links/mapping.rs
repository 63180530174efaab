//! The ways to peers' device memory: which there are, and going them.

use super::gathered_round::{GpuInfo, MemoryHandle};
use super::local_registry;
use super::paths::LinkClass;
use crate::bootstrap::PeerInfo;
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::{Context, Device, DeviceMemory, IPC_HANDLE_BYTES, IpcHandle, IpcMemory};
use crate::sys::cuda::p2p_attribute;
use std::ffi::c_int;
use std::sync::Arc;

/// How the reason begins where peer access is switched off.
pub(super) const SWITCHED_OFF: &str = "CINCH_P2P_DISABLE=1";

/// A way to a peer's device memory, as far as the driver knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum MappingPlan {
    /// It may be tried.
    Open {
        /// The kind of link.
        class: LinkClass,
        /// The driver's rank of it, 0 for the fastest; `None` if the other GPU is hidden.
        performance_rank: Option<u32>,
    },
    /// There is none, or it must not be used; why.
    Refused(String),
}

/// The ways from `me` to all ranks, by rank; that to itself is of no account.
///
/// # Errors
/// Those of the driver.
pub(super) fn ways(
    gpu: &Context,
    me: usize,
    peers: &[PeerInfo],
    gpus: &[GpuInfo],
) -> Result<Vec<MappingPlan>> {
    let visible = gpu.driver().devices()?;
    let way = |peer: usize| -> Result<MappingPlan> {
        let (own, gpu_info) = (&gpus[me], &gpus[peer]);
        for (rank, gpu_info) in [(me, own), (peer, gpu_info)] {
            if gpu_info.p2p_disable {
                let reason = format!("{SWITCHED_OFF} on rank {rank}");
                return Ok(MappingPlan::Refused(reason));
            }
        }
        if own.uuid == gpu_info.uuid {
            return Ok(MappingPlan::Open {
                class: LinkClass::SameDevice,
                performance_rank: Some(0),
            });
        }
        // A process that is told to see one GPU alone can still map the memory of others.
        let Some(device) = visible.iter().find(|device| device.uuid == gpu_info.uuid) else {
            return Ok(MappingPlan::Open {
                class: LinkClass::Pcie,
                performance_rank: None,
            });
        };
        link(gpu.device(), device).map(|way| match way {
            MappingPlan::Refused(why) => MappingPlan::Refused(format!("{}: {why}", peers[me])),
            open => open,
        })
    };
    (0..peers.len()).map(way).collect()
}

/// What is refused, for the other ranks.
pub(super) fn refusals(ways: &[MappingPlan]) -> Vec<(usize, String)> {
    let refusal = |(rank, way): (usize, &MappingPlan)| match way {
        MappingPlan::Refused(reason) => Some((rank, reason.clone())),
        MappingPlan::Open { .. } => None,
    };
    ways.iter().enumerate().filter_map(refusal).collect()
}

/// By which kind of link `own` reaches the memory of `other`, by what the driver says.
///
/// # Errors
/// Those of the driver.
pub fn link_class(own: &Device, other: &Device) -> Result<LinkClass> {
    if own.uuid == other.uuid {
        return Ok(LinkClass::SameDevice);
    }
    Ok(match link(own, other)? {
        MappingPlan::Open { class, .. } => class,
        MappingPlan::Refused(_) => LinkClass::Host,
    })
}

/// What the driver says about the link between two GPUs.
fn link(own: &Device, other: &Device) -> Result<MappingPlan> {
    if !own.can_access(other)? {
        return Ok(MappingPlan::Refused(format!(
            "the driver offers no peer access from {own} to {other}"
        )));
    }
    let driver = own.driver();
    let ask = |attribute: c_int| -> Result<u32> {
        let mut value: c_int = 0;
        // SAFETY: handles of this driver; writes one integer.
        let result = unsafe {
            let api = driver.api();
            api.cuDeviceGetP2PAttribute(&mut value, attribute, own.handle(), other.handle())
        };
        driver.check("cuDeviceGetP2PAttribute", result)?;
        Ok(value.unsigned_abs())
    };
    let class = match ask(p2p_attribute::NATIVE_ATOMIC_SUPPORTED)? {
        0 => LinkClass::Pcie,
        _ => LinkClass::NvLink,
    };
    Ok(MappingPlan::Open {
        class,
        performance_rank: Some(ask(p2p_attribute::PERFORMANCE_RANK)?),
    })
}

/// How other processes may open `memory`.
///
/// # Errors
/// Those of the driver.
pub(super) fn export(memory: &DeviceMemory) -> Result<[u8; IPC_HANDLE_BYTES]> {
    let handle = IpcHandle::export(memory.context(), memory.address(), memory.bytes())?;
    Ok(handle.to_bytes())
}

/// A peer's inbox, as this rank's GPU addresses it, kept there while this lives.
#[derive(Debug)]
pub(super) enum Mapping {
    /// Of a rank of this process.
    Near(Arc<DeviceMemory>),
    /// Of another process.
    Mapped(IpcMemory),
}

impl Mapping {
    /// Maps the `bytes` bytes that `exported` names.
    ///
    /// # Errors
    /// Those of the driver; unsupported if it refuses peer access; mismatch if the memory is
    /// smaller.
    pub fn open(
        gpu: &Arc<Context>,
        exported: &MemoryHandle,
        same_process: bool,
        bytes: usize,
    ) -> Result<Mapping> {
        let reached = if same_process {
            let memory: Arc<DeviceMemory> = local_registry::take(exported.offer)?;
            if !gpu.enable_peer(memory.context())? {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!(
                        "peer access from {} to {} is refused",
                        gpu.device(),
                        memory.context().device()
                    ),
                ));
            }
            Mapping::Near(memory)
        } else {
            let none = || match &exported.refusal[..] {
                "" => Error::internal("no IPC handle came"),
                why => Error::new(ErrorKind::Unsupported, why),
            };
            let handle = exported.handle.ok_or_else(none)?;
            Mapping::Mapped(IpcMemory::open(gpu, &IpcHandle::from_bytes(&handle))?)
        };
        let found = match &reached {
            Mapping::Near(memory) => memory.bytes(),
            Mapping::Mapped(memory) => memory.bytes(),
        };
        if found < bytes {
            return Err(Error::new(
                ErrorKind::Mismatch,
                format!("a peer's inbox has {found} bytes, expected {bytes}"),
            ));
        }
        Ok(reached)
    }

    /// Its first byte.
    pub fn address(&self) -> u64 {
        match self {
            Mapping::Near(memory) => memory.address(),
            Mapping::Mapped(memory) => memory.address(),
        }
    }
}
