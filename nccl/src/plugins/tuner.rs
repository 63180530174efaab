//! The tuner plug-in: it gets the predicted times of a call, and its cheapest entry selects algorithm and protocol. It may
//! also bound the channels.

use super::abi::{
    ALGORITHMS, CostTable, NO_COST, NvlinkDomains, PROTOCOLS, TunerConstants, TunerFunctions, unset,
};
use super::costs::{CallCosts, CostCache, ExpectedRun};
use super::loader::Plugin;
use super::logger::log_function;
use super::names::{
    ALGORITHM_NAMES, PROTOCOL_NAMES, algorithm_number, numbered_algorithm, numbered_protocol,
    protocol_number, tuned_func,
};
use crate::types::{as_int, ncclSuccess};
use cinch::comm::Call;
use cinch::types::{Algorithm, Protocol};
use cinch::{Collective, Communicator};
use std::ffi::{c_int, c_void};
use std::num::NonZeroU8;
use std::sync::atomic::AtomicBool;

/// Whether the log has that the plug-in sets constants.
static CONSTANTS_LOGGED: AtomicBool = AtomicBool::new(false);

/// The tuner of one communicator.
pub(super) struct CommTuner {
    plugin: &'static Plugin<TunerFunctions>,
    context: *mut c_void,
    nranks: usize,
    logged: LoggedLimits,
}

/// Limits of cinch that were logged, each once for a communicator.
#[derive(Default)]
struct LoggedLimits {
    failure: AtomicBool,
    foreign: AtomicBool,
    nothing: AtomicBool,
    channels: AtomicBool,
}

// SAFETY: NCCL requires of plug-ins that any thread may use a context; cinch passes it to one call at a time.
unsafe impl Send for CommTuner {}
// SAFETY: see `Send`; `getCollInfo` is called by the threads that make the communicator's calls, which the program
// orders.
unsafe impl Sync for CommTuner {}

impl CommTuner {
    /// Initialises the tuner of a communicator. Logs one warning and returns `None` if the plug-in refuses.
    pub(super) fn init(
        plugin: &'static Plugin<TunerFunctions>,
        communicator: &Communicator,
    ) -> Option<CommTuner> {
        let init = plugin.functions.init?;
        let hosts = communicator.info().hosts;
        let sizes = (0..hosts.count()).map(|host| match hosts.count() {
            1 => communicator.nranks(),
            _ => hosts.ranks(host).len(),
        });
        let mut domains = NvlinkDomains {
            count: int(hosts.count()),
            least_ranks: int(sizes.clone().min().unwrap_or(0)),
            most_ranks: int(sizes.max().unwrap_or(0)),
        };
        let mut constants = TunerConstants::ZERO;
        let mut context = unset();
        // SAFETY: the function is the plug-in's, which reads and writes the structs during the call only.
        let result = unsafe {
            init(
                &mut context,
                communicator.number(),
                communicator.nranks(),
                hosts.count(),
                log_function,
                &mut domains,
                &mut constants,
            )
        };
        plugin.accept(result)?;
        if constants != TunerConstants::ZERO {
            plugin.log_once(&CONSTANTS_LOGGED, || {
                "it sets constants of NCCL's cost model, which cinch does not have".into()
            });
        }
        Some(CommTuner {
            plugin,
            context,
            nranks: communicator.nranks(),
            logged: LoggedLimits::default(),
        })
    }

    /// Selects algorithm and protocol of a call that names no algorithm, if the plug-in changes the predicted times, and
    /// bounds its channels, if the plug-in sets their number.
    pub(super) fn tune(&self, communicator: &Communicator, costs: &CostCache, call: &mut Call) {
        let Some(func) = tuned_func(call.collective) else {
            return;
        };
        if call.algorithm.is_some() || call.count == 0 || self.nranks == 1 {
            return;
        }
        // The call itself reports why it is impossible.
        let Ok(Some(costs)) = costs.find(communicator, call) else {
            return;
        };
        let bytes = message_bytes(call, self.nranks);
        let Some((table, channels)) = self.coll_info(func, bytes, &costs.table) else {
            return;
        };
        call.tuning.max_channels = self.bound(channels);
        match decide(&costs, &table) {
            TunerDecision::Leave => {}
            TunerDecision::Take(algorithm, protocol) => {
                call.algorithm = Some(algorithm);
                call.tuning.protocol = protocol;
            }
        }
        let has_any = |table: &CostTable| entries(table).next().is_some();
        if has_any(&costs.table) && !has_any(&table) {
            self.plugin.warn_once(&self.logged.nothing, || {
                let runs = call
                    .algorithm
                    .map_or("cinch selects as without a tuner".into(), |algorithm| {
                        format!("{algorithm} runs, which NCCL lacks")
                    });
                format!(
                    "it disables all algorithms and protocols of {}, so {runs}",
                    call.collective
                )
            });
        }
        if let Some((algorithm, protocol)) = foreign(&costs.table, &table) {
            self.plugin.log_once(&self.logged.foreign, || {
                format!(
                    "cinch has no {}/{} for {}, so this entry has no effect",
                    ALGORITHM_NAMES[algorithm], PROTOCOL_NAMES[protocol], call.collective
                )
            });
        }
    }

    /// Returns the plug-in's table and number of channels for a call; `None` if the plug-in returns an error.
    fn coll_info(
        &self,
        func: c_int,
        bytes: usize,
        before: &CostTable,
    ) -> Option<(CostTable, c_int)> {
        let coll_info = self.plugin.functions.coll_info?;
        let (mut table, mut channels) = (*before, 0);
        // SAFETY: the function is the plug-in's, with a context that it made. The interface passes an array of arrays
        // under this type.
        let result = unsafe {
            coll_info(
                self.context,
                func,
                bytes,
                1,
                table.as_mut_ptr().cast(),
                ALGORITHMS as c_int,
                PROTOCOLS as c_int,
                0,
                &mut channels,
            )
        };
        if result != ncclSuccess {
            self.plugin.log_once(&self.logged.failure, || {
                format!("getCollInfo returned {result}, so cinch selects as without a tuner")
            });
            return None;
        }
        Some((table, channels))
    }

    /// Returns the bound on a call's channels that follows from the plug-in's number, in which 0 is unset. Logs a
    /// negative number once.
    fn bound(&self, channels: c_int) -> Option<NonZeroU8> {
        if channels < 0 {
            self.plugin.log_once(&self.logged.channels, || {
                format!("it sets {channels} channels, so cinch keeps the number of its settings")
            });
        }
        // No communicator has more channels than a byte holds.
        NonZeroU8::new(u8::try_from(channels.max(0)).unwrap_or(u8::MAX))
    }
}

impl Drop for CommTuner {
    fn drop(&mut self) {
        if let Some(finalize) = self.plugin.functions.finalize {
            // SAFETY: the function is the plug-in's, with a context that it made and that no call uses any more.
            unsafe { finalize(self.context) };
        }
    }
}

/// Result of a tuner's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TunerDecision {
    /// cinch selects as without a tuner.
    Leave,
    /// Algorithm and protocol of the cheapest entry run, or an algorithm that NCCL lacks with a protocol of cinch's choice.
    Take(Algorithm, Option<Protocol>),
}

/// Decides by a tuner's table. Times are compared in whole nanoseconds; ties go to the lower number.
///
/// A table that the tuner has left unchanged decides nothing, because NCCL's table lacks algorithms of cinch. These
/// compete with their predicted times, and run where the tuner disables what would run without it.
pub(super) fn decide(costs: &CallCosts, table: &CostTable) -> TunerDecision {
    if *table == costs.table {
        return TunerDecision::Leave;
    }
    let cheapest = entries(table)
        .filter(|&(algorithm, protocol, _)| costs.table[algorithm][protocol] != NO_COST)
        .min_by_key(|&(_, _, time)| time);
    let others = costs.others.and_then(|(_, others)| nanoseconds(others));
    let cheapest = cheapest.filter(|&(_, _, time)| others.is_none_or(|others| time <= others));
    if let Some((number, protocol, _)) = cheapest
        && let Some(algorithm) = numbered_algorithm(number)
    {
        return TunerDecision::Take(algorithm, numbered_protocol(protocol));
    }
    let ExpectedRun {
        algorithm,
        protocol,
        ..
    } = costs.expected;
    let is_unwanted = algorithm_number(algorithm).is_some_and(|number| {
        let entry = |table: &CostTable| table[number][protocol_number(protocol)];
        entry(table) != entry(&costs.table)
    });
    match costs.others {
        Some((algorithm, _)) if is_unwanted => TunerDecision::Take(algorithm, None),
        _ => TunerDecision::Leave,
    }
}

/// Returns the entry with a time that cinch's table lacks, and that the tuner wants most.
fn foreign(before: &CostTable, table: &CostTable) -> Option<(usize, usize)> {
    let (algorithm, protocol, _) = entries(table).min_by_key(|&(_, _, time)| time)?;
    (before[algorithm][protocol] == NO_COST).then_some((algorithm, protocol))
}

/// Returns the numbers of algorithm and protocol of all entries with a time, and the time in nanoseconds.
fn entries(table: &CostTable) -> impl Iterator<Item = (usize, usize, u64)> + '_ {
    table.iter().enumerate().flat_map(|(algorithm, row)| {
        let of_row =
            move |(protocol, &time): (usize, &f32)| Some((algorithm, protocol, nanoseconds(time)?));
        row.iter().enumerate().filter_map(of_row)
    })
}

/// Returns a time of a table in nanoseconds; `None` for entries without a time, and for values that are no time.
fn nanoseconds(microseconds: f32) -> Option<u64> {
    // The conversion saturates.
    (microseconds >= 0.0).then_some((f64::from(microseconds) * 1e3).round() as u64)
}

/// Returns the size of a call's message as tuners get it: the larger of a rank's buffers, in bytes.
fn message_bytes(call: &Call, nranks: usize) -> usize {
    let blocks = match call.collective {
        Collective::AllGather | Collective::ReduceScatter => nranks,
        _ => 1,
    };
    call.count
        .saturating_mul(blocks)
        .saturating_mul(call.dtype.size())
}

fn int(number: usize) -> c_int {
    as_int(number).unwrap_or(c_int::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TREE: usize = 0;
    const RING: usize = 1;
    const NVLS: usize = 4;
    const LL128: usize = 1;
    const SIMPLE: usize = 2;

    fn costs(others: Option<f32>) -> CallCosts {
        let mut table = [[NO_COST; PROTOCOLS]; ALGORITHMS];
        (table[TREE][SIMPLE], table[RING][SIMPLE]) = (30.0, 20.0);
        table[RING][LL128] = 40.0;
        CallCosts {
            table,
            others: others.map(|time| (Algorithm::Direct, time)),
            expected: ExpectedRun {
                algorithm: Algorithm::Ring,
                protocol: Protocol::Simple,
                channels: 1,
            },
        }
    }

    fn decided(others: Option<f32>, change: impl Fn(&mut CostTable)) -> Option<Algorithm> {
        match decision(others, change) {
            TunerDecision::Leave => None,
            TunerDecision::Take(algorithm, protocol) => {
                let own = protocol.is_none() && algorithm == Algorithm::Direct;
                assert!(own || protocol == Some(Protocol::Simple));
                Some(algorithm)
            }
        }
    }

    fn decision(others: Option<f32>, change: impl Fn(&mut CostTable)) -> TunerDecision {
        let costs = costs(others);
        let mut table = costs.table;
        change(&mut table);
        decide(&costs, &table)
    }

    #[test]
    fn protocol_of_the_cheapest_entry_is_taken() {
        let ring = |protocol| TunerDecision::Take(Algorithm::Ring, Some(protocol));
        let lines = |table: &mut CostTable| table[RING][LL128] = 0.0;
        assert_eq!(decision(Some(5.0), lines), ring(Protocol::Ll128));
        let no_slots = |table: &mut CostTable| {
            (table[RING][SIMPLE], table[TREE][SIMPLE]) = (NO_COST, NO_COST);
        };
        assert_eq!(decision(None, no_slots), ring(Protocol::Ll128));
        // No kernel of this call has ll.
        let ll = |table: &mut CostTable| table[RING][0] = 0.0;
        assert_eq!(decision(None, ll), ring(Protocol::Simple));
    }

    #[test]
    fn cheapest_entry_of_a_changed_table_decides() {
        assert_eq!(decided(None, |_| {}), None);
        assert_eq!(
            decided(None, |table| table[TREE][SIMPLE] = 0.0),
            Some(Algorithm::Tree)
        );
        assert_eq!(
            decided(None, |table| table[TREE][SIMPLE] = 21.0),
            Some(Algorithm::Ring)
        );
        assert_eq!(
            decided(None, |table| table[RING][SIMPLE] = NO_COST),
            Some(Algorithm::Tree)
        );
        // Ties go to the lower number.
        assert_eq!(
            decided(None, |table| table[TREE][SIMPLE] = 20.0),
            Some(Algorithm::Tree)
        );
    }

    #[test]
    fn algorithms_that_nccl_lacks_compete_with_their_times() {
        let tree_at = |time| move |table: &mut CostTable| table[TREE][SIMPLE] = time;
        assert_eq!(decided(Some(5.0), tree_at(6.0)), None);
        assert_eq!(decided(Some(5.0), tree_at(5.0)), Some(Algorithm::Tree));
        assert_eq!(decided(Some(0.0), tree_at(0.0)), Some(Algorithm::Tree));
        // Where the tuner disables what would run, they run before slower entries.
        let no_ring = |table: &mut CostTable| table[RING][SIMPLE] = NO_COST;
        assert_eq!(decided(Some(25.0), no_ring), Some(Algorithm::Direct));
        assert_eq!(decided(Some(31.0), no_ring), Some(Algorithm::Tree));
        let nothing = |table: &mut CostTable| *table = [[NO_COST; PROTOCOLS]; ALGORITHMS];
        assert_eq!(decided(Some(99.0), nothing), Some(Algorithm::Direct));
    }

    #[test]
    fn entries_that_cinch_lacks_or_that_are_no_time_have_no_effect() {
        let nvls = |table: &mut CostTable| table[NVLS][SIMPLE] = 0.0;
        assert_eq!(decided(None, nvls), Some(Algorithm::Ring));
        let mut table = costs(None).table;
        assert_eq!(foreign(&costs(None).table, &table), None);
        nvls(&mut table);
        assert_eq!(foreign(&costs(None).table, &table), Some((NVLS, SIMPLE)));
        for wrong in [f32::NAN, -7.0, f32::NEG_INFINITY] {
            assert_eq!(
                decided(None, |table| table[RING][SIMPLE] = wrong),
                Some(Algorithm::Tree)
            );
        }
        let nothing = |table: &mut CostTable| *table = [[NO_COST; PROTOCOLS]; ALGORITHMS];
        assert_eq!(decided(None, nothing), None);
        assert_eq!(
            decided(None, |table| table[RING][SIMPLE] = f32::INFINITY),
            Some(Algorithm::Tree)
        );
    }

    #[test]
    fn size_of_a_message_is_the_larger_of_the_buffers() {
        let bytes = |collective| {
            let call = Call::new(collective, cinch::DType::F16, 100);
            message_bytes(&call, 4)
        };
        assert_eq!(bytes(Collective::AllReduce), 200);
        assert_eq!(bytes(Collective::Broadcast), 200);
        assert_eq!(bytes(Collective::AllGather), 800);
        assert_eq!(bytes(Collective::ReduceScatter), 800);
    }
}
