//! Tree: two complementary binary trees, each carrying half of the message. For N ranks, a
//! message of S bytes and D = floor(log2(N-1)) + 1 levels below the root:
//!
//! | collective | messages on the way of a chunk | bytes sent by a rank |
//! | --- | --- | --- |
//! | all_reduce | D up, D down | at most 2 S |
//! | broadcast | D down | at most S |
//! | reduce | D up | S |
//!
//! Ranks are labelled by their distance from the root: 0 is the root of both trees, with one child
//! in each. The other M = N-1 labels form an in-order binary tree in which odd labels are leaves
//! (Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and
//! scan", 2009). The second tree is the first with labels mirrored (M even) or shifted (M odd), so
//! that even labels are its leaves: but for the root, no rank is inner in both, and every rank
//! carries the same load.
//!
//! A rank at depth d sends up in stage D-d and down in stage D+d. Every message is received one
//! stage after it was sent, and a connection carries at most two messages a pass: two slots suffice, and
//! 2D+1 passes overlap.

use super::chunks::SchedulePattern;
use super::generator::Generator;
use super::ir::{Op, Step};
use crate::types::{Algorithm, Collective};

pub(super) const GENERATOR: Generator = Generator {
    algorithm: Algorithm::Tree,
    collectives: &[
        Collective::AllReduce,
        Collective::Broadcast,
        Collective::Reduce,
    ],
    parts: |pattern| match pattern.collective {
        Collective::AllReduce | Collective::Broadcast | Collective::Reduce => 2,
        _ => 1,
    },
    slots: |_| 2,
    stages: |pattern| ways(pattern.collective) * depth(pattern.nranks) + 1,
    hops: |pattern| pattern.flat_hops(ways(pattern.collective) * depth(pattern.nranks)),
    steps,
};

/// Returns how often a chunk passes through all levels: twice in an all_reduce, up and down.
const fn ways(collective: Collective) -> usize {
    match collective {
        Collective::AllReduce => 2,
        _ => 1,
    }
}

/// Returns the number of levels below the root.
pub(super) fn depth(nranks: usize) -> usize {
    match nranks {
        0 | 1 => 0,
        n => (n - 1).ilog2() as usize + 1,
    }
}

fn steps(pattern: &SchedulePattern, rank: usize) -> Vec<Step> {
    let SchedulePattern { nranks, .. } = *pattern;
    let root = match pattern.collective {
        Collective::AllReduce => 0,
        _ => pattern.root,
    };
    let deepest = depth(nranks);
    let label = (rank + nranks - root) % nranks;
    let mut steps = Vec::new();
    for index in 0..2 {
        let tree = Tree::new(nranks, index);
        let rank_of = |label: usize| (label + root) % nranks;
        let children: Vec<_> = tree.children(label).map(rank_of).collect();
        let parent = tree.parent(label).map(rank_of);
        let depth = tree.depth(label);
        let down = |stage, op_inner, op_leaf| {
            let op = if children.is_empty() {
                op_leaf
            } else {
                op_inner
            };
            Step::new(stage, op, index)
                .from(parent)
                .to(children.iter().copied())
        };
        let up = |op_inner, op_leaf| {
            let op = if children.is_empty() {
                op_leaf
            } else {
                op_inner
            };
            let step = Step::new(deepest - depth, op, index);
            step.from(children.iter().copied()).to(parent)
        };
        match (pattern.collective, parent) {
            (Collective::AllReduce, None) => {
                let turn = Step::new(deepest, Op::RecvReduceCopySend, index);
                let children = || children.iter().copied();
                steps.push(turn.from(children()).to(children()));
            }
            (Collective::AllReduce, Some(_)) => {
                steps.push(up(Op::RecvReduceSend, Op::Send));
                steps.push(down(deepest + depth, Op::RecvCopySend, Op::Recv));
            }
            (Collective::Broadcast, None) => {
                let source = Step::new(0, Op::RecvReduceCopySend, index);
                steps.push(source.to(children.iter().copied()));
            }
            (Collective::Broadcast, Some(_)) => {
                steps.push(down(depth, Op::RecvCopySend, Op::Recv));
            }
            (Collective::Reduce, None) => {
                steps.push(up(Op::RecvReduceCopy, Op::RecvReduceCopy));
            }
            (Collective::Reduce, Some(_)) => steps.push(up(Op::RecvReduceSend, Op::Send)),
            _ => {}
        }
    }
    steps.sort_by_key(|step| step.stage);
    steps
}

/// A binary tree over the labels 0 (the root) to `inner`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tree {
    inner: usize,
    index: usize,
}

impl Tree {
    /// Creates tree `index`, 0 or 1, over the labels 0 to `nodes` - 1.
    pub(super) fn new(nodes: usize, index: usize) -> Tree {
        Tree {
            inner: nodes - 1,
            index,
        }
    }

    pub(super) fn parent(&self, label: usize) -> Option<usize> {
        if label == 0 {
            return None;
        }
        let node = self.node(label);
        let bit = lowest_bit(node);
        let up = (node ^ bit) | (bit << 1);
        Some(self.label(if up > self.inner { node ^ bit } else { up }))
    }

    pub(super) fn children(&self, label: usize) -> impl Iterator<Item = usize> + use<> {
        let node = self.node(label);
        let (left, right) = if node == 0 {
            let top = (self.inner > 0).then(|| 1 << self.inner.ilog2());
            (top, None)
        } else {
            let mut half = lowest_bit(node) / 2;
            let left = (half > 0).then(|| node - half);
            // If the right subtree is cut off at `inner`, its highest existing node becomes the
            // right child.
            while half > 0 && node + half > self.inner {
                half /= 2;
            }
            (left, (half > 0).then(|| node + half))
        };
        let tree = *self;
        left.into_iter()
            .chain(right)
            .map(move |node| tree.label(node))
    }

    pub(super) fn depth(&self, label: usize) -> usize {
        std::iter::successors(self.parent(label), |&up| self.parent(up)).count()
    }

    /// Returns the node of the in-order tree that carries a label.
    fn node(&self, label: usize) -> usize {
        match (label, self.index) {
            (0, _) | (_, 0) => label,
            _ if self.inner.is_multiple_of(2) => self.inner + 1 - label,
            (1, _) => self.inner,
            _ => label - 1,
        }
    }

    /// Returns the label of a node of the in-order tree.
    fn label(&self, node: usize) -> usize {
        match (node, self.index) {
            (0, _) | (_, 0) => node,
            _ if self.inner.is_multiple_of(2) => self.inner + 1 - node,
            _ if node == self.inner => 1,
            _ => node + 1,
        }
    }
}

fn lowest_bit(node: usize) -> usize {
    node & node.wrapping_neg()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_are_trees_and_complement_each_other() {
        for nranks in (2..=70).chain([255, 256, 257, 1000, 65_536]) {
            let trees = [0, 1].map(|index| Tree::new(nranks, index));
            let mut inner = vec![0; nranks];
            for tree in trees {
                let mut deepest = 0;
                let mut seen = 0;
                for (label, inner) in inner.iter_mut().enumerate() {
                    let children: Vec<_> = tree.children(label).collect();
                    for &child in &children {
                        assert_eq!(
                            tree.parent(child),
                            Some(label),
                            "of {child}, {nranks} ranks"
                        );
                    }
                    seen += children.len();
                    *inner += usize::from(!children.is_empty());
                    deepest = deepest.max(tree.depth(label));
                }
                assert_eq!(seen, nranks - 1, "every rank but the root is a child");
                assert_eq!(deepest, depth(nranks), "{nranks} ranks");
            }
            assert_eq!(inner[0], 2);
            assert!(inner[1..].iter().all(|&trees| trees <= 1), "{nranks} ranks");
        }
    }
}
