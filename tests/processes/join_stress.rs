//! Lets eight local ranks join again and again, and prints how long that takes.

use crate::support;
use cinch::types::TransportKind;
use cinch::{Communicator, ReduceOp, UniqueId};
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Asserts only the results and not the time, because a busy machine may take longer.
#[test]
fn eight_local_ranks_join() {
    const RANKS: usize = 8;
    for transport in [TransportKind::Shm, TransportKind::Tcp] {
        let config = support::config(transport);
        let mut times = Vec::new();
        for _ in 0..20 {
            let id = UniqueId::create_for_one_host(&config).unwrap();
            let start = Barrier::new(RANKS);
            let took = std::thread::scope(|scope| {
                let ranks: Vec<_> = (0..RANKS)
                    .map(|rank| {
                        let (config, start) = (config.clone(), &start);
                        scope.spawn(move || {
                            start.wait();
                            let begin = Instant::now();
                            let comm = Communicator::init(&id, rank, RANKS, config).unwrap();
                            let took = begin.elapsed();
                            let mut sum = [rank as u32];
                            comm.all_reduce_in_place(&mut sum, ReduceOp::Sum).unwrap();
                            assert_eq!(sum, [28]);
                            took
                        })
                    })
                    .collect();
                let times = ranks.into_iter().map(|rank| rank.join().unwrap());
                times.max().unwrap_or(Duration::ZERO)
            });
            times.push(took);
        }
        times.sort();
        println!(
            "init of {RANKS} local ranks over {transport}: median {:.1} ms, worst {:.1} ms",
            times[times.len() / 2].as_secs_f64() * 1e3,
            times[times.len() - 1].as_secs_f64() * 1e3
        );
    }
}
