//! GPUs: each rank's slots lie in its GPU's memory, and its peers of the same host write them there.
//!
//! A box for each ordered pair of ranks ([`crate::mem::PeerBufferLayout`]) lies with the reader. Ranks of
//! one process pass addresses and enable peer access; other processes open an IPC handle. Before a
//! pair relies on that, each side writes a pattern to the other and the other looks at it: systems
//! that promise peer access and deliver garbage exist. Where it is refused, fails or is switched
//! off, the pair's boxes lie in pinned host memory instead, the log says why, and
//! [`GpuLinks::paths`] shows it.
//!
//! Ranks of different hosts do not reach each other at all. Kernels on both sides use boxes in
//! pinned memory of their own host, and the engine's proxy carries messages between those by a
//! host transport: see [`Network`].
//!
//! Unlike the other transports this one moves nothing itself: kernels do, with what
//! [`GpuLinks::view`] tells them.

mod connect;
mod gathered_round;
mod host;
mod local_registry;
mod mapping;
mod network;
mod path_probe;
mod paths;

#[cfg(all(test, not(loom)))]
mod tests;

pub use connect::connect;
pub use mapping::link_class;
pub use network::Network;
pub use paths::{LinkClass, PeerPath};

use crate::gpu::DeviceMemory;
use crate::gpu::abi::{CURSORS_BYTES, CommView, MAX_RANKS, Protocol};
use crate::mem::{ControlWords, PeerBufferLayout, Staging};
use crate::types::TransportKind;
use host::HostPeerBuffers;
use mapping::Mapping;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The kind that reports give for calls over peer memory of GPUs.
pub const KIND: TransportKind = TransportKind::Cuda;

/// All connections of one GPU rank: where its boxes are, and what keeps them alive.
///
/// Drop it when no kernel of this rank uses it any more: kernels that wait for a peer have ended,
/// or were told to abort and have ended. Peers of this process keep each other's memory alive;
/// peers of other processes should have unmapped it ([`GpuLinks::unmap`]): what CUDA does with
/// memory that is freed while another process maps it is not defined.
#[derive(Debug)]
pub struct GpuLinks {
    // Dropped from first to last: mappings of others' memory before our own.
    reached: Mutex<Vec<(usize, Mapping)>>,
    host: Option<HostPeerBuffers>,
    network: Mutex<Option<Network>>,
    staging: Vec<Arc<Staging>>,
    memory: Option<Arc<DeviceMemory>>,
    private: DeviceMemory,
    control: ControlWords,
    /// This rank.
    pub rank: usize,
    /// The layout of each box.
    pub shape: PeerBufferLayout,
    /// The box p -> this rank, as kernels of this rank's GPU address it; 0 where there is none.
    pub inbox: [u64; MAX_RANKS],
    /// The box this rank -> p, likewise.
    pub outbox: [u64; MAX_RANKS],
    /// By which way this rank and rank p reach each other; None for this rank itself. Both ranks
    /// of a pair have the same kind of path.
    pub paths: Vec<Option<PeerPath>>,
    /// The slowest link between any two ranks of a host: the same on all ranks, for selection.
    pub slowest: LinkClass,
    /// Whether the GPUs of all ranks are of one kind that shows lines of 128 bytes whole: the same on
    /// all ranks.
    gpus_keep_lines_whole: bool,
    /// Device memory of this rank: boxes, cursors and epoch.
    pub device_bytes: usize,
    /// Pinned host memory of this rank: boxes from peers that cannot reach it, and the control
    /// words.
    pub pinned_bytes: usize,
    /// Host memory of this rank: slots of the connections with ranks of other hosts.
    pub connection_bytes: usize,
}

impl GpuLinks {
    /// Ranks of the communicator.
    pub fn nranks(&self) -> usize {
        self.shape.nranks()
    }

    /// Memory that this rank's boxes and connections take, wherever it is.
    pub fn buffer_bytes(&self) -> usize {
        self.device_bytes + self.pinned_bytes + self.connection_bytes
    }

    /// Device address of the cursors: `cinch_cursor[CINCH_PROTOCOLS][CINCH_MAX_LANES]
    /// [CINCH_MAX_RANKS]`, zero at first.
    pub fn cursors(&self) -> u64 {
        self.private.address()
    }

    /// Device addresses of the two 64-bit words of the fused kernels that send packets, and of those
    /// that send lines, zero at first. The calls of each are counted by themselves: every so many of
    /// its own, one sends all packets anew.
    pub fn epochs(&self) -> [u64; 2] {
        let first = self.private.address() + CURSORS_BYTES as u64;
        [first, first + 16]
    }

    /// The words that the host and this rank's kernels share.
    pub fn control(&self) -> &ControlWords {
        &self.control
    }

    /// What a kernel needs to know that uses `protocol` and lets each wait last `timeout`.
    pub fn view(&self, protocol: Protocol, timeout: Duration) -> CommView {
        CommView {
            inbox: self.inbox,
            outbox: self.outbox,
            cursors: self.cursors(),
            control: self.control.device_address(),
            timeout_ns: u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX),
            rank: self.rank as u32,
            nranks: self.nranks() as u32,
            fifo: self.shape.fifo(protocol),
            protocol: protocol as u32,
            unused: 0,
        }
    }

    /// The connections with ranks of other hosts, for the proxy: once, and only where there are
    /// such ranks.
    pub fn take_network(&self) -> Option<Network> {
        let network = self.network.lock();
        network.unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Whether the ll128 protocol works between all ranks of each host; the same on all ranks.
    pub fn lines_arrive_whole(&self) -> bool {
        self.gpus_keep_lines_whole && self.slowest.keeps_lines_whole()
    }

    /// Gives up this rank's mappings of other processes' memory. Ranks that all do so, meet once
    /// more, and drop their links only then, never free memory that another still maps. No kernel
    /// may use the links from here on.
    pub fn unmap(&self) {
        let mut reached = self.reached.lock().unwrap_or_else(PoisonError::into_inner);
        reached.clear();
    }

    /// The same for memory of ranks of this process alone. It is theirs to free: see
    /// [`GpuLinks::is_mapped_by_peers`]. Returns whether there was any.
    pub fn unmap_local_peers(&self) -> bool {
        let mut reached = self.reached.lock().unwrap_or_else(PoisonError::into_inner);
        let all = reached.len();
        reached.retain(|(_, memory)| !matches!(memory, Mapping::Near(_)));
        reached.len() < all
    }

    /// Whether ranks of this process have not given up this one's memory yet. Links that are dropped
    /// then leave it to the last of them to free it, on whatever GPU that one is.
    pub fn is_mapped_by_peers(&self) -> bool {
        let memory = self.memory.as_ref();
        memory.is_some_and(|memory| Arc::strong_count(memory) > 1)
    }
}
