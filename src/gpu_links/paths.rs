//! By which way two GPUs reach each other. Pure: what each rank found out goes in, and all ranks
//! come to the same answer about every pair.

use crate::schedule::Hosts;
use crate::types::TransportKind;
use std::collections::BTreeMap;
use std::fmt;

/// What lies between two GPUs, from fast to slow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum LinkClass {
    /// Nothing: they are one.
    SameDevice = 0,
    /// A link that carries atomics, as NVLink does: a line of 128 bytes arrives whole.
    NvLink = 1,
    /// PCIe, or unknown because the other GPU is hidden from this process: lines may be torn.
    Pcie = 2,
    /// Memory of the host.
    Host = 3,
}

/// Compute capabilities of GPUs that show each other the 128 bytes of a line together. No document
/// promises it of any: 9.0 is where this library has been tried, and these are the ones of those it has
/// kernels for on which NCCL takes its protocol of that kind by itself (2.28, `src/graph/tuning.cc`). On
/// others stale words could pass for a message.
pub const GPUS_THAT_KEEP_LINES_WHOLE: [(u32, u32); 3] = [(8, 0), (9, 0), (10, 0)];

impl LinkClass {
    const ALL: [LinkClass; 4] = [
        LinkClass::SameDevice,
        LinkClass::NvLink,
        LinkClass::Pcie,
        LinkClass::Host,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            LinkClass::SameDevice => "same GPU",
            LinkClass::NvLink => "NVLink",
            LinkClass::Pcie => "PCIe",
            LinkClass::Host => "pinned host memory",
        }
    }

    /// Whether 128 bytes that a warp stores together are seen together, as the ll128 protocol
    /// needs, between GPUs that keep lines whole (`GPUS_THAT_KEEP_LINES_WHOLE`).
    pub fn keeps_lines_whole(self) -> bool {
        self <= LinkClass::NvLink
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

/// Where the boxes of a pair of ranks lie, both directions alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerPath {
    /// On the GPU that both ranks use.
    SameDevice,
    /// Each on the reader's GPU, written over the link between the two.
    Peer {
        /// The kind of link.
        class: LinkClass,
        /// The driver's rank of the link, 0 for the fastest; `None` if the other GPU is hidden
        /// from this process.
        performance_rank: Option<u32>,
    },
    /// In pinned host memory, because one GPU cannot or must not write the other's memory.
    PinnedHost {
        /// Why.
        reason: String,
    },
    /// On different hosts: each rank's kernels use boxes in pinned memory of their own host, and
    /// its proxy carries messages from one to the other.
    Network {
        /// By which transport.
        transport: TransportKind,
    },
}

impl PeerPath {
    /// What lies between a rank and what its kernels write to.
    pub fn class(&self) -> LinkClass {
        match self {
            PeerPath::SameDevice => LinkClass::SameDevice,
            PeerPath::Peer { class, .. } => *class,
            PeerPath::PinnedHost { .. } | PeerPath::Network { .. } => LinkClass::Host,
        }
    }

    /// The transport that carries messages.
    pub fn transport(&self) -> TransportKind {
        match self {
            PeerPath::Network { transport } => *transport,
            _ => super::KIND,
        }
    }

    /// What the two have between them, without a reason for it.
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

/// Why pairs of ranks of one host cannot use each other's device memory, as far as all ranks have
/// said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PathFailures {
    pairs: BTreeMap<(usize, usize), String>,
    hosts: Hosts,
}

impl PathFailures {
    /// None yet between ranks of `hosts`.
    pub fn on(hosts: &Hosts) -> PathFailures {
        PathFailures {
            pairs: BTreeMap::new(),
            hosts: hosts.clone(),
        }
    }

    /// Notes what rank `by` said about its way to `peer`. The first word about a pair stays.
    /// Between hosts there is no way that it could be about.
    pub fn note(&mut self, by: usize, peer: usize, reason: String) {
        let pair = (by.min(peer), by.max(peer));
        if self.hosts.share(by, peer) {
            self.pairs.entry(pair).or_insert(reason);
        }
    }

    /// What keeps the two apart, if anything does.
    pub fn between(&self, one: usize, two: usize) -> Option<&str> {
        let pair = (one.min(two), one.max(two));
        self.pairs.get(&pair).map(String::as_str)
    }

    /// Whether there is none at all.
    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    /// Peers of `me` whose device memory it uses.
    pub fn reachable(&self, me: usize, nranks: usize) -> Vec<usize> {
        self.peers(me, nranks, |peer| {
            self.hosts.share(me, peer) && self.between(me, peer).is_none()
        })
    }

    /// Peers of `me` that it meets in memory of their host.
    pub fn apart(&self, me: usize, nranks: usize) -> Vec<usize> {
        self.peers(me, nranks, |peer| self.between(me, peer).is_some())
    }

    /// Peers of `me` on other hosts.
    pub fn abroad(&self, me: usize, nranks: usize) -> Vec<usize> {
        self.peers(me, nranks, |peer| !self.hosts.share(me, peer))
    }

    fn peers(&self, me: usize, nranks: usize, which: impl Fn(usize) -> bool) -> Vec<usize> {
        let others = (0..nranks).filter(|&peer| peer != me);
        others.filter(|&peer| which(peer)).collect()
    }

    /// For the log: each reason with the peers above `me` that it is about, so that of each pair
    /// one rank speaks.
    pub fn told_by(&self, me: usize) -> Vec<(&str, Vec<usize>)> {
        let mut told: Vec<(&str, Vec<usize>)> = Vec::new();
        for (&(_, high), reason) in self.pairs.range((me, 0)..(me + 1, 0)) {
            match told.iter_mut().find(|(known, _)| known == reason) {
                Some((_, peers)) => peers.push(high),
                None => told.push((reason, vec![high])),
            }
        }
        told
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_pair_has_one_answer_whoever_asks_and_whoever_spoke() {
        let mut failures = PathFailures::default();
        assert!(failures.is_empty());
        failures.note(2, 0, "first".into());
        failures.note(0, 2, "second".into());
        failures.note(0, 3, "first".into());
        failures.note(1, 0, "third".into());
        assert_eq!(failures.between(0, 2), Some("first"));
        assert_eq!(failures.between(2, 0), Some("first"));
        assert_eq!(failures.between(1, 2), None);
        assert_eq!(failures.reachable(0, 5), [4]);
        assert_eq!(failures.apart(0, 5), [1, 2, 3]);
        assert_eq!(failures.reachable(2, 5), [1, 3, 4]);
        assert_eq!(
            failures.told_by(0),
            [("third", vec![1]), ("first", vec![2, 3])]
        );
        assert!(failures.told_by(2).is_empty());
    }

    #[test]
    fn ranks_of_different_hosts_meet_nowhere() {
        let mut failures = PathFailures::on(&Hosts::even(2, 2));
        failures.note(0, 2, "no link".into());
        assert!(failures.is_empty() && failures.between(0, 2).is_none());
        failures.note(2, 3, "no link".into());
        assert_eq!(failures.reachable(0, 4), [1]);
        assert_eq!(failures.abroad(0, 4), [2, 3]);
        assert!(failures.reachable(3, 4).is_empty());
        assert_eq!(failures.apart(3, 4), [2]);
        assert_eq!(failures.abroad(3, 4), [0, 1]);
        let path = PeerPath::Network {
            transport: TransportKind::Tcp,
        };
        assert_eq!(path.name(), "pinned staging through tcp");
        assert_eq!(path.transport(), TransportKind::Tcp);
    }

    #[test]
    fn classes_go_from_fast_to_slow_and_travel_as_numbers() {
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
