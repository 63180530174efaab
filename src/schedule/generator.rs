//! Defines the facts that each algorithm states about its schedules, in the file that generates
//! them.

use super::chunks::SchedulePattern;
use super::cost::Hops;
use super::ir::Step;
use crate::types::{Algorithm, Collective};

/// The facts about an algorithm, and its generator. Its functions are called only for patterns of at least 2
/// ranks.
pub(super) struct Generator {
    /// Algorithm whose schedules these functions describe.
    pub algorithm: Algorithm,
    /// Collectives for which the algorithm has a schedule that ignores groups.
    pub collectives: &'static [Collective],
    /// Returns the number of parts into which a pass divides its range.
    pub parts: fn(&SchedulePattern) -> usize,
    /// Returns the number of slots that each connection needs for freedom from deadlock.
    pub slots: fn(&SchedulePattern) -> usize,
    /// Returns the number of stages of a pass.
    pub stages: fn(&SchedulePattern) -> usize,
    /// Returns the length of the longest chain of dependent messages in a pass.
    pub hops: fn(&SchedulePattern) -> Hops,
    /// Returns the steps of a rank in one pass, in order of stage.
    pub steps: fn(&SchedulePattern, usize) -> Vec<Step>,
}

impl Generator {
    /// Returns whether the algorithm has a schedule of `collective` that ignores groups.
    pub const fn has(&self, collective: Collective) -> bool {
        let mut at = 0;
        while at < self.collectives.len() {
            if self.collectives[at] as u8 == collective as u8 {
                return true;
            }
            at += 1;
        }
        false
    }
}

/// The flat (not hierarchical) algorithms of a collective, in numeric order.
#[derive(Clone, Copy)]
pub(super) struct FlatAlgorithms {
    algorithms: [Algorithm; Algorithm::ALL.len()],
    count: usize,
}

impl FlatAlgorithms {
    const NONE: FlatAlgorithms = FlatAlgorithms {
        algorithms: Algorithm::ALL,
        count: 0,
    };

    /// Returns the algorithms of each collective, in numeric order. Fails to compile if `table` is not in the
    /// order of [`Algorithm::ALL`], because it is indexed by the algorithm's number.
    pub const fn of_all(
        table: &[Generator; Algorithm::ALL.len()],
    ) -> [FlatAlgorithms; Collective::ALL.len()] {
        let mut all = [FlatAlgorithms::NONE; Collective::ALL.len()];
        let mut at = 0;
        while at < table.len() {
            assert!(
                table[at].algorithm as usize == at,
                "the table is in numeric order"
            );
            let mut collective = 0;
            while collective < all.len() {
                if table[at].has(Collective::ALL[collective]) {
                    let flat = &mut all[collective];
                    flat.algorithms[flat.count] = table[at].algorithm;
                    flat.count += 1;
                }
                collective += 1;
            }
            at += 1;
        }
        all
    }

    /// Returns the algorithms as a slice.
    pub fn as_slice(&self) -> &[Algorithm] {
        &self.algorithms[..self.count]
    }
}
