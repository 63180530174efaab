//! Lists the facts, besides the request, from which the planner selects. All ranks share them, so
//! that all ranks select alike.

use super::Request;
use super::candidate::ChannelRings;
use super::cost::MachineFacts;
use crate::gpu::abi;
use crate::gpu_links::PairLinks;
use crate::mem::PeerBufferLayout;
use crate::schedule::{Groups, RingOrders};
use crate::topology::RankTopology;
use crate::types::{Algorithm, Kernel, KernelProtocol, Protocol};
use std::sync::Arc;

/// Facts, besides the request, from which the planner selects. They are equal on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// Number of ranks of the communicator.
    pub nranks: usize,
    /// Payload bytes of a slot.
    pub slot_bytes: usize,
    /// Slots of each connection.
    pub slots: usize,
    /// Number of connected channels, which bounds the channels of a call.
    pub channels: usize,
    /// Algorithm preferred by the communicator's settings.
    pub algorithm: Option<Algorithm>,
    /// Costs of the machine's links and cores.
    pub machine: MachineFacts,
    /// Host of each rank.
    pub hosts: Groups,
    /// Topology of the ranks; `None` if nothing is known of it, or on several hosts.
    pub topology: Option<Arc<RankTopology>>,
    /// Facts about the GPUs; `None` if buffers are in host memory.
    pub gpu: Option<GpuLimits>,
}

impl Limits {
    /// Returns the groups of hierarchical schedules: hosts, or on one host the groups of its topology.
    pub fn groups(&self) -> &Groups {
        match &self.topology {
            Some(topology) if self.hosts.count() == 1 => topology.groups(),
            _ => &self.hosts,
        }
    }

    /// Returns the sets of rings that are faster than the topology's best ring, the fastest last.
    pub(super) fn ring_sets(&self) -> &[RingOrders] {
        self.topology
            .as_ref()
            .map_or(&[], |topology| topology.ring_sets())
    }

    /// Returns the orders of a channel's rings. A set that the topology does not have is its best ring.
    pub(super) fn orders(&self, rings: ChannelRings) -> RingOrders {
        let set = match rings {
            ChannelRings::OneOrder(_) => None,
            ChannelRings::Set { pairs } => {
                let mut sets = self.ring_sets().iter();
                sets.find(|set| set.pairs() == pairs).cloned()
            }
        };
        set.unwrap_or_else(|| match &self.topology {
            None => RingOrders::BY_RANK,
            Some(topology) => topology.order().clone().into(),
        })
    }
}

/// Largest number of thread blocks that keeps the blocks of all ranks on a rank's GPU resident at
/// once: the minimum over all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    /// Blocks of a kernel that interprets a schedule. It has one block per channel.
    pub channels: usize,
    /// Blocks of a fused kernel.
    pub fused: usize,
}

#[cfg(feature = "internal")]
impl Resident {
    /// Returns a limit of `blocks` for both kinds of kernels.
    pub fn both(blocks: usize) -> Resident {
        Resident {
            channels: blocks,
            fused: blocks,
        }
    }
}

/// Facts about the GPUs from which the planner selects. They are equal on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuLimits {
    /// Payload bytes of a slot, and number of channels, for each [`Protocol`].
    pub fifos: [(usize, usize); abi::PROTOCOLS],
    /// Slots of each connection, for each [`Protocol`].
    pub depths: [usize; abi::PROTOCOLS],
    /// Largest number of payload bytes from one rank to another in a fused kernel with ll, over all
    /// its phases.
    pub oneshot_bytes: usize,
    /// Largest number of payload bytes from one rank to another in a fused kernel with ll128, over
    /// all its phases.
    pub lines_bytes: usize,
    /// Largest numbers of blocks that may be launched at once.
    pub resident: Resident,
    /// Largest number of channels by `CINCH_GPU_CHANNELS`.
    pub channels: usize,
    /// Whether 128-byte lines are always delivered whole between all pairs of ranks.
    pub ll128: bool,
    /// Links of all pairs of ranks of a host. A schedule may use ll128 if lines arrive whole on all links that it uses.
    pub pairs: PairLinks,
    /// Protocol set by `CINCH_PROTO`; `None` if it is auto.
    pub protocol: Option<Protocol>,
    /// Kernel set by `CINCH_KERNEL`; `None` if it is auto.
    pub kernel: Option<Kernel>,
}

impl GpuLimits {
    /// Creates the limits that follow from peer buffers of this layout.
    pub fn new(shape: &PeerBufferLayout, resident: Resident, channels: usize) -> GpuLimits {
        let fifo = |protocol| {
            let fifo = shape.fifo(protocol);
            (fifo.slot_bytes as usize, fifo.channels as usize)
        };
        GpuLimits {
            fifos: Protocol::ALL.map(fifo),
            depths: Protocol::ALL.map(|protocol| shape.fifo(protocol).depth as usize),
            oneshot_bytes: shape.oneshot_bytes(),
            lines_bytes: shape.lines_bytes(),
            resident,
            channels,
            ll128: false,
            pairs: PairLinks::SPLITTING,
            protocol: None,
            kernel: None,
        }
    }

    /// Returns the largest number of channels by `CINCH_GPU_CHANNELS` and by the call.
    pub(super) fn most_channels(&self, request: &Request) -> usize {
        self.channels.min(request.tuning.most_channels())
    }

    /// Returns whether the call or the settings name a kernel or a protocol, and `kernel` matches all that they name. Those
    /// of the call precede those of the settings.
    pub(super) fn asks_for(&self, request: &Request, kernel: KernelProtocol) -> bool {
        let protocol = request.tuning.protocol.or(self.protocol);
        let asked_kernel = request.tuning.kernel.or(self.kernel);
        (protocol.is_some() || asked_kernel.is_some())
            && protocol.is_none_or(|asked| asked == kernel.protocol)
            && asked_kernel.is_none_or(|asked| asked == kernel.kernel)
    }

    /// Returns these limits with settings that force `kernel`.
    pub fn forced(self, kernel: KernelProtocol) -> GpuLimits {
        GpuLimits {
            protocol: Some(kernel.protocol),
            kernel: Some(kernel.kernel),
            ..self
        }
    }

    /// Returns whether the settings name a kernel or a protocol.
    pub(super) fn is_forced(&self) -> bool {
        self.protocol.is_some() || self.kernel.is_some()
    }
}
