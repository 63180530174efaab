//! States of ranks and communicators, in NCCL's terms.

use crate::error::code;
use crate::types::{ncclResult_t, ncclSuccess};
use cinch::recorder::{CommSnapshot, GatheredRank, RankSnapshot};
use cinch::types::Collective;
use std::collections::BTreeMap;

/// Collectives that NCCL counts, by its names and in its order.
pub(super) const COUNTED: [(&str, Collective); 5] = [
    ("Broadcast", Collective::Broadcast),
    ("Reduce", Collective::Reduce),
    ("AllGather", Collective::AllGather),
    ("ReduceScatter", Collective::ReduceScatter),
    ("AllReduce", Collective::AllReduce),
];

/// Stage of a rank, in the order in which ranks pass through them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum RankStage {
    /// The process lives and has no part in the communicator any more.
    NoComm,
    /// The rank takes calls.
    Running,
    /// The rank was finalized or destroyed.
    Finalize,
    /// The rank has aborted the communicator.
    Abort,
}

impl RankStage {
    /// Returns the stage of a rank that answered.
    pub(super) fn of(rank: &RankSnapshot) -> RankStage {
        match rank {
            rank if rank.is_aborted => RankStage::Abort,
            rank if rank.is_closing || rank.is_destroyed => RankStage::Finalize,
            _ => RankStage::Running,
        }
    }

    /// Returns NCCL's word for the stage.
    pub(super) fn name(self) -> &'static str {
        match self {
            RankStage::NoComm => "NOCOMM",
            RankStage::Running => "RUNNING",
            RankStage::Finalize => "FINALIZE",
            RankStage::Abort => "ABORT",
        }
    }
}

/// Returns the number of calls that a rank has made of a collective.
pub(super) fn count_of(rank: &RankSnapshot, collective: Collective) -> u64 {
    rank.counts
        .get(collective as usize)
        .copied()
        .unwrap_or_default()
}

/// Returns the code that `ncclCommGetAsyncError` would give for a rank.
pub(super) fn async_error(rank: &RankSnapshot) -> ncclResult_t {
    match &rank.error {
        // The rank's own abort is no error to it.
        Some(error) if !rank.is_aborted => code(error),
        _ => ncclSuccess,
    }
}

/// Returns the ranks of each value of `key`, by the value.
pub(super) fn grouped<K: Ord>(
    comm: &CommSnapshot<'_>,
    key: impl Fn(&RankSnapshot) -> K,
) -> BTreeMap<K, Vec<usize>> {
    let mut groups: BTreeMap<K, Vec<usize>> = BTreeMap::new();
    for (rank, GatheredRank { rank: snapshot, .. }) in &comm.ranks {
        groups.entry(key(snapshot)).or_default().push(*rank);
    }
    groups
}

/// Returns the ranks of each stage. Ranks without an answer are in none.
pub(super) fn stages(comm: &CommSnapshot<'_>) -> BTreeMap<RankStage, Vec<usize>> {
    let mut stages = grouped(comm, RankStage::of);
    let left = comm.missing.iter().filter(|one| !one.is_unresponsive);
    for rank in left {
        stages.entry(RankStage::NoComm).or_default().push(rank.rank);
    }
    stages
}
