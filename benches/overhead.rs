//! Benchmarks what the flight recorder and the counters cost a call of 8 bytes on host memory.
//!
//! Two ranks are threads. Batches of calls with and without the recorder alternate, so that other load on the machine
//! affects both alike. `cargo bench --bench overhead -- [--json]` prints the slower rank's medians over the batches, and
//! the median of the ratios of neighbouring batches.

use cinch::types::TransportKind;
use cinch::{Communicator, Config, ReduceOp, UniqueId};
use std::time::Instant;

const RANKS: usize = 2;
/// Calls of a batch.
const CALLS: usize = 2_000;
/// Pairs of timed batches.
const PAIRS: usize = 1_000;
/// Pairs of batches before the timed ones.
const WARM: usize = 50;

fn main() {
    let json = std::env::args().any(|argument| argument == "--json");
    let [without, with, ratio] = measure();
    let overhead = (ratio - 1.0) * 100.0;
    if json {
        println!(
            "{{\"bench\": \"overhead\", \"ranks\": {RANKS}, \"bytes\": 8, \"without_us\": {without:.4}, \
             \"with_us\": {with:.4}, \"overhead_percent\": {overhead:.2}}}"
        );
    } else {
        println!(
            "all_reduce of 8 bytes, {RANKS} ranks over shared memory, median of {PAIRS} batches of {CALLS} calls\n\
             without recorder and counters {without:.4} us, with both {with:.4} us: {overhead:.2} % more"
        );
    }
}

/// Returns the median microseconds of a call of the slower rank, without and with the recorder, and the median ratio of
/// both in neighbouring batches.
fn measure() -> [f64; 3] {
    let config = Config {
        transport: Some(TransportKind::Shm),
        ..Config::default()
    };
    let id = UniqueId::create(&config).expect("an id");
    let times: Vec<Vec<[f64; 2]>> = std::thread::scope(|scope| {
        let start = |rank| {
            let config = config.clone();
            scope.spawn(move || run_rank(&id, rank, config))
        };
        let threads: Vec<_> = (0..RANKS).map(start).collect();
        let results = threads.into_iter().map(|it| it.join().expect("no panic"));
        results.collect()
    });
    let slowest = |pair: usize, kind: usize| {
        let of_ranks = times.iter().map(|times| times[pair][kind]);
        of_ranks.fold(0.0, f64::max)
    };
    let pairs = || WARM..WARM + PAIRS;
    let medians = [0, 1].map(|kind| median(pairs().map(|pair| slowest(pair, kind)).collect()));
    let ratios = pairs().map(|pair| slowest(pair, 1) / slowest(pair, 0));
    let per_call = 1e6 / CALLS as f64;
    [
        medians[0] * per_call,
        medians[1] * per_call,
        median(ratios.collect()),
    ]
}

/// Returns the seconds of each pair of batches: without, and with the recorder.
fn run_rank(id: &UniqueId, rank: usize, config: Config) -> Vec<[f64; 2]> {
    let comm = Communicator::init(id, rank, RANKS, config).expect("two ranks join");
    let mut data = [1.0f32, -1.0];
    let mut batch = |is_muted: bool| {
        comm.mute_recorder(is_muted);
        comm.barrier().expect("both ranks");
        let begun = Instant::now();
        for _ in 0..CALLS {
            comm.all_reduce_in_place(&mut data, ReduceOp::Max)
                .expect("a sum of both ranks");
        }
        begun.elapsed().as_secs_f64()
    };
    (0..WARM + PAIRS)
        .map(|pair| {
            // Neither kind is always the first of its pair.
            let first = pair % 2 == 0;
            let times = [batch(first), batch(!first)];
            if first { times } else { [times[1], times[0]] }
        })
        .collect()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
