//! Tests ranks that end right after a call. The ranks that are still in this call have received all data that
//! they need, so they must complete it.
//! `CINCH_TEST_ENDINGS=100 cargo test --test processes teardown -- --nocapture` runs 100 rounds of each kind.

mod waits;

use crate::support::{self, Rng, TRANSPORTS, config, number, seed};
use cinch::bootstrap::{ControlPlane, LocalOutOfBand, OutOfBand, OutOfBandRef, PeerInfo};
use cinch::comm::Call;
use cinch::mem::{UserBuffers, bytes_of, bytes_of_mut};
use cinch::sync::Fault;
use cinch::testing::local_world;
use cinch::types::{SIGNATURE_WORDS, TransportKind};
use cinch::{Collective, Communicator, Config, DType, Error, ErrorKind, UniqueId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const RANKS: usize = 4;

/// The way in which rank 0 ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Aborts a communicator whose ranks are threads of one process, without control connections.
    AbortLocal,
    /// Aborts a communicator with control connections.
    Abort,
    /// Closes its connections without notice, as the kernel does for a process that dies.
    Vanish,
}

/// An out-of-band exchange whose `leave` does nothing, and which delays its announcements.
#[derive(Debug)]
struct SilentLeave(OutOfBandRef, Duration);

impl OutOfBand for SilentLeave {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn peers(&self) -> &[PeerInfo] {
        self.0.peers()
    }

    fn all_gather(&self, bytes: &[u8]) -> cinch::Result<Vec<Vec<u8>>> {
        self.0.all_gather(bytes)
    }

    fn announce(&self, reason: &Error) {
        let (exchange, late, reason) = (self.0.clone(), self.1, reason.clone());
        if late.is_zero() {
            return exchange.announce(&reason);
        }
        std::thread::spawn(move || {
            std::thread::sleep(late);
            exchange.announce(&reason);
        });
    }

    fn log_call(&self, signature: [u64; SIGNATURE_WORDS]) {
        self.0.log_call(signature);
    }

    fn has_left(&self, rank: usize) -> bool {
        self.0.has_left(rank)
    }

    fn key(&self, purpose: &str) -> [u8; 32] {
        self.0.key(purpose)
    }

    fn leave(&self) {}
}

/// Runs `rank_main` on threads that join over control connections. Rank 0 leaves without notice.
fn world_with_silent_leave<R: Send>(
    config: &Config,
    rank_main: impl Fn(Communicator) -> R + Sync,
) -> Vec<R> {
    let id = UniqueId::create(config).expect("a unique id");
    let rank_main = &rank_main;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..RANKS)
            .map(|rank| {
                scope.spawn(move || {
                    let fault = Fault::new();
                    let control = ControlPlane::join(&id, rank, RANKS, config, fault.clone())
                        .expect("control connections");
                    let exchange: OutOfBandRef = match rank {
                        0 => Arc::new(SilentLeave(control, Duration::ZERO)),
                        _ => control,
                    };
                    rank_main(Communicator::over(exchange, fault, config.clone()).expect("links"))
                })
            })
            .collect();
        let results = ranks.into_iter().map(|rank| rank.join().expect("a rank"));
        results.collect()
    })
}

/// A call that rank 0 completes before the other ranks.
#[derive(Debug)]
struct Round {
    collective: Collective,
    count: usize,
    seed: u64,
    /// Number of ranks other than 0 that have entered the call, or completed it.
    entered: AtomicUsize,
}

impl Round {
    fn input(&self, rank: usize) -> Vec<f32> {
        let mut rng = Rng(self.seed ^ rank as u64);
        // The numbers are integers below 1000, so that a sum of four is exact in any order.
        (0..self.count).map(|_| rng.below(1000) as f32).collect()
    }

    fn expected(&self) -> Vec<f32> {
        match self.collective {
            Collective::AllReduce => {
                let mut sum = vec![0.0; self.count];
                for rank in 0..RANKS {
                    let input = self.input(rank);
                    sum.iter_mut().zip(input).for_each(|(sum, x)| *sum += x);
                }
                sum
            }
            Collective::Broadcast => self.input(0),
            _ => (0..RANKS).flat_map(|rank| self.input(rank)).collect(),
        }
    }

    fn call(&self, comm: &Communicator) -> cinch::Result<Vec<f32>> {
        let input = self.input(comm.rank());
        let mut output = vec![0.0f32; self.expected().len()];
        let call = Call::new(self.collective, DType::F32, self.count);
        let reads = self.collective != Collective::Broadcast || comm.rank() == 0;
        let input = if reads { bytes_of(&input) } else { &[] };
        comm.call(&call, UserBuffers::new(input, bytes_of_mut(&mut output)))?;
        Ok(output)
    }

    /// Makes the call on a rank that does not end. A second thread counts the rank as soon as it is
    /// in the call. A call that begins after rank 0 has ended would be refused.
    fn stay(&self, comm: &Communicator) -> cinch::Result<Vec<f32>> {
        let through = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while comm.is_idle() && !through.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                self.entered.fetch_add(1, Ordering::Release);
            });
            let result = self.call(comm);
            through.store(true, Ordering::Release);
            result
        })
    }

    /// Makes the call on rank 0, and waits until all other ranks have entered it.
    fn go(&self, comm: &Communicator) -> cinch::Result<Vec<f32>> {
        let result = self.call(comm);
        while self.entered.load(Ordering::Acquire) < RANKS - 1 {
            std::thread::yield_now();
        }
        result
    }
}

/// The result of the call, the result of a next call without rank 0, and the time of the next call.
type Outcome = (cinch::Result<Vec<f32>>, cinch::Result<Vec<f32>>, Duration);

fn outcomes(round: &Round, end: End, config: &Config) -> Vec<Option<Outcome>> {
    let stay = |comm: &Communicator| {
        let result = round.stay(comm);
        let begin = Instant::now();
        let next = round.call(comm);
        let took = begin.elapsed();
        assert_eq!(comm.async_error().as_ref(), next.as_ref().err());
        Some((result, next, took))
    };
    let go = |comm: &Communicator| {
        round.go(comm).expect("the first call of rank 0");
        None
    };
    let aborts = |comm: &Communicator| {
        if comm.rank() > 0 {
            return stay(comm);
        }
        go(comm);
        comm.abort();
        None
    };
    match end {
        End::AbortLocal => local_world(RANKS, config, aborts),
        End::Abort => support::world(RANKS, config, |comm| aborts(&comm)),
        End::Vanish => world_with_silent_leave(config, |comm| match comm.rank() {
            0 => go(&comm),
            _ => stay(&comm),
        }),
    }
}

#[test]
fn call_with_all_its_data_completes_after_a_peer_ends() {
    let mut rng = Rng(seed());
    for transport in TRANSPORTS {
        for end in [End::AbortLocal, End::Abort, End::Vanish] {
            let config = config(transport);
            let (mut calls, mut failed, mut slowest) = (0, Vec::new(), Duration::ZERO);
            for _ in 0..number("CINCH_TEST_ENDINGS").unwrap_or(8) {
                let round = Round {
                    collective: rng.pick(&[
                        Collective::AllReduce,
                        Collective::Broadcast,
                        Collective::AllGather,
                    ]),
                    count: 1 + rng.below(20_000),
                    seed: rng.next(),
                    entered: AtomicUsize::new(0),
                };
                let what = format!("{:?} of {}", round.collective, round.count);
                let results = outcomes(&round, end, &config);
                for (rank, outcome) in results.into_iter().enumerate() {
                    let Some((result, next, took)) = outcome else {
                        continue;
                    };
                    calls += 1;
                    match result {
                        Ok(got) => assert!(got == round.expected(), "{what}: rank {rank}"),
                        Err(error) => failed.push(format!("{what}: rank {rank}: {error}")),
                    }
                    let error = next.expect_err("rank 0 is gone");
                    let gone = [ErrorKind::Aborted, ErrorKind::Remote].contains(&error.kind());
                    let named = error.message().contains("rank 0 (");
                    assert!(gone && named, "{what}: rank {rank}: {error}");
                    slowest = slowest.max(took);
                }
            }
            println!(
                "{transport}, {end:?}: {} of {calls} calls failed; the next one at the latest \
                 after {slowest:?}",
                failed.len()
            );
            assert!(failed.is_empty(), "{transport}, {end:?}: {failed:#?}");
            assert!(slowest < Duration::from_secs(2), "{slowest:?}");
        }
    }
}

#[test]
fn rank_that_fails_and_ends_is_reported_with_its_failure() {
    let config = Config {
        heartbeat: Duration::from_secs(60),
        ..config(TransportKind::Loopback)
    };
    for local in [true, false] {
        let body = |comm: &Communicator| {
            if comm.rank() == 0 {
                // Raises the fault of this communicator, as a failure of its parent communicator does.
                comm.fault().raise(Error::internal("what went wrong"));
                return String::new();
            }
            let error = comm.recv(&mut [0u8; 8], 0).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Internal);
            error.message().to_string()
        };
        let said = match local {
            // Rank 0 drops its communicator when `body` returns.
            true => local_world(2, &config, body),
            false => support::world(2, &config, |comm| body(&comm)),
        };
        let named = said[1].starts_with("rank 0 (") && said[1].ends_with("what went wrong");
        assert!(named, "{said:?}");
    }
}

/// Waits up to 20 s for `condition`. Returns whether it holds.
fn soon(condition: impl Fn() -> bool) -> bool {
    let begin = Instant::now();
    while !condition() && begin.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(1));
    }
    condition()
}

/// A rank that aborts leaves the exchange of a split before its announcement of the abort arrives.
/// The last rank keeps the split from completing.
#[test]
fn abort_during_a_split_is_reported_as_an_abort() {
    let config = config(TransportKind::Loopback);
    let faults: Vec<_> = (0..RANKS).map(|_| Fault::new()).collect();
    let exchanges = LocalOutOfBand::world_with(RANKS, &faults, &config);
    let errors: Vec<_> = std::thread::scope(|scope| {
        let ranks = exchanges.into_iter().zip(faults).map(|(exchange, fault)| {
            let config = config.clone();
            scope.spawn(move || {
                let late = Duration::from_millis(100);
                let exchange: OutOfBandRef = Arc::new(SilentLeave(exchange, late));
                let comm = Communicator::over(exchange.clone(), fault, config).unwrap();
                if comm.rank() == RANKS - 1 {
                    let mut colour = [0; 13];
                    colour[0] = 1;
                    exchange.all_gather(&colour).unwrap();
                    exchange.all_gather(&[]).unwrap();
                    assert!(soon(|| comm.async_error().is_some()));
                    return comm.async_error().unwrap();
                }
                std::thread::scope(|scope| {
                    if comm.rank() == RANKS - 2 {
                        scope.spawn(|| {
                            // After this pause all other ranks wait in the split.
                            std::thread::sleep(Duration::from_millis(500));
                            comm.abort();
                        });
                    }
                    comm.split(Some(0), 0).unwrap_err()
                })
            })
        });
        let ranks: Vec<_> = ranks.collect();
        let errors = ranks.into_iter().map(|rank| rank.join().expect("a rank"));
        errors.collect()
    });
    for (rank, error) in errors.iter().enumerate() {
        assert_eq!(error.kind(), ErrorKind::Aborted, "rank {rank}: {error}");
        assert!(error.message().contains("rank 2 ("), "rank {rank}: {error}");
    }
}

#[test]
fn abort_does_not_wait_for_a_heartbeat() {
    let config = Config {
        heartbeat: Duration::from_secs(60),
        timeout: Duration::from_secs(60),
        ..config(TransportKind::Tcp)
    };
    let times = support::world(2, &config, |comm| {
        if comm.rank() == 1 {
            // Rank 1 makes no call; it only waits until it learns of the abort.
            let begin = Instant::now();
            while comm.async_error().is_none() && begin.elapsed() < Duration::from_secs(20) {
                std::thread::sleep(Duration::from_millis(1));
            }
            return begin.elapsed();
        }
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let mut data = [0.0f32; 10];
                let error = comm.recv(&mut data, 1).unwrap_err();
                (error, Instant::now())
            });
            while comm.is_idle() {
                std::thread::yield_now();
            }
            let begin = Instant::now();
            comm.abort();
            let (error, freed) = waiting.join().unwrap();
            assert_eq!(error.kind(), ErrorKind::Aborted);
            freed - begin
        })
    });
    // A rank that missed the abort would wait for the heartbeat interval of 60 s. The limit of 5 s
    // leaves time for other tests that keep the cores busy.
    assert!(times[0] < Duration::from_secs(5), "{times:?}");
    assert!(times[1] < Duration::from_secs(2), "{times:?}");
}
