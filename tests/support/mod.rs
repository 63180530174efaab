//! Common parts of the test programs: seeded random numbers, ranks as threads, the oracle of
//! results, and paths of the built programs.
#![allow(dead_code)] // every test program uses a part

pub mod c_library;
pub mod launcher;
pub mod oracle;

use cinch::types::{Scalar, TransportKind};
use cinch::{Communicator, Config, ReduceOp, UniqueId};
use std::time::Duration;

/// SplitMix64 generator: equal seeds give equal numbers on every machine.
#[derive(Clone, Debug)]
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// Returns a uniform number in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns an approximately normal number with variance 1: the sum of twelve uniform numbers.
    pub fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.unit()).sum::<f64>() - 6.0
    }
}

/// Returns the seed of a test: `CINCH_TEST_SEED`, or a fixed seed. Prints it, so that a failed test
/// shows it.
pub fn seed() -> u64 {
    let seed = number("CINCH_TEST_SEED").unwrap_or(20_261_120);
    println!("seed {seed} (CINCH_TEST_SEED)");
    seed
}

/// Reads a number from the environment.
pub fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name}={text} is not a number")),
    )
}

/// Returns settings with one transport and short deadlines, so that a hang ends the test.
pub fn config(transport: TransportKind) -> Config {
    Config {
        transport: Some(transport),
        timeout: Duration::from_secs(20),
        init_timeout: Duration::from_secs(20),
        ..Config::default()
    }
}

/// Transports of host memory that need no device.
pub const TRANSPORTS: [TransportKind; 3] = [
    TransportKind::Loopback,
    TransportKind::Shm,
    TransportKind::Tcp,
];

/// Every kind of reduction, with the neutral factor of a pre-multiplied sum.
pub const OPS: [ReduceOp; 6] = [
    ReduceOp::Sum,
    ReduceOp::Prod,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Avg,
    ReduceOp::PreMulSum(Scalar::Float(1.0)),
];

/// Runs `rank_main` on `nranks` threads with a communicator each, and returns the results by rank.
///
/// # Panics
/// If a rank panics or cannot join.
pub fn world<R: Send>(
    nranks: usize,
    config: &Config,
    rank_main: impl Fn(Communicator) -> R + Sync,
) -> Vec<R> {
    let id = UniqueId::create(config).expect("a unique id");
    let rank_main = &rank_main;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..nranks)
            .map(|rank| {
                scope.spawn(move || {
                    let comm = Communicator::init(&id, rank, nranks, config.clone())
                        .unwrap_or_else(|error| panic!("rank {rank} of {nranks}: {error}"));
                    rank_main(comm)
                })
            })
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().expect("a rank panicked, see above"))
            .collect()
    })
}
