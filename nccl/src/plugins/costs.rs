//! Predicted times of calls, as tuners read them, and what runs without a tuner.

use super::abi::{ALGORITHMS, CostTable, NO_COST, PROTOCOLS};
use super::names::{algorithm_number, protocol_number};
use cinch::comm::Call;
use cinch::plan::Candidate;
use cinch::types::{Algorithm, CodecSetting, Protocol};
use cinch::{Collective, Communicator, DType, Result};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Largest number of calls whose times are kept; with more, all are predicted anew.
const CACHED: usize = 1024;

/// Predicted times of a call in microseconds.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct CallCosts {
    /// Times of the algorithms that NCCL has, too.
    pub(super) table: CostTable,
    /// Least time of the other algorithms.
    pub(super) others: Option<f32>,
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
                None => costs.others = Some(costs.others.map_or(time, |least| least.min(time))),
            }
        }
        Some(costs)
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
        };
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = all.get(&key) {
            return Ok(Some(known.clone()));
        }
        let costs = CallCosts::of(&communicator.candidates(call)?).map(Arc::new);
        if all.len() >= CACHED {
            all.clear();
        }
        all.extend(costs.clone().map(|costs| (key, costs)));
        Ok(costs)
    }
}
