//! Time of the fullest link of the machine's topology.

use super::Geometry;
use super::limits::Limits;
use crate::error::Result;
use crate::schedule::SchedulePattern;
use crate::types::Level;

/// Returns the seconds that the fullest link between ranks takes for a call, whose messages have
/// `wire_bytes` at each [`Level`]; 0 if the topology is unknown.
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
    let mut bytes = vec![0u64; ranks * ranks];
    for from in 0..ranks {
        for step in &pattern.schedule(from)?.steps {
            let sent = match step.gives {
                Level::Intra => wire_bytes[0],
                Level::Inter => wire_bytes[1],
            };
            for &to in step.send_to.iter() {
                bytes[from * ranks + to as usize] += sent as u64;
            }
        }
    }
    let passes = geometry.passes() as u64;
    let messages = bytes.iter().enumerate().filter(|(_, bytes)| **bytes > 0);
    Ok(topology.seconds(messages.map(|(at, bytes)| (at / ranks, at % ranks, bytes * passes))))
}
