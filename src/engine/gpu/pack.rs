//! Schedules as kernels read them: chains joined, places resolved, waits taken together.
//!
//! The host splits fans into steps of bounded width; a kernel takes any fan in one step, so a
//! chain becomes one step here, and so do sends of the same chunk.
//!
//! Consecutive steps of one stage and op that do not concern each other form a batch. A kernel
//! takes the waits of a batch together, so that N waits cost one latency instead of N. A step of
//! a batch may thus start later than in the host's walk, never earlier, and a rank may hold back
//! what a peer waits for; that no rank then waits for ever at the slots that a pattern says it needs is
//! shown by running every schedule (see the tests).

use crate::error::{Error, ErrorKind, Result};
use crate::gpu::abi::MAX_RANKS;
use crate::gpu::abi::{self, Combine, KernelWork};
use crate::plan::Plan;
use crate::reduce;
use crate::schedule::{self, Op, Own, Pattern, Place, Schedule};
use crate::types::{ReduceOp, Scalar};

/// One rank's part of a pass, packed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedSchedule {
    /// Steps, in order of stage.
    pub steps: Vec<abi::KernelStep>,
    /// Peers of the steps.
    pub peers: Vec<u8>,
    /// Stages of a pass.
    pub stages: u16,
}

impl PackedSchedule {
    /// Packs `schedule`, whose chunks lie where `pattern` says.
    ///
    /// # Errors
    /// Unsupported if it is for more ranks, steps or stages than a kernel can number.
    pub fn new(schedule: &Schedule, pattern: &Pattern) -> Result<PackedSchedule> {
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
        let mut peers = Vec::new();
        let mut steps = Vec::with_capacity(joined.len());
        for step in &joined {
            // A rank may forward a part that it neither reads nor keeps.
            let block = |place: Option<Place>| place.and_then(|place| place.block).unwrap_or(0);
            let in_block = block(pattern.input(schedule.rank, step.chunk)) as u16;
            let out_block = block(pattern.output(schedule.rank, step.chunk)) as u16;
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
                peers: numbered("peers", peers.len())?,
                nrecv: step.recv.len() as u8,
                nsend: step.send.len() as u8,
                recv_mask: 0,
                send_mask: 0,
            });
            peers.extend(step.recv.iter().chain(&step.send));
        }
        for batch in batches(&joined) {
            let first = &mut steps[batch.first];
            first.batch = batch.len as u8;
            (first.recv_mask, first.send_mask) = (batch.from, batch.to);
        }
        numbered("steps", steps.len())?;
        Ok(PackedSchedule {
            steps,
            peers,
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

/// A step of any fan.
struct Joined {
    stage: usize,
    op: Op,
    chunk: usize,
    own: Own,
    recv: Vec<u8>,
    send: Vec<u8>,
}

/// Chains as one step each, and so the sends of one chunk, which travel as the same bytes.
fn join(steps: &[schedule::Step]) -> Vec<Joined> {
    let mut joined: Vec<Joined> = Vec::new();
    let mut more = false;
    for step in steps {
        let ranks = |peers: &[u32]| peers.iter().map(|&rank| rank as u8).collect::<Vec<u8>>();
        let (recv, send) = (ranks(&step.recv_from), ranks(&step.send_to));
        let continues = more;
        more = step.more;
        if let Some(last) = joined.last_mut() {
            let same = last.stage == step.stage as usize && last.chunk == step.chunk as usize;
            if continues {
                let before = last.recv.len() as u8;
                match step.own {
                    Own::Absent => {}
                    Own::Exact { after } => {
                        last.own = Own::Exact {
                            after: before + after,
                        };
                    }
                    Own::Coded { after } => {
                        last.own = Own::Coded {
                            after: before + after,
                        };
                    }
                }
                // All steps of a chain that forwards mean one message.
                if step.op != Op::RecvCopySend {
                    last.recv.extend(recv);
                }
                last.send.extend(send);
                continue;
            }
            let source =
                step.op == Op::RecvReduceCopySend && recv.is_empty() && step.own == Own::FIRST;
            if same && last.op == Op::Send && (step.op == Op::Send || source) && !step.more {
                last.op = step.op;
                last.own = step.own;
                last.send.extend(send);
                continue;
            }
        }
        joined.push(Joined {
            stage: step.stage as usize,
            op: step.op,
            chunk: step.chunk as usize,
            own: step.own,
            recv,
            send,
        });
    }
    joined
}

/// Steps whose waits are taken together.
#[derive(Default)]
struct Batch {
    first: usize,
    len: usize,
    /// Bit r: receives from rank r.
    from: u32,
    /// Bit r: sends to rank r.
    to: u32,
}

/// Steps of a batch have one stage and op, no connection in common, and different chunks unless
/// they only send.
fn batches(steps: &[Joined]) -> Vec<Batch> {
    let mut found: Vec<Batch> = Vec::new();
    let bits = |peers: &[u8]| peers.iter().fold(0u32, |bits, &peer| bits | 1 << peer);
    for (index, step) in steps.iter().enumerate() {
        let (from, to) = (bits(&step.recv), bits(&step.send));
        let joins = |batch: &&mut Batch| {
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
            None => found.push(Batch {
                first: index,
                len: 1,
                from,
                to,
            }),
        }
    }
    found
}

/// What a launch works on: works, steps and peers, in the order of [`abi::ScheduleArgs::work_buffer`].
#[derive(Clone, Debug, Default)]
pub struct WorkBuffer {
    pub(super) works: Vec<KernelWork>,
    pub(super) steps: Vec<abi::KernelStep>,
    pub(super) peers: Vec<u8>,
    pub(super) channels: usize,
}

impl WorkBuffer {
    /// Adds a call whose other fields are in `work`; it gets the next blocks of the launch.
    ///
    /// # Errors
    /// Unsupported if the launch grows beyond what a kernel can number.
    pub fn add(&mut self, schedule: &PackedSchedule, mut work: KernelWork) -> Result<()> {
        let peers = numbered("peers", self.peers.len())?;
        numbered("peers", self.peers.len() + schedule.peers.len())?;
        work.first_block = numbered("channels", self.channels)?;
        work.steps = numbered("steps", self.steps.len())?;
        work.nsteps = numbered("steps", schedule.steps.len())?;
        work.stages = schedule.stages;
        self.channels += usize::from(work.channels);
        self.steps
            .extend(schedule.steps.iter().map(|step| abi::KernelStep {
                peers: step.peers + peers,
                ..*step
            }));
        self.peers.extend(&schedule.peers);
        self.works.push(work);
        Ok(())
    }

    /// Channels of all works.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// Works, steps and peers.
    pub fn counts(&self) -> [u32; 3] {
        [self.works.len(), self.steps.len(), self.peers.len()].map(|count| count as u32)
    }

    /// Bytes that it takes.
    pub fn len(&self) -> usize {
        size_of_val(&self.works[..]) + size_of_val(&self.steps[..]) + self.peers.len()
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.works.is_empty()
    }

    /// Writes it to the beginning of `to`, which has room.
    ///
    /// # Panics
    /// If it has not.
    pub fn write(&self, to: &mut [u8]) {
        let (works, rest) = to.split_at_mut(size_of_val(&self.works[..]));
        let (steps, rest) = rest.split_at_mut(size_of_val(&self.steps[..]));
        works.copy_from_slice(abi::plain_bytes(&self.works));
        steps.copy_from_slice(abi::plain_bytes(&self.steps));
        rest[..self.peers.len()].copy_from_slice(&self.peers);
    }

    /// The works.
    pub fn works(&self) -> &[KernelWork] {
        &self.works
    }
}

/// Device addresses of one call's input and output; 0 where there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// Of the input.
    pub input: u64,
    /// Of the output.
    pub output: u64,
}

/// The work of one call, without its place in a launch.
///
/// # Errors
/// As [`arithmetic`].
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
        ..KernelWork::default()
    })
}

/// The flag that says where vectors of 16 bytes may be loaded and stored.
pub fn aligned(at: Addresses) -> u8 {
    if (at.input | at.output).is_multiple_of(16) {
        abi::ALIGNED
    } else {
        0
    }
}

/// How contributions are combined, the factor, and the flags that follow from the operator.
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
        ReduceOp::Avg => (Combine::Sum, 0, abi::AVERAGE),
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
mod tests;
