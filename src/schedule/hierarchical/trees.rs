//! Generates trees between groups, with one chunk per tree. Groups are labelled by their distance from the
//! root's group (all_reduce: from group 0).
//!
//! Hosts form two binary trees. Groups inside a host form a path, along which all rails go in one direction,
//! so that a group sends to one other group at a time. A path takes more hops, but sends each byte over a
//! group's way out once where an inner node of a binary tree sends it to two children.
//!
//! Let D be the depth of the tree. A group at depth d sends up in stage 1 + D - d, and its ranks send their
//! contributions one stage before. It sends down in stage 1 + d (all_reduce: 1 + D + d), and its ranks
//! receive one stage later. If the root is not on the tree's rail, one more message connects the root and the
//! rail.

use super::Position;
use crate::schedule::fan;
use crate::schedule::groups::Groups;
use crate::schedule::ir::{Op, Step};
use crate::schedule::tree::{self, Tree};

/// Returns the number of trees, and so of chunks of a pass: one per rail, or two if there is a
/// single rail.
pub(super) fn count(groups: &Groups) -> usize {
    match groups.rails() {
        1 => 2,
        rails => rails,
    }
}

/// Returns the number of levels below the root's group.
pub(super) fn depth(groups: &Groups) -> usize {
    match groups.are_inside_host() {
        true => groups.count() - 1,
        false => tree::depth(groups.count()),
    }
}

/// Returns the rank of `group` that is in tree `index`.
pub(super) fn owner(groups: &Groups, group: usize, index: usize) -> usize {
    match groups.ranks(group) {
        [] => 0,
        ranks => ranks[index % groups.rails() % ranks.len()] as usize,
    }
}

pub(super) fn all_reduce(position: &Position<'_>) -> Vec<Step> {
    let deepest = depth(position.groups);
    let mut steps = Vec::new();
    for index in 0..count(position.groups) {
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
    let home = position.groups.of(root).0;
    let mut steps = Vec::new();
    for index in 0..count(position.groups) {
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
    let home = position.groups.of(root).0;
    let deepest = depth(position.groups);
    let mut steps = Vec::new();
    for index in 0..count(position.groups) {
        let node = Node::new(position, index, home);
        let up = 1 + deepest - node.depth;
        if !node.mine {
            steps.push(position.contribute(up - 1, index, node.owner));
            if position.rank == root {
                // The sum is final: for an average, the owner has divided it.
                steps.push(Step::new(up + 1, Op::Recv, index).from([node.owner]));
            }
            continue;
        }
        let children = node.children.iter().copied();
        steps.extend(match position.rank == root {
            true => position.sum(up, Op::RecvReduceCopy, index, children, None),
            false => match node.parent {
                Some(above) => position.sum(up, Op::RecvReduceSend, index, children, [above]),
                None => position.sum(up, Op::RecvReduceFinishSend, index, children, [root]),
            },
        });
    }
    steps
}

/// The node of this rank's group in one tree.
struct Node {
    /// The rank that represents the group in the tree.
    owner: usize,
    /// Whether this rank represents the group.
    mine: bool,
    /// Parent and children in other groups; none if another rank represents the group.
    parent: Option<usize>,
    children: Vec<usize>,
    depth: usize,
}

impl Node {
    fn new(position: &Position<'_>, index: usize, home: usize) -> Node {
        let groups = position.groups.count();
        let label = (position.group + groups - home) % groups;
        let (parent, children, depth) = match position.groups.are_inside_host() {
            true => {
                let below = (label + 1 < groups).then_some(label + 1);
                (label.checked_sub(1), below.into_iter().collect(), label)
            }
            false => {
                let tree = Tree::new(groups, index % 2);
                let children: Vec<usize> = tree.children(label).collect();
                (tree.parent(label), children, tree.depth(label))
            }
        };
        let owner_of = |label: usize| owner(position.groups, (label + home) % groups, index);
        let mine = owner_of(label) == position.rank;
        Node {
            owner: owner_of(label),
            parent: parent.filter(|_| mine).map(owner_of),
            children: match mine {
                true => children.into_iter().map(owner_of).collect(),
                false => Vec::new(),
            },
            depth,
            mine,
        }
    }
}
