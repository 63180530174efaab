//! Time that the links of the machine's topology need for the messages of a call.

use super::Geometry;
use super::limits::Limits;
use crate::error::Result;
use crate::schedule::{Groups, SchedulePattern};
use crate::topology::RankTopology;
use crate::types::Level;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A message of one pass.
#[derive(Clone, Copy, Debug)]
struct PassMessage {
    from: usize,
    to: usize,
    /// Part of the pass that the message carries.
    part: usize,
    level: Level,
}

/// The messages of one pass, by phase. A phase is a stage in which a group inside a host sends to one other group.
#[derive(Debug)]
pub(super) struct LinkWork {
    topology: Arc<RankTopology>,
    phases: Vec<Vec<PassMessage>>,
    parts: usize,
}

impl LinkWork {
    /// Lists the messages of `pattern`; `None` if the topology is unknown.
    pub fn new(limits: &Limits, pattern: &SchedulePattern) -> Result<Option<LinkWork>> {
        let Some(topology) = &limits.topology else {
            return Ok(None);
        };
        let mut phases: BTreeMap<(u32, usize), Vec<PassMessage>> = BTreeMap::new();
        for from in 0..limits.nranks {
            for step in &pattern.schedule(from)?.steps {
                let part = pattern.part(step.chunk as usize);
                for &to in step.send_to.iter() {
                    let to = to as usize;
                    let phase = (step.stage, groups_ahead(&pattern.groups, from, to));
                    phases.entry(phase).or_default().push(PassMessage {
                        from,
                        to,
                        part,
                        level: step.gives,
                    });
                }
            }
        }
        Ok(Some(LinkWork {
            topology: topology.clone(),
            phases: phases.into_values().collect(),
            parts: pattern.parts(),
        }))
    }

    /// Returns the seconds that links need for all passes. `wire_bytes` returns the bytes of a message of so many
    /// elements.
    ///
    /// Passes overlap, so in all passes but one the fullest link is never idle. The phases of that one pass follow
    /// each other, and each takes as long as its own fullest link.
    pub fn seconds(&self, geometry: &Geometry, wire_bytes: impl Fn(Level, usize) -> usize) -> f64 {
        let passes = geometry.passes();
        // All passes but the last have full chunks.
        let bytes = |level: Level, part: usize| {
            let elements = |pass| geometry.range(pass, part).len();
            let message = |pass| match elements(pass) {
                0 => 0,
                elements => wire_bytes(level, elements) as u64,
            };
            (passes as u64 - 1) * message(0) + message(passes - 1)
        };
        let by_level = Level::ALL.map(|level| {
            let parts = 0..self.parts;
            parts.map(|part| bytes(level, part)).collect::<Vec<_>>()
        });
        let messages = |phase: &Vec<PassMessage>| {
            let size = |one: &PassMessage| by_level[one.level as usize][one.part];
            let sized = phase.iter().map(|one| (one.from, one.to, size(one)));
            sized.collect::<Vec<_>>()
        };
        let phases: Vec<_> = self.phases.iter().map(messages).collect();
        let alone = phases
            .iter()
            .map(|phase| self.topology.seconds([phase.iter().copied()]));
        let in_turn: f64 = alone.sum();
        let fullest = self
            .topology
            .seconds(phases.iter().map(|phase| phase.iter().copied()));
        fullest + (in_turn - fullest).max(0.0) / passes as f64
    }
}

/// Returns by how much the group number of `to` is larger than that of `from`, modulo the number of groups.
fn groups_ahead(groups: &Groups, from: usize, to: usize) -> usize {
    let [from, to] = [from, to].map(|rank| groups.of(rank).0);
    (to + groups.count() - from) % groups.count()
}
