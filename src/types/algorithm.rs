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

/// How payload and the news of its arrival travel. Host memory has [`Protocol::Simple`] alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Protocol {
    /// Payload in a slot, then a counter: full bandwidth.
    Simple = 0,
    /// Packets of 8 payload bytes and 8 flag bytes: half the bandwidth, the least latency.
    Ll = 1,
    /// Lines of 120 payload bytes and 8 flag bytes, where a line of 128 bytes arrives whole.
    Ll128 = 2,
}

impl Protocol {
    /// Every protocol, in numeric order.
    pub const ALL: [Protocol; 3] = [Protocol::Simple, Protocol::Ll, Protocol::Ll128];

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Protocol::Simple => "simple",
            Protocol::Ll => "ll",
            Protocol::Ll128 => "ll128",
        }
    }

    /// The protocol with this name.
    pub fn from_name(name: &str) -> Option<Protocol> {
        Protocol::ALL
            .into_iter()
            .find(|protocol| protocol.name() == name)
    }
}

/// Which kind of GPU kernel runs a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kernel {
    /// Interprets the steps of a schedule.
    Schedule = 0,
    /// Is written for one collective and algorithm, and sends in flagged packets or lines.
    Fused = 1,
}

impl Kernel {
    /// Every kind, in numeric order.
    pub const ALL: [Kernel; 2] = [Kernel::Schedule, Kernel::Fused];

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Kernel::Schedule => "schedule",
            Kernel::Fused => "fused",
        }
    }

    /// The kind with this name.
    pub fn from_name(name: &str) -> Option<Kernel> {
        Kernel::ALL.into_iter().find(|kernel| kernel.name() == name)
    }
}

/// A kind of kernel and its protocol. Fused kernels have no slots, and so no [`Protocol::Simple`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelProtocol {
    /// The kernel.
    pub kernel: Kernel,
    /// Its protocol.
    pub protocol: Protocol,
}

impl KernelProtocol {
    /// The schedule interpreter with slots and counters.
    pub const SIMPLE: KernelProtocol = KernelProtocol::new(Kernel::Schedule, Protocol::Simple);
    /// The schedule interpreter with packets.
    pub const LL: KernelProtocol = KernelProtocol::new(Kernel::Schedule, Protocol::Ll);
    /// The schedule interpreter with lines.
    pub const LL128: KernelProtocol = KernelProtocol::new(Kernel::Schedule, Protocol::Ll128);
    /// A fused kernel with packets.
    pub const FUSED_LL: KernelProtocol = KernelProtocol::new(Kernel::Fused, Protocol::Ll);
    /// A fused kernel with lines.
    pub const FUSED_LL128: KernelProtocol = KernelProtocol::new(Kernel::Fused, Protocol::Ll128);

    /// Every pair that exists. A kernel reports its pair by the index.
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

    /// Whether the kernel is a fused one.
    pub const fn is_fused(self) -> bool {
        matches!(self.kernel, Kernel::Fused)
    }

    /// The index in [`KernelProtocol::ALL`].
    pub const fn number(self) -> u32 {
        match self.kernel {
            Kernel::Schedule => self.protocol as u32,
            Kernel::Fused => 2 + self.protocol as u32,
        }
    }
}

impl fmt::Display for KernelProtocol {
    /// `schedule simple`: the words of a tuning table.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kernel.name(), self.protocol)
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
