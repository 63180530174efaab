//! What ranks tell each other while they connect, round by round.
//!
//! A rank that is in trouble says so in place of its part, so that the others hear of it in the
//! same round instead of waiting for one who will not come.

use super::paths::LinkClass;
use crate::bootstrap::{OutOfBand, PeerInfo};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::IPC_HANDLE_BYTES;
use crate::wire::{Damaged, Reader, WireResult, Writer};

/// Longest reason that travels; drivers' and systems' sentences are shorter.
const LONGEST: usize = 400;

/// Gives `mine` to all ranks and returns the parts of all, in rank order.
///
/// # Errors
/// `mine`, if it is an error, after the others have received it; remote, naming the rank that
/// failed; those of the exchange.
pub(super) fn round(exchange: &dyn OutOfBand, mine: Result<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
    let all = exchange.gather_results("connect its GPU", &mine)?;
    mine?;
    all.into_iter().collect()
}

/// Another rank's bytes make no sense.
pub(super) fn foreign(peer: &PeerInfo) -> Error {
    Error::new(
        ErrorKind::Mismatch,
        format!(
            "{peer} described its GPU in another format: use one version, and the same kind of \
             CINCH_DEVICE on all ranks"
        ),
    )
}

/// Describes the GPU of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GpuInfo {
    /// The GPU's identity, the same in every process.
    pub uuid: [u8; 16],
    /// The GPU's number in the rank's process.
    pub ordinal: u32,
    /// Its compute capability.
    pub capability: (u32, u32),
    /// `CINCH_P2P_DISABLE`.
    pub p2p_disable: bool,
}

const MAGIC: &[u8; 8] = b"cinchgpu";

impl GpuInfo {
    /// As it travels.
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

    /// Reads the GPUs of all ranks.
    ///
    /// # Errors
    /// Mismatch, naming a rank, if its bytes are no description of a GPU. The same on all ranks.
    pub fn read_all(parts: &[Vec<u8>], peers: &[PeerInfo]) -> Result<Vec<GpuInfo>> {
        let gpu = |(bytes, peer): (&Vec<u8>, _)| GpuInfo::decode(bytes).map_err(|_| foreign(peer));
        parts.iter().zip(peers).map(gpu).collect()
    }
}

/// What a rank found out about its ways to the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PathReport {
    /// Why a peer's memory cannot be written, or what it wrote was wrong: rank and reason.
    pub failures: Vec<(usize, String)>,
    /// The slowest of its links that have no failure.
    pub slowest: LinkClass,
}

impl PathReport {
    /// As it travels.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.u8(self.slowest as u8);
        for (rank, reason) in &self.failures {
            writer.u32(*rank as u32).text(shortened(reason));
        }
        writer.0
    }

    /// From what travelled.
    ///
    /// # Errors
    /// Mismatch if it is nothing of the kind.
    pub fn decode(bytes: &[u8], peer: &PeerInfo, nranks: usize) -> Result<PathReport> {
        let read = || -> WireResult<PathReport> {
            let mut reader = Reader(bytes);
            let mut report = PathReport {
                slowest: LinkClass::from_number(reader.u8()?).ok_or(Damaged)?,
                failures: Vec::new(),
            };
            while reader.end().is_err() {
                let (rank, reason) = (reader.u32()? as usize, reader.text()?);
                report.failures.push((rank, reason));
            }
            let sensible = report.failures.iter().all(|(rank, _)| *rank < nranks);
            sensible.then_some(report).ok_or(Damaged)
        };
        read().map_err(|_| foreign(peer))
    }
}

/// Where a rank's boxes can be had.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct MemoryHandle {
    /// Under which its memory is offered to its process; 0 if it is not.
    pub offer: u64,
    /// How other processes open it: an IPC handle, or the name of a socket in the first 16 bytes.
    pub handle: Option<[u8; IPC_HANDLE_BYTES]>,
    /// Why there is no handle although there should be one; empty otherwise.
    pub refusal: String,
}

impl MemoryHandle {
    /// As it travels.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.u64(self.offer).text(shortened(&self.refusal));
        writer.put(&self.handle);
        writer.0
    }

    /// From what travelled.
    ///
    /// # Errors
    /// Mismatch if it is nothing of the kind.
    pub fn decode(bytes: &[u8], peer: &PeerInfo) -> Result<MemoryHandle> {
        let read = || -> WireResult<MemoryHandle> {
            let mut reader = Reader(bytes);
            let (offer, refusal) = (reader.u64()?, reader.text()?);
            let handle = reader.take()?;
            reader.end().map(|()| MemoryHandle {
                offer,
                handle,
                refusal,
            })
        };
        read().map_err(|_| foreign(peer))
    }
}

fn shortened(text: &str) -> &str {
    let mut end = text.len().min(LONGEST);
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
    fn everything_travels_and_no_prefix_passes() {
        let bytes = gpu_info().encode();
        assert_eq!(GpuInfo::decode(&bytes), Ok(gpu_info()));
        assert!((0..bytes.len()).all(|cut| GpuInfo::decode(&bytes[..cut]).is_err()));

        let report = PathReport {
            failures: vec![(1, "the driver says no".into()), (4, String::new())],
            slowest: LinkClass::NvLink,
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
        assert_eq!(back.failures[0].1, "é".repeat(LONGEST / 2));

        for (handle, refusal) in [
            (None, ""),
            (None, "no sharing"),
            (Some([7; IPC_HANDLE_BYTES]), ""),
        ] {
            let exported = MemoryHandle {
                offer: 9,
                handle,
                refusal: refusal.into(),
            };
            let bytes = exported.encode();
            assert_eq!(MemoryHandle::decode(&bytes, &one).unwrap(), exported);
            assert!(MemoryHandle::decode(&bytes[..bytes.len() - 1], &one).is_err());
        }
    }

    #[test]
    fn gpu_of_another_format_names_its_rank() {
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
