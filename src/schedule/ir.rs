//! The intermediate representation.

use std::ops::Deref;

/// Largest fan-in and fan-out of one step.
pub const MAX_FAN: usize = 8;

/// What one step does with its chunk. `in` and `out` are the chunk's place in the user's input
/// and output; `enc` encodes, `dec` decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    /// enc(in) to the peers.
    Send,
    /// out = dec(received).
    Recv,
    /// out = in.
    Copy,
    /// out = out + in, exactly.
    Reduce,
    /// out = in + sum of dec(received). Final: an average divides here.
    RecvReduceCopy,
    /// enc(in + sum of dec(received)) to the peers: a partial sum on its way.
    RecvReduceSend,
    /// out = dec(received); the received bytes go on unchanged.
    RecvCopySend,
    /// e = enc(in + sum of dec(received)); e to the peers; out = dec(e), so that the owner ends
    /// with the bits that everybody ends with. Final: an average divides before the encode.
    RecvReduceCopySend,
}

impl Op {
    /// Whether the step receives.
    pub const fn receives(self) -> bool {
        !matches!(self, Op::Send | Op::Copy | Op::Reduce)
    }

    /// Whether the step sends.
    pub const fn sends(self) -> bool {
        matches!(
            self,
            Op::Send | Op::RecvReduceSend | Op::RecvCopySend | Op::RecvReduceCopySend
        )
    }

    /// Whether the step writes the output.
    pub const fn writes(self) -> bool {
        !matches!(self, Op::Send | Op::RecvReduceSend)
    }

    /// Whether the step reads the input.
    pub const fn reads(self) -> bool {
        !matches!(self, Op::Recv | Op::RecvCopySend)
    }

    /// Whether the step adds contributions.
    pub const fn reduces(self) -> bool {
        matches!(
            self,
            Op::Reduce | Op::RecvReduceCopy | Op::RecvReduceSend | Op::RecvReduceCopySend
        )
    }
}

/// Up to [`MAX_FAN`] ranks, in the order in which contributions are added.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Peers {
    ranks: [u32; MAX_FAN],
    len: u8,
}

impl Peers {
    /// Nobody.
    pub const NONE: Peers = Peers {
        ranks: [0; MAX_FAN],
        len: 0,
    };

    /// One rank.
    pub fn one(rank: usize) -> Peers {
        Peers::from_iter([rank])
    }
}

impl FromIterator<usize> for Peers {
    /// # Panics
    /// If there are more than [`MAX_FAN`] ranks: generators split their fan before that.
    fn from_iter<I: IntoIterator<Item = usize>>(ranks: I) -> Peers {
        let mut peers = Peers::NONE;
        for rank in ranks {
            peers.ranks[usize::from(peers.len)] = rank as u32;
            peers.len += 1;
        }
        peers
    }
}

impl Deref for Peers {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.ranks[..usize::from(self.len)]
    }
}

impl std::fmt::Debug for Peers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// One action of one rank on one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// When: pass p runs stage s at time p + s. Steps of a rank stand in order of stage.
    pub stage: u32,
    /// What.
    pub op: Op,
    /// On which chunk of the pass. How chunks lie in the buffers is the collective's business:
    /// see `plan::Geometry`.
    pub chunk: u32,
    /// From whom; contributions are added in this order, after the rank's own.
    pub recv_from: Peers,
    /// To whom.
    pub send_to: Peers,
}

/// One rank's part of one pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Ranks that take part.
    pub nranks: usize,
    /// Whose steps these are.
    pub rank: usize,
    /// Chunks of a pass, over all ranks.
    pub chunks: usize,
    /// Stages of a pass, over all ranks: largest stage + 1.
    pub stages: usize,
    /// The steps, in order of stage.
    pub steps: Vec<Step>,
}

/// One step of one pass, as [`walk`] yields it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visit {
    /// Which pass.
    pub pass: usize,
    /// Index into [`Schedule::steps`].
    pub step: usize,
}

/// The order in which one rank runs `passes` passes: by time; within one time the newest pass
/// first, so that sends leave before the rank waits for what older passes still owe; within a
/// pass as listed.
pub fn walk(schedule: &Schedule, passes: usize) -> Walk<'_> {
    Walk {
        schedule,
        passes,
        time: 0,
        pass: 0,
        step: 0,
        fresh: true,
    }
}

/// Iterator of [`walk`]. Cheap to clone; allocates nothing.
#[derive(Clone, Debug)]
pub struct Walk<'a> {
    schedule: &'a Schedule,
    passes: usize,
    time: usize,
    pass: usize,
    step: usize,
    fresh: bool,
}

impl Walk<'_> {
    fn first_step_of(&self, stage: usize) -> usize {
        self.schedule
            .steps
            .partition_point(|step| (step.stage as usize) < stage)
    }
}

impl Iterator for Walk<'_> {
    type Item = Visit;

    fn next(&mut self) -> Option<Visit> {
        if self.passes == 0 || self.schedule.steps.is_empty() {
            return None;
        }
        loop {
            if self.time >= self.passes + self.schedule.stages - 1 {
                return None;
            }
            if self.fresh {
                // Newest pass of this time.
                self.pass = self.time.min(self.passes - 1);
                self.step = self.first_step_of(self.time - self.pass);
                self.fresh = false;
            }
            let stage = self.time - self.pass;
            match self.schedule.steps.get(self.step) {
                Some(step) if step.stage as usize == stage => {
                    self.step += 1;
                    return Some(Visit {
                        pass: self.pass,
                        step: self.step - 1,
                    });
                }
                _ => {}
            }
            // The next older pass runs the next stage, whose steps follow in the list.
            if self.pass > 0 && stage + 1 < self.schedule.stages {
                self.pass -= 1;
                self.step = self.first_step_of(stage + 1);
            } else {
                self.time += 1;
                self.fresh = true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn staged(stages: &[u32]) -> Schedule {
        let steps = stages
            .iter()
            .map(|&stage| Step {
                stage,
                op: Op::Copy,
                chunk: 0,
                recv_from: Peers::NONE,
                send_to: Peers::NONE,
            })
            .collect();
        let stages = stages.iter().max().map_or(0, |&stage| stage as usize + 1);
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
            (1, 0),
            (0, 1),
            (0, 2), // time 1
            (2, 0),
            (1, 1),
            (1, 2), // time 2: pass 0 has nothing at stage 2
            (2, 1),
            (2, 2),
            (0, 3), // time 3
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
