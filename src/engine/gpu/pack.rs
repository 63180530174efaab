//! Packed schedules for kernels: chains become single steps, ranges are resolved, and waits are batched.
//!
//! A host schedule splits a step with many peers into a chain of steps with a few peers each. A kernel
//! executes a step with any number of peers, so packing joins each chain, and all sends of one chunk, into
//! one step.
//!
//! Consecutive independent steps of one stage and op form a batch. A kernel waits once for all steps of a
//! batch, so that N waits cost one latency. A step of a batch may thus start later than on the host, but
//! never earlier. Its rank then sends later than a peer may expect. The tests run every schedule with the
//! smallest number of slots that its pattern allows, and so prove that no rank waits for ever.
//!
//! A launch exchanges messages with at most [`MAX_PEERS`] ranks. In larger communicators a schedule may use few
//! enough of them, as a ring does, or its messages are independent of each other, as those of an all_to_all, and
//! take several launches. A message is in the same launch at both ends, so no launch waits for a later one.

use crate::error::{Error, ErrorKind, Result};
use crate::gpu::abi::{self, Combine, KernelWork};
use crate::gpu::abi::{MAX_PEERS, MAX_RANKS};
use crate::plan::Plan;
use crate::reduce;
use crate::schedule::{self, ChunkPlace, Op, Own, Schedule, SchedulePattern};
use crate::types::{Collective, KernelIntra, Level, ReduceOp, Scalar, ScaleRule};

/// A rank's steps of one pass in one launch, in the form that kernels read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedSchedule {
    /// Steps, sorted by stage.
    pub steps: Vec<abi::KernelStep>,
    /// Peers of all steps, in the order of the steps: first those to receive from, then those to send to. Peer p is
    /// rank `ranks[p]`.
    pub peers: Vec<u8>,
    /// Ranks of the launch's peers. In a communicator of at most [`MAX_PEERS`] ranks these are all ranks, in order.
    pub ranks: Vec<u8>,
    /// Number of stages of a pass.
    pub stages: u16,
}

impl PackedSchedule {
    /// Bytes of a work item.
    pub(super) const WORK_BYTES: usize = size_of::<KernelWork>();

    /// Returns the bytes of a work item with the steps and peers of this schedule.
    pub(super) fn bytes(&self) -> usize {
        PackedSchedule::WORK_BYTES + size_of_val(&self.steps[..]) + self.peers.len()
    }

    /// Packs `schedule` for as many launches as it takes, equally many on all ranks; `pattern` maps its chunks to input
    /// and output. A rank without messages in a launch has no steps there, and leaves it out.
    ///
    /// # Errors
    /// Unsupported if the schedule has more ranks, steps or stages than a kernel can number, or if a launch would have
    /// more than [`MAX_PEERS`] peers.
    pub fn launches(schedule: &Schedule, pattern: &SchedulePattern) -> Result<Vec<PackedSchedule>> {
        if schedule.nranks > MAX_RANKS {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "a communicator on GPUs has at most {MAX_RANKS} ranks, not {}",
                    schedule.nranks
                ),
            ));
        }
        let joined = join(&schedule.steps);
        if schedule.nranks <= MAX_PEERS {
            let ranks = (0..schedule.nranks as u8).collect();
            return Ok(vec![PackedSchedule::new(
                schedule, pattern, &joined, ranks,
            )?]);
        }
        let is_divisible = matches!(
            pattern.collective,
            Collective::AllToAll | Collective::Gather | Collective::Scatter
        );
        let launches = match is_divisible && schedule.nranks - 1 > MAX_PEERS {
            true => by_distance(schedule, joined)?,
            false => vec![joined],
        };
        let launches = launches.into_iter();
        launches
            .map(|steps| PackedSchedule::new(schedule, pattern, &steps, peer_ranks(&steps)))
            .collect()
    }

    /// Packs steps of `schedule` for a launch whose peers are `ranks`.
    fn new(
        schedule: &Schedule,
        pattern: &SchedulePattern,
        joined: &[JoinedStep],
        ranks: Vec<u8>,
    ) -> Result<PackedSchedule> {
        if ranks.len() > MAX_PEERS {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "a rank exchanges messages with {} others in a call, a kernel does with at most {MAX_PEERS}",
                    ranks.len()
                ),
            ));
        }
        let number = |rank: &u8| ranks.partition_point(|other| other < rank) as u8;
        let mut peers = Vec::new();
        let mut steps = Vec::with_capacity(joined.len());
        for step in joined {
            // A rank may forward a chunk that is in neither its input nor its output; its block is
            // then unused.
            let block =
                |place: Option<ChunkPlace>| place.and_then(|place| place.block).unwrap_or(0);
            let in_block = block(pattern.input(schedule.rank, step.chunk)) as u8;
            let out_block = block(pattern.output(schedule.rank, step.chunk)) as u8;
            let (own, own_after) = match step.own {
                Own::Absent => (abi::OWN_ABSENT, 0),
                Own::Exact { after } => (abi::OWN_EXACT, after),
                Own::Coded { after } => (abi::OWN_CODED, after),
            };
            steps.push(abi::KernelStep {
                op: step.op as u8,
                own,
                own_after,
                batch: 0,
                stage: numbered("stages", step.stage)?,
                part: pattern.part(step.chunk) as u16,
                in_block,
                out_block,
                intra_recv: step.intra_recv()?,
                intra_send: u8::from(step.gives == Level::Intra),
                peers: numbered("peers", peers.len())?,
                nrecv: step.recv.len() as u8,
                nsend: step.send.len() as u8,
                recv_mask: 0,
                send_mask: 0,
            });
            peers.extend(step.recv.iter().chain(&step.send).map(number));
        }
        for batch in batches(joined, number) {
            let first = &mut steps[batch.first];
            first.batch = batch.len as u8;
            (first.recv_mask, first.send_mask) = (batch.from, batch.to);
        }
        numbered("steps", steps.len())?;
        Ok(PackedSchedule {
            steps,
            peers,
            ranks,
            stages: numbered("stages", schedule.stages)?,
        })
    }
}

fn numbered(what: &str, number: usize) -> Result<u16> {
    u16::try_from(number).map_err(|_| {
        Error::new(
            ErrorKind::Unsupported,
            format!("a schedule of {number} {what} is more than a kernel can number"),
        )
    })
}

/// A step with any number of peers, joined from the steps of a chain or from the sends of a chunk.
struct JoinedStep {
    stage: usize,
    op: Op,
    chunk: usize,
    own: Own,
    recv: Vec<u8>,
    /// Level of each received message.
    takes: Vec<Level>,
    send: Vec<u8>,
    gives: Level,
}

impl JoinedStep {
    /// Returns the number of received messages that are for [`Level::Intra`].
    ///
    /// # Errors
    /// Internal if one of them follows another message, or if the step does not add it, for which kernels have no code.
    fn intra_recv(&self) -> Result<u8> {
        let is_intra = |level: &&Level| **level == Level::Intra;
        let leading = self.takes.iter().take_while(is_intra).count();
        let all = self.takes.iter().filter(is_intra).count();
        match leading == all && (all == 0 || self.op.sums()) {
            true => Ok(leading as u8),
            false => Err(Error::internal(
                "a step has messages of its group behind others",
            )),
        }
    }
}

/// Joins the steps of each chain into one step. Also joins the sends of one chunk, which carry the
/// same bytes.
fn join(steps: &[schedule::Step]) -> Vec<JoinedStep> {
    let mut joined: Vec<JoinedStep> = Vec::new();
    let mut more = false;
    for step in steps {
        let ranks = |peers: &[u32]| peers.iter().map(|&rank| rank as u8).collect::<Vec<u8>>();
        let (recv, send) = (ranks(&step.recv_from), ranks(&step.send_to));
        let takes = vec![step.takes; recv.len()];
        let continues = more;
        more = step.more;
        if let Some(last) = joined.last_mut() {
            let same = last.stage == step.stage as usize && last.chunk == step.chunk as usize;
            if continues {
                last.own = shifted(step.own, last.recv.len() as u8).unwrap_or(last.own);
                // All steps of a forwarding chain refer to one message.
                if step.op != Op::RecvCopySend {
                    last.recv.extend(recv);
                    last.takes.extend(takes);
                }
                if !send.is_empty() {
                    last.gives = step.gives;
                }
                last.send.extend(send);
                continue;
            }
            let source =
                step.op == Op::RecvReduceCopySend && recv.is_empty() && step.own == Own::FIRST;
            let carries_same = same && last.gives == step.gives;
            if carries_same && last.op == Op::Send && (step.op == Op::Send || source) && !step.more
            {
                last.op = step.op;
                last.own = step.own;
                last.send.extend(send);
                continue;
            }
        }
        joined.push(JoinedStep {
            stage: step.stage as usize,
            op: step.op,
            chunk: step.chunk as usize,
            own: step.own,
            recv,
            takes,
            send,
            gives: step.gives,
        });
    }
    joined
}

/// Returns the position of this rank's contribution if `before` more sources precede it; `None` without a
/// contribution.
fn shifted(own: Own, before: u8) -> Option<Own> {
    match own {
        Own::Absent => None,
        Own::Exact { after } => Some(Own::Exact {
            after: before + after,
        }),
        Own::Coded { after } => Some(Own::Coded {
            after: before + after,
        }),
    }
}

/// Returns the ranks with which steps exchange messages, in order.
fn peer_ranks(steps: &[JoinedStep]) -> Vec<u8> {
    let all = steps
        .iter()
        .flat_map(|step| step.recv.iter().chain(&step.send));
    let ranks: std::collections::BTreeSet<u8> = all.copied().collect();
    ranks.into_iter().collect()
}

/// Distances of ranks whose messages share a launch. Each rank has two others at a distance.
const DISTANCES_PER_LAUNCH: usize = MAX_PEERS / 2;

/// Distributes steps that are independent of each other among launches, by the distance of the two ranks, which both
/// know. What a rank sends to another and receives from it is in one launch: an all_to_all in place receives into the
/// block that it sends.
///
/// # Errors
/// Internal if a step has several peers.
fn by_distance(schedule: &Schedule, steps: Vec<JoinedStep>) -> Result<Vec<Vec<JoinedStep>>> {
    let nranks = schedule.nranks;
    let mut launches: Vec<Vec<JoinedStep>> = Vec::new();
    launches.resize_with((nranks / 2).div_ceil(DISTANCES_PER_LAUNCH), Vec::new);
    for step in steps {
        let distance = match (&step.op, &step.recv[..], &step.send[..]) {
            (Op::Copy, [], []) => 1,
            (Op::Send, [], [other]) | (Op::Recv, [other], []) => {
                let ahead = (usize::from(*other) + nranks - schedule.rank) % nranks;
                ahead.min(nranks - ahead)
            }
            _ => return Err(Error::internal("a step of several peers has no distance")),
        };
        launches[(distance - 1) / DISTANCES_PER_LAUNCH].push(step);
    }
    Ok(launches)
}

/// Consecutive steps for which a kernel waits once.
#[derive(Default)]
struct StepBatch {
    first: usize,
    len: usize,
    /// Bit p is set if the batch receives from peer p.
    from: u32,
    /// Bit p is set if the batch sends to peer p.
    to: u32,
}

/// Groups steps into batches. Steps of a batch share stage and op, share no connection, and have different
/// chunks unless they only send. `number` returns the peer that a rank is.
fn batches(steps: &[JoinedStep], number: impl Fn(&u8) -> u8) -> Vec<StepBatch> {
    let mut found: Vec<StepBatch> = Vec::new();
    let bits = |ranks: &[u8]| {
        ranks
            .iter()
            .fold(0u32, |bits, rank| bits | 1 << number(rank))
    };
    for (index, step) in steps.iter().enumerate() {
        let (from, to) = (bits(&step.recv), bits(&step.send));
        let joins = |batch: &&mut StepBatch| {
            let members = &steps[batch.first..index];
            batch.len < abi::MAX_BATCH
                && (step.stage, step.op) == (members[0].stage, members[0].op)
                && batch.from & from == 0
                && batch.to & to == 0
                && (step.op == Op::Send || members.iter().all(|one| one.chunk != step.chunk))
        };
        match found.last_mut().filter(joins) {
            Some(batch) => {
                batch.len += 1;
                batch.from |= from;
                batch.to |= to;
            }
            None => found.push(StepBatch {
                first: index,
                len: 1,
                from,
                to,
            }),
        }
    }
    found
}

/// The work buffer of a launch: work items (one for each call), steps and peers, in the order of
/// [`abi::ScheduleArgs::work_buffer`].
#[derive(Clone, Debug, Default)]
pub struct WorkBuffer {
    pub(super) works: Vec<KernelWork>,
    pub(super) steps: Vec<abi::KernelStep>,
    pub(super) peers: Vec<u8>,
    /// Ranks of the launch's peers.
    pub(super) ranks: Vec<u8>,
    pub(super) channels: usize,
}

impl WorkBuffer {
    /// Adds a call to the launch, and gives it the launch's next blocks and steps. The caller has
    /// set all other fields of `work`.
    ///
    /// # Errors
    /// Unsupported if the launch grows beyond what a kernel can number. Internal if its calls together have more than
    /// [`MAX_PEERS`] peers.
    pub fn add(&mut self, schedule: &PackedSchedule, mut work: KernelWork) -> Result<()> {
        if self.works.is_empty() {
            self.ranks.clone_from(&schedule.ranks);
        } else if self.ranks != schedule.ranks {
            let renumbered = self.renumbered(schedule)?;
            return self.add(&renumbered, work);
        }
        work.first_block = numbered("channels", self.channels)?;
        work.nsteps = numbered("steps", schedule.steps.len())?;
        work.stages = schedule.stages;
        self.channels += usize::from(work.channels);
        work.steps = match self.last_steps(schedule) {
            Some(steps) => steps,
            None => self.add_steps(schedule)?,
        };
        self.works.push(work);
        Ok(())
    }

    /// Returns the index of the first step of the last work item, if its steps and peers are those of `schedule`. Small calls
    /// that share a launch differ in little else than their buffers, and share their steps as well.
    fn last_steps(&self, schedule: &PackedSchedule) -> Option<u16> {
        let last = self.works.last()?;
        let known = &self.steps[usize::from(last.steps)..][..usize::from(last.nsteps)];
        let peers = known.first()?.peers;
        let moved = |step: &abi::KernelStep| abi::KernelStep {
            peers: step.peers + peers,
            ..*step
        };
        let has_steps = known.iter().copied().eq(schedule.steps.iter().map(moved));
        let has_peers = || self.peers[usize::from(peers)..].starts_with(&schedule.peers);
        (has_steps && has_peers()).then_some(last.steps)
    }

    /// Adds the steps and peers of a schedule, and returns the index of the first step.
    fn add_steps(&mut self, schedule: &PackedSchedule) -> Result<u16> {
        let peers = numbered("peers", self.peers.len())?;
        numbered("peers", self.peers.len() + schedule.peers.len())?;
        let first = numbered("steps", self.steps.len())?;
        self.steps
            .extend(schedule.steps.iter().map(|step| abi::KernelStep {
                peers: step.peers + peers,
                ..*step
            }));
        self.peers.extend(&schedule.peers);
        Ok(first)
    }

    /// Adds the peers of a schedule to the launch. Returns the schedule with the launch's numbers of them.
    fn renumbered(&mut self, schedule: &PackedSchedule) -> Result<PackedSchedule> {
        let missing = schedule
            .ranks
            .iter()
            .filter(|rank| !self.ranks.contains(rank));
        let missing: Vec<u8> = missing.copied().collect();
        if self.ranks.len() + missing.len() > MAX_PEERS {
            return Err(Error::internal("the calls of a launch have too many peers"));
        }
        self.ranks.extend(missing);
        let number = |peer: u8| {
            let rank = schedule.ranks[usize::from(peer)];
            let at = self.ranks.iter().position(|&other| other == rank);
            at.unwrap_or_default() as u8
        };
        let bits = |mask: u32| {
            let set = (0..schedule.ranks.len() as u8).filter(|peer| mask >> peer & 1 == 1);
            set.fold(0, |bits, peer| bits | 1 << number(peer))
        };
        let steps = schedule.steps.iter().map(|step| abi::KernelStep {
            recv_mask: bits(step.recv_mask),
            send_mask: bits(step.send_mask),
            ..*step
        });
        Ok(PackedSchedule {
            steps: steps.collect(),
            peers: schedule.peers.iter().map(|&peer| number(peer)).collect(),
            ranks: self.ranks.clone(),
            stages: schedule.stages,
        })
    }

    /// Returns the ranks of the launch's peers.
    pub fn ranks(&self) -> &[u8] {
        &self.ranks
    }

    /// Returns the number of channels of all work items together, which is the number of blocks of the
    /// launch.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// Returns the numbers of work items, steps and peers.
    pub fn counts(&self) -> [u32; 3] {
        [self.works.len(), self.steps.len(), self.peers.len()].map(|count| count as u32)
    }

    /// Returns the number of bytes that [`WorkBuffer::write`] writes.
    pub fn len(&self) -> usize {
        size_of_val(&self.works[..]) + size_of_val(&self.steps[..]) + self.peers.len()
    }

    /// Returns whether the launch has no work items.
    pub fn is_empty(&self) -> bool {
        self.works.is_empty()
    }

    /// Writes the packed form to the beginning of `to`.
    ///
    /// # Panics
    /// If `to` is too short.
    pub fn write(&self, to: &mut [u8]) {
        let (works, rest) = to.split_at_mut(size_of_val(&self.works[..]));
        let (steps, rest) = rest.split_at_mut(size_of_val(&self.steps[..]));
        works.copy_from_slice(abi::plain_bytes(&self.works));
        steps.copy_from_slice(abi::plain_bytes(&self.steps));
        rest[..self.peers.len()].copy_from_slice(&self.peers);
    }

    /// Returns the work items of the launch, one for each call.
    pub fn works(&self) -> &[KernelWork] {
        &self.works
    }
}

/// Device addresses of one call's input and output; 0 for a buffer that the call does not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// Address of the input.
    pub input: u64,
    /// Address of the output.
    pub output: u64,
}

/// Returns the work item of one call; [`WorkBuffer::add`] sets its blocks and steps.
///
/// # Errors
/// See [`arithmetic`]; unsupported if a kernel cannot number the passes.
pub fn work(plan: &Plan, op: ReduceOp, at: Addresses) -> Result<KernelWork> {
    let (combine, factor, flags) = arithmetic(plan, op)?;
    let flags = flags | aligned(at);
    Ok(KernelWork {
        input: at.input,
        output: at.output,
        count: plan.count as u64,
        chunk: plan.geometry.chunk() as u64,
        factor,
        parts: plan.pattern.parts() as u32,
        passes: u32::try_from(plan.geometry.passes()).map_err(|_| {
            Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{} of {} {} takes {} passes, more than a kernel can number; raise \
                     CINCH_BUFFER_BYTES",
                    plan.collective,
                    plan.count,
                    plan.dtype,
                    plan.geometry.passes()
                ),
            )
        })?,
        channels: plan.channels as u16,
        combine: combine as u8,
        flags,
        intra: intra(plan)?,
        ..KernelWork::default()
    })
}

/// Returns how messages inside groups are encoded.
fn intra(plan: &Plan) -> Result<u8> {
    match (KernelIntra::of(plan.specs), plan.specs.intra.scale) {
        (Some(KernelIntra::Coded), _) => Ok(abi::INTRA_CODED),
        (Some(KernelIntra::Raw), _) => Ok(abi::INTRA_RAW),
        (Some(KernelIntra::Cast16), _) => Ok(abi::INTRA_CAST16),
        (Some(KernelIntra::CastBf16), _) => Ok(abi::INTRA_CAST_BF16),
        (Some(KernelIntra::Linear8), ScaleRule::Block(block)) => {
            Ok(abi::INTRA_LINEAR8 + block.ilog2() as u8)
        }
        (Some(KernelIntra::Linear8) | None, _) => Err(Error::internal(
            "a plan for a GPU has a codec inside groups that kernels lack",
        )),
    }
}

/// Returns the flag [`abi::ALIGNED`] if both addresses allow vector access of 16 bytes, and 0
/// otherwise.
pub fn aligned(at: Addresses) -> u8 {
    if (at.input | at.output).is_multiple_of(16) {
        abi::ALIGNED
    } else {
        0
    }
}

/// Returns the combination, the factor, and the flags of an operator.
///
/// # Errors
/// Invalid argument if the factor does not fit the elements.
pub fn arithmetic(plan: &Plan, op: ReduceOp) -> Result<(Combine, u64, u8)> {
    if !plan.collective.reduces() {
        return Ok((Combine::Sum, 0, 0));
    }
    Ok(match op {
        ReduceOp::Sum => (Combine::Sum, 0, 0),
        ReduceOp::Prod => (Combine::Prod, 0, 0),
        ReduceOp::Max => (Combine::Max, 0, 0),
        ReduceOp::Min => (Combine::Min, 0, 0),
        ReduceOp::Avg => match plan.average_shift(op) {
            0 => (Combine::Sum, 0, abi::AVERAGE),
            shift => (
                Combine::Sum,
                reduce::scale_of(shift).to_bits().into(),
                abi::AVERAGE | abi::PREMULTIPLY,
            ),
        },
        ReduceOp::PreMulSum(Scalar::Device(address)) => {
            (Combine::Sum, address, abi::PREMULTIPLY | abi::FACTOR_AT)
        }
        ReduceOp::PreMulSum(scalar) => (
            Combine::Sum,
            reduce::factor_word(plan.dtype, scalar)?,
            abi::PREMULTIPLY,
        ),
    })
}

#[cfg(test)]
mod level_tests;
#[cfg(test)]
mod many_ranks_tests;
#[cfg(test)]
mod tests;
