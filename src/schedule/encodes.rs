//! Counts the contributions in each partial sum that a schedule encodes. The error of a lossy codec follows from
//! them: an encode of a sum of s contributions adds a noise whose variance is proportional to s.

use super::chunks::SchedulePattern;
use super::ir::{Op, Schedule, Step};
use crate::error::{Error, Result};
use std::collections::HashMap;

/// Returns, for each [`Level`](crate::types::Level), the number of contributions in a partial sum, added up over all encodes of a chunk:
/// the mean over the chunks of a pass. For an all_reduce by direct of N ranks it is (N - 1) + N: N - 1 ranks encode
/// their contributions, and the owner encodes the sum.
///
/// # Errors
/// Internal if a message is received that no rank sends.
pub fn encoded_contributions(pattern: &SchedulePattern) -> Result<[f64; 2]> {
    let schedules: Vec<Schedule> = (0..pattern.nranks)
        .map(|rank| pattern.schedule(rank))
        .collect::<Result<_>>()?;
    let mut senders = Senders::new(&schedules);
    let mut encoded = [0u64; 2];
    for (rank, schedule) in schedules.iter().enumerate() {
        for (at, step) in schedule.steps.iter().enumerate() {
            if encodes(schedule, at) {
                encoded[step.gives as usize] += senders.contributions(rank, at)?;
            }
        }
    }
    let chunks = pattern.chunks() as f64;
    Ok(encoded.map(|sum| sum as f64 / chunks))
}

/// Returns whether step `at` encodes what no step before it has encoded. A chain sends the bytes of its first step
/// that sends, and a contribution to many ranks has equal bytes in all its steps.
fn encodes(schedule: &Schedule, at: usize) -> bool {
    let (step, before) = (&schedule.steps[at], &schedule.steps[..at]);
    let is_first = match step.op {
        Op::Send => before
            .iter()
            .all(|one| one.op != Op::Send || one.chunk != step.chunk),
        op => op.sums() && chain(schedule, at).all(|one| before[one].send_to.is_empty()),
    };
    is_first && !step.send_to.is_empty()
}

/// Returns the steps before `at` of its chain.
fn chain(schedule: &Schedule, at: usize) -> impl Iterator<Item = usize> + use<'_> {
    (0..at)
        .rev()
        .take_while(|&before| schedule.steps[before].more)
}

/// Finds the step that sent a message.
struct Senders<'a> {
    schedules: &'a [Schedule],
    /// Steps that send a chunk from one rank to another, in order.
    sends: HashMap<(usize, usize, u32), Vec<usize>>,
    /// Number of contributions that a step of a rank sends.
    known: HashMap<(usize, usize), u64>,
}

impl<'a> Senders<'a> {
    fn new(schedules: &'a [Schedule]) -> Senders<'a> {
        let mut sends: HashMap<_, Vec<usize>> = HashMap::new();
        for (rank, schedule) in schedules.iter().enumerate() {
            for (at, step) in schedule.steps.iter().enumerate() {
                for &to in step.send_to.iter() {
                    let key = (rank, to as usize, step.chunk);
                    sends.entry(key).or_default().push(at);
                }
            }
        }
        Senders {
            schedules,
            sends,
            known: HashMap::new(),
        }
    }

    /// Returns the number of contributions that the result of step `at` of `rank` holds.
    fn contributions(&mut self, rank: usize, at: usize) -> Result<u64> {
        if let Some(&known) = self.known.get(&(rank, at)) {
            return Ok(known);
        }
        let schedules = self.schedules;
        let schedule = &schedules[rank];
        let steps: Vec<usize> = chain(schedule, at).chain([at]).collect();
        let mut sum = u64::from(schedule.steps[at].op == Op::Send);
        for &part in &steps {
            let step = &schedule.steps[part];
            sum += u64::from(step.op.sums() && step.own.after().is_some());
            // The steps of a chain that forwards name one message.
            if step.op.sums() || part == at {
                for &from in step.recv_from.iter() {
                    sum += self.received(rank, part, from as usize)?;
                }
            }
        }
        self.known.insert((rank, at), sum);
        Ok(sum)
    }

    /// Returns the number of contributions in the message that step `at` of `rank` receives from `from`.
    fn received(&mut self, rank: usize, at: usize, from: usize) -> Result<u64> {
        let schedules = self.schedules;
        let schedule = &schedules[rank];
        let step = &schedule.steps[at];
        let takes = |one: &&Step| one.chunk == step.chunk && one.recv_from.contains(&(from as u32));
        let repeats = |one: &&Step| one.more && !one.op.sums();
        // Several steps of a forwarding chain receive one message.
        let before = schedule.steps[..at]
            .iter()
            .filter(takes)
            .filter(|one| !repeats(one))
            .count();
        let sent = self.sends.get(&(from, rank, step.chunk));
        let sender = sent
            .and_then(|sent| sent.get(before))
            .copied()
            .ok_or_else(|| {
                Error::internal(format!(
                    "rank {rank} receives chunk {} from rank {from}, which does not send it",
                    step.chunk
                ))
            })?;
        self.contributions(from, sender)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{GroupUnit, Groups};
    use crate::types::{Algorithm, Collective};

    fn all_reduce(algorithm: Algorithm, nranks: usize) -> SchedulePattern {
        SchedulePattern::flat(Collective::AllReduce, algorithm, nranks)
    }

    fn total(pattern: &SchedulePattern) -> f64 {
        encoded_contributions(pattern).unwrap().iter().sum()
    }

    #[test]
    fn flat_schedules_have_their_closed_forms() {
        for levels in 1..=5 {
            let (nranks, n) = (1 << levels, f64::from(1 << levels));
            let ring = total(&all_reduce(Algorithm::Ring, nranks));
            assert_eq!(ring, n * (n + 1.0) / 2.0);
            assert_eq!(total(&all_reduce(Algorithm::Direct, nranks)), 2.0 * n - 1.0);
            let tree = n * f64::from(levels) + 1.0;
            assert_eq!(total(&all_reduce(Algorithm::Tree, nranks)), tree);
        }
    }

    /// Contributions of all but the owner of each group, sums of groups, and the whole sum.
    #[test]
    fn hierarchical_schedules_have_their_closed_forms() {
        for (groups, ranks) in [(2, 4), (4, 2), (4, 4), (3, 3)] {
            let members: Vec<Vec<usize>> = (0..groups)
                .map(|group| (group * ranks..(group + 1) * ranks).collect())
                .collect();
            let inside = Groups::of_members(GroupUnit::Switch, &members).unwrap();
            for (between, sums) in [
                (Algorithm::Direct, (groups - 1) * ranks),
                (Algorithm::Ring, groups * (groups - 1) / 2 * ranks),
                (Algorithm::Tree, groups * (groups - 1) / 2 * ranks),
            ] {
                let pattern = SchedulePattern {
                    groups: inside.clone(),
                    between,
                    ..all_reduce(Algorithm::Hierarchical, groups * ranks)
                };
                let expected = [groups * (ranks - 1), sums + groups * ranks];
                let found = encoded_contributions(&pattern).unwrap();
                assert_eq!(
                    found,
                    expected.map(|sum| sum as f64),
                    "{between} {groups}x{ranks}"
                );
            }
        }
    }
}
