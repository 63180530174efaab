//! Counts the work of a schedule for the cost model.

use super::chunks::SchedulePattern;
use super::generator_of;
use super::groups::Groups;
use super::ir::{Op, Own, Schedule};
use crate::types::Level;
use std::collections::HashSet;

/// Work of one rank in one pass, counted in chunks and messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CostCounts {
    /// Number of messages sent.
    pub sends: usize,
    /// Number of messages received.
    pub recvs: usize,
    /// Number of chunks encoded. A chunk that a chain of steps sends to several peers counts once.
    pub encodes: usize,
    /// Number of chunks decoded.
    pub decodes: usize,
    /// Number of additions of one chunk to another.
    pub reduces: usize,
    /// Number of encodes, and of decodes, of the rank's own contribution to a sum, so that it adds the values
    /// that its peers receive. They take time only if the codec is lossy.
    pub coded: usize,
    /// Number of connections used, where each direction counts.
    pub connections: usize,
    /// Numbers of sends and of receives that are encoded for [`Level::Intra`].
    pub intra: [usize; 2],
    /// Numbers of encodes and of decodes for [`Level::Intra`].
    pub intra_coded: [usize; 2],
    /// Numbers of messages sent to other groups, and received from them.
    pub crossing: [usize; 2],
}

/// Counts the work of one rank in one pass. `groups` determines which messages leave a group.
pub fn cost_counts(schedule: &Schedule, groups: &Groups) -> CostCounts {
    let mut counts = CostCounts::default();
    let (mut to, mut from) = (HashSet::<u32>::new(), HashSet::<u32>::new());
    // Number of terms of the sum that the current chain forms.
    let mut terms = 0;
    let crosses = |peers: &[u32]| {
        let abroad = |peer: &&u32| !groups.share(schedule.rank, **peer as usize);
        match groups.count() {
            1 => 0,
            _ => peers.iter().filter(abroad).count(),
        }
    };
    for step in &schedule.steps {
        let last = usize::from(!step.more);
        let before = counts;
        to.extend(step.send_to.iter());
        from.extend(step.recv_from.iter());
        counts.sends += step.send_to.len();
        match step.op {
            Op::Send => counts.encodes += 1,
            Op::Recv | Op::RecvCopySend => {
                // All steps of a chain with this op receive one message, so only the last step
                // counts it.
                counts.recvs += last;
                counts.decodes += last;
            }
            Op::Copy => {}
            Op::Reduce => counts.reduces += 1,
            Op::RecvReduceCopy
            | Op::RecvReduceSend
            | Op::RecvReduceCopySend
            | Op::RecvReduceFinishSend => {
                let received = step.recv_from.len();
                terms += received + usize::from(step.own.after().is_some());
                counts.recvs += received;
                counts.decodes += received;
                if matches!(step.own, Own::Coded { .. }) {
                    counts.encodes += 1;
                    counts.decodes += 1;
                    counts.coded += 1;
                }
                if !step.more {
                    counts.reduces += terms - terms.min(1);
                    terms = 0;
                    counts.encodes += usize::from(step.op.sends());
                    // The owner decodes the bytes that it sent, to end with the values that its
                    // peers get.
                    counts.decodes += usize::from(step.op == Op::RecvReduceCopySend);
                }
            }
        }
        let received = counts.recvs - before.recvs;
        if step.gives == Level::Intra {
            counts.intra[0] += step.send_to.len();
            counts.intra_coded[0] += counts.encodes - before.encodes;
        }
        if step.takes == Level::Intra {
            counts.intra[1] += received;
            counts.intra_coded[1] += received;
        }
        counts.crossing[0] += crosses(&step.send_to);
        if received > 0 {
            counts.crossing[1] += crosses(&step.recv_from);
        }
    }
    counts.connections = to.len() + from.len();
    counts
}

/// Length of the longest chain of dependent messages from the input to the last output of a pass. Each
/// message of the chain waits for the message before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hops {
    /// Number of the chain's messages between ranks of one group.
    pub inside: usize,
    /// Number of the chain's messages between groups. Algorithms that ignore groups count all
    /// messages here if there are several groups.
    pub between: usize,
}

impl Hops {
    /// Returns the length of the whole chain.
    pub const fn total(self) -> usize {
        self.inside + self.between
    }
}

impl SchedulePattern {
    /// Returns the length of the longest chain of dependent messages. [`super::algorithms`] lists the valid
    /// combinations of collective and algorithm.
    pub fn hops(&self) -> Hops {
        match self.nranks {
            0 | 1 => Hops::default(),
            _ => (generator_of(self.algorithm).hops)(self),
        }
    }

    /// Returns a chain of `messages` messages for an algorithm that ignores groups. With
    /// several groups, any of them may travel between groups.
    pub(super) fn flat_hops(&self, messages: usize) -> Hops {
        match self.groups.count() {
            1 => Hops {
                inside: messages,
                between: 0,
            },
            _ => Hops {
                inside: 0,
                between: messages,
            },
        }
    }
}
