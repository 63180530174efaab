//! Generates one rank's steps from a pattern.

use super::chunks::SchedulePattern;
use super::groups::Groups;
use super::ir::{Op, Schedule, Step};
use super::rank_order::RankOrder;
use super::{algorithms, generator_of};
use crate::error::{Error, ErrorKind, Result};
use crate::types::{Algorithm, Collective};

/// Generates the steps of `rank` in one pass, in time proportional to their number. `root` is the sender of a
/// send/recv and `peer` its receiver; collectives without them ignore both.
///
/// # Errors
/// As for [`SchedulePattern::schedule`].
pub fn generate(
    collective: Collective,
    algorithm: Algorithm,
    nranks: usize,
    rank: usize,
    root: usize,
    peer: usize,
) -> Result<Schedule> {
    SchedulePattern {
        root,
        peer,
        ..SchedulePattern::flat(collective, algorithm, nranks)
    }
    .schedule(rank)
}

impl SchedulePattern {
    /// Generates the steps of `rank` in one pass, in time proportional to their number.
    ///
    /// # Errors
    /// Unsupported if the collective does not offer the algorithm, or if a chunk's number does not
    /// fit in 32 bits. Invalid argument if `rank`, `root` or `peer` does not exist.
    pub fn schedule(&self, rank: usize) -> Result<Schedule> {
        self.check(rank)?;
        let (stages, steps) = if self.nranks == 1 {
            (1, vec![alone(self.collective)])
        } else {
            let generator = generator_of(self.algorithm);
            ((generator.stages)(self), (generator.steps)(self, rank))
        };
        Ok(Schedule {
            nranks: self.nranks,
            rank,
            chunks: self.chunks(),
            stages,
            steps,
        })
    }

    /// Returns the algorithms that a hierarchical schedule of `collective` may use between groups.
    pub const fn between_groups(collective: Collective) -> &'static [Algorithm] {
        match collective {
            Collective::AllReduce => &[Algorithm::Ring, Algorithm::Tree, Algorithm::Direct],
            Collective::Broadcast | Collective::Reduce => &[Algorithm::Tree],
            Collective::AllGather | Collective::ReduceScatter => &[Algorithm::Direct],
            _ => &[],
        }
    }

    /// Returns why `collective` has no hierarchical schedule on `groups`, as a sentence; `None` if
    /// it has one.
    pub fn no_hierarchy(collective: Collective, groups: &Groups) -> Option<String> {
        if SchedulePattern::between_groups(collective).is_empty() {
            return Some(format!(
                "{collective} has no algorithm hierarchical: every block is for one rank alone, \
                 so {} have nothing to combine",
                groups.unit().plural()
            ));
        }
        let why = groups.single_level_reason()?;
        Some(format!(
            "{collective} by hierarchical needs several {} with several ranks: {why}",
            groups.unit().plural()
        ))
    }

    fn check(&self, rank: usize) -> Result<()> {
        let SchedulePattern {
            collective,
            algorithm,
            nranks,
            ..
        } = *self;
        let exists = algorithms(collective);
        if algorithm == Algorithm::Hierarchical {
            self.check_hierarchy()?;
        } else if !exists.contains(&algorithm) {
            let names: Vec<_> = exists.iter().map(|algorithm| algorithm.name()).collect();
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{collective} has no algorithm {algorithm}; it has {}",
                    names.join(", ")
                ),
            ));
        }
        let mut named = vec![("rank", rank)];
        if collective.has_root() {
            named.push(("root", self.root));
        }
        if collective.is_message() {
            named.extend([("sender", self.root), ("receiver", self.peer)]);
        }
        if let Some((name, rank)) = named.into_iter().find(|(_, rank)| *rank >= nranks) {
            return Err(Error::invalid_argument(format!(
                "{collective}: {name} {rank} does not exist among {nranks} ranks"
            )));
        }
        let mut listed = self.orders.as_slice().iter().filter_map(RankOrder::nranks);
        if let Some(listed) = listed.find(|&listed| listed != nranks) {
            return Err(Error::internal(format!(
                "an order of {listed} ranks for {nranks} ranks"
            )));
        }
        let most = u32::MAX as usize;
        let is_exchange = collective.splits_input() && collective.joins_output();
        let blocks = if is_exchange { nranks } else { 1 };
        if nranks > most / blocks {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{collective} over {nranks} ranks has more chunks than the {most} that a \
                     step can number; split the communicator"
                ),
            ));
        }
        Ok(())
    }
}

impl SchedulePattern {
    fn check_hierarchy(&self) -> Result<()> {
        let unsupported = |sentence| Err(Error::new(ErrorKind::Unsupported, sentence));
        if let Some(why) = SchedulePattern::no_hierarchy(self.collective, &self.groups) {
            return unsupported(why);
        }
        let between = SchedulePattern::between_groups(self.collective);
        if !between.contains(&self.between) {
            let names: Vec<_> = between.iter().map(|algorithm| algorithm.name()).collect();
            return unsupported(format!(
                "{} by hierarchical has no algorithm {} between {}; it has {}",
                self.collective,
                self.between,
                self.groups.unit().plural(),
                names.join(", ")
            ));
        }
        if self.groups.nranks() != Some(self.nranks) {
            return Err(Error::internal(format!(
                "a map of {} for {} ranks",
                self.groups, self.nranks
            )));
        }
        Ok(())
    }
}

/// Returns the only step of a call with a single rank. A reduction over one rank still multiplies by its
/// factor.
fn alone(collective: Collective) -> Step {
    let op = if collective.reduces() {
        Op::RecvReduceCopy
    } else {
        Op::Copy
    };
    Step::new(0, op, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_exist_is_named() {
        let error = generate(Collective::Gather, Algorithm::Tree, 4, 0, 0, 0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert_eq!(
            error.message(),
            "gather has no algorithm tree; it has direct"
        );
        let cases = [
            (Collective::AllReduce, 4, 4, 0, 0, "rank 4"),
            (Collective::AllReduce, 0, 0, 0, 0, "rank 0"),
            (Collective::Reduce, 4, 0, 9, 0, "root 9"),
            (Collective::SendRecv, 4, 0, 4, 0, "sender 4"),
            (Collective::SendRecv, 4, 0, 0, 5, "receiver 5"),
        ];
        for (collective, nranks, rank, root, peer, what) in cases {
            let error =
                generate(collective, Algorithm::Direct, nranks, rank, root, peer).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.message().contains(what), "{error}");
        }
        let error = generate(Collective::AllToAll, Algorithm::Direct, 65_536, 0, 0, 0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("65536"), "{error}");
        // The root is ignored where the collective has none.
        assert!(generate(Collective::AllReduce, Algorithm::Ring, 4, 0, 9, 9).is_ok());
    }
}
