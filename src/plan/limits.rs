//! Facts by which the planner selects, besides the request. All ranks share them, so that all ranks
//! select alike.

use super::cost::MachineFacts;
use crate::gpu::abi;
use crate::mem::PeerBufferLayout;
use crate::schedule::Hosts;
use crate::types::{Algorithm, Kernel, KernelProtocol, Protocol};

/// Facts by which the planner selects, besides the request. They are equal on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// Ranks.
    pub nranks: usize,
    /// Payload bytes of a slot.
    pub slot_bytes: usize,
    /// Slots of a connection.
    pub slots: usize,
    /// Channels that are connected.
    pub channels: usize,
    /// Algorithm preferred by the communicator's settings.
    pub algorithm: Option<Algorithm>,
    /// Costs of the machine's links and cores.
    pub machine: MachineFacts,
    /// Which ranks share a host.
    pub hosts: Hosts,
    /// Facts about the GPUs; `None` if buffers are in host memory.
    pub gpu: Option<GpuLimits>,
}

/// Blocks that a rank may launch so that the blocks of all ranks on its GPU are resident at once:
/// the minimum over all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    /// Blocks, and so channels, of a kernel that interprets a schedule.
    pub channels: usize,
    /// Blocks of a fused kernel.
    pub fused: usize,
}

#[cfg(test)]
impl Resident {
    /// Returns a limit of `blocks` for both kinds of kernels.
    pub fn both(blocks: usize) -> Resident {
        Resident {
            channels: blocks,
            fused: blocks,
        }
    }
}

/// Facts by which the planner selects on GPUs. They are equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpuLimits {
    /// Payload bytes of a slot and number of channels, for each [`Protocol`].
    pub fifos: [(usize, usize); abi::PROTOCOLS],
    /// Slots of a connection with [`Protocol::Simple`].
    pub depth: usize,
    /// Most payload bytes from one rank to another in a fused kernel with packets, over all its
    /// trips.
    pub oneshot_bytes: usize,
    /// Most payload bytes from one rank to another in a fused kernel with lines, over all its
    /// trips.
    pub lines_bytes: usize,
    /// Blocks that may be launched at once.
    pub resident: Resident,
    /// `CINCH_GPU_CHANNELS`.
    pub channels: usize,
    /// Whether 128-byte lines arrive whole between all pairs of ranks.
    pub ll128: bool,
    /// `CINCH_PROTO`, where it is not auto.
    pub protocol: Option<Protocol>,
    /// `CINCH_KERNEL`, where it is not auto.
    pub kernel: Option<Kernel>,
}

impl GpuLimits {
    /// Returns the limits that follow from peer buffers of this layout.
    pub fn new(shape: &PeerBufferLayout, resident: Resident, channels: usize) -> GpuLimits {
        let fifo = |protocol| {
            let fifo = shape.fifo(protocol);
            (fifo.slot_bytes as usize, fifo.channels as usize)
        };
        GpuLimits {
            fifos: Protocol::ALL.map(fifo),
            depth: shape.fifo(Protocol::Simple).depth as usize,
            oneshot_bytes: shape.oneshot_bytes(),
            lines_bytes: shape.lines_bytes(),
            resident,
            channels,
            ll128: false,
            protocol: None,
            kernel: None,
        }
    }

    /// Whether the settings ask for a kernel or a protocol, and `kernel` has both.
    pub(super) fn asks_for(&self, kernel: KernelProtocol) -> bool {
        self.is_forced()
            && self.protocol.is_none_or(|asked| asked == kernel.protocol)
            && self.kernel.is_none_or(|asked| asked == kernel.kernel)
    }

    /// Returns these limits with settings that ask for `kernel`.
    pub fn forced(self, kernel: KernelProtocol) -> GpuLimits {
        GpuLimits {
            protocol: Some(kernel.protocol),
            kernel: Some(kernel.kernel),
            ..self
        }
    }

    /// Whether the settings ask for a kernel or a protocol.
    pub(super) fn is_forced(&self) -> bool {
        self.protocol.is_some() || self.kernel.is_some()
    }
}
