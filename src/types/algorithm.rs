//! Names and properties of algorithms, kinds of links (inside and between hosts), transports and
//! protocols.

use super::named_enum::named_enum;
use std::fmt;

named_enum! {
    /// A family of schedules. Call signatures carry the number of the variant.
    Algorithm {
        /// Each rank sends to its neighbour, N-1 hops each way.
        Ring = 0, "ring";
        /// Two complementary binary trees.
        Tree = 1, "tree";
        /// Every rank sends to every other rank in one step: least latency, but N-1 times the
        /// bytes.
        OneShot = 2, "oneshot";
        /// Two-shot: every rank sends each chunk to the rank that reduces it, which sends the
        /// result back. Takes two steps and sends as many bytes as the ring.
        Direct = 3, "direct";
        /// Runs inside each host first, then between hosts on each rail, then inside each host
        /// again.
        Hierarchical = 4, "hierarchical";
        /// All contributions go to rank 0, which sends the sum to every other rank: the fewest messages, but
        /// N-1 times the bytes for that rank.
        FlatTree = 5, "flat_tree";
    }
}

impl Algorithm {
    /// The algorithms that ignore the hosts of the ranks, in numeric order.
    pub const FLAT: [Algorithm; Algorithm::ALL.len() - 1] = {
        let mut flat = [Algorithm::Ring; Algorithm::ALL.len() - 1];
        let (mut at, mut count) = (0, 0);
        while at < Algorithm::ALL.len() {
            if !matches!(Algorithm::ALL[at], Algorithm::Hierarchical) {
                flat[count] = Algorithm::ALL[at];
                count += 1;
            }
            at += 1;
        }
        flat
    };
}

named_enum! {
    /// The kind of link for which a message is encoded. A schedule that treats all ranks alike
    /// encodes every message for [`Level::Inter`].
    Level {
        /// The receiver is a rank of the same host.
        Intra = 0, "intra";
        /// The data crosses hosts. A message that came from another host keeps its encoding inside
        /// the host. Encoding it again would take time, and with another lossy codec ranks would
        /// get different bits.
        Inter = 1, "inter";
    }
}

named_enum! {
    /// The kind of connection that carries slots between two ranks.
    TransportKind {
        /// Memory shared by threads of one process.
        Loopback = 0, "loopback";
        /// Sealed shared memory between processes of one host.
        Shm = 1, "shm";
        /// TCP sockets.
        Tcp = 2, "tcp";
        /// GPU memory of one host, written by peers. GPUs without peer access use pinned host
        /// memory.
        Cuda = 3, "cuda";
        /// Writes into memory of peers over InfiniBand or RoCE.
        Rdma = 4, "rdma";
    }
}

named_enum! {
    /// How payload is transferred, and how its arrival is signalled. Buffers in host memory support
    /// only [`Protocol::Simple`].
    Protocol {
        /// Payload in a slot, then a counter that signals its arrival: full bandwidth.
        Simple = 0, "simple";
        /// Packets of 8 payload bytes and 8 flag bytes: half the bandwidth, the least latency.
        Ll = 1, "ll";
        /// Lines of 120 payload bytes and 8 flag bytes, on links that deliver a line of 128 bytes
        /// as a whole.
        Ll128 = 2, "ll128";
    }
}

named_enum! {
    /// Which kind of GPU kernel runs a call.
    Kernel {
        /// Interprets the steps of a schedule.
        Schedule = 0, "schedule";
        /// Is written for one collective and algorithm, and sends in ll packets or ll128 lines.
        Fused = 1, "fused";
    }
}

/// A kind of kernel and its protocol. Fused kernels have no slots, so they cannot use
/// [`Protocol::Simple`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelProtocol {
    /// Kind of GPU kernel that runs the call.
    pub kernel: Kernel,
    /// Protocol in which the kernel sends and receives.
    pub protocol: Protocol,
}

impl KernelProtocol {
    /// The schedule interpreter with slots and counters.
    pub const SIMPLE: KernelProtocol = KernelProtocol::new(Kernel::Schedule, Protocol::Simple);
    /// The schedule interpreter with ll packets.
    pub const LL: KernelProtocol = KernelProtocol::new(Kernel::Schedule, Protocol::Ll);
    /// The schedule interpreter with ll128 lines.
    pub const LL128: KernelProtocol = KernelProtocol::new(Kernel::Schedule, Protocol::Ll128);
    /// A fused kernel with ll packets.
    pub const FUSED_LL: KernelProtocol = KernelProtocol::new(Kernel::Fused, Protocol::Ll);
    /// A fused kernel with ll128 lines.
    pub const FUSED_LL128: KernelProtocol = KernelProtocol::new(Kernel::Fused, Protocol::Ll128);

    /// All valid pairs. A kernel reports its pair by the index in this list.
    pub const ALL: [KernelProtocol; 5] = [
        KernelProtocol::SIMPLE,
        KernelProtocol::LL,
        KernelProtocol::LL128,
        KernelProtocol::FUSED_LL,
        KernelProtocol::FUSED_LL128,
    ];

    const fn new(kernel: Kernel, protocol: Protocol) -> KernelProtocol {
        KernelProtocol { kernel, protocol }
    }

    /// Returns whether the kernel is fused.
    pub const fn is_fused(self) -> bool {
        matches!(self.kernel, Kernel::Fused)
    }

    /// Returns the index in [`KernelProtocol::ALL`].
    pub const fn number(self) -> u32 {
        match self.kernel {
            Kernel::Schedule => self.protocol as u32,
            Kernel::Fused => 2 + self.protocol as u32,
        }
    }
}

impl fmt::Display for KernelProtocol {
    /// Writes kernel and protocol as in a tuning table, for example `schedule simple`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kernel.name(), self.protocol)
    }
}
