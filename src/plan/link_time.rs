//! Time that the fullest link of the machine's topology needs for the messages of a call.

use super::Geometry;
use super::limits::Limits;
use crate::error::Result;
use crate::schedule::{Groups, SchedulePattern};
use crate::types::Level;
use std::collections::BTreeMap;

/// Returns the seconds that the fullest link or pool between ranks needs for the messages of a call. A
/// message has `wire_bytes` bytes, by [`Level`]. Returns 0 if the topology is unknown.
pub(super) fn link_seconds(
    limits: &Limits,
    pattern: &SchedulePattern,
    geometry: &Geometry,
    wire_bytes: [usize; 2],
) -> Result<f64> {
    let Some(topology) = &limits.topology else {
        return Ok(0.0);
    };
    let ranks = limits.nranks;
    // Bytes between ranks, at `from * ranks + to`, of each phase: a stage, in which a group inside a host sends to
    // one other group at a time.
    let mut phases: BTreeMap<(u32, usize), Vec<u64>> = BTreeMap::new();
    for from in 0..ranks {
        for step in &pattern.schedule(from)?.steps {
            let sent = match step.gives {
                Level::Intra => wire_bytes[0],
                Level::Inter => wire_bytes[1],
            };
            for &to in step.send_to.iter() {
                let phase = (step.stage, groups_ahead(&pattern.groups, from, to as usize));
                let bytes = phases
                    .entry(phase)
                    .or_insert_with(|| vec![0; ranks * ranks]);
                bytes[from * ranks + to as usize] += sent as u64;
            }
        }
    }
    let passes = geometry.passes() as u64;
    let messages = phases.values().map(|bytes| {
        let sent = bytes.iter().enumerate().filter(|(_, bytes)| **bytes > 0);
        sent.map(|(at, bytes)| (at / ranks, at % ranks, bytes * passes))
    });
    Ok(topology.seconds(messages))
}

/// Returns by how much the group number of `to` is larger than that of `from`, modulo the number of groups.
fn groups_ahead(groups: &Groups, from: usize, to: usize) -> usize {
    let [from, to] = [from, to].map(|rank| groups.of(rank).0);
    (to + groups.count() - from) % groups.count()
}
