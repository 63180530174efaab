//! Names and facts of algorithms, levels, transports and protocols.

use super::named_enum::named_enum;

named_enum! {
    /// A family of schedules. Numbers travel in call signatures.
    Algorithm {
        /// Neighbour to neighbour, N-1 hops each way.
        Ring = 0, "ring";
        /// Two complementary binary trees.
        Tree = 1, "tree";
        /// Every rank to every other in one step: least latency, N-1 times the bytes.
        OneShot = 2, "oneshot";
        /// Every rank to the owner of each chunk and back (two-shot): two steps, the ring's bytes.
        Direct = 3, "direct";
        /// Inside each host first, then between hosts on each rail, then inside again.
        Hierarchical = 4, "hierarchical";
    }
}

impl Algorithm {
    /// The algorithms that treat all ranks alike, whatever host they are on, in numeric order.
    pub const FLAT: [Algorithm; 4] = [
        Algorithm::Ring,
        Algorithm::Tree,
        Algorithm::OneShot,
        Algorithm::Direct,
    ];
}

named_enum! {
    /// The kind of link that a message is encoded for. A schedule that treats all ranks alike
    /// encodes every message for [`Level::Inter`].
    Level {
        /// To a rank of the same host.
        Intra = 0, "intra";
        /// Between hosts. A message that came from another host keeps its encoding inside the host:
        /// encoding it again would cost time and, in another lossy codec, the agreement of all
        /// ranks.
        Inter = 1, "inter";
    }
}

named_enum! {
    /// What carries slots between two ranks.
    TransportKind {
        /// Threads of one process.
        Loopback = 0, "loopback";
        /// Sealed shared memory between processes of one host.
        Shm = 1, "shm";
        /// TCP sockets.
        Tcp = 2, "tcp";
        /// Memory of GPUs of one host, written by peers; pinned host memory where they cannot.
        Cuda = 3, "cuda";
        /// Writes into memory of peers over InfiniBand or RoCE.
        Rdma = 4, "rdma";
    }
}

impl TransportKind {
    /// The kinds that carry host memory. A pair takes the first that connects it, and RDMA in place
    /// of TCP where all ranks of a communicator can.
    pub const HOST: [TransportKind; 4] = [
        TransportKind::Loopback,
        TransportKind::Shm,
        TransportKind::Tcp,
        TransportKind::Rdma,
    ];
}

named_enum! {
    /// How a kernel carries the messages of a call. Host memory has [`Protocol::Simple`] only.
    Protocol {
        /// Payload, then a counter.
        Simple = 0, "simple";
        /// Packets of 8 payload and 8 flag bytes: half the bandwidth, least latency.
        Ll = 1, "ll";
        /// Lines of 120 payload and 8 flag bytes, where a line of 128 bytes arrives whole.
        Ll128 = 2, "ll128";
        /// A fused kernel in packets of [`Protocol::Ll`]: small all-to-all exchanges of one or two
        /// steps.
        Fused = 3, "fused";
        /// A fused kernel in lines of [`Protocol::Ll128`]: exchanges, broadcast and reduce.
        Fused128 = 4, "fused128";
    }
}

impl Protocol {
    /// Returns whether a fused kernel does the call, not a kernel that interprets a schedule.
    pub const fn is_fused(self) -> bool {
        matches!(self, Protocol::Fused | Protocol::Fused128)
    }
}
