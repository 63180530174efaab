//! Benchmarks groups of many small all_reduces, once with fused calls and once with separate calls.
//!
//! Ranks are threads. Groups of both kinds alternate, so that other load on the machine affects both alike.
//! `cargo bench --bench groups -- [--json]` prints the slowest rank's medians over the rounds, with `--json`
//! as JSON lines for `benches/baselines/`.

use cinch::bootstrap::LocalOutOfBand;
use cinch::comm::{Call, Group};
use cinch::mem::{UserBuffers, bytes_of_mut};
use cinch::sync::Fault;
use cinch::types::TransportKind;
use cinch::{Collective, Communicator, Config, DType, ReduceOp};
use std::time::Instant;

/// Number of tensors in a group, each with one all_reduce.
const TENSORS: usize = 100;
/// Number of timed groups of each kind.
const ROUNDS: usize = 200;
/// Number of groups of each kind before the timed ones.
const WARM: usize = 20;

fn main() {
    let json = std::env::args().any(|argument| argument == "--json");
    if !json {
        println!(
            "{TENSORS} all_reduces of f32 in a group, codec raw; us per group, median of {ROUNDS}"
        );
        println!(
            "{:<10} {:>5} {:>9} {:>10} {:>10} {:>7}",
            "transport", "ranks", "bytes", "separate", "fused", "ratio"
        );
    }
    for transport in [TransportKind::Shm, TransportKind::Tcp] {
        for nranks in [2, 4] {
            for bytes in [256, 4 << 10, 32 << 10] {
                let [separate, fused] = compare(transport, nranks, bytes);
                let (separate, fused) = (separate * 1e6, fused * 1e6);
                let ratio = separate / fused;
                if json {
                    println!(
                        "{{\"bench\": \"groups\", \"transport\": \"{transport}\", \"ranks\": \
                         {nranks}, \"tensors\": {TENSORS}, \"bytes\": {bytes}, \"apart_us\": \
                         {separate:.1}, \"fused_us\": {fused:.1}, \"ratio\": {ratio:.2}}}"
                    );
                } else {
                    println!(
                        "{transport:<10} {nranks:>5} {bytes:>9} {separate:>10.1} {fused:>10.1} {ratio:>7.2}",
                    );
                }
            }
        }
    }
}

/// Returns the slowest rank's median seconds of a group with separate calls, and with fused ones.
fn compare(transport: TransportKind, nranks: usize, bytes: usize) -> [f64; 2] {
    let config = |fuse_bytes| Config {
        transport: Some(transport),
        fuse_bytes,
        ..Config::default()
    };
    let worlds = [0, Config::default().fuse_bytes].map(|fuse_bytes| {
        let config = config(fuse_bytes);
        let faults: Vec<_> = (0..nranks).map(|_| Fault::new()).collect();
        let exchanges = LocalOutOfBand::world_with(nranks, &faults, &config);
        exchanges
            .into_iter()
            .zip(faults)
            .map(move |(exchange, fault)| {
                let config = config.clone();
                move || Communicator::over(exchange, fault, config).unwrap()
            })
    });
    let [separate, fused] = worlds;
    let threads: Vec<_> = separate
        .zip(fused)
        .map(|(separate, fused)| {
            std::thread::spawn(move || alternate(&[separate(), fused()], bytes))
        })
        .collect();
    let ranks: Vec<_> = threads
        .into_iter()
        .map(|thread| thread.join().unwrap())
        .collect();
    let slowest = |kind: usize| ranks.iter().map(|times| times[kind]).fold(0.0, f64::max);
    [slowest(0), slowest(1)]
}

/// Returns this rank's median seconds of a group, for each communicator.
fn alternate(comms: &[Communicator; 2], bytes: usize) -> [f64; 2] {
    let mut data = vec![vec![1f32; bytes / 4]; TENSORS];
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..WARM + ROUNDS {
        // Each communicator goes first in half of the rounds.
        for kind in [round % 2, 1 - round % 2] {
            comms[kind].barrier().unwrap();
            let start = Instant::now();
            group(&comms[kind], &mut data);
            let seconds = start.elapsed().as_secs_f64();
            if round >= WARM {
                times[kind].push(seconds);
            }
        }
    }
    times.map(median)
}

fn group(comm: &Communicator, data: &mut [Vec<f32>]) {
    let mut group = Group::new();
    for x in data {
        // The average of ones is one, so repeated in-place calls keep the data.
        let call = Call {
            op: ReduceOp::Avg,
            ..Call::new(Collective::AllReduce, DType::F32, x.len())
        };
        let bytes = bytes_of_mut(x);
        let n = bytes.len();
        let buffers = UserBuffers::in_place(bytes, 0, n).unwrap();
        group.add(comm, &call, buffers).unwrap();
    }
    group.run().unwrap();
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
