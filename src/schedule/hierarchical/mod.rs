//! Hierarchical: first inside each group, then between groups, then inside again, so that data crosses
//! between groups once. A group is a host, or the ranks of one host behind one way out ([`Groups`]). For G
//! groups of M ranks, with R rails, and a message (or block) of S bytes:
//!
//! | collective | phases | bytes that a group sends to others |
//! | --- | --- | --- |
//! | all_reduce | parts to the group's rank on their rail, which sums; on each rail a ring, a tree or a two-shot between groups; the sum to everyone in the group | 2 S (G-1)/G; tree: at most 3 S on a rail, 2 S where rails are even in number or groups are inside a host |
//! | broadcast | the root sends each rail a part; a tree between groups; to everyone in the group | as a tree; inside a host at most S |
//! | reduce | the broadcast backwards | as a tree; inside a host at most S |
//! | reduce_scatter | blocks to the group's rank that has the place of their owner, which sums and sends to the owner | M S (G-1) |
//! | all_gather | each rank's block to the rank at its place in each other group, which sends it to everyone there | M S (G-1) |
//!
//! Flat algorithms send up to M times as many bytes between groups. Other collectives gain nothing: each of
//! their blocks is for one rank alone.
//!
//! Rails: rail r leads to the rank at place r of each group, modulo the group's number of ranks. Groups may
//! have different numbers of ranks, in any order. Hosts have as many rails as the smallest has ranks, so
//! ranks beyond that number are on no rail; they send their contributions to the rails and receive the
//! results. Groups inside a host have as many rails as the largest has ranks, so a rank of a smaller group
//! is on several rails. A single rail between hosts runs both trees. With several rails, each runs tree
//! `rail % 2`, so that inner hosts of one tree are leaves of the other.
//!
//! Ways out: the ranks of a group inside a host share one way out, which is fast only while they all send to
//! one other group. At one stage a group therefore sends to one other group, with two exceptions: in the
//! first phase of a two-shot, and in a reduce_scatter, it sends to all other groups in stage 0, to one after
//! the other. Before a rank goes on to the next group, it waits for contributions that the other ranks of
//! its group send after their messages to the group before. Separate stages would change nothing in this
//! order of messages, but would need a slot more for each group, because the owner receives all sums at once.
//! Two phases differ from hosts: the second phase of a two-shot goes round the groups, and trees are paths.
//!
//! Levels: contributions inside a group are encoded for [`Level::Intra`]. The sum of a group, and everything
//! after it, is encoded for [`Level::Inter`], also when it is finally sent to the ranks of a
//! group. It is forwarded unchanged, so all ranks end with the same bits under any pair of codecs.
//!
//! The sum of a group is formed in the order of places. The sums of other groups are added after it, in the
//! order of groups (ring: in the order of the ring; tree: in the order of the children).
//!
//! Two slots suffice for each rail of a connection; chunks that are blocks need two in all. Where all steps have one stage, a rank's
//! sends and receives on connections inside a group alternate, rail by rail. In trees each message is
//! received one stage after it was sent, and a connection carries at most two messages of a rail a pass.

mod blocks;
mod sums;
mod trees;

use super::chunks::SchedulePattern;
use super::cost::Hops;
use super::fan::{self, OwnTerm};
use super::generator::Generator;
use super::groups::Groups;
use super::ir::{Op, Step};
use crate::types::{Algorithm, Collective, Level};

/// States no collective: every hierarchical schedule needs groups, and the list is for schedules
/// that ignore groups.
pub(super) const GENERATOR: Generator = Generator {
    algorithm: Algorithm::Hierarchical,
    collectives: &[],
    parts,
    slots: |pattern| match pattern.collective {
        // Their connections carry one message a round, whatever the number of rails.
        Collective::AllGather | Collective::ReduceScatter => 2,
        _ => 2 * pattern.groups.rails_per_connection(),
    },
    stages,
    hops,
    steps,
};

/// Returns the number of parts of a pass's range; 1 if chunks are blocks.
fn parts(pattern: &SchedulePattern) -> usize {
    let groups = &pattern.groups;
    match (pattern.collective, pattern.between) {
        (Collective::AllReduce, Algorithm::Ring | Algorithm::Direct) => {
            groups.rails() * groups.count()
        }
        (Collective::AllReduce | Collective::Broadcast | Collective::Reduce, _) => {
            trees::count(groups)
        }
        _ => 1,
    }
}

/// Returns the number of stages of a pass.
fn stages(pattern: &SchedulePattern) -> usize {
    let depth = trees::depth(&pattern.groups);
    match (pattern.collective, pattern.between) {
        (Collective::AllReduce, Algorithm::Tree) => 2 * depth + 3,
        (Collective::Broadcast | Collective::Reduce, _) => depth + 3,
        (Collective::AllGather, _) => blocks::all_gather_stages(&pattern.groups),
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

/// Returns the length of the longest chain of dependent messages if every group has several ranks. In uneven
/// groups the actual chain may be shorter.
fn hops(pattern: &SchedulePattern) -> Hops {
    let groups = &pattern.groups;
    let (count, depth) = (groups.count(), trees::depth(groups));
    let home = groups.of(pattern.root).0;
    // The root needs one more message if another rank of its group belongs to a tree.
    let detour = usize::from(
        (0..trees::count(groups)).any(|tree| trees::owner(groups, home, tree) != pattern.root),
    );
    let (inside, between) = match (pattern.collective, pattern.between) {
        (Collective::AllReduce, Algorithm::Ring) => (2, 2 * (count - 1)),
        (Collective::AllReduce, Algorithm::Direct) if groups.are_inside_host() => (2, count),
        (Collective::AllReduce, Algorithm::Direct) => (2, 2),
        (Collective::AllReduce, _) => (2, 2 * depth),
        (Collective::Broadcast | Collective::Reduce, _) => (1 + detour, depth),
        _ => (1, 1),
    };
    Hops { inside, between }
}

/// The position of a rank: its group, and its index among the group's ranks.
struct Position<'a> {
    groups: &'a Groups,
    rank: usize,
    group: usize,
    /// Index of the rank among the group's ranks.
    place: usize,
}

impl<'a> Position<'a> {
    fn new(pattern: &'a SchedulePattern, rank: usize) -> Position<'a> {
        let (group, place) = pattern.groups.of(rank);
        Position {
            groups: &pattern.groups,
            rank,
            group,
            place,
        }
    }

    /// Returns the rank of `group` at `place`, modulo the group's number of ranks. So the rank on rail r is
    /// the rank at place r.
    fn at(&self, group: usize, place: usize) -> usize {
        let ranks = self.groups.ranks(group);
        ranks[place % ranks.len()] as usize
    }

    /// Returns the rails of this rank if `mine`, else the rails of the other ranks of its group.
    fn rails(&self, mine: bool) -> impl Iterator<Item = usize> + use<> {
        let (place, ranks) = (self.place, self.groups.ranks(self.group).len());
        (0..self.groups.rails()).filter(move |rail| (rail % ranks == place) == mine)
    }

    /// Returns the other ranks of this rank's group, in order.
    fn others(&self) -> impl Iterator<Item = usize> + use<'a> {
        let me = self.rank;
        let ranks = self.groups.ranks(self.group).iter();
        ranks.map(|&rank| rank as usize).filter(move |&r| r != me)
    }

    /// Returns the group whose number is `ahead` larger than this group's, modulo the number of
    /// groups.
    fn ahead(&self, ahead: usize) -> usize {
        (self.group + ahead) % self.groups.count()
    }

    /// Returns the group whose number is `back` smaller than this group's, modulo the number of
    /// groups.
    fn back(&self, back: usize) -> usize {
        (self.group + self.groups.count() - back) % self.groups.count()
    }

    /// Returns a step that sends this rank's contribution to rank `to` of this group, which sums the
    /// chunk.
    fn contribute(&self, stage: usize, chunk: usize, to: usize) -> Step {
        Step::new(stage, Op::Send, chunk)
            .to([to])
            .gives(Level::Intra)
    }

    /// Returns steps that add this group's contributions and the partial sums of ranks `from` in other
    /// groups, and send the result to `to`.
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
            // In a group of one rank, the partial sum is that rank's contribution, which is sent
            // unchanged.
            return fan::send(stage, chunk, to);
        }
        let at = Step::new(stage, op, chunk);
        let terms = [(Level::Intra, &others[..]), (Level::Inter, &from[..])];
        fan::sum(at, &terms, (OwnTerm::Exact, self.place), to)
    }
}
