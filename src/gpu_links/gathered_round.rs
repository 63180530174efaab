//! What ranks tell each other while they connect, round by round.
//!
//! A rank that is in trouble says so in place of its part, so that the others hear of it in the
//! same round instead of waiting for one who will not come.

use super::paths::LinkClass;
use crate::bootstrap::{OutOfBand, PeerInfo};
use crate::config::Config;
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

/// A setting that all ranks must share: its name, and how it is read.
type Shared = (&'static str, fn(&Config) -> u64);

/// A setting that is left to cinch; none can be asked for by this number.
const AUTO: u64 = 0;

/// All of them.
const SHARED: [Shared; 3] = [
    ("CINCH_BUFFER_BYTES", |config| config.buffer_bytes as u64),
    ("CINCH_GPU_CHANNELS", |config| {
        config.gpu_channels.map_or(AUTO, |number| number as u64)
    }),
    (
        "the bound of NCCL_MAX_CTAS, NCCL_MAX_NCHANNELS and maxCTAs",
        |config| {
            config
                .gpu_channels_most
                .map_or(AUTO, |number| number as u64)
        },
    ),
];

/// Which GPU a rank sits on, and what it was told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GpuInfo {
    /// In the order of [`SHARED`].
    pub settings: [u64; SHARED.len()],
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
    /// The settings that [`GpuInfo::settings`] holds.
    pub fn settings_of(config: &Config) -> [u64; SHARED.len()] {
        SHARED.map(|(_, read)| read(config))
    }

    /// As it travels.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.bytes(MAGIC).put(&self.settings).put(&self.uuid);
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
            settings: reader.take()?,
            uuid: reader.take()?,
            ordinal: reader.u32()?,
            capability: (reader.u32()?, reader.u32()?),
            p2p_disable: reader.take()?,
        })
    }

    /// Everybody's gpus, if these ranks can be connected.
    ///
    /// # Errors
    /// Mismatch, naming two ranks and both values. The same on all ranks.
    pub fn compare(parts: &[Vec<u8>], peers: &[PeerInfo]) -> Result<Vec<GpuInfo>> {
        let gpus: Result<Vec<GpuInfo>> = parts
            .iter()
            .zip(peers)
            .map(|(bytes, peer)| GpuInfo::decode(bytes).map_err(|_| foreign(peer)))
            .collect();
        let gpus = gpus?;
        for (gpu_info, peer) in gpus.iter().zip(peers) {
            for (index, (name, _)) in SHARED.iter().enumerate() {
                let (first, other) = (gpus[0].settings[index], gpu_info.settings[index]);
                if first != other {
                    let [first, other] = [first, other].map(|value| match value {
                        AUTO => "auto".to_string(),
                        value => value.to_string(),
                    });
                    return Err(Error::new(
                        ErrorKind::Mismatch,
                        format!(
                            "{name} is {first} on {} and {other} on {peer}: set it alike on all \
                             ranks",
                            peers[0]
                        ),
                    ));
                }
            }
        }
        Ok(gpus)
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
        let mut writer = Writer::default();
        writer.u8(self.slowest as u8);
        for (rank, reason) in &self.obstacles {
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
            let mut findings = PathReport {
                slowest: LinkClass::from_number(reader.u8()?).ok_or(Damaged)?,
                obstacles: Vec::new(),
            };
            while reader.end().is_err() {
                let (rank, reason) = (reader.u32()? as usize, reader.text()?);
                findings.obstacles.push((rank, reason));
            }
            let sensible = findings.obstacles.iter().all(|(rank, _)| *rank < nranks);
            sensible.then_some(findings).ok_or(Damaged)
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
            settings: GpuInfo::settings_of(&Config::default()),
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
    fn ranks_that_do_not_fit_are_named() {
        let peers = [peer(0, 1), peer(1, 1)];
        let mut other = gpu_info();
        other.settings[1] = 8;
        let parts = [gpu_info().encode(), other.encode()];
        let error = GpuInfo::compare(&parts, &peers).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        for part in [
            "CINCH_GPU_CHANNELS is auto on rank 0",
            "8 on rank 1 (host h1, pid 100)",
        ] {
            assert!(error.message().contains(part), "{error}");
        }
        let parts = [gpu_info().encode(), gpu_info().encode()];
        assert_eq!(
            GpuInfo::compare(&parts, &peers).unwrap(),
            [gpu_info(), gpu_info()]
        );
        let error = GpuInfo::compare(&[gpu_info().encode(), vec![0; 200]], &peers).unwrap_err();
        assert!(error.message().contains("rank 1"), "{error}");
    }
}
