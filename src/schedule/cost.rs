//! Counts the work of a schedule for the cost model.

use super::chunks::SchedulePattern;
use super::generator_of;
use super::hosts::Hosts;
use super::ir::{Op, Own, Schedule};
use crate::types::Level;
use std::collections::HashSet;

/// Work of one rank in one pass, in chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CostCounts {
    /// Messages sent.
    pub sends: usize,
    /// Messages received.
    pub recvs: usize,
    /// Chunks encoded. A chunk that a chain sends to several peers counts once.
    pub encodes: usize,
    /// Chunks decoded.
    pub decodes: usize,
    /// Chunks added to another.
    pub reduces: usize,
    /// Encodes, and as many decodes, through which a rank reads its own contribution as its peers do. They
    /// are work only if the codec is lossy.
    pub coded: usize,
    /// Connections used, both directions counted.
    pub connections: usize,
    /// Sends and receives that are encoded for [`Level::Intra`].
    pub intra: [usize; 2],
    /// Encodes and decodes for [`Level::Intra`].
    pub intra_coded: [usize; 2],
    /// Sends to other hosts, and receives from them.
    pub crossing: [usize; 2],
}

/// Counts the work of one rank in one pass. `hosts` decides which messages leave a host.
pub fn cost_counts(schedule: &Schedule, hosts: &Hosts) -> CostCounts {
    let mut counts = CostCounts::default();
    let (mut to, mut from) = (HashSet::<u32>::new(), HashSet::<u32>::new());
    // Terms of the sum that the current chain forms.
    let mut terms = 0;
    let crosses = |peers: &[u32]| {
        let abroad = |peer: &&u32| !hosts.share(schedule.rank, **peer as usize);
        match hosts.count() {
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
                // All steps of a chain receive one message.
                counts.recvs += last;
                counts.decodes += last;
            }
            Op::Copy => {}
            Op::Reduce => counts.reduces += 1,
            Op::RecvReduceCopy | Op::RecvReduceSend | Op::RecvReduceCopySend => {
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
                    // The owner decodes what it sent.
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

/// The longest chain of messages that wait for one another, from the input to the last output of a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hops {
    /// Between ranks of one host.
    pub inside: usize,
    /// Between hosts; all messages of an algorithm that ignores hosts.
    pub between: usize,
}

impl Hops {
    /// Returns both together.
    pub const fn total(self) -> usize {
        self.inside + self.between
    }
}

impl SchedulePattern {
    /// Returns the longest chain of messages. [`super::algorithms`] lists the combinations that exist.
    pub fn hops(&self) -> Hops {
        match self.nranks {
            0 | 1 => Hops::default(),
            _ => (generator_of(self.algorithm).hops)(self),
        }
    }

    /// Returns the chain of `messages` between ranks that may be on different hosts.
    pub(super) fn flat_hops(&self, messages: usize) -> Hops {
        match self.hosts.count() {
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
