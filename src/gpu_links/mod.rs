//! Sets up peer memory between GPU ranks.
//!
//! Each ordered pair of ranks has a peer buffer ([`crate::mem::PeerBufferLayout`]) in memory of the reader's
//! GPU. The peer buffers of one reader are its inbox. Ranks of one process pass addresses and enable peer
//! access; ranks of different processes open CUDA IPC handles. Some systems offer peer access and deliver
//! wrong data, so each pair is probed with a pattern first. If peer access is refused, fails or is
//! switched off, the peer buffers of the pair are in pinned host memory. The log and [`GpuLinks::paths`]
//! give the reason.
//!
//! Ranks of different hosts have peer buffers in pinned memory of both hosts. The engine's proxy carries
//! messages between these by a host transport; see [`Network`].
//!
//! Kernels move the data, through the addresses in [`GpuLinks::view`].

mod connect;
mod host;
mod local_registry;
mod mapping;
mod network;
mod pair_links;
mod path_probe;
mod paths;
mod pattern_meter;
mod round_messages;
mod setup;

#[cfg(all(test, not(loom)))]
mod tests;

pub use connect::connect;
pub use mapping::link_class;
pub use network::Network;
pub use pair_links::PairLinks;
pub use paths::{LinkClass, PeerPath};
pub use pattern_meter::GpuPatternMeter;

use crate::gpu::DeviceMemory;
use crate::gpu::abi::{CommView, MAX_PEERS, Protocol, cursors_bytes};
use crate::mem::{ControlWords, PeerBufferLayout, Staging};
use crate::types::TransportKind;
use host::HostPeerBuffers;
use mapping::PeerMapping;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Transport that reports name for a call over peer memory.
pub const KIND: TransportKind = TransportKind::Cuda;

/// The connections of one GPU rank: the addresses of its peer buffers, and the memory they are in.
///
/// The caller must drop the links after all kernels of this rank have ended; kernels that wait for a peer
/// end when they are aborted. Ranks of one process share ownership of their memory. Ranks of other
/// processes must unmap it before ([`GpuLinks::unmap`]), because CUDA does not define the effect of freeing
/// memory that another process maps.
#[derive(Debug)]
pub struct GpuLinks {
    // Mappings of peers' memory. The field comes before this rank's memory, because fields are
    // dropped in order.
    mappings: Mutex<Vec<(usize, PeerMapping)>>,
    host: Option<HostPeerBuffers>,
    network: Mutex<Option<Network>>,
    staging: Vec<Arc<Staging>>,
    memory: Option<Arc<DeviceMemory>>,
    private: DeviceMemory,
    control: ControlWords,
    /// Number of this rank in the communicator.
    pub rank: usize,
    /// The layout of each peer buffer.
    pub shape: PeerBufferLayout,
    /// Address of the peer buffer from rank p to this rank, for kernels of this rank; 0 if unused.
    pub inbox: Vec<u64>,
    /// Address of the peer buffer from this rank to rank p, for kernels of this rank; 0 if unused.
    pub outbox: Vec<u64>,
    /// The path between this rank and rank p, equal on both ranks; `None` for this rank itself.
    pub paths: Vec<Option<PeerPath>>,
    /// The slowest link between any two ranks of a host, equal on all ranks.
    pub slowest: LinkClass,
    /// Whether all GPUs have a compute capability of [`paths::GPUS_THAT_KEEP_LINES_WHOLE`], and all have the
    /// same one. Equal on all ranks.
    gpus_keep_lines_whole: bool,
    /// Links of all pairs of ranks of a host.
    pairs: PairLinks,
    /// Bytes of this rank's device memory: its inbox, cursors and epochs.
    pub device_bytes: usize,
    /// Bytes of this rank's pinned host memory: peer buffers of pairs without peer access, and control words.
    pub pinned_bytes: usize,
    /// Bytes of this rank's host memory: slots of the connections to other hosts.
    pub connection_bytes: usize,
}

impl GpuLinks {
    /// Returns the number of ranks.
    pub fn nranks(&self) -> usize {
        self.shape.nranks()
    }

    /// Returns the total size of this rank's peer buffers and connections in device and host
    /// memory, in bytes.
    pub fn buffer_bytes(&self) -> usize {
        self.device_bytes + self.pinned_bytes + self.connection_bytes
    }

    /// Returns the device address of the cursors: `cinch_cursor[CINCH_PROTOCOLS][CINCH_MAX_CHANNELS]` of all ranks,
    /// initially zero.
    pub fn cursors(&self) -> u64 {
        self.private.address()
    }

    /// Returns the device addresses of the call counters of fused kernels, initially zero. Kernels that send
    /// ll packets and kernels that send ll128 lines have two 64-bit words each. The counters are separate,
    /// because each kind of kernel refreshes its own area once in a number of its own calls (`REFRESH_PERIOD`
    /// of the kernels).
    pub fn epochs(&self) -> [u64; 2] {
        let first = self.private.address() + cursors_bytes(self.nranks()) as u64;
        [first, first + 16]
    }

    /// Returns the control words, which the host and this rank's kernels share.
    pub fn control(&self) -> &ControlWords {
        &self.control
    }

    /// Returns the kernel argument for a launch that exchanges messages with these ranks, at most [`MAX_PEERS`], uses
    /// `protocol` and limits each wait to `timeout`.
    pub fn view(&self, peers: &[u8], protocol: Protocol, timeout: Duration) -> CommView {
        let mut ranks = [0; MAX_PEERS];
        ranks[..peers.len()].copy_from_slice(peers);
        let addresses = |of: &[u64]| {
            let at = |peer: usize| peers.get(peer).map_or(0, |&rank| of[usize::from(rank)]);
            std::array::from_fn(at)
        };
        CommView {
            inbox: addresses(&self.inbox),
            outbox: addresses(&self.outbox),
            cursors: self.cursors(),
            control: self.control.device_address(),
            timeout_ns: u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX),
            rank: self.rank as u32,
            nranks: self.nranks() as u32,
            fifo: self.shape.fifo(protocol),
            protocol: protocol as u32,
            npeers: peers.len() as u32,
            ranks,
        }
    }

    /// Moves the connections to other hosts out of the links, for the proxy. Returns `None` if all ranks
    /// share one host, and from the second call on.
    pub fn take_network(&self) -> Option<Network> {
        let network = self.network.lock();
        network.unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Returns whether the ll128 protocol works between all ranks of each host; equal on all ranks.
    pub fn lines_arrive_whole(&self) -> bool {
        self.gpus_keep_lines_whole && self.slowest.keeps_lines_whole()
    }

    /// Returns the links of all pairs of ranks of a host; equal on all ranks. A schedule may use the ll128 protocol if
    /// lines arrive whole between all pairs that exchange messages in it.
    pub fn pair_links(&self) -> PairLinks {
        self.pairs.clone()
    }

    /// Unmaps the memory of all peers; no kernel may use the links afterwards. If all ranks unmap and pass
    /// a barrier before they drop their links, no rank frees memory that another process maps.
    pub fn unmap(&self) {
        self.mappings().clear();
    }

    /// Unmaps the memory of ranks of this process only. Returns whether any was mapped. The owner frees the
    /// memory; see [`GpuLinks::is_mapped_by_peers`].
    pub fn unmap_local_peers(&self) -> bool {
        let mut mappings = self.mappings();
        let all = mappings.len();
        mappings.retain(|(_, mapping)| !matches!(mapping, PeerMapping::Local(_)));
        mappings.len() < all
    }

    /// Returns whether ranks of this process still map this rank's memory. If the links are dropped while
    /// they do, the last of these ranks frees the memory, and waits for the kernels of this rank's GPU.
    pub fn is_mapped_by_peers(&self) -> bool {
        let memory = self.memory.as_ref();
        memory.is_some_and(|memory| Arc::strong_count(memory) > 1)
    }

    /// Locks the mappings of peers' inboxes, each with the peer's rank.
    fn mappings(&self) -> MutexGuard<'_, Vec<(usize, PeerMapping)>> {
        self.mappings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
