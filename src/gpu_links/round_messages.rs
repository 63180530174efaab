//! The messages that ranks exchange in the rounds of connecting.

use super::paths::LinkClass;
use crate::bootstrap::PeerInfo;
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::IPC_HANDLE_BYTES;
use crate::wire::{Damaged, Reader, WireResult, Writer};

/// Largest size of a reason in a message in bytes, so that messages have a bounded size. Error sentences of
/// drivers are shorter.
const MAX_REASON_BYTES: usize = 400;

/// Returns the error of a message from `peer` that cannot be decoded.
fn malformed(peer: &PeerInfo) -> Error {
    Error::new(
        ErrorKind::Mismatch,
        format!(
            "{peer} described its GPU in another format: use one version, and the same kind of \
             CINCH_DEVICE on all ranks"
        ),
    )
}

/// The GPU of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GpuInfo {
    /// Unique id of the GPU, equal in every process.
    pub uuid: [u8; 16],
    /// Ordinal of the GPU in the rank's process.
    pub ordinal: u32,
    /// Compute capability, (9, 0) for sm_90.
    pub capability: (u32, u32),
    /// Setting `CINCH_P2P_DISABLE` of the rank.
    pub p2p_disable: bool,
}

const MAGIC: &[u8; 8] = b"cinchgpu";

impl GpuInfo {
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.bytes(MAGIC).put(&self.uuid);
        let (major, minor) = self.capability;
        writer.u32(self.ordinal).u32(major).u32(minor);
        writer.put(&self.p2p_disable);
        writer.0
    }

    fn decode(bytes: &[u8]) -> WireResult<GpuInfo> {
        let mut reader = Reader(bytes);
        if reader.bytes(8)? != MAGIC {
            return Err(Damaged);
        }
        Ok(GpuInfo {
            uuid: reader.take()?,
            ordinal: reader.u32()?,
            capability: (reader.u32()?, reader.u32()?),
            p2p_disable: reader.take()?,
        })
    }

    /// Decodes the messages of all ranks into their GPUs.
    ///
    /// # Errors
    /// Mismatch, naming a rank, if its message is malformed. All ranks return this error alike.
    pub fn read_all(parts: &[Vec<u8>], peers: &[PeerInfo]) -> Result<Vec<GpuInfo>> {
        let gpu =
            |(bytes, peer): (&Vec<u8>, _)| GpuInfo::decode(bytes).map_err(|_| malformed(peer));
        parts.iter().zip(peers).map(gpu).collect()
    }
}

/// State of a rank's paths to its peers, which the rank reports in a round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PathReport {
    /// Peers whose path failed, each with the reason.
    pub failures: Vec<(usize, String)>,
    /// Class of the link to each rank, [`LinkClass::SameDevice`] where there is none; empty before the ranks have
    /// tried their paths.
    pub classes: Vec<LinkClass>,
}

impl PathReport {
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.u32(self.classes.len() as u32);
        for class in &self.classes {
            writer.u8(class.number());
        }
        for (rank, reason) in &self.failures {
            writer.u32(*rank as u32).text(shortened(reason));
        }
        writer.0
    }

    /// # Errors
    /// Mismatch, naming `peer`, if the message is malformed.
    pub fn decode(bytes: &[u8], peer: &PeerInfo, nranks: usize) -> Result<PathReport> {
        let read = || -> WireResult<PathReport> {
            let mut reader = Reader(bytes);
            let count = reader.u32()?;
            let classes = (0..count).map(|_| LinkClass::from_number(reader.u8()?).ok_or(Damaged));
            let mut report = PathReport {
                classes: classes.collect::<WireResult<_>>()?,
                failures: Vec::new(),
            };
            while reader.end().is_err() {
                let (rank, reason) = (reader.u32()? as usize, reader.text()?);
                report.failures.push((rank, reason));
            }
            let ranks_exist = report.failures.iter().all(|(rank, _)| *rank < nranks);
            let is_complete = [0, nranks].contains(&report.classes.len());
            (ranks_exist && is_complete)
                .then_some(report)
                .ok_or(Damaged)
        };
        read().map_err(|_| malformed(peer))
    }
}

/// A handle by which peers map a rank's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct MemoryHandle {
    /// Number of the memory in the [local registry](super::local_registry); 0 if no peer is in the rank's
    /// process.
    pub registration: u64,
    /// Handle for other processes: a CUDA IPC handle, or in its first 16 bytes the name of the socket that
    /// passes a memfd.
    pub ipc: Option<[u8; IPC_HANDLE_BYTES]>,
    /// Why the driver exports no IPC handle; empty if it does, or if no peer needs a handle.
    pub refusal: String,
}

impl MemoryHandle {
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.u64(self.registration).text(shortened(&self.refusal));
        writer.put(&self.ipc);
        writer.0
    }

    /// # Errors
    /// Mismatch, naming `peer`, if the message is malformed.
    pub fn decode(bytes: &[u8], peer: &PeerInfo) -> Result<MemoryHandle> {
        let read = || -> WireResult<MemoryHandle> {
            let mut reader = Reader(bytes);
            let (registration, refusal) = (reader.u64()?, reader.text()?);
            let ipc = reader.take()?;
            reader.end().map(|()| MemoryHandle {
                registration,
                ipc,
                refusal,
            })
        };
        read().map_err(|_| malformed(peer))
    }
}

/// Returns the longest prefix of `text` that a message may carry.
fn shortened(text: &str) -> &str {
    let mut end = text.len().min(MAX_REASON_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn peer(rank: usize, host: u8) -> PeerInfo {
        PeerInfo {
            rank,
            pid: 100,
            uid: 0,
            host: format!("h{host}"),
            host_id: [host; 16],
            process_id: [1; 16],
            address: [127, 0, 0, 1].into(),
        }
    }

    fn gpu_info() -> GpuInfo {
        GpuInfo {
            uuid: std::array::from_fn(|at| at as u8),
            ordinal: 3,
            capability: (9, 0),
            p2p_disable: true,
        }
    }

    #[test]
    fn messages_survive_a_round_trip_and_prefixes_are_malformed() {
        let bytes = gpu_info().encode();
        assert_eq!(GpuInfo::decode(&bytes), Ok(gpu_info()));
        assert!((0..bytes.len()).all(|cut| GpuInfo::decode(&bytes[..cut]).is_err()));

        let report = PathReport {
            failures: vec![(1, "the driver refuses".into()), (4, String::new())],
            classes: vec![
                LinkClass::NvLink,
                LinkClass::SameDevice,
                LinkClass::Pcie,
                LinkClass::Host,
                LinkClass::NvLink,
            ],
        };
        let bytes = report.encode();
        let one = peer(1, 1);
        assert_eq!(PathReport::decode(&bytes, &one, 5).unwrap(), report);
        assert!(PathReport::decode(&bytes, &one, 4).is_err());
        assert!(PathReport::decode(&bytes[..bytes.len() - 1], &one, 5).is_err());
        assert!(PathReport::decode(&[], &one, 5).is_err());
        let long = PathReport {
            failures: vec![(0, "é".repeat(1000))],
            ..report
        };
        let back = PathReport::decode(&long.encode(), &one, 5).unwrap();
        assert_eq!(back.failures[0].1, "é".repeat(MAX_REASON_BYTES / 2));

        for (ipc, refusal) in [
            (None, ""),
            (None, "no sharing"),
            (Some([7; IPC_HANDLE_BYTES]), ""),
        ] {
            let handle = MemoryHandle {
                registration: 9,
                ipc,
                refusal: refusal.into(),
            };
            let bytes = handle.encode();
            assert_eq!(MemoryHandle::decode(&bytes, &one).unwrap(), handle);
            assert!(MemoryHandle::decode(&bytes[..bytes.len() - 1], &one).is_err());
        }
    }

    #[test]
    fn read_all_with_a_malformed_message_names_the_rank() {
        let peers = [peer(0, 1), peer(1, 1)];
        let parts = [gpu_info().encode(), gpu_info().encode()];
        assert_eq!(
            GpuInfo::read_all(&parts, &peers).unwrap(),
            [gpu_info(), gpu_info()]
        );
        let error = GpuInfo::read_all(&[gpu_info().encode(), vec![0; 200]], &peers).unwrap_err();
        assert!(error.message().contains("rank 1"), "{error}");
    }
}
