//! Checks the steps of each rank by themselves, without the messages of other ranks.

use crate::error::{Error, Result};
use crate::schedule::chunks::SchedulePattern;
use crate::schedule::ir::{Op, Own, Schedule, Step};

pub(super) fn check(pattern: &SchedulePattern, schedules: &[Schedule]) -> Result<()> {
    if schedules.len() != pattern.nranks {
        return Err(Error::internal(format!(
            "{} schedules for {} ranks",
            schedules.len(),
            pattern.nranks
        )));
    }
    for (rank, schedule) in schedules.iter().enumerate() {
        let agreed = (pattern.nranks, rank, pattern.chunks(), schedules[0].stages);
        let found = (
            schedule.nranks,
            schedule.rank,
            schedule.chunks,
            schedule.stages,
        );
        if found != agreed {
            return Err(Error::internal(format!(
                "rank {rank}: (ranks, rank, chunks, stages) are {found:?}, not {agreed:?}"
            )));
        }
        let mut before: Option<&Step> = None;
        for (index, step) in schedule.steps.iter().enumerate() {
            let wrong = wrong_with(step, schedule).or_else(|| wrong_after(step, before));
            if let Some(what) = wrong {
                return Err(Error::internal(format!(
                    "rank {rank}, step {index}: {what}: {step:?}"
                )));
            }
            before = Some(step);
        }
        if before.is_some_and(|last| last.more) {
            return Err(Error::internal(format!(
                "rank {rank}: the last step is to be continued"
            )));
        }
    }
    Ok(())
}

fn wrong_with(step: &Step, schedule: &Schedule) -> Option<&'static str> {
    let foreign = |rank: &u32| *rank as usize >= schedule.nranks || *rank as usize == schedule.rank;
    let twice = |peers: &[u32]| (1..peers.len()).any(|i| peers[..i].contains(&peers[i]));
    let own_beyond = step
        .own
        .after()
        .is_some_and(|after| after > step.recv_from.len());
    if step.stage as usize >= schedule.stages {
        Some("its stage is beyond the last")
    } else if step.chunk as usize >= schedule.chunks {
        Some("its chunk does not exist")
    } else if step
        .recv_from
        .iter()
        .chain(step.send_to.iter())
        .any(foreign)
    {
        Some("a peer does not exist or is the rank itself")
    } else if twice(&step.recv_from) || twice(&step.send_to) {
        Some("it names a peer twice")
    } else if !step.op.receives() && !step.recv_from.is_empty() {
        Some("its op does not receive")
    } else if !step.op.sends() && !step.send_to.is_empty() {
        Some("its op does not send")
    } else if !step.op.sums() && step.own != Own::Absent {
        Some("its op forms no sum, so there is no own term")
    } else if own_beyond {
        Some("the own term stands behind more terms than there are")
    } else if matches!(step.op, Op::Recv | Op::RecvCopySend) && step.recv_from.len() != 1 {
        Some("its op receives from one rank")
    } else if step.op == Op::RecvCopySend && step.takes != step.gives {
        Some("it forwards bytes and cannot change their level")
    } else if step.more && (!step.op.receives() || step.op == Op::Recv) {
        Some("its op cannot be continued")
    } else if step.op.sends() && step.send_to.is_empty() && !step.more {
        Some("it sends to nobody")
    } else {
        None
    }
}

fn wrong_after(step: &Step, before: Option<&Step>) -> Option<&'static str> {
    let before = before?;
    if step.stage < before.stage {
        return Some("its stage is lower than that of the step before");
    }
    if !before.more {
        return None;
    }
    if (step.stage, step.op, step.chunk) != (before.stage, before.op, before.chunk) {
        Some("it does not continue the chain of the step before")
    } else if step.op == Op::RecvCopySend && step.recv_from != before.recv_from {
        Some("the chain forwards one message, but this step names another sender")
    } else if step.op.sums()
        && !before.send_to.is_empty()
        && (!step.recv_from.is_empty() || step.own != Own::Absent)
    {
        Some("it adds to a sum that the chain has already sent")
    } else {
        None
    }
}
