//! [`Connections`]: the engine's view of a communicator's peer buffers.

use crate::gpu::abi::{CommView, Protocol, Trouble};
use crate::gpu_links::{GpuLinks, PairLinks};
use crate::mem::PeerBufferLayout;
use std::fmt::Debug;
use std::time::Duration;

/// The connections of one GPU rank, which stay open until the value is dropped.
pub trait Connections: Send + Sync + Debug {
    /// Returns the layout of each peer buffer.
    fn shape(&self) -> &PeerBufferLayout;

    /// Returns the kernel argument for a launch that exchanges messages with the ranks `peers` and uses
    /// `protocol`, with `timeout` as the limit of each wait.
    fn view(&self, peers: &[u8], protocol: Protocol, timeout: Duration) -> CommView;

    /// Returns the device addresses of two call counters: for fused kernels with ll packets, and for fused
    /// kernels with ll128 lines.
    fn epochs(&self) -> [u64; 2];

    /// Aborts all current and later waits of this rank's kernels.
    fn abort(&self);

    /// Unmaps memory of other ranks. No kernel may use the connections afterwards.
    fn unmap(&self);

    /// Unmaps memory of those ranks that run in this process, without a driver call. Returns whether any
    /// memory was mapped.
    fn unmap_local_peers(&self) -> bool;

    /// Returns whether ranks of this process still map memory of this rank.
    fn is_mapped_by_peers(&self) -> bool;

    /// Returns the first failure that a kernel has reported; `None` if none has.
    fn trouble(&self) -> Option<Trouble>;

    /// Returns whether ll128 lines of 128 bytes arrive whole between all ranks of each host. All ranks get
    /// the same answer.
    fn lines_arrive_whole(&self) -> bool;

    /// Returns the links of all pairs of ranks of a host. All ranks get the same answer.
    fn pair_links(&self) -> PairLinks;
}

impl Connections for GpuLinks {
    fn shape(&self) -> &PeerBufferLayout {
        &self.shape
    }

    fn view(&self, peers: &[u8], protocol: Protocol, timeout: Duration) -> CommView {
        GpuLinks::view(self, peers, protocol, timeout)
    }

    fn epochs(&self) -> [u64; 2] {
        GpuLinks::epochs(self)
    }

    fn abort(&self) {
        self.control().abort();
    }

    fn unmap(&self) {
        GpuLinks::unmap(self);
    }

    fn unmap_local_peers(&self) -> bool {
        GpuLinks::unmap_local_peers(self)
    }

    fn is_mapped_by_peers(&self) -> bool {
        GpuLinks::is_mapped_by_peers(self)
    }

    fn trouble(&self) -> Option<Trouble> {
        self.control().trouble()
    }

    fn lines_arrive_whole(&self) -> bool {
        GpuLinks::lines_arrive_whole(self)
    }

    fn pair_links(&self) -> PairLinks {
        GpuLinks::pair_links(self)
    }
}
