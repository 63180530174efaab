//! Names of algorithms and transports.

use std::fmt;

/// A family of schedules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Algorithm {
    /// Neighbour to neighbour, N-1 hops each way.
    Ring = 0,
    /// Two complementary binary trees.
    Tree = 1,
    /// Everyone to everyone, in one step: least latency, N-1 times the bytes.
    OneShot = 2,
    /// Everyone to the owner of each chunk and back: two steps, the ring's bytes.
    Direct = 3,
    /// Inside each host first, then between hosts on each rail, then inside again.
    Hierarchical = 4,
}

impl Algorithm {
    /// Every algorithm, in numeric order.
    pub const ALL: [Algorithm; 5] = [
        Algorithm::Ring,
        Algorithm::Tree,
        Algorithm::OneShot,
        Algorithm::Direct,
        Algorithm::Hierarchical,
    ];

    /// Those that treat all ranks alike, whatever host they are on, in numeric order.
    pub const FLAT: [Algorithm; 4] = [
        Algorithm::Ring,
        Algorithm::Tree,
        Algorithm::OneShot,
        Algorithm::Direct,
    ];

    /// Lower-case name. `direct` is the two-shot form.
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::Ring => "ring",
            Algorithm::Tree => "tree",
            Algorithm::OneShot => "oneshot",
            Algorithm::Direct => "direct",
            Algorithm::Hierarchical => "hierarchical",
        }
    }

    /// The algorithm with this name.
    pub fn from_name(name: &str) -> Option<Algorithm> {
        Algorithm::ALL
            .into_iter()
            .find(|algorithm| algorithm.name() == name)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// For what a message is encoded. A schedule that treats all ranks alike encodes everything for
/// [`Level::Inter`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Level {
    /// For the way to a rank of the same host.
    Intra = 0,
    /// For the way between hosts. What was encoded for it keeps its encoding on the rest of its
    /// way inside a host: decoding and encoding again would cost time and, in another lossy codec,
    /// the agreement of all ranks.
    Inter = 1,
}

impl Level {
    /// Both levels, in numeric order.
    pub const ALL: [Level; 2] = [Level::Intra, Level::Inter];

    /// As settings name it.
    pub const fn name(self) -> &'static str {
        match self {
            Level::Intra => "intra",
            Level::Inter => "inter",
        }
    }
}

/// What carries slots between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum TransportKind {
    /// Threads of one process.
    Loopback = 0,
    /// Sealed shared memory between processes of one host.
    Shm = 1,
    /// TCP sockets.
    Tcp = 2,
    /// Memory of GPUs of one host, written by peers; pinned host memory where they cannot.
    Cuda = 3,
    /// Writes into memory of peers over InfiniBand or RoCE.
    Rdma = 4,
}

impl TransportKind {
    /// Every kind, in numeric order.
    pub const ALL: [TransportKind; 5] = [
        TransportKind::Loopback,
        TransportKind::Shm,
        TransportKind::Tcp,
        TransportKind::Cuda,
        TransportKind::Rdma,
    ];

    /// The kinds that carry host memory. A pair takes the first that connects it, and RDMA in place
    /// of TCP where all ranks of a communicator can.
    pub const HOST: [TransportKind; 4] = [
        TransportKind::Loopback,
        TransportKind::Shm,
        TransportKind::Tcp,
        TransportKind::Rdma,
    ];

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            TransportKind::Loopback => "loopback",
            TransportKind::Shm => "shm",
            TransportKind::Tcp => "tcp",
            TransportKind::Cuda => "cuda",
            TransportKind::Rdma => "rdma",
        }
    }

    /// The kind with this name.
    pub fn from_name(name: &str) -> Option<TransportKind> {
        TransportKind::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How a kernel carries the messages of a call. The host has but [`Protocol::Simple`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Protocol {
    /// Payload, then a counter.
    Simple = 0,
    /// 8 payload bytes and 8 flag bytes a packet: half the bandwidth, least latency.
    Ll = 1,
    /// 120 payload bytes and 8 flag bytes a line; where a line of 128 bytes arrives whole.
    Ll128 = 2,
    /// A fused kernel, in packets of its own: something small from everybody to everybody, once or twice.
    Fused = 3,
    /// The same in lines, and a broadcast or reduce.
    Fused128 = 4,
}

impl Protocol {
    /// Every protocol, in numeric order.
    pub const ALL: [Protocol; 5] = [
        Protocol::Simple,
        Protocol::Ll,
        Protocol::Ll128,
        Protocol::Fused,
        Protocol::Fused128,
    ];

    /// Whether a fused kernel does the call, and not one that interprets a schedule.
    pub const fn is_fused(self) -> bool {
        matches!(self, Protocol::Fused | Protocol::Fused128)
    }

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Protocol::Simple => "simple",
            Protocol::Ll => "ll",
            Protocol::Ll128 => "ll128",
            Protocol::Fused => "fused",
            Protocol::Fused128 => "fused128",
        }
    }

    /// The protocol with this name.
    pub fn from_name(name: &str) -> Option<Protocol> {
        Protocol::ALL
            .into_iter()
            .find(|protocol| protocol.name() == name)
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
