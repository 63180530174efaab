//! What ranks tell each other while they connect, round by round.
//!
//! A rank that is in trouble says so in place of its part, so that the others hear of it in the
//! same round instead of waiting for one who will not come.

use super::paths::LinkClass;
use crate::bootstrap::{OutOfBand, PeerInfo};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::IPC_HANDLE_BYTES;

const FINE: u8 = 0;
const TROUBLE: u8 = 1;

/// Longest reason that travels; drivers' and systems' sentences are shorter.
const LONGEST: usize = 400;

/// Gives `mine` to all ranks and returns what all gave, in rank order.
///
/// # Errors
/// `mine`, if it is one, after the others have been told; remote, naming the rank that is in
/// trouble; those of the exchange.
pub(super) fn round(exchange: &dyn OutOfBand, mine: Result<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
    let bytes = match &mine {
        Ok(part) => [&[FINE], &part[..]].concat(),
        Err(error) => [&[TROUBLE], shortened(error.message()).as_bytes()].concat(),
    };
    let all = exchange.all_gather(&bytes)?;
    mine?;
    let peers = exchange.peers();
    let part = |(mut bytes, peer): (Vec<u8>, &PeerInfo)| match bytes.first() {
        Some(&FINE) => {
            bytes.remove(0);
            Ok(bytes)
        }
        Some(&TROUBLE) => Err(Error::new(
            ErrorKind::Remote,
            format!(
                "{peer} cannot connect its GPU: {}",
                String::from_utf8_lossy(&bytes[1..])
            ),
        )),
        _ => Err(foreign(peer)),
    };
    all.into_iter().zip(peers).map(part).collect()
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
const SEAT: usize = 8 + 16 + 4 + 8 + 1;

impl GpuInfo {
    /// As it travels.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(SEAT);
        bytes.extend(MAGIC);
        bytes.extend(self.uuid);
        let (major, minor) = self.capability;
        for word in [self.ordinal, major, minor] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.push(u8::from(self.p2p_disable));
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<GpuInfo> {
        let mut reader = Reader(bytes);
        if reader.take(8)? != MAGIC {
            return None;
        }
        Some(GpuInfo {
            uuid: reader.take(16)?.try_into().ok()?,
            ordinal: reader.word()?,
            capability: (reader.word()?, reader.word()?),
            p2p_disable: reader.take(1)? == [1],
        })
    }

    /// Reads the GPUs of all ranks.
    ///
    /// # Errors
    /// Mismatch, naming a rank, if its bytes are no description of a GPU. The same on all ranks.
    pub fn read_all(parts: &[Vec<u8>], peers: &[PeerInfo]) -> Result<Vec<GpuInfo>> {
        let gpu =
            |(bytes, peer): (&Vec<u8>, _)| GpuInfo::decode(bytes).ok_or_else(|| foreign(peer));
        parts.iter().zip(peers).map(gpu).collect()
    }
}

/// What a rank found out about its ways to the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PathReport {
    /// Why a peer's memory cannot be written, or what it wrote was wrong: rank and reason.
    pub obstacles: Vec<(usize, String)>,
    /// The slowest of its links that have no obstacle.
    pub slowest: LinkClass,
}

impl PathReport {
    /// As it travels.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![self.slowest as u8];
        for (rank, reason) in &self.obstacles {
            let reason = shortened(reason);
            bytes.extend((*rank as u32).to_le_bytes());
            bytes.extend((reason.len() as u32).to_le_bytes());
            bytes.extend(reason.as_bytes());
        }
        bytes
    }

    /// From what travelled.
    ///
    /// # Errors
    /// Mismatch if it is nothing of the kind.
    pub fn decode(bytes: &[u8], peer: &PeerInfo, nranks: usize) -> Result<PathReport> {
        let read = || {
            let mut reader = Reader(bytes);
            let mut findings = PathReport {
                slowest: LinkClass::from_number(reader.take(1)?[0])?,
                obstacles: Vec::new(),
            };
            while !reader.0.is_empty() {
                let rank = reader.word()? as usize;
                let len = reader.word()? as usize;
                let reason = String::from_utf8(reader.take(len)?.to_vec()).ok()?;
                findings.obstacles.push((rank, reason));
            }
            let sensible = findings.obstacles.iter().all(|(rank, _)| *rank < nranks);
            sensible.then_some(findings)
        };
        read().ok_or_else(|| foreign(peer))
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
        let refusal = shortened(&self.refusal);
        let mut bytes = self.offer.to_le_bytes().to_vec();
        bytes.extend((refusal.len() as u32).to_le_bytes());
        bytes.extend(refusal.as_bytes());
        bytes.extend(self.handle.iter().flatten());
        bytes
    }

    /// From what travelled.
    ///
    /// # Errors
    /// Mismatch if it is nothing of the kind.
    pub fn decode(bytes: &[u8], peer: &PeerInfo) -> Result<MemoryHandle> {
        let read = || {
            let mut reader = Reader(bytes);
            let offer = reader.long()?;
            let len = reader.word()? as usize;
            let refusal = String::from_utf8(reader.take(len)?.to_vec()).ok()?;
            let handle = match reader.0.is_empty() {
                true => None,
                false => Some(reader.take(IPC_HANDLE_BYTES)?.try_into().ok()?),
            };
            reader.0.is_empty().then_some(MemoryHandle {
                offer,
                handle,
                refusal,
            })
        };
        read().ok_or_else(|| foreign(peer))
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(taken)
    }

    fn word(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn long(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
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
        assert_eq!(GpuInfo::decode(&bytes), Some(gpu_info()));
        assert!((0..bytes.len()).all(|cut| GpuInfo::decode(&bytes[..cut]).is_none()));

        let findings = PathReport {
            obstacles: vec![(1, "the driver says no".into()), (4, String::new())],
            slowest: LinkClass::NvLink,
        };
        let bytes = findings.encode();
        let one = peer(1, 1);
        assert_eq!(PathReport::decode(&bytes, &one, 5).unwrap(), findings);
        assert!(PathReport::decode(&bytes, &one, 4).is_err());
        assert!(PathReport::decode(&bytes[..bytes.len() - 1], &one, 5).is_err());
        assert!(PathReport::decode(&[], &one, 5).is_err());
        let long = PathReport {
            obstacles: vec![(0, "é".repeat(1000))],
            ..findings
        };
        let back = PathReport::decode(&long.encode(), &one, 5).unwrap();
        assert_eq!(back.obstacles[0].1, "é".repeat(LONGEST / 2));

        for (handle, refusal) in [
            (None, ""),
            (None, "no sharing"),
            (Some([7; IPC_HANDLE_BYTES]), ""),
        ] {
            let whereabouts = MemoryHandle {
                offer: 9,
                handle,
                refusal: refusal.into(),
            };
            let bytes = whereabouts.encode();
            assert_eq!(MemoryHandle::decode(&bytes, &one).unwrap(), whereabouts);
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
