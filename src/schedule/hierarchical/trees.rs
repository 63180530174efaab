//! Generates trees between hosts, with one chunk per tree. Groups are labelled by their distance from the
//! root's host (all_reduce: from host 0).
//!
//! Let D be the depth of the tree. A host at depth d sends up in stage 1 + D - d, and its ranks send their
//! contributions one stage before. It sends down in stage 1 + d (all_reduce: 1 + D + d), and its ranks
//! receive one stage later. If the root is not on the tree's rail, one more message connects the root and the
//! rail.

use super::{Position, Tree, tree};
use crate::schedule::fan;
use crate::schedule::groups::Groups;
use crate::schedule::ir::{Op, Own, Step};

/// Returns the number of trees, and so of chunks of a pass: one per rail, or two if there is a
/// single rail.
pub(super) fn count(hosts: &Groups) -> usize {
    match hosts.rails() {
        1 => 2,
        rails => rails,
    }
}

/// Returns the rank of `host` that is in tree `index`.
pub(super) fn owner(hosts: &Groups, host: usize, index: usize) -> usize {
    match hosts.ranks(host) {
        [] => 0,
        ranks => ranks[index % hosts.rails()] as usize,
    }
}

pub(super) fn all_reduce(position: &Position<'_>) -> Vec<Step> {
    let deepest = tree::depth(position.hosts.count());
    let mut steps = Vec::new();
    for index in 0..count(position.hosts) {
        let node = Node::new(position, index, 0);
        let turn = 1 + deepest;
        let (up, down) = (turn - node.depth, turn + node.depth);
        if !node.mine {
            steps.push(position.contribute(up - 1, index, node.owner));
            steps.push(Step::new(down + 1, Op::Recv, index).from([node.owner]));
            continue;
        }
        let children = || node.children.iter().copied();
        let below = children().chain(position.others());
        steps.extend(match node.parent {
            None => position.sum(turn, Op::RecvReduceCopySend, index, children(), below),
            Some(parent) => {
                let mut both = position.sum(up, Op::RecvReduceSend, index, children(), [parent]);
                both.extend(fan::forward(down, index, parent, below));
                both
            }
        });
    }
    steps
}

pub(super) fn broadcast(position: &Position<'_>, root: usize) -> Vec<Step> {
    let home = position.hosts.of(root).0;
    let mut steps = Vec::new();
    for index in 0..count(position.hosts) {
        let node = Node::new(position, index, home);
        let down = 1 + node.depth;
        let others = position.others().filter(|&other| other != root);
        let below = node.children.iter().copied().chain(others);
        if position.rank == root && !node.mine {
            let give = Step::new(0, Op::RecvReduceCopySend, index);
            steps.push(give.to([node.owner]));
        } else if position.rank == root {
            steps.extend(fan::source(down, index, below));
        } else if node.mine {
            let above = node.parent.unwrap_or(root);
            steps.extend(fan::forward(down, index, above, below));
        } else {
            steps.push(Step::new(down + 1, Op::Recv, index).from([node.owner]));
        }
    }
    steps
}

pub(super) fn reduce(position: &Position<'_>, root: usize) -> Vec<Step> {
    let home = position.hosts.of(root).0;
    let deepest = tree::depth(position.hosts.count());
    let mut steps = Vec::new();
    for index in 0..count(position.hosts) {
        let node = Node::new(position, index, home);
        let up = 1 + deepest - node.depth;
        if !node.mine {
            steps.push(position.contribute(up - 1, index, node.owner));
            if position.rank == root {
                // The sum is complete but not divided: for an average, the root divides it with a
                // final op.
                let end = Step::new(up + 1, Op::RecvReduceCopy, index);
                steps.push(end.own(Own::Absent).from([node.owner]));
            }
            continue;
        }
        let children = node.children.iter().copied();
        steps.extend(match position.rank == root {
            true => position.sum(up, Op::RecvReduceCopy, index, children, None),
            false => {
                let above = node.parent.unwrap_or(root);
                position.sum(up, Op::RecvReduceSend, index, children, [above])
            }
        });
    }
    steps
}

/// The node of this rank's host in one tree.
struct Node {
    /// The rank that represents the host in the tree.
    owner: usize,
    /// Whether this rank represents the host.
    mine: bool,
    /// Parent and children on other hosts; none if another rank represents the host.
    parent: Option<usize>,
    children: Vec<usize>,
    depth: usize,
}

impl Node {
    fn new(position: &Position<'_>, index: usize, home: usize) -> Node {
        let hosts = position.hosts.count();
        let tree = Tree::new(hosts, index % 2);
        let label = (position.host + hosts - home) % hosts;
        let owner_of = |label: usize| owner(position.hosts, (label + home) % hosts, index);
        let mine = owner_of(label) == position.rank;
        Node {
            owner: owner_of(label),
            parent: tree.parent(label).filter(|_| mine).map(owner_of),
            children: match mine {
                true => tree.children(label).map(owner_of).collect(),
                false => Vec::new(),
            },
            depth: tree.depth(label),
            mine,
        }
    }
}
