//! The path of each pair of GPUs. It is a pure function of the reports of all ranks, so that all ranks find
//! the same path for every pair.

use crate::schedule::Groups;
use crate::types::TransportKind;
use std::collections::BTreeMap;
use std::fmt;

/// Class of the link between two GPUs, from fast to slow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum LinkClass {
    /// Both ranks use one GPU, so there is no link.
    SameDevice = 0,
    /// A link with native atomics, such as NVLink. An ll128 line of 128 bytes arrives as a whole.
    NvLink = 1,
    /// PCIe, or a link that is unknown because this process does not see the other GPU. An ll128 line of 128
    /// bytes may arrive in pieces.
    Pcie = 2,
    /// Pinned host memory, used instead of a link between the GPUs.
    Host = 3,
}

/// Compute capabilities of GPUs that keep ll128 lines whole: another GPU sees the 128 bytes that a warp
/// stores together at once. No document promises this. The tests of this project cover capability 9.0. For
/// all three, NCCL 2.28 selects LL128 by default (`src/graph/tuning.cc`). On other GPUs stale words could
/// pass for a message.
pub const GPUS_THAT_KEEP_LINES_WHOLE: [(u32, u32); 3] = [(8, 0), (9, 0), (10, 0)];

impl LinkClass {
    const ALL: [LinkClass; 4] = [
        LinkClass::SameDevice,
        LinkClass::NvLink,
        LinkClass::Pcie,
        LinkClass::Host,
    ];

    /// Returns the name of the link class for logs and reports.
    pub fn name(self) -> &'static str {
        match self {
            LinkClass::SameDevice => "same GPU",
            LinkClass::NvLink => "NVLink",
            LinkClass::Pcie => "PCIe",
            LinkClass::Host => "pinned host memory",
        }
    }

    /// Returns whether the link keeps ll128 lines whole between GPUs of `GPUS_THAT_KEEP_LINES_WHOLE`. The
    /// ll128 protocol relies on whole lines.
    pub fn keeps_lines_whole(self) -> bool {
        self <= LinkClass::NvLink
    }

    pub(super) const fn number(self) -> u8 {
        self as u8
    }

    pub(super) fn from_number(number: u8) -> Option<LinkClass> {
        LinkClass::ALL.get(usize::from(number)).copied()
    }
}

impl fmt::Display for LinkClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Where the peer buffers of a pair of ranks lie, equal for both directions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerPath {
    /// The peer buffers lie in memory of the GPU that both ranks use.
    SameDevice,
    /// The peer buffers lie in memory of the reader's GPU; the writer's GPU writes them over the
    /// link.
    Peer {
        /// The class of the link.
        class: LinkClass,
        /// The driver's performance rank of the link, 0 for the fastest; `None` if this process does not
        /// see the other GPU.
        performance_rank: Option<u32>,
    },
    /// The peer buffers lie in pinned host memory, because one GPU cannot write the other's memory or a
    /// setting forbids it.
    PinnedHost {
        /// Why the pair has no peer access.
        reason: String,
    },
    /// In pinned memory of both hosts. Kernels use the peer buffers of their own host, and proxies carry
    /// messages between the hosts.
    Network {
        /// The transport that carries the messages.
        transport: TransportKind,
    },
}

impl PeerPath {
    /// Returns the class of the link between a rank's GPU and the peer buffers that its kernels write.
    pub fn class(&self) -> LinkClass {
        match self {
            PeerPath::SameDevice => LinkClass::SameDevice,
            PeerPath::Peer { class, .. } => *class,
            PeerPath::PinnedHost { .. } | PeerPath::Network { .. } => LinkClass::Host,
        }
    }

    /// Returns the transport that carries messages.
    pub fn transport(&self) -> TransportKind {
        match self {
            PeerPath::Network { transport } => *transport,
            _ => super::KIND,
        }
    }

    /// Returns a name of the path for reports; it leaves out the reason of a failure.
    pub fn name(&self) -> String {
        match self {
            PeerPath::Network { .. } => self.to_string(),
            other => other.class().name().into(),
        }
    }
}

impl fmt::Display for PeerPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PeerPath::PinnedHost { reason } => write!(f, "pinned host memory: {reason}"),
            PeerPath::Network { transport } => write!(f, "pinned staging through {transport}"),
            other => other.class().fmt(f),
        }
    }
}

/// Pairs of ranks of one host that have no peer access, with the reasons that ranks reported.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PathFailures {
    pairs: BTreeMap<(usize, usize), String>,
    hosts: Groups,
}

impl PathFailures {
    /// Returns an empty set for the ranks of `hosts`.
    pub fn new(hosts: &Groups) -> PathFailures {
        PathFailures {
            pairs: BTreeMap::new(),
            hosts: hosts.clone(),
        }
    }

    /// Records the failure that rank `reporter` reported about `peer`. The first reason of a pair stays.
    /// Pairs between hosts are ignored, because they never have peer access.
    pub fn record(&mut self, reporter: usize, peer: usize, reason: String) {
        let pair = (reporter.min(peer), reporter.max(peer));
        if self.hosts.share(reporter, peer) {
            self.pairs.entry(pair).or_insert(reason);
        }
    }

    /// Returns the reason why two ranks have no peer access; `None` if no failure was recorded for
    /// them.
    pub fn between(&self, one: usize, two: usize) -> Option<&str> {
        let pair = (one.min(two), one.max(two));
        self.pairs.get(&pair).map(String::as_str)
    }

    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    /// Returns the peers with which `me` has peer access.
    pub fn reachable(&self, me: usize, nranks: usize) -> Vec<usize> {
        self.peers(me, nranks, |peer| {
            self.hosts.share(me, peer) && self.between(me, peer).is_none()
        })
    }

    /// Returns the peers whose peer buffers are in pinned memory of the host they share with `me`.
    pub fn in_host_memory(&self, me: usize, nranks: usize) -> Vec<usize> {
        self.peers(me, nranks, |peer| self.between(me, peer).is_some())
    }

    /// Returns the peers of `me` on other hosts.
    pub fn on_other_hosts(&self, me: usize, nranks: usize) -> Vec<usize> {
        self.peers(me, nranks, |peer| !self.hosts.share(me, peer))
    }

    fn peers(&self, me: usize, nranks: usize, selects: impl Fn(usize) -> bool) -> Vec<usize> {
        let others = (0..nranks).filter(|&peer| peer != me);
        others.filter(|&peer| selects(peer)).collect()
    }

    /// Returns the failures between `me` and higher ranks, grouped by reason, so that one rank of each pair
    /// logs them.
    pub fn with_higher_ranks(&self, me: usize) -> Vec<(&str, Vec<usize>)> {
        let mut found: Vec<(&str, Vec<usize>)> = Vec::new();
        for (&(_, high), reason) in self.pairs.range((me, 0)..(me + 1, 0)) {
            match found.iter_mut().find(|(known, _)| known == reason) {
                Some((_, peers)) => peers.push(high),
                None => found.push((reason, vec![high])),
            }
        }
        found
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_equal_for_both_ranks_and_the_first_reason_stays() {
        let mut failures = PathFailures::default();
        assert!(failures.is_empty());
        failures.record(2, 0, "first".into());
        failures.record(0, 2, "second".into());
        failures.record(0, 3, "first".into());
        failures.record(1, 0, "third".into());
        assert_eq!(failures.between(0, 2), Some("first"));
        assert_eq!(failures.between(2, 0), Some("first"));
        assert_eq!(failures.between(1, 2), None);
        assert_eq!(failures.reachable(0, 5), [4]);
        assert_eq!(failures.in_host_memory(0, 5), [1, 2, 3]);
        assert_eq!(failures.reachable(2, 5), [1, 3, 4]);
        assert_eq!(
            failures.with_higher_ranks(0),
            [("third", vec![1]), ("first", vec![2, 3])]
        );
        assert!(failures.with_higher_ranks(2).is_empty());
    }

    #[test]
    fn pairs_of_different_hosts_record_no_failure() {
        let mut failures = PathFailures::new(&Groups::even_hosts(2, 2));
        failures.record(0, 2, "no link".into());
        assert!(failures.is_empty() && failures.between(0, 2).is_none());
        failures.record(2, 3, "no link".into());
        assert_eq!(failures.reachable(0, 4), [1]);
        assert_eq!(failures.on_other_hosts(0, 4), [2, 3]);
        assert!(failures.reachable(3, 4).is_empty());
        assert_eq!(failures.in_host_memory(3, 4), [2]);
        assert_eq!(failures.on_other_hosts(3, 4), [0, 1]);
        let path = PeerPath::Network {
            transport: TransportKind::Tcp,
        };
        assert_eq!(path.name(), "pinned staging through tcp");
        assert_eq!(path.transport(), TransportKind::Tcp);
    }

    #[test]
    fn link_classes_are_ordered_and_survive_a_round_trip() {
        assert!(LinkClass::ALL.windows(2).all(|pair| pair[0] < pair[1]));
        for (number, class) in LinkClass::ALL.into_iter().enumerate() {
            assert_eq!(LinkClass::from_number(number as u8), Some(class));
            assert_eq!(class as usize, number);
        }
        assert_eq!(LinkClass::from_number(4), None);
        let path = PeerPath::PinnedHost {
            reason: "no way".into(),
        };
        assert!(path.to_string().ends_with("no way"));
        let whole = LinkClass::ALL.map(LinkClass::keeps_lines_whole);
        assert_eq!(whole, [true, true, false, false]);
    }
}
