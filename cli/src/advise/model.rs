//! Predicted times of a run's calls with and without a codec, by the planner's cost model. The costs of the cores are
//! measured; those of the link are fitted, so that the model gives the times that the run took.

use super::counters::{ClassName, ClassSums, CommunicatorCounts};
use crate::bench::hosts::limits;
use crate::bench::metrics::count_of;
use cinch::comm::Call;
use cinch::config::{CodecPolicy, CommFacts, Config};
use cinch::cpu::Isa;
use cinch::plan::{Affine, MeasuredCosts, Planner};
use cinch::schedule::Groups;
use cinch::types::CodecSetting;
use cinch::{CodecSpec, DType, Result};

/// Largest cost of a byte on a link: 10 KB/s.
const MOST_BYTE: f64 = 1e-4;

/// Largest cost of a message, in seconds.
const MOST_MESSAGE: f64 = 0.1;

/// Steps of a bisection: the interval shrinks by 2^48.
const STEPS: usize = 48;

/// Rounds in which the costs of a byte and of a message are fitted in turn.
const ROUNDS: usize = 4;

/// Measures the costs of this machine's cores for a codec.
pub type CoreCosts<'a> = &'a dyn Fn(CodecSpec) -> Result<MeasuredCosts>;

/// A communicator of the run, and costs that explain its times.
pub struct CommModel<'a> {
    ranks: usize,
    groups: Groups,
    core: CoreCosts<'a>,
    /// Costs of the link, fitted to the run.
    pub link: Affine,
}

/// Returns the hosts of the ranks: those that are known, or else an even division.
pub fn groups(comm: &CommunicatorCounts, ranks: usize, hosts: Option<usize>) -> Groups {
    let mut names: Vec<&String> = comm.hosts.values().collect();
    if hosts.is_none() && names.len() == ranks {
        return Groups::of_hosts(names);
    }
    names.sort();
    names.dedup();
    match hosts.unwrap_or(names.len()).clamp(1, ranks) {
        hosts if ranks.is_multiple_of(hosts) => Groups::even_hosts(hosts, ranks / hosts),
        // Ranks of uneven hosts that are not known count as hosts of their own: the link between hosts decides.
        _ => Groups::even_hosts(ranks, 1),
    }
}

impl<'a> CommModel<'a> {
    /// Fits the link to the raw calls of `comm`. Returns `None` if no raw call was timed.
    ///
    /// # Errors
    /// Returns the planner's errors, such as one about too many ranks for the slots.
    pub fn fitted(
        comm: &CommunicatorCounts,
        ranks: usize,
        groups: Groups,
        core: CoreCosts<'a>,
    ) -> Result<Option<CommModel<'a>>> {
        let timed = comm
            .classes
            .iter()
            .filter(|(class, sums)| class.codec.is_raw() && sums.timed_calls > 0.0);
        let timed: Vec<(&ClassName, &ClassSums)> = timed.collect();
        let by_size = |(class, _): &&(&ClassName, &ClassSums)| class.size_class;
        let (Some(small), Some(large)) = (
            timed.iter().min_by_key(by_size),
            timed.iter().max_by_key(by_size),
        ) else {
            return Ok(None);
        };
        let mut model = CommModel {
            ranks,
            groups,
            core,
            link: Affine {
                fixed: 1e-6,
                each: 1e-9,
            },
        };
        let costs = (core)(CodecSpec::RAW)?;
        let mut fit = |change: fn(&mut Affine) -> &mut f64,
                       most: f64,
                       (class, sums): (&ClassName, &ClassSums)|
         -> Result<()> {
            let (mut low, mut high) = (0.0, most);
            let taken = sums.timed_seconds / sums.timed_calls;
            for _ in 0..STEPS {
                let middle = (low + high) / 2.0;
                *change(&mut model.link) = middle;
                let predicted = model.predict(class, sums, CodecSetting::RAW, costs)?;
                match predicted < taken {
                    true => low = middle,
                    false => high = middle,
                }
            }
            Ok(())
        };
        // Small calls show the cost of a message only if there are larger ones that show that of a byte.
        let has_small = small.0.size_class * 16 <= large.0.size_class;
        for _ in 0..ROUNDS {
            fit(|link| &mut link.each, MOST_BYTE, *large)?;
            if has_small {
                fit(|link| &mut link.fixed, MOST_MESSAGE, *small)?;
            }
        }
        Ok(Some(model))
    }

    /// Returns the predicted time with a codec over the predicted time without.
    ///
    /// # Errors
    /// As for [`CommModel::fitted`].
    pub fn ratio(&self, class: &ClassName, sums: &ClassSums, codec: CodecSpec) -> Result<f64> {
        let costs = (self.core)(codec)?;
        let raw = self.predict(class, sums, CodecSetting::RAW, costs)?;
        let coded = self.predict(class, sums, CodecSetting::from(codec), costs)?;
        Ok(coded / raw)
    }

    /// Returns the predicted seconds of a call of the class, with fp32 elements.
    fn predict(
        &self,
        class: &ClassName,
        sums: &ClassSums,
        codec: CodecSetting,
        costs: MeasuredCosts,
    ) -> Result<f64> {
        let config = Config::default();
        let mut limits = limits(&config, self.ranks, &self.groups)?;
        limits.machine.measured = Some(MeasuredCosts {
            send: self.link,
            ..costs
        });
        let bytes = (sums.bytes / sums.calls.max(1.0)) as usize;
        let count = count_of(class.collective, DType::F32, self.ranks, bytes).max(1);
        let call = Call {
            codec: Some(codec),
            ..Call::new(class.collective, DType::F32, count)
        };
        let policy = CodecPolicy::new(&config, CommFacts::first(self.ranks, self.groups.count()));
        let request = call.under(&policy, self.ranks)?;
        Planner::new(limits, 0, Isa::Scalar).predict(&request)
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use cinch::Collective;
    use cinch::types::CodecKind;

    /// Returns costs of a core that encodes and decodes an element in a nanosecond.
    pub fn core(_: CodecSpec) -> Result<MeasuredCosts> {
        let line = Affine {
            fixed: 0.0,
            each: 1e-9,
        };
        let mut costs = MeasuredCosts::of_core(Affine::default(), &[], Isa::Scalar)?;
        costs.reduce = Affine {
            fixed: 0.0,
            each: 1e-10,
        };
        costs.encode = costs.encode.map(|_| line);
        costs.decode = costs.decode.map(|_| line);
        Ok(costs)
    }

    /// Returns counters of two ranks on two hosts that made 10 raw all_reduces of each size in the given seconds.
    pub fn counters(times: &[(u64, f64)]) -> CommunicatorCounts {
        let mut comm = CommunicatorCounts::default();
        for rank in 0..2 {
            comm.hosts.insert(rank, format!("h{rank}"));
        }
        for &(bytes, seconds) in times {
            let class = ClassName {
                collective: Collective::AllReduce,
                codec: CodecKind::Raw,
                size_class: bytes.next_power_of_two(),
            };
            let sums = ClassSums {
                calls: 20.0,
                bytes: 20.0 * bytes as f64,
                wire_bytes: 20.0 * bytes as f64,
                timed_calls: 20.0,
                timed_seconds: 20.0 * seconds,
            };
            comm.classes.insert(class, sums);
        }
        comm
    }

    fn fitted(times: &[(u64, f64)]) -> (CommunicatorCounts, CommModel<'static>) {
        let comm = counters(times);
        let groups = groups(&comm, 2, None);
        assert_eq!(groups.count(), 2);
        let model = CommModel::fitted(&comm, 2, groups, &core).unwrap().unwrap();
        (comm, model)
    }

    #[test]
    fn fitted_link_explains_the_times_of_the_run() {
        let times = [(4096, 100e-6), (64 << 20, 0.6)];
        let (comm, model) = fitted(&times);
        let costs = core(CodecSpec::RAW).unwrap();
        for ((class, sums), (_, seconds)) in comm.classes.iter().zip(times) {
            let predicted = model
                .predict(class, sums, CodecSetting::RAW, costs)
                .unwrap();
            assert!(
                (predicted / seconds - 1.0).abs() < 0.02,
                "{predicted} {seconds}"
            );
        }
        // 64 MiB in 0.6 s are about 0.112 GB/s.
        let bandwidth = 1e-9 / model.link.each;
        assert!((0.1..0.13).contains(&bandwidth), "{bandwidth}");
    }

    #[test]
    fn codec_pays_on_a_slow_link_and_not_on_a_fast_one() {
        let linear: CodecSpec = "linear8".parse().unwrap();
        let ratio = |seconds: f64| {
            let (comm, model) = fitted(&[(64 << 20, seconds)]);
            let (class, sums) = comm.classes.first_key_value().unwrap();
            model.ratio(class, sums, linear).unwrap()
        };
        // At 0.1 GB/s the wire decides, and a quarter of the bytes travels.
        let slow = ratio(0.6);
        assert!((0.2..0.35).contains(&slow), "{slow}");
        // At 10 GB/s coding 16 million elements takes longer than sending them raw.
        let fast = ratio(0.007);
        assert!(fast > 1.0, "{fast}");
    }

    #[test]
    fn hosts_come_from_the_counters_or_from_the_option() {
        let comm = counters(&[]);
        assert_eq!(groups(&comm, 2, Some(1)).count(), 1);
        // Two of four ranks are known, on two hosts.
        assert_eq!(groups(&comm, 4, None).count(), 2);
        assert_eq!(groups(&comm, 3, None).count(), 3);
    }
}
