//! The intermediate representation: steps, schedules, and the order in which engines run them.

use crate::types::Level;
use std::ops::Deref;

/// Largest number of peers to receive from, and of peers to send to, in one step.
pub const MAX_FAN: usize = 8;

/// The action of a step on its chunk. `in` and `out` are the chunk's place in the user's input
/// and output; `enc` encodes, `dec` decodes. Where the collective reduces with a pre-multiplied
/// sum, `in` is the input times the rank's factor, wherever it is read.
///
/// The sum of a reducing step starts with its first term and adds the others one by one: the
/// terms are dec(received), in the order of [`Step::recv_from`], with the rank's own contribution
/// at the place that [`Step::own`] names. A sum of one term is that term.
///
/// `enc` is a pure function of the values that it is given (and of the call's codec state). So a
/// chunk that two steps encode travels as equal bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    /// enc(in) to the peers.
    Send,
    /// out = dec(received).
    Recv,
    /// out = in, without encoding.
    Copy,
    /// out = out + in, without encoding.
    Reduce,
    /// out = sum. An average is divided before the write.
    RecvReduceCopy,
    /// enc(sum) to the peers. The sum is not final: an average is not divided yet.
    RecvReduceSend,
    /// The received bytes to the peers, unchanged; out = dec(received).
    RecvCopySend,
    /// e = enc(sum); e to the peers; out = dec(e), so that the owner and its peers end with equal
    /// bits. An average is divided before the encode. Without `recv_from` the sum is the rank's own
    /// contribution. The source of an allgather or a broadcast, which never divide, uses this to
    /// end with the bits that it sent.
    RecvReduceCopySend,
    /// enc(sum) to the peers. The sum is final: an average is divided before the encode. The rank has no
    /// output for the chunk: the owner of a chunk of a reduce sends the root's result.
    RecvReduceFinishSend,
}

impl Op {
    /// Returns whether the step receives.
    pub const fn receives(self) -> bool {
        !matches!(self, Op::Send | Op::Copy | Op::Reduce)
    }

    /// Returns whether the step sends.
    pub const fn sends(self) -> bool {
        matches!(
            self,
            Op::Send
                | Op::RecvReduceSend
                | Op::RecvCopySend
                | Op::RecvReduceCopySend
                | Op::RecvReduceFinishSend
        )
    }

    /// Returns whether the step writes the output. In a chain only the last step does.
    pub const fn writes(self) -> bool {
        !matches!(
            self,
            Op::Send | Op::RecvReduceSend | Op::RecvReduceFinishSend
        )
    }

    /// Returns whether the step forms a sum of received contributions and its own.
    pub const fn sums(self) -> bool {
        matches!(
            self,
            Op::RecvReduceCopy
                | Op::RecvReduceSend
                | Op::RecvReduceCopySend
                | Op::RecvReduceFinishSend
        )
    }

    /// Returns whether the step completes a sum, so that an average is divided here.
    pub const fn is_final(self) -> bool {
        matches!(
            self,
            Op::RecvReduceCopy | Op::RecvReduceCopySend | Op::RecvReduceFinishSend
        )
    }
}

/// Up to [`MAX_FAN`] ranks, in the order in which contributions are added.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct StepPeers {
    ranks: [u32; MAX_FAN],
    len: u8,
}

impl StepPeers {
    /// The empty set of peers.
    pub const NONE: StepPeers = StepPeers {
        ranks: [0; MAX_FAN],
        len: 0,
    };

    /// Creates a set with the single peer `rank`.
    pub fn one(rank: usize) -> StepPeers {
        StepPeers::from_iter([rank])
    }
}

impl FromIterator<usize> for StepPeers {
    /// # Panics
    /// If there are more than [`MAX_FAN`] ranks. Generators divide more peers among several steps.
    fn from_iter<I: IntoIterator<Item = usize>>(ranks: I) -> StepPeers {
        let mut peers = StepPeers::NONE;
        for rank in ranks {
            peers.ranks[usize::from(peers.len)] = rank as u32;
            peers.len += 1;
        }
        peers
    }
}

impl Deref for StepPeers {
    type Target = [u32];

    #[inline]
    fn deref(&self) -> &[u32] {
        &self.ranks[..usize::from(self.len)]
    }
}

impl std::fmt::Debug for StepPeers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// How a step adds the rank's own contribution to its sum. `after` is the number of the step's
/// `recv_from` that are added before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Own {
    /// The step does not add the own contribution. Its op forms no sum, another step of the chain adds it, or
    /// the rank only passes on the contributions of others.
    Absent,
    /// Adds the input exactly.
    Exact {
        /// Number of received terms that are added before the own contribution.
        after: u8,
    },
    /// Adds dec(enc(in)), the values that the peers receive. If several ranks form one sum, each for itself,
    /// their results then agree. Equal to `Exact` under a lossless codec.
    Coded {
        /// Number of received terms that are added before the own contribution.
        after: u8,
    },
}

impl Own {
    /// Adds the input exactly, before all received terms.
    pub const FIRST: Own = Own::Exact { after: 0 };

    /// Returns the number of received terms before the own contribution; `None` if the step does
    /// not add it.
    pub const fn after(self) -> Option<usize> {
        match self {
            Own::Absent => None,
            Own::Exact { after } | Own::Coded { after } => Some(after as usize),
        }
    }
}

/// An action of one rank on one chunk.
///
/// # Chains
/// A step with `more` is continued by the next step of the list, which has the same stage, op and
/// chunk. The chain acts as one step whose fan is not bounded by [`MAX_FAN`]; only ops that
/// receive may be chained.
/// - An op that sums keeps its accumulator, in full precision, from step to step. The sum is
///   complete in the first step of the chain that has `send_to` or no `more`. An average is
///   divided there, once. Later steps add nothing (no `recv_from`, own absent) and send the same bytes to
///   more peers. Only the last step writes the output. Each step releases what it received.
/// - `recv_copy_send`: every step names the same single rank in `recv_from`. All refer to one
///   message, which the last step releases after it has written the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Stage of the step: pass p runs stage s at time p + s. The steps of a rank are in order of
    /// stage.
    pub stage: u32,
    /// Action of the step on its chunk: which data the step combines, sends and stores.
    pub op: Op,
    /// Number of the chunk in the pass. [`super::SchedulePattern`] gives its position in the
    /// buffers.
    pub chunk: u32,
    /// Whether the next step of the list continues this step, as part of a chain.
    pub more: bool,
    /// How the step adds the rank's own contribution to the sum.
    pub own: Own,
    /// Ranks from which the step receives one message each; contributions are added in this order.
    pub recv_from: StepPeers,
    /// Ranks to which the step sends one message each.
    pub send_to: StepPeers,
    /// Topology level, inside or between groups, whose codec encoded the received messages.
    pub takes: Level,
    /// Topology level whose codec encodes the sent messages; equal to `takes` if the step forwards
    /// them.
    pub gives: Level,
}

impl Step {
    /// Creates a step that neither receives nor sends; the methods below add peers.
    pub const fn new(stage: usize, op: Op, chunk: usize) -> Step {
        Step {
            stage: stage as u32,
            op,
            chunk: chunk as u32,
            more: false,
            own: if op.sums() { Own::FIRST } else { Own::Absent },
            recv_from: StepPeers::NONE,
            send_to: StepPeers::NONE,
            takes: Level::Inter,
            gives: Level::Inter,
        }
    }

    /// Sets the level for which received messages are encoded.
    pub const fn takes(self, level: Level) -> Step {
        Step {
            takes: level,
            ..self
        }
    }

    /// Sets the level for which sent messages are encoded.
    pub const fn gives(self, level: Level) -> Step {
        Step {
            gives: level,
            ..self
        }
    }

    /// Sets the ranks from which the step receives.
    ///
    /// # Panics
    /// If there are more than [`MAX_FAN`].
    pub fn from(self, peers: impl IntoIterator<Item = usize>) -> Step {
        let recv_from = peers.into_iter().collect();
        Step { recv_from, ..self }
    }

    /// Sets the ranks to which the step sends.
    ///
    /// # Panics
    /// If there are more than [`MAX_FAN`].
    pub fn to(self, peers: impl IntoIterator<Item = usize>) -> Step {
        let send_to = peers.into_iter().collect();
        Step { send_to, ..self }
    }

    /// Sets how the step adds the rank's own contribution.
    pub const fn own(self, own: Own) -> Step {
        Step { own, ..self }
    }

    /// Returns whether the step reads the rank's input.
    pub const fn reads(&self) -> bool {
        match self.op {
            Op::Send | Op::Copy | Op::Reduce => true,
            Op::Recv | Op::RecvCopySend => false,
            Op::RecvReduceCopy
            | Op::RecvReduceSend
            | Op::RecvReduceCopySend
            | Op::RecvReduceFinishSend => self.own.after().is_some(),
        }
    }

    /// Returns whether the step writes the rank's output.
    pub const fn writes(&self) -> bool {
        self.op.writes() && !self.more
    }
}

/// The steps of one rank in one pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Number of ranks that take part.
    pub nranks: usize,
    /// The rank that runs the steps.
    pub rank: usize,
    /// Number of chunks of a pass, over all ranks.
    pub chunks: usize,
    /// Number of stages of a pass, over all ranks: the largest stage + 1.
    pub stages: usize,
    /// The steps, in order of stage.
    pub steps: Vec<Step>,
}

/// A step in a given pass, as [`walk`] yields it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visit {
    /// Number of the pass.
    pub pass: usize,
    /// Index of the step in [`Schedule::steps`].
    pub step: usize,
}

/// Returns the order in which one rank runs `passes` passes. Steps are ordered by time; at equal times the
/// oldest pass comes first, and within a pass the order of the list.
///
/// With the oldest pass first, a rank frees the slots that its peers need at this time before it waits for
/// slots itself. A message that is sent at stage s and received at stage s + 1 then needs one slot. A
/// connection that carries two such messages a pass needs two slots. With the newest pass first, two ranks
/// could each have two full slots and wait for the other to receive.
pub fn walk(schedule: &Schedule, passes: usize) -> Walk<'_> {
    Walk {
        schedule,
        cursor: WalkCursor::new(schedule, passes),
    }
}

/// Iterator that [`walk`] returns. Cheap to clone; allocates nothing.
#[derive(Clone, Debug)]
pub struct Walk<'a> {
    schedule: &'a Schedule,
    cursor: WalkCursor,
}

impl Iterator for Walk<'_> {
    type Item = Visit;

    fn next(&mut self) -> Option<Visit> {
        self.cursor.next(self.schedule)
    }
}

/// A position in a [`walk`] that does not borrow the schedule, for engines that keep both.
#[derive(Clone, Debug)]
pub struct WalkCursor {
    passes: usize,
    time: usize,
    pass: usize,
    /// Index of the first step of the stages that are finished at the current time.
    begin: usize,
    step: usize,
    end: usize,
}

impl WalkCursor {
    /// Creates a cursor at the beginning of a walk over `passes` passes of `schedule`.
    pub fn new(schedule: &Schedule, passes: usize) -> WalkCursor {
        WalkCursor {
            passes,
            time: 0,
            pass: 0,
            begin: schedule.steps.len(),
            step: 0,
            end: 0,
        }
    }

    /// Returns the next step to run; `schedule` must be the schedule that was passed to
    /// [`WalkCursor::new`].
    pub fn next(&mut self, schedule: &Schedule) -> Option<Visit> {
        let steps = &schedule.steps;
        while self.step == self.end {
            if self.begin == 0 {
                self.time += 1;
                self.begin = steps.len();
            }
            // Older passes are at later stages, so stages are taken from the end of the list.
            let stage = steps[..self.begin].last()?.stage as usize;
            if self.passes == 0 || self.time >= self.passes + schedule.stages - 1 {
                return None;
            }
            let end = self.begin;
            self.begin = steps[..end].partition_point(|step| (step.stage as usize) < stage);
            if stage <= self.time && self.time - stage < self.passes {
                self.pass = self.time - stage;
                (self.step, self.end) = (self.begin, end);
            }
        }
        self.step += 1;
        Some(Visit {
            pass: self.pass,
            step: self.step - 1,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn staged(stages: &[usize]) -> Schedule {
        let steps = stages
            .iter()
            .map(|&stage| Step::new(stage, Op::Copy, 0))
            .collect();
        let stages = stages.iter().max().map_or(0, |&stage| stage + 1);
        Schedule {
            nranks: 1,
            rank: 0,
            chunks: 1,
            stages,
            steps,
        }
    }

    #[test]
    fn walk_overlaps_passes_by_stage() {
        let order: Vec<_> = walk(&staged(&[0, 1, 1, 3]), 3)
            .map(|visit| (visit.pass, visit.step))
            .collect();
        let expected = [
            (0, 0), // time 0
            (0, 1),
            (0, 2),
            (1, 0), // time 1
            (1, 1),
            (1, 2),
            (2, 0), // time 2: pass 0 has nothing at stage 2
            (0, 3),
            (2, 1),
            (2, 2), // time 3
            (1, 3),
            (2, 3),
        ];
        assert_eq!(order, expected);
    }

    #[test]
    fn walk_of_nothing_is_empty() {
        assert_eq!(walk(&staged(&[]), 5).count(), 0);
        assert_eq!(walk(&staged(&[0]), 0).count(), 0);
    }
}
