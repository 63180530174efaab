//! Test programs share seeded randomness, worlds of rank threads, the oracle of results, and the
//! programs of this build.
#![allow(dead_code)] // every test program uses a part

pub mod c_library;
pub mod launcher;
pub mod oracle;

use cinch::types::TransportKind;
use cinch::{Communicator, Config, UniqueId};
use std::time::Duration;

/// SplitMix64: small, seeded, the same everywhere.
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

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Close to normal with variance 1: the sum of twelve uniform numbers.
    pub fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.unit()).sum::<f64>() - 6.0
    }
}

/// The seed of a test: `CINCH_TEST_SEED`, or a fixed one. Printed, and shown if the test fails.
pub fn seed() -> u64 {
    let seed = number("CINCH_TEST_SEED").unwrap_or(20_261_120);
    println!("seed {seed} (CINCH_TEST_SEED)");
    seed
}

/// A number from the environment.
pub fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name}={text} is not a number")),
    )
}

/// Settings for tests: one transport, short deadlines so that a defect ends the run.
pub fn config(transport: TransportKind) -> Config {
    Config {
        transport: Some(transport),
        timeout: Duration::from_secs(20),
        init_timeout: Duration::from_secs(20),
        ..Config::default()
    }
}

/// The transports of host memory that need no device.
pub const TRANSPORTS: [TransportKind; 3] = [
    TransportKind::Loopback,
    TransportKind::Shm,
    TransportKind::Tcp,
];

/// Runs `rank_main` on `nranks` threads that share a communicator; results in rank order.
///
/// # Panics
/// If a rank does, or cannot join.
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
