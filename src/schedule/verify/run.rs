//! Runs the schedules of all ranks on symbolic values.

use super::value::{Census, Value};
use super::{Proof, VerifyLimits};
use crate::error::{Error, Result};
use crate::schedule::chunks::{ChunkPlace, SchedulePattern};
use crate::schedule::ir::{Op, Own, Schedule, Step, Visit, Walk, walk};
use crate::types::Level;
use std::collections::VecDeque;

pub(super) struct SymbolicRun<'a> {
    pattern: &'a SchedulePattern,
    schedules: &'a [Schedule],
    limits: VerifyLimits,
    ranks: Vec<Rank<'a>>,
    wires: Wires,
    /// Ranks whose next step may be ready to run.
    runnable: VecDeque<usize>,
    /// By pass and chunk: for a chunk that several ranks receive, the first rank that finished it,
    /// and the hash of its value.
    references: Vec<Vec<Option<(usize, u64)>>>,
    census: Census,
    sent: usize,
    hops: u32,
}

/// The state of a rank.
struct Rank<'a> {
    walk: Walk<'a>,
    /// The next step; `None` after the last.
    visit: Option<Visit>,
    /// The connection for which the next step waits.
    waits_for: Option<usize>,
    /// Sum of a chain that is not complete.
    open: Option<Value>,
    /// Number of the oldest unfinished pass; `passes` has the state of that pass and of later
    /// passes.
    first: usize,
    passes: VecDeque<PassState>,
}

struct PassState {
    steps_left: usize,
    /// Values written to the output, indexed by [`cell`].
    written: Vec<Option<Value>>,
}

#[derive(Clone, Copy)]
struct Message {
    value: Value,
    level: Level,
    pass: u32,
    chunk: u32,
}

impl<'a> SymbolicRun<'a> {
    pub fn new(
        pattern: &'a SchedulePattern,
        schedules: &'a [Schedule],
        limits: VerifyLimits,
    ) -> SymbolicRun<'a> {
        let ranks = schedules.iter().map(|schedule| {
            let mut walk = walk(schedule, limits.passes);
            Rank {
                visit: walk.next(),
                walk,
                waits_for: None,
                open: None,
                first: 0,
                passes: VecDeque::new(),
            }
        });
        let shared_chunks = if pattern.collective.replicates_output() {
            pattern.chunks()
        } else {
            0
        };
        SymbolicRun {
            pattern,
            schedules,
            limits,
            ranks: ranks.collect(),
            wires: Wires::new(schedules, limits.slots),
            runnable: (0..schedules.len()).collect(),
            references: vec![vec![None; shared_chunks]; limits.passes],
            census: Census::new(pattern.nranks),
            sent: 0,
            hops: 0,
        }
    }

    /// Runs all ranks to the end and checks their outputs.
    pub fn finish(mut self) -> Result<Proof> {
        for rank in 0..self.schedules.len() {
            if self.schedules[rank].steps.is_empty() {
                self.check_outputs(rank, 0, &[])?;
            }
        }
        while let Some(rank) = self.runnable.pop_front() {
            while let Some(visit) = self.ranks[rank].visit {
                let step = &self.schedules[rank].steps[visit.step];
                self.ranks[rank].waits_for = self.first_blocker(rank, step);
                if self.ranks[rank].waits_for.is_some() {
                    break;
                }
                self.execute(rank, visit, step)?;
                self.ranks[rank].visit = self.ranks[rank].walk.next();
                self.retire(rank, visit.pass)?;
            }
        }
        self.check_end()?;
        Ok(Proof {
            messages: self.sent / self.limits.passes.max(1),
            hops: self.hops as usize,
        })
    }

    /// Returns the first connection that keeps a step from running: one without a message to
    /// receive, or without a slot to send.
    fn first_blocker(&self, rank: usize, step: &Step) -> Option<usize> {
        let empty = step.recv_from.iter().find_map(|&peer| {
            let wire = self.wires.find(peer as usize, rank)?;
            (self.wires.len[wire] == 0).then_some(wire)
        });
        empty.or_else(|| {
            step.send_to.iter().find_map(|&peer| {
                let wire = self.wires.find(rank, peer as usize)?;
                (self.wires.len[wire] == self.limits.slots).then_some(wire)
            })
        })
    }

    fn execute(&mut self, rank: usize, visit: Visit, step: &Step) -> Result<()> {
        match step.op {
            Op::Send => {
                let value = self.read(rank, visit, step)?;
                self.send(rank, visit, step, value.coded(step.gives))
            }
            Op::Recv => {
                let value = self.receive(rank, visit, step, 0, true)?;
                self.write(rank, visit, step, value)
            }
            Op::Copy => {
                let value = self.read(rank, visit, step)?;
                self.write(rank, visit, step, value)
            }
            Op::Reduce => {
                let own = self.read(rank, visit, step)?;
                // Taking the old value lets `write` accept the new one; no other op may write an
                // output twice.
                let cell = self.output_cell(rank, step).unwrap_or(usize::MAX);
                let written = &mut self.state(rank, visit.pass).written;
                let Some(sum) = written.get_mut(cell).and_then(Option::take) else {
                    return Err(self.wrong(rank, visit, step, "nothing is there to add to"));
                };
                self.write(rank, visit, step, sum.plus(own))
            }
            Op::RecvCopySend => {
                let value = self.receive(rank, visit, step, 0, !step.more)?;
                self.send(rank, visit, step, value)?;
                if step.more {
                    return Ok(());
                }
                self.write(rank, visit, step, value)
            }
            Op::RecvReduceCopy
            | Op::RecvReduceSend
            | Op::RecvReduceCopySend
            | Op::RecvReduceFinishSend => {
                let mut sum = self.ranks[rank].open.take();
                for at in 0..=step.recv_from.len() {
                    if step.own.after() == Some(at) {
                        let own = self.read(rank, visit, step)?;
                        let coded = is_coded(step.own);
                        add(&mut sum, if coded { own.coded(step.takes) } else { own });
                    }
                    if at < step.recv_from.len() {
                        let received = self.receive(rank, visit, step, at, true)?;
                        if received.divided && self.pattern.collective.reduces() {
                            return Err(self.wrong(
                                rank,
                                visit,
                                step,
                                "it adds what is already divided",
                            ));
                        }
                        add(&mut sum, received);
                    }
                }
                let Some(sum) = sum else {
                    return Err(self.wrong(rank, visit, step, "the sum has no term"));
                };
                self.pass_sum_on(rank, visit, step, sum)
            }
        }
    }

    /// Sends and writes the sum of a step whose terms are added. If the chain goes on, the kept sum stays
    /// undivided. A chain may not add to a sum that it has sent; `shape` checks this.
    fn pass_sum_on(&mut self, rank: usize, visit: Visit, step: &Step, sum: Value) -> Result<()> {
        let divides = step.op.is_final() && self.pattern.collective.reduces();
        let total = if divides { sum.divided() } else { sum };
        self.send(rank, visit, step, total.coded(step.gives))?;
        if step.more {
            self.ranks[rank].open = Some(sum);
            return Ok(());
        }
        match step.op {
            Op::RecvReduceCopy => self.write(rank, visit, step, total),
            Op::RecvReduceCopySend => self.write(rank, visit, step, total.coded(step.gives)),
            _ => Ok(()),
        }
    }

    fn read(&mut self, rank: usize, visit: Visit, step: &Step) -> Result<Value> {
        let Some(place) = self.pattern.input(rank, step.chunk as usize) else {
            return Err(self.wrong(rank, visit, step, "the rank has no such input"));
        };
        let cell = cell(self.pattern, rank, place);
        let written = &self.state(rank, visit.pass).written;
        if written.get(cell).is_some_and(Option::is_some) {
            let what = "it reads input that an earlier step overwrites when the call is in place";
            return Err(self.wrong(rank, visit, step, what));
        }
        Ok(Value::of(rank))
    }

    fn write(&mut self, rank: usize, visit: Visit, step: &Step, value: Value) -> Result<()> {
        let Some(cell) = self.output_cell(rank, step) else {
            return Err(self.wrong(rank, visit, step, "the rank has no such output"));
        };
        let written = &mut self.state(rank, visit.pass).written;
        if written.len() <= cell {
            written.resize(cell + 1, None);
        }
        if written[cell].replace(value).is_some() {
            return Err(self.wrong(rank, visit, step, "the output has been written before"));
        }
        Ok(())
    }

    fn receive(
        &mut self,
        rank: usize,
        visit: Visit,
        step: &Step,
        at: usize,
        release: bool,
    ) -> Result<Value> {
        let from = step.recv_from[at] as usize;
        let expected = (visit.pass as u32, step.chunk);
        let wire = self.wires.find(from, rank);
        let Some((wire, message)) = wire.and_then(|w| Some((w, self.wires.front(w)?))) else {
            let what = format!("rank {from} never sends to rank {rank}");
            return Err(self.wrong(rank, visit, step, &what));
        };
        if (message.pass, message.chunk) != expected {
            let what = format!(
                "rank {from}'s next message is chunk {} of pass {}",
                message.chunk, message.pass
            );
            return Err(self.wrong(rank, visit, step, &what));
        }
        if message.level != step.takes {
            let what = format!("rank {from} has encoded it for {}", message.level.name());
            return Err(self.wrong(rank, visit, step, &what));
        }
        if release {
            self.wires.pop(wire);
            if self.ranks[from].waits_for == Some(wire) {
                self.ranks[from].waits_for = None;
                self.runnable.push_back(from);
            }
        }
        Ok(message.value)
    }

    fn send(&mut self, rank: usize, visit: Visit, step: &Step, value: Value) -> Result<()> {
        let message = Message {
            value: value.sent(),
            level: step.gives,
            pass: visit.pass as u32,
            chunk: step.chunk,
        };
        for &to in step.send_to.iter() {
            let to = to as usize;
            let Some(wire) = self.wires.find(rank, to) else {
                return Err(self.wrong(rank, visit, step, "no connection leads there"));
            };
            self.wires.push(wire, message);
            self.sent += 1;
            if self.ranks[to].waits_for == Some(wire) {
                self.ranks[to].waits_for = None;
                self.runnable.push_back(to);
            }
        }
        Ok(())
    }

    /// Counts a step as done, and checks the outputs of each pass that is complete.
    fn retire(&mut self, rank: usize, pass: usize) -> Result<()> {
        self.state(rank, pass).steps_left -= 1;
        while let Some(state) = self.ranks[rank].passes.front() {
            if state.steps_left > 0 {
                break;
            }
            let done = self.ranks[rank].first;
            let state = self.ranks[rank].passes.pop_front();
            self.ranks[rank].first += 1;
            self.check_outputs(rank, done, &state.map_or(Vec::new(), |state| state.written))?;
        }
        Ok(())
    }

    fn check_outputs(&mut self, rank: usize, pass: usize, written: &[Option<Value>]) -> Result<()> {
        for chunk in self.pattern.outputs(rank) {
            let wrong = |what: &str| {
                Error::internal(format!(
                    "rank {rank}, pass {pass}: output chunk {chunk} {what}"
                ))
            };
            let place = self.pattern.output(rank, chunk);
            let cell = place.map(|place| cell(self.pattern, rank, place));
            let value = cell.and_then(|cell| written.get(cell).copied().flatten());
            let Some(value) = value else {
                return Err(wrong("is never written"));
            };
            let contributors = self.pattern.contributors(rank, chunk);
            if let Some(what) = self.census.wrong(&value, contributors) {
                return Err(wrong(&what));
            }
            if self.pattern.collective.reduces() && !value.divided {
                return Err(wrong("is no final sum: an average would not be divided"));
            }
            self.hops = self.hops.max(value.hops);
            if self.pattern.collective.replicates_output() {
                let (first, identity) =
                    *self.references[pass][chunk].get_or_insert((rank, value.identity));
                if identity != value.identity {
                    return Err(wrong(&format!(
                        "is not the same expression as on rank {first}: the bits may differ"
                    )));
                }
            }
        }
        Ok(())
    }

    fn check_end(&self) -> Result<()> {
        let stuck: Vec<_> = (0..self.ranks.len())
            .filter(|&rank| self.ranks[rank].visit.is_some())
            .collect();
        if !stuck.is_empty() {
            let reasons: Vec<_> = stuck.iter().take(4).map(|&rank| self.why(rank)).collect();
            return Err(Error::internal(format!(
                "deadlock of {} ranks with {} slots a connection: {}",
                stuck.len(),
                self.limits.slots,
                reasons.join("; ")
            )));
        }
        for (wire, &(from, to)) in self.wires.ends.iter().enumerate() {
            if let Some(message) = self.wires.front(wire) {
                return Err(Error::internal(format!(
                    "rank {to} never receives chunk {} of pass {} from rank {from}",
                    message.chunk, message.pass
                )));
            }
        }
        Ok(())
    }

    fn why(&self, rank: usize) -> String {
        let Some(visit) = self.ranks[rank].visit else {
            return String::new();
        };
        let step = &self.schedules[rank].steps[visit.step];
        let reason = match self.ranks[rank].waits_for.map(|w| self.wires.ends[w]) {
            Some((from, to)) if to == rank => format!("waits for a message from rank {from}"),
            Some((_, to)) => format!("waits for a slot to rank {to}"),
            None => "waits".to_string(),
        };
        self.wrong(rank, visit, step, &reason).message().to_string()
    }

    fn wrong(&self, rank: usize, visit: Visit, step: &Step, what: &str) -> Error {
        Error::internal(format!(
            "rank {rank}, pass {}, step {} ({:?} of chunk {}, stage {}): {what}",
            visit.pass, visit.step, step.op, step.chunk, step.stage
        ))
    }

    fn output_cell(&self, rank: usize, step: &Step) -> Option<usize> {
        let place = self.pattern.output(rank, step.chunk as usize)?;
        Some(cell(self.pattern, rank, place))
    }

    fn state(&mut self, rank: usize, pass: usize) -> &mut PassState {
        let steps_left = self.schedules[rank].steps.len();
        let rank = &mut self.ranks[rank];
        while rank.first + rank.passes.len() <= pass {
            rank.passes.push_back(PassState {
                steps_left,
                written: Vec::new(),
            });
        }
        &mut rank.passes[pass - rank.first]
    }
}

fn add(sum: &mut Option<Value>, term: Value) {
    *sum = Some(sum.map_or(term, |sum| sum.plus(term)));
}

fn is_coded(own: Own) -> bool {
    matches!(own, Own::Coded { .. })
}

/// Returns the index of a position when input and output share one buffer. The larger of the two is the
/// buffer, and the smaller is the rank's own block in it. Blocks are counted from the rank's own, because
/// some ranks write no other.
fn cell(pattern: &SchedulePattern, rank: usize, place: ChunkPlace) -> usize {
    // A buffer without blocks is the rank's own block of the larger buffer.
    let block = place.block.unwrap_or(rank);
    (block + pattern.nranks - rank) % pattern.nranks * pattern.parts() + place.part
}

/// The connections of all ranks, each a FIFO of slots.
struct Wires {
    slots: usize,
    /// `begin[r]..begin[r + 1]` are the indexes of sender r's connections, ordered by receiver.
    begin: Vec<usize>,
    ends: Vec<(usize, usize)>,
    head: Vec<usize>,
    len: Vec<usize>,
    ring: Vec<Option<Message>>,
}

impl Wires {
    fn new(schedules: &[Schedule], slots: usize) -> Wires {
        let mut begin = vec![0];
        let mut ends = Vec::new();
        for (from, schedule) in schedules.iter().enumerate() {
            let peers = schedule.steps.iter().flat_map(|step| step.send_to.iter());
            let mut peers: Vec<usize> = peers.map(|&to| to as usize).collect();
            peers.sort_unstable();
            peers.dedup();
            ends.extend(peers.into_iter().map(|to| (from, to)));
            begin.push(ends.len());
        }
        Wires {
            slots,
            begin,
            head: vec![0; ends.len()],
            len: vec![0; ends.len()],
            ring: vec![None; ends.len() * slots],
            ends,
        }
    }

    fn find(&self, from: usize, to: usize) -> Option<usize> {
        let begin = self.begin[from];
        let of_sender = &self.ends[begin..self.begin[from + 1]];
        let at = of_sender.binary_search_by_key(&to, |ends| ends.1).ok()?;
        Some(begin + at)
    }

    fn front(&self, wire: usize) -> Option<Message> {
        if self.len[wire] == 0 {
            return None;
        }
        self.ring[wire * self.slots + self.head[wire]]
    }

    fn push(&mut self, wire: usize, message: Message) {
        let at = (self.head[wire] + self.len[wire]) % self.slots;
        self.ring[wire * self.slots + at] = Some(message);
        self.len[wire] += 1;
    }

    fn pop(&mut self, wire: usize) {
        self.head[wire] = (self.head[wire] + 1) % self.slots;
        self.len[wire] -= 1;
    }
}
