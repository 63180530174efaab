//! Predicted times of calls, as tuners read them, and what runs without a tuner.

use super::abi::{ALGORITHMS, CostTable, NO_COST, PROTOCOLS};
use super::names::{algorithm_number, numbered_algorithm, numbered_protocol, protocol_number};
use cinch::comm::Call;
use cinch::plan::Candidate;
use cinch::types::{Algorithm, CallTuning, CodecSetting, Protocol};
use cinch::{Collective, Communicator, DType, ErrorKind, Result};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Largest number of calls whose times are kept; with more, all are predicted anew.
const CACHED: usize = 1024;

/// Factor by which a protocol that cinch leaves out for the size of a call is predicted to be slower than all entries
/// of its algorithm at least. A tuner can select it, but a change elsewhere in the table does not.
const LEFT_OUT: f32 = 1.01;

/// Predicted times of a call in microseconds.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct CallCosts {
    /// Times of the algorithms that NCCL has, too.
    pub(super) table: CostTable,
    /// The fastest of the other algorithms, and its time.
    pub(super) others: Option<(Algorithm, f32)>,
    /// The candidate that runs unless a tuner decides.
    pub(super) expected: ExpectedRun,
}

/// How a call is expected to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExpectedRun {
    pub(super) algorithm: Algorithm,
    pub(super) protocol: Protocol,
    pub(super) channels: usize,
}

impl CallCosts {
    /// Returns the times of `candidates`, of which the first runs; `None` if there are none.
    fn of(candidates: &[Candidate]) -> Option<CallCosts> {
        let first = candidates.first()?;
        let mut costs = CallCosts {
            table: [[NO_COST; PROTOCOLS]; ALGORITHMS],
            others: None,
            expected: ExpectedRun {
                algorithm: first.algorithm,
                protocol: first.kernel.protocol,
                channels: first.channels,
            },
        };
        for candidate in candidates {
            let time = (candidate.seconds * 1e6) as f32;
            match algorithm_number(candidate.algorithm) {
                Some(algorithm) => {
                    let protocol = protocol_number(candidate.kernel.protocol);
                    let entry = &mut costs.table[algorithm][protocol];
                    if *entry == NO_COST || time < *entry {
                        *entry = time;
                    }
                }
                None if costs.others.is_none_or(|(_, least)| time < least) => {
                    costs.others = Some((candidate.algorithm, time));
                }
                None => {}
            }
        }
        Some(costs)
    }

    /// Adds the protocols that can run the call by an algorithm of the table, but that cinch leaves out for its size.
    /// `candidates` returns the candidates of an algorithm with a protocol, where the call has them.
    fn add_left_out(
        &mut self,
        candidates: impl Fn(Algorithm, Protocol) -> Result<Vec<Candidate>>,
    ) -> Result<()> {
        for (number, row) in self.table.iter_mut().enumerate() {
            let slowest = row.iter().copied().fold(NO_COST, f32::max);
            let Some(algorithm) = numbered_algorithm(number).filter(|_| slowest != NO_COST) else {
                continue;
            };
            for (number, entry) in row.iter_mut().enumerate() {
                let Some(protocol) = numbered_protocol(number).filter(|_| *entry == NO_COST) else {
                    continue;
                };
                let found = match candidates(algorithm, protocol) {
                    Err(error) if error.kind() == ErrorKind::Unsupported => Vec::new(),
                    found => found?,
                };
                let found = found
                    .iter()
                    .filter(|candidate| candidate.kernel.protocol == protocol);
                if let Some(least) = found.map(|candidate| candidate.seconds).reduce(f64::min) {
                    *entry = ((least * 1e6) as f32).max(slowest * LEFT_OUT);
                }
            }
        }
        Ok(())
    }
}

/// Properties of a call on which its predicted times depend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct CostKey {
    collective: Collective,
    dtype: DType,
    op: u8,
    count: usize,
    root: usize,
    peer: usize,
    codec: Option<CodecSetting>,
    algorithm: Option<Algorithm>,
    tuning: CallTuning,
}

/// Predicted times of a communicator's calls.
#[derive(Default)]
pub(super) struct CostCache(Mutex<HashMap<CostKey, Arc<CallCosts>>>);

impl CostCache {
    /// Returns the predicted times of `call`, equal on all ranks.
    ///
    /// # Errors
    /// See [`Communicator::candidates`].
    pub(super) fn find(
        &self,
        communicator: &Communicator,
        call: &Call,
    ) -> Result<Option<Arc<CallCosts>>> {
        let key = CostKey {
            collective: call.collective,
            dtype: call.dtype,
            op: call.op.number(),
            count: call.count,
            root: call.root,
            peer: call.peer,
            codec: call.codec,
            algorithm: call.algorithm,
            tuning: call.tuning,
        };
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = all.get(&key) {
            return Ok(Some(known.clone()));
        }
        let mut costs = CallCosts::of(&communicator.candidates(call)?);
        // CINCH_PROTO excludes the other protocols, host memory has a single one, and a call that names its algorithm is
        // not tuned.
        let is_open = communicator.config().protocol.is_none()
            && communicator.gpu().is_some()
            && call.algorithm.is_none();
        if let Some(costs) = costs.as_mut().filter(|_| is_open) {
            costs.add_left_out(|algorithm, protocol| {
                let tuning = CallTuning {
                    protocol: Some(protocol),
                    ..call.tuning
                };
                communicator.candidates(&Call {
                    algorithm: Some(algorithm),
                    tuning,
                    ..*call
                })
            })?;
        }
        let costs = costs.map(Arc::new);
        if all.len() >= CACHED {
            all.clear();
        }
        all.extend(costs.clone().map(|costs| (key, costs)));
        Ok(costs)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tuner::{TunerDecision, decide};
    use super::*;
    use cinch::cpu::Isa;
    use cinch::plan::{Planner, Request};
    use cinch::testing::{gpu_limits, plan_request};
    use cinch::types::Kernel;

    const TREE: usize = 0;
    const RING: usize = 1;
    const LL: usize = 0;
    const LL128: usize = 1;
    const SIMPLE: usize = 2;

    /// Returns a planner for kernels of four ranks of one host. No GPU is needed.
    fn planner(ll128: bool) -> Planner {
        let mut limits = gpu_limits(4, 132);
        limits.gpu.as_mut().unwrap().ll128 = ll128;
        Planner::new(limits, 0, Isa::Scalar)
    }

    fn sum(count: usize, codec: &str) -> Request {
        plan_request(Collective::AllReduce, count, codec)
    }

    fn asking(request: &Request, algorithm: Algorithm, tuning: CallTuning) -> Request {
        Request {
            algorithm: Some(algorithm),
            tuning,
            ..*request
        }
    }

    fn costs(planner: &Planner, request: &Request) -> CallCosts {
        let mut costs = CallCosts::of(&planner.candidates(request).unwrap()).unwrap();
        let with = |algorithm, protocol| {
            let tuning = CallTuning {
                protocol: Some(protocol),
                kernel: None,
                max_channels: None,
            };
            planner.candidates(&asking(request, algorithm, tuning))
        };
        costs.add_left_out(with).unwrap();
        costs
    }

    fn existing(costs: &CallCosts) -> Vec<(usize, usize)> {
        let all = (0..ALGORITHMS).flat_map(|row| (0..PROTOCOLS).map(move |column| (row, column)));
        all.filter(|&(row, column)| costs.table[row][column] != NO_COST)
            .collect()
    }

    #[test]
    fn table_has_the_combinations_that_kernels_have() {
        let all = [LL, LL128, SIMPLE];
        for count in [256, 1 << 14, 1 << 18, 16 << 20] {
            let of = |ll128, codec| existing(&costs(&planner(ll128), &sum(count, codec)));
            let both = |protocols: &[usize]| {
                let rows = [TREE, RING].into_iter();
                rows.flat_map(|row| protocols.iter().map(move |&protocol| (row, protocol)))
                    .collect::<Vec<_>>()
            };
            assert_eq!(of(true, "raw"), both(&all), "{count}");
            assert_eq!(of(false, "raw"), both(&[LL, SIMPLE]), "{count}");
            let coded = of(true, "linear8");
            assert!(
                coded.iter().all(|&(_, protocol)| protocol == SIMPLE),
                "{coded:?}"
            );
        }
    }

    /// A protocol that cinch leaves out for the size costs more than all others of its algorithm, so that no change
    /// elsewhere in the table selects it.
    #[test]
    fn left_out_protocols_are_the_slowest_of_their_algorithm() {
        let costs = costs(&planner(true), &sum(16 << 20, "raw"));
        for row in [TREE, RING] {
            let [ll, ll128, simple] = costs.table[row];
            assert!(ll > simple && ll128 > simple, "{ll} {ll128} {simple}");
        }
    }

    #[test]
    fn plan_has_algorithm_protocol_and_channels_of_the_tuner() {
        for (row, algorithm) in [(TREE, Algorithm::Tree), (RING, Algorithm::Ring)] {
            for protocol in [LL, LL128, SIMPLE] {
                for count in [256, 1 << 14, 16 << 20] {
                    let mut planner = planner(true);
                    let request = sum(count, "raw");
                    let costs = costs(&planner, &request);
                    let mut table = costs.table;
                    table[row][protocol] = 0.0;
                    let taken = numbered_protocol(protocol);
                    assert_eq!(
                        decide(&costs, &table),
                        TunerDecision::Take(algorithm, taken)
                    );
                    let tuning = CallTuning {
                        protocol: taken,
                        kernel: None,
                        max_channels: std::num::NonZeroU8::new(5),
                    };
                    let plan = planner.plan(&asking(&request, algorithm, tuning)).unwrap();
                    assert_eq!(plan.algorithm, algorithm);
                    assert_eq!(plan.kernel.kernel, Kernel::Schedule);
                    assert_eq!(Some(plan.kernel.protocol), taken);
                    assert!((1..=5).contains(&plan.channels), "{}", plan.channels);
                }
            }
        }
    }
}
