//! Plans and opens the mappings of peers' device memory.

use super::local_registry;
use super::paths::LinkClass;
use super::round_messages::{GpuInfo, MemoryHandle};
use crate::bootstrap::PeerInfo;
use crate::config::{Config, EmulatedMachine};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::{Context, Device, DeviceMemory, IPC_HANDLE_BYTES, IpcHandle, IpcMemory};
use crate::sys::cuda::CUdevice_P2PAttribute;
use crate::topology::{MachineGraph, Paths, PeerAccess, read_xml};
use std::ffi::c_int;
use std::sync::Arc;

/// Beginning of the reason for a pair without peer access, if a setting forbids peer access.
pub(super) const SWITCHED_OFF: &str = "CINCH_P2P_DISABLE=1";

/// Whether the driver and the settings allow this rank to map a peer's device memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum MappingPlan {
    /// The mapping is allowed; opening it can still fail.
    Open {
        /// The class of the link.
        class: LinkClass,
        /// The driver's performance rank of the link, 0 for the fastest; `None` if this process does not
        /// see the other GPU.
        performance_rank: Option<u32>,
    },
    /// The driver or a setting refuses the mapping, for this reason.
    Refused(String),
}

/// Returns the plans of rank `me`, indexed by peer rank. The plan for `me` itself is unused.
///
/// # Errors
/// The driver's errors.
pub(super) fn plans(
    (gpu, config): (&Context, &Config),
    me: usize,
    peers: &[PeerInfo],
    gpus: &[GpuInfo],
) -> Result<Vec<MappingPlan>> {
    let emulated = config.emulated_machine();
    let reaches = emulated.map(|machine| emulated_access(machine, peers.len()));
    let reaches = reaches.transpose()?;
    let visible = gpu.driver().devices()?;
    let plan = |peer: usize| -> Result<MappingPlan> {
        let (own, other) = (&gpus[me], &gpus[peer]);
        for (rank, gpu) in [(me, own), (peer, other)] {
            if gpu.p2p_disable {
                let reason = format!("{SWITCHED_OFF} on rank {rank}");
                return Ok(MappingPlan::Refused(reason));
            }
        }
        if let (Some(reaches), Some(machine)) = (&reaches, emulated)
            && !reaches[me * peers.len() + peer]
        {
            let file = &machine.file;
            let reason = format!("no peer access between ranks {me} and {peer} in {file}");
            return Ok(MappingPlan::Refused(reason));
        }
        if own.uuid == other.uuid {
            return Ok(MappingPlan::Open {
                class: LinkClass::SameDevice,
                performance_rank: Some(0),
            });
        }
        // With CUDA_VISIBLE_DEVICES a process may not see the other GPU. It can still map that GPU's
        // memory by an IPC handle, over a link of unknown class.
        let Some(device) = visible.iter().find(|device| device.uuid == other.uuid) else {
            return Ok(MappingPlan::Open {
                class: LinkClass::Pcie,
                performance_rank: None,
            });
        };
        link(gpu.device(), device).map(|plan| match plan {
            MappingPlan::Refused(why) => MappingPlan::Refused(format!("{}: {why}", peers[me])),
            open => open,
        })
    };
    (0..peers.len()).map(plan).collect()
}

/// Returns which ranks have peer access on an emulated machine, by `from * nranks + to`. Rank r stands for the r-th GPU
/// of the file.
///
/// # Errors
/// Invalid argument if the file is malformed or has too few GPUs.
fn emulated_access(machine: &EmulatedMachine, nranks: usize) -> Result<Vec<bool>> {
    let graph = MachineGraph::new(&read_xml(&machine.xml)?);
    let gpus = graph.by_rank();
    if gpus.len() < nranks {
        return Err(Error::invalid_argument(format!(
            "{} has {} GPUs for {nranks} ranks",
            machine.file,
            gpus.len()
        )));
    }
    let paths = Paths::new(&graph, &PeerAccess::Rule);
    let pairs = (0..nranks * nranks).map(|pair| (gpus[pair / nranks], gpus[pair % nranks]));
    Ok(pairs
        .map(|(from, to)| paths.get(from, to).peer_access)
        .collect())
}

/// Returns the ranks whose mapping is refused, with the reasons.
pub(super) fn refusals(plans: &[MappingPlan]) -> Vec<(usize, String)> {
    let refusal = |(rank, plan): (usize, &MappingPlan)| match plan {
        MappingPlan::Refused(reason) => Some((rank, reason.clone())),
        MappingPlan::Open { .. } => None,
    };
    plans.iter().enumerate().filter_map(refusal).collect()
}

/// Returns the class of the link over which `own` reaches the memory of `other`; [`LinkClass::Host`] if the
/// driver offers no peer access.
///
/// # Errors
/// The driver's errors.
pub fn link_class(own: &Device, other: &Device) -> Result<LinkClass> {
    if own.uuid == other.uuid {
        return Ok(LinkClass::SameDevice);
    }
    Ok(match link(own, other)? {
        MappingPlan::Open { class, .. } => class,
        MappingPlan::Refused(_) => LinkClass::Host,
    })
}

/// Queries the driver for the link between two different GPUs.
fn link(own: &Device, other: &Device) -> Result<MappingPlan> {
    if !own.can_access(other)? {
        return Ok(MappingPlan::Refused(format!(
            "the driver offers no peer access from {own} to {other}"
        )));
    }
    let driver = own.driver();
    let attribute = |attribute: CUdevice_P2PAttribute| -> Result<u32> {
        let mut value: c_int = 0;
        // SAFETY: `own` and `other` hold valid device handles of this driver; the call writes one integer.
        let result = unsafe {
            let api = driver.api();
            api.cuDeviceGetP2PAttribute(&mut value, attribute, own.handle(), other.handle())
        };
        driver.check("cuDeviceGetP2PAttribute", result)?;
        Ok(value.unsigned_abs())
    };
    let class =
        match attribute(CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)? {
            0 => LinkClass::Pcie,
            _ => LinkClass::NvLink,
        };
    Ok(MappingPlan::Open {
        class,
        performance_rank: Some(attribute(
            CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK,
        )?),
    })
}

/// Exports the IPC handle by which other processes open `memory`.
///
/// # Errors
/// The driver's errors.
pub(super) fn export(memory: &DeviceMemory) -> Result<[u8; IPC_HANDLE_BYTES]> {
    let handle = IpcHandle::export(memory.context(), memory.address(), memory.bytes())?;
    Ok(handle.to_bytes())
}

/// A peer's inbox, mapped for this rank's GPU until the mapping is dropped.
#[derive(Debug)]
pub(super) enum PeerMapping {
    /// Memory of a rank of this process, shared by reference.
    Local(Arc<DeviceMemory>),
    /// Memory of another process, mapped by an IPC handle.
    Ipc(IpcMemory),
}

impl PeerMapping {
    /// Maps a peer's inbox of at least `bytes` bytes.
    ///
    /// # Errors
    /// The driver's errors; unsupported if it refuses peer access; mismatch if the memory is
    /// smaller.
    pub fn open(
        gpu: &Arc<Context>,
        handle: &MemoryHandle,
        same_process: bool,
        bytes: usize,
    ) -> Result<PeerMapping> {
        let mapping = if same_process {
            let memory: Arc<DeviceMemory> = local_registry::lookup(handle.registration)?;
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
            PeerMapping::Local(memory)
        } else {
            let none = || match &handle.refusal[..] {
                "" => Error::internal("no IPC handle came"),
                why => Error::new(ErrorKind::Unsupported, why),
            };
            let ipc = handle.ipc.ok_or_else(none)?;
            PeerMapping::Ipc(IpcMemory::open(gpu, &IpcHandle::from_bytes(&ipc))?)
        };
        let found = match &mapping {
            PeerMapping::Local(memory) => memory.bytes(),
            PeerMapping::Ipc(memory) => memory.bytes(),
        };
        if found < bytes {
            return Err(Error::new(
                ErrorKind::Mismatch,
                format!("a peer's inbox has {found} bytes, expected {bytes}"),
            ));
        }
        Ok(mapping)
    }

    /// Returns the address of the inbox.
    pub fn address(&self) -> u64 {
        match self {
            PeerMapping::Local(memory) => memory.address(),
            PeerMapping::Ipc(memory) => memory.address(),
        }
    }
}
