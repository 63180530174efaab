//! Hierarchical: first inside each host, then between hosts, then inside again, so that data crosses
//! between hosts once. For H hosts of M ranks (of the smallest host: R rails), and a
//! message (or block) of S bytes:
//!
//! | collective | phases | bytes that a host sends to others |
//! | --- | --- | --- |
//! | all_reduce | parts to the host's rank on their rail, which sums; on each rail a ring, a tree or a two-shot between hosts; the sum to everyone on the host | 2 S (H-1)/H; tree: at most 3 S on a rail, 2 S where rails are even in number |
//! | broadcast | the root sends each rail a part; a tree between hosts; to everyone on the host | as a tree |
//! | reduce | the broadcast backwards | as a tree |
//! | reduce_scatter | blocks to the host's rank that has the place of their owner, which sums and sends to the owner | M S (H-1) |
//! | all_gather | each rank's block to the rank at its place on each other host, which sends it to everyone there | M S (H-1) |
//!
//! Flat algorithms send up to M times as many bytes between hosts. Other collectives gain nothing: each of
//! their blocks is for one rank alone.
//!
//! Rails: the rank at place p of each host is on rail p. Hosts may have different numbers of
//! ranks, in any order. Ranks beyond the smallest host's number are on no rail; they send their
//! contributions to the rails and receive the results. A single rail runs both trees. With
//! several rails, each runs tree `rail % 2`, so that inner hosts of one tree are leaves of the other.
//!
//! Levels: contributions inside a host are encoded for [`Level::Intra`]. The sum of a host, and everything
//! after it, is encoded for [`Level::Inter`], also when it is finally sent to the ranks of a
//! host. It is forwarded unchanged, so all ranks end with the same bits under any pair of codecs.
//!
//! The sum of a host is formed in rank order. The sums of other hosts are added after it, in the order
//! of hosts (ring: in the order of the ring; tree: in the order of the children).
//!
//! Two slots suffice. Where all steps have one stage, a rank's sends and receives on connections inside a
//! host alternate, message by message. In trees each message is received one stage after it was sent,
//! and a connection carries at most two messages a pass.

mod blocks;
mod sums;
mod trees;

use super::chunks::SchedulePattern;
use super::cost::Hops;
use super::fan::{self, OwnTerm};
use super::generator::Generator;
use super::groups::Groups;
use super::ir::{Op, Step};
use super::tree::{self, Tree};
use crate::types::{Algorithm, Collective, Level};

/// States no collective: every hierarchical schedule needs hosts, and the list is for schedules
/// that ignore hosts.
pub(super) const GENERATOR: Generator = Generator {
    algorithm: Algorithm::Hierarchical,
    collectives: &[],
    parts,
    slots: |_| 2,
    stages,
    hops,
    steps,
};

/// Returns the number of parts of a pass's range; 1 if chunks are blocks.
fn parts(pattern: &SchedulePattern) -> usize {
    let hosts = &pattern.groups;
    match (pattern.collective, pattern.between) {
        (Collective::AllReduce, Algorithm::Ring | Algorithm::Direct) => {
            hosts.rails() * hosts.count()
        }
        (Collective::AllReduce | Collective::Broadcast | Collective::Reduce, _) => {
            trees::count(hosts)
        }
        _ => 1,
    }
}

/// Returns the number of stages of a pass.
fn stages(pattern: &SchedulePattern) -> usize {
    let depth = tree::depth(pattern.groups.count());
    match (pattern.collective, pattern.between) {
        (Collective::AllReduce, Algorithm::Tree) => 2 * depth + 3,
        (Collective::Broadcast | Collective::Reduce, _) => depth + 3,
        _ => 3,
    }
}

/// Returns the steps of `rank`, in order of stage.
fn steps(pattern: &SchedulePattern, rank: usize) -> Vec<Step> {
    let position = Position::new(pattern, rank);
    let mut steps = match (pattern.collective, pattern.between) {
        (Collective::AllReduce, Algorithm::Ring) => sums::ring(&position),
        (Collective::AllReduce, Algorithm::Direct) => sums::direct(&position),
        (Collective::AllReduce, _) => trees::all_reduce(&position),
        (Collective::Broadcast, _) => trees::broadcast(&position, pattern.root),
        (Collective::Reduce, _) => trees::reduce(&position, pattern.root),
        (Collective::ReduceScatter, _) => blocks::reduce_scatter(&position),
        (Collective::AllGather, _) => blocks::all_gather(&position),
        _ => Vec::new(),
    };
    steps.sort_by_key(|step| step.stage);
    steps
}

/// Returns the longest chain of messages if every host has several ranks. On uneven hosts the actual chain
/// may be shorter.
fn hops(pattern: &SchedulePattern) -> Hops {
    let hosts = pattern.groups.count();
    let depth = tree::depth(hosts);
    let home = pattern.groups.of(pattern.root).0;
    // The root needs one more message if another rank of its host belongs to a tree.
    let detour = usize::from(
        (0..trees::count(&pattern.groups))
            .any(|tree| trees::owner(&pattern.groups, home, tree) != pattern.root),
    );
    let (inside, between) = match (pattern.collective, pattern.between) {
        (Collective::AllReduce, Algorithm::Ring) => (2, 2 * (hosts - 1)),
        (Collective::AllReduce, Algorithm::Direct) => (2, 2),
        (Collective::AllReduce, _) => (2, 2 * depth),
        (Collective::Broadcast | Collective::Reduce, _) => (1 + detour, depth),
        _ => (1, 1),
    };
    Hops { inside, between }
}

/// The position of a rank: its host, and its index among the host's ranks.
struct Position<'a> {
    hosts: &'a Groups,
    rank: usize,
    host: usize,
    /// Index of the rank among the host's ranks.
    local_rank: usize,
}

impl<'a> Position<'a> {
    fn new(pattern: &'a SchedulePattern, rank: usize) -> Position<'a> {
        let (host, local_rank) = pattern.groups.of(rank);
        Position {
            hosts: &pattern.groups,
            rank,
            host,
            local_rank,
        }
    }

    /// Returns the rank with index `local_rank` on `host`.
    fn at(&self, host: usize, local_rank: usize) -> usize {
        self.hosts.ranks(host)[local_rank] as usize
    }

    /// Returns the other ranks of this rank's host, in order.
    fn others(&self) -> impl Iterator<Item = usize> + use<'a> {
        let me = self.rank;
        let ranks = self.hosts.ranks(self.host).iter();
        ranks.map(|&rank| rank as usize).filter(move |&r| r != me)
    }

    /// Returns the host whose number is `ahead` larger than this host's, modulo the number of
    /// hosts.
    fn ahead(&self, ahead: usize) -> usize {
        (self.host + ahead) % self.hosts.count()
    }

    /// Returns the host whose number is `back` smaller than this host's, modulo the number of
    /// hosts.
    fn back(&self, back: usize) -> usize {
        (self.host + self.hosts.count() - back) % self.hosts.count()
    }

    /// Returns a step that sends this rank's contribution to rank `to` of this host, which sums the
    /// chunk.
    fn contribute(&self, stage: usize, chunk: usize, to: usize) -> Step {
        Step::new(stage, Op::Send, chunk)
            .to([to])
            .gives(Level::Intra)
    }

    /// Returns steps that add this host's contributions and the partial sums of ranks `from` on other hosts,
    /// and send the result to `to`.
    fn sum(
        &self,
        stage: usize,
        op: Op,
        chunk: usize,
        from: impl IntoIterator<Item = usize>,
        to: impl IntoIterator<Item = usize>,
    ) -> Vec<Step> {
        let from: Vec<usize> = from.into_iter().collect();
        let others: Vec<usize> = self.others().collect();
        if others.is_empty() && from.is_empty() && op == Op::RecvReduceSend {
            // On a host with one rank, the partial sum is that rank's contribution, which is sent
            // unchanged.
            return fan::send(stage, chunk, to);
        }
        let at = Step::new(stage, op, chunk);
        let terms = [(Level::Intra, &others[..]), (Level::Inter, &from[..])];
        fan::sum(at, &terms, (OwnTerm::Exact, self.local_rank), to)
    }
}
