//! Averages gradients over four ranks, each a thread of this process, and checks the average.
//!
//! ```sh
//! cargo run -p cinch-examples --example all_reduce
//! ```
//!
//! A program whose ranks are processes calls `Communicator::from_env` in each; see `sub_groups.rs`.

use cinch::{Communicator, Config, Error, ReduceOp, UniqueId};
use std::thread;

const NRANKS: usize = 4;
const COUNT: usize = 1 << 20;

fn main() -> cinch::Result<()> {
    let config = Config::from_env()?;
    let id = UniqueId::create(&config)?;
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..NRANKS)
            .map(|rank| {
                let (id, config) = (&id, config.clone());
                scope.spawn(move || run_rank(id, rank, config))
            })
            .collect();
        ranks
            .into_iter()
            .try_for_each(|rank| rank.join().expect("a rank panicked"))
    })
}

/// Joins as `rank` and averages the gradients `(rank + 1) * (i % 1000)`.
fn run_rank(id: &UniqueId, rank: usize, config: Config) -> cinch::Result<()> {
    let comm = Communicator::init(id, rank, NRANKS, config)?;
    let mut gradients: Vec<f32> = (0..COUNT)
        .map(|i| ((rank + 1) * (i % 1000)) as f32)
        .collect();
    let report = comm.all_reduce_in_place(&mut gradients, ReduceOp::Avg)?;

    // The mean of 1..=NRANKS is a multiple of a half, so these averages are exact in f32.
    let mean = (NRANKS + 1) as f32 / 2.0;
    for (i, &gradient) in gradients.iter().enumerate() {
        let expected = mean * (i % 1000) as f32;
        if gradient != expected {
            return Err(Error::internal(format!(
                "rank {rank}: gradient {i} is {gradient} and not {expected}"
            )));
        }
    }
    println!(
        "rank {rank} of {NRANKS}: averaged {COUNT} gradients, sent {} bytes as {}",
        report.wire_bytes, report.codec
    );
    comm.finalize()
}
