//! What the engine knows of a communicator's connections.

use crate::gpu::abi::{CommView, Protocol, Trouble};
use crate::gpu_links::GpuLinks;
use crate::mem::PeerBufferLayout;
use std::fmt::Debug;
use std::time::Duration;

/// The connections of one GPU rank, alive for as long as the value.
pub trait Connections: Send + Sync + Debug {
    /// The layout of each box.
    fn shape(&self) -> &PeerBufferLayout;

    /// What a kernel needs to know that uses `protocol` and lets each wait last `timeout`.
    fn view(&self, protocol: Protocol, timeout: Duration) -> CommView;

    /// Device addresses of the two words of the fused kernels that send packets, and of those that
    /// send lines.
    fn epochs(&self) -> [u64; 2];

    /// Ends every wait of this rank's kernels, now and later.
    fn abort(&self);

    /// Gives up what other ranks own: no kernel may use the connections from here on.
    fn unmap(&self);

    /// The same for what ranks of this process own alone, which asks the driver for nothing. Returns
    /// whether there was any.
    fn unmap_local_peers(&self) -> bool;

    /// Whether ranks of this process have not given up yet what this one owns.
    fn is_mapped_by_peers(&self) -> bool;

    /// What went wrong first, once a kernel has said so.
    fn trouble(&self) -> Option<Trouble>;

    /// Whether the ll128 protocol works between all ranks; the same on all ranks.
    fn lines_arrive_whole(&self) -> bool;
}

impl Connections for GpuLinks {
    fn shape(&self) -> &PeerBufferLayout {
        &self.shape
    }

    fn view(&self, protocol: Protocol, timeout: Duration) -> CommView {
        GpuLinks::view(self, protocol, timeout)
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
}
