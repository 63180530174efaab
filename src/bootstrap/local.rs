//! [`OutOfBand`] between threads of one process: the control plane's semantics without sockets.

use super::call_log::{self, CallOrderChecker};
use super::rank_entry::name_ranks;
use super::{OutOfBand, PeerInfo, address, keys, process, raise_reported};
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Fault;
use crate::types::SIGNATURE_WORDS;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Interval of checks of the fault, which other threads raise without waking the waiting thread.
const FAULT_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A rank of a communicator whose ranks are threads.
#[derive(Debug)]
pub struct LocalOutOfBand {
    rank: usize,
    world: Arc<ThreadWorld>,
    timeout: Duration,
    /// Generation of the next all-gather, and the error after which ranks no longer agree on it.
    sequence: Mutex<(u64, Option<Error>)>,
}

#[derive(Debug)]
struct ThreadWorld {
    peers: Vec<PeerInfo>,
    faults: Vec<Arc<Fault>>,
    key: keys::DerivedKey,
    heartbeat: Duration,
    state: Mutex<WorldState>,
    changed: Condvar,
}

#[derive(Debug)]
struct WorldState {
    gathers: BTreeMap<u64, LocalGather>,
    has_left: Vec<bool>,
    call_order: CallOrderChecker,
}

#[derive(Debug)]
struct LocalGather {
    contributions: Vec<Option<Vec<u8>>>,
    /// Number of ranks that have not read the contributions.
    readers: usize,
}

impl LocalOutOfBand {
    /// Makes `nranks` ranks with the default timeout. Rank r raises and watches `faults[r]`.
    ///
    /// # Panics
    /// If there are not `nranks` faults.
    pub fn world(nranks: usize, faults: &[Arc<Fault>]) -> Vec<Arc<LocalOutOfBand>> {
        LocalOutOfBand::world_with(nranks, faults, &Config::default())
    }

    /// Makes `nranks` ranks with the timeout and host id of `config`.
    ///
    /// # Panics
    /// If there are not `nranks` faults.
    pub fn world_with(
        nranks: usize,
        faults: &[Arc<Fault>],
        config: &Config,
    ) -> Vec<Arc<LocalOutOfBand>> {
        LocalOutOfBand::world_of(&vec![config.clone(); nranks], faults)
    }

    /// Makes one rank for each of `configs`, which may name different hosts. Timeout and heartbeat
    /// come from the first.
    ///
    /// # Panics
    /// If there are no ranks, or not as many faults.
    pub fn world_of(configs: &[Config], faults: &[Arc<Fault>]) -> Vec<Arc<LocalOutOfBand>> {
        let nranks = configs.len();
        assert_eq!(faults.len(), nranks, "one fault for each rank");
        let host = process::host_name();
        let process_id = process::process_id().unwrap_or_default();
        let peers = configs.iter().enumerate().map(|(rank, config)| PeerInfo {
            rank,
            pid: std::process::id(),
            uid: nix::unistd::getuid().as_raw(),
            host: host.clone(),
            host_id: process::host_id(config).unwrap_or_default(),
            process_id,
            address: address::for_one_host(),
        });
        let world = Arc::new(ThreadWorld {
            peers: peers.collect(),
            faults: faults.to_vec(),
            // Random bytes are not needed for security: only threads of this process use the key.
            key: keys::random().unwrap_or([0; 32]),
            heartbeat: configs[0].heartbeat,
            state: Mutex::new(WorldState {
                gathers: BTreeMap::new(),
                has_left: vec![false; nranks],
                call_order: CallOrderChecker::new(),
            }),
            changed: Condvar::new(),
        });
        let exchange = |rank| {
            Arc::new(LocalOutOfBand {
                rank,
                world: world.clone(),
                timeout: configs[0].timeout,
                sequence: Mutex::new((0, None)),
            })
        };
        (0..nranks).map(exchange).collect()
    }

    fn gather(&self, generation: u64, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let world = &self.world;
        let nranks = world.peers.len();
        let deadline = Instant::now() + self.timeout;
        let mut state = world.state();
        let gather = state.gathers.entry(generation);
        let gather = gather.or_insert_with(|| LocalGather {
            contributions: vec![None; nranks],
            readers: nranks,
        });
        gather.contributions[self.rank] = Some(bytes.to_vec());
        world.changed.notify_all();
        loop {
            let WorldState {
                gathers, has_left, ..
            } = &mut *state;
            let gather = gathers
                .get_mut(&generation)
                .ok_or_else(|| Error::internal("an exchange without parts"))?;
            let all = &gather.contributions;
            let missing: Vec<usize> = (0..nranks).filter(|&rank| all[rank].is_none()).collect();
            if missing.is_empty() {
                let result = all.iter().flatten().cloned().collect();
                gather.readers -= 1;
                if gather.readers == 0 {
                    gathers.remove(&generation);
                }
                return Ok(result);
            }
            world.faults[self.rank].check()?;
            if let Some(&gone) = missing.iter().find(|&&rank| has_left[rank]) {
                return Err(Error::new(
                    ErrorKind::Remote,
                    format!(
                        "{} left before it took part in exchange {generation}",
                        world.peers[gone]
                    ),
                ));
            }
            let now = Instant::now();
            if now >= deadline {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!(
                        "{} did not take part in exchange {generation} within {:.3} s",
                        name_ranks(&missing),
                        self.timeout.as_secs_f64()
                    ),
                ));
            }
            let limit = FAULT_POLL_INTERVAL.min(deadline - now);
            let waited = world.changed.wait_timeout(state, limit);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl ThreadWorld {
    fn state(&self) -> MutexGuard<'_, WorldState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OutOfBand for LocalOutOfBand {
    fn rank(&self) -> usize {
        self.rank
    }

    fn peers(&self) -> &[PeerInfo] {
        &self.world.peers
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let sequence = self.sequence.lock();
        let mut sequence = sequence.unwrap_or_else(PoisonError::into_inner);
        self.world.faults[self.rank].check()?;
        if let Some(error) = &sequence.1 {
            return Err(error
                .clone()
                .context("ranks no longer agree on the order of exchanges"));
        }
        if self.has_left(self.rank) {
            return Err(Error::invalid_usage("this rank has left its communicator"));
        }
        let generation = sequence.0;
        sequence.0 += 1;
        let result = self.gather(generation, bytes);
        if let Err(error) = &result {
            sequence.1 = Some(error.clone());
        }
        result
    }

    fn announce(&self, reason: &Error) {
        let mine = &self.world.peers[self.rank];
        let report = reason.clone().context(format!("{mine} reports"));
        for (rank, fault) in self.world.faults.iter().enumerate() {
            if rank != self.rank {
                raise_reported(fault, report.clone(), self.world.heartbeat);
            } else if !fault.is_raised() {
                // If the fault is raised already, `reason` may only forward another rank's failure,
                // whose timeout stays.
                fault.raise(reason.clone());
            }
        }
        self.world.changed.notify_all();
    }

    fn log_call(&self, signature: [u64; SIGNATURE_WORDS]) {
        if !call_log::is_comparable(&signature) {
            return;
        }
        let disagreement = {
            let mut state = self.world.state();
            state
                .call_order
                .enter(self.rank, signature, &self.world.peers)
        };
        if let Some(error) = disagreement {
            for fault in &self.world.faults {
                fault.raise(error.clone());
            }
            self.world.changed.notify_all();
        }
    }

    fn has_left(&self, rank: usize) -> bool {
        self.world
            .state()
            .has_left
            .get(rank)
            .copied()
            .unwrap_or(false)
    }

    fn key(&self, purpose: &str) -> [u8; 32] {
        keys::derive(&self.world.key, b"for transports", purpose)
    }

    fn leave(&self) {
        self.world.state().has_left[self.rank] = true;
        self.world.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::call_log::tests::call;
    use super::*;
    use crate::types::Collective;

    fn world(nranks: usize, timeout: f64) -> (Vec<Arc<Fault>>, Vec<Arc<LocalOutOfBand>>) {
        let faults: Vec<Arc<Fault>> = (0..nranks).map(|_| Fault::new()).collect();
        let config = Config {
            timeout: Duration::from_secs_f64(timeout),
            ..Config::default()
        };
        let world = LocalOutOfBand::world_with(nranks, &faults, &config);
        (faults, world)
    }

    #[test]
    fn all_gather_returns_all_contributions_in_rank_order() {
        let (_, world) = world(5, 60.0);
        std::thread::scope(|scope| {
            for exchange in &world {
                scope.spawn(move || {
                    for round in 0..200u8 {
                        let mine = vec![round; exchange.rank()];
                        let all = exchange.all_gather(&mine).unwrap();
                        let expected: Vec<Vec<u8>> = (0..5).map(|r| vec![round; r]).collect();
                        assert_eq!(all, expected);
                    }
                });
            }
        });
        assert!(world[0].world.state().gathers.is_empty());
        assert_eq!(world[0].key("a"), world[4].key("a"));
        assert_ne!(world[0].key("a"), world[0].key("b"));
    }

    #[test]
    fn missing_ranks_are_named_and_waiting_ranks_woken() {
        let (_, late) = world(3, 0.05);
        let error = late[0].all_gather(b"x").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(error.message().contains("ranks 1, 2"), "{error}");
        assert!(
            late[0]
                .all_gather(b"x")
                .unwrap_err()
                .message()
                .contains("order of exchanges")
        );

        let (faults, ranks) = world(2, 60.0);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| ranks[0].barrier());
            ranks[1].announce(&Error::new(ErrorKind::Aborted, "no more"));
            let error = waiting.join().unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Aborted);
            assert!(error.message().starts_with("rank 1 ("), "{error}");
        });
        assert_eq!(faults[1].reason().unwrap().message(), "no more");

        let (faults, ranks) = world(2, 60.0);
        assert!(!ranks[0].has_left(1));
        ranks[1].leave();
        assert!(ranks[0].has_left(1) && !ranks[0].has_left(0));
        assert!(ranks[0].barrier().unwrap_err().message().contains("rank 1"));
        assert!(faults.iter().all(|fault| !fault.is_raised()));
    }

    #[test]
    fn different_calls_fail_on_all_ranks() {
        let (faults, ranks) = world(3, 60.0);
        ranks[0].log_call(call(Collective::SendRecv, 4, 1));
        ranks[1].log_call(call(Collective::SendRecv, 4, 2));
        ranks[0].log_call(call(Collective::AllReduce, 4, 1000));
        ranks[2].log_call(call(Collective::AllReduce, 4, 1000));
        assert!(faults.iter().all(|fault| !fault.is_raised()));
        ranks[1].log_call(call(Collective::AllReduce, 4, 1024));
        for fault in &faults {
            let error = fault.check().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch);
            for word in ["rank 0 (", "rank 1 (", "1000", "1024"] {
                assert!(error.message().contains(word), "{error}");
            }
        }
    }
}
