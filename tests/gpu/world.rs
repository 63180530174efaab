//! Ranks as threads of this process, each with its own communicator.

use crate::arena::Arena;
use crate::case::{Case, Done, Outcome};
use crate::harness::{Setup, Stop, ensure};
use cinch::config::FileChoice;
use cinch::plan::Limits;
use cinch::types::{DeviceChoice, TransportKind};
use cinch::{Collective, Communicator, Config, ErrorKind, Report, UniqueId};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

/// Ranks of a test, with the GPU and host of each.
#[derive(Clone, Debug)]
pub struct World {
    /// Number of each rank's GPU; `None` puts the rank on host memory.
    pub gpus: Vec<Option<usize>>,
    /// Number of the simulated host of each rank; empty if all ranks are on one host.
    pub hosts: Vec<usize>,
    /// Settings of every rank.
    pub config: Config,
}

impl World {
    /// Creates `nranks` ranks. They are distributed over the first `gpus` GPUs in turn, or are all
    /// on host memory under `--host`.
    pub fn new(setup: &Setup, nranks: usize, gpus: usize) -> World {
        let gpu = |rank: usize| (!setup.options.host).then_some(rank % gpus);
        World {
            gpus: (0..nranks).map(gpu).collect(),
            hosts: Vec::new(),
            config: config(),
        }
    }

    /// Creates a rank for each of the simulated hosts in `hosts`, over the first `gpus` GPUs. TCP
    /// connects the hosts, also on machines with RDMA ports.
    pub fn on_hosts(setup: &Setup, hosts: &[usize], gpus: usize) -> World {
        let mut world = World::new(setup, hosts.len(), gpus);
        world.hosts = hosts.to_vec();
        world.config.ib_disable = true;
        world
    }

    /// Returns an equal number of ranks on host memory. Their slots are large enough for the GPU's
    /// chunk sizes, so `copy_limits` can cut messages as the GPU does.
    pub fn on_host_memory(&self, limits: &Limits) -> World {
        let mut world = self.clone();
        world.gpus = vec![None; self.nranks()];
        // `limits` already describes which ranks share a host and which kernels may run.
        world.hosts = Vec::new();
        world.config.protocol = None;
        world.config.gpu_channels = None;
        world.config.p2p_disable = false;
        world.config.emulated = None;
        world.config.topology = FileChoice::Off;
        world.config.transport = Some(TransportKind::Loopback);
        world.config.slot_bytes = limits.slot_bytes.max(world.config.slot_bytes);
        world.config.slot_bytes = world.config.slot_bytes.next_multiple_of(64);
        world.config.buffer_bytes = 16 << 30;
        world
    }

    pub fn nranks(&self) -> usize {
        self.gpus.len()
    }

    /// Returns the settings of `rank`.
    pub fn config_of(&self, rank: usize) -> Config {
        let mut config = self.config.clone();
        match self.gpus[rank] {
            Some(gpu) => config.device = DeviceChoice::Cuda(gpu as u32),
            None if self.hosts.is_empty() => config.transport = Some(TransportKind::Loopback),
            None => {}
        }
        let host = self.hosts.get(rank);
        config.host_id = host.map(|host| format!("test host {host}"));
        config
    }

    pub fn arenas(&self, bytes: usize) -> Result<Vec<Arena>, Stop> {
        let arena = |gpu: &Option<usize>| Arena::new(*gpu, bytes);
        Ok(self.gpus.iter().map(arena).collect::<Result<_, _>>()?)
    }

    /// Runs `body` in a thread per rank and returns the results by rank. A rank that fails aborts
    /// the communicator, so the other ranks fail as well.
    pub fn run<R: Send>(
        &self,
        body: impl Fn(&Communicator) -> Result<R, Stop> + Sync,
    ) -> Result<Vec<R>, Stop> {
        let id = UniqueId::create_for_one_host(&self.config)?;
        let nranks = self.nranks();
        let rank = |rank: usize| -> Result<R, Stop> {
            let comm = Communicator::init(&id, rank, nranks, self.config_of(rank))
                .map_err(|error| Stop::from(error).context(format!("rank {rank} joins")))?;
            let result = body(&comm);
            match &result {
                // `finalize` waits for the peers, so no rank frees memory while a peer's kernel
                // still waits for this rank.
                Ok(_) => comm.finalize()?,
                Err(_) => comm.abort(),
            }
            result.map_err(|stop| stop.context(format!("rank {rank} of {nranks}")))
        };
        let results: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..nranks)
                .map(|number| {
                    let rank = &rank;
                    scope.spawn(move || rank(number))
                })
                .collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                thread
                    .join()
                    .unwrap_or_else(|cause| std::panic::resume_unwind(cause))
            };
            threads.into_iter().map(join).collect()
        });
        // Reports the original failure before failures that another rank's abort caused.
        let is_consequence = |stop: &Stop| match stop {
            Stop::Wrong(why) => why.contains("aborted the communicator"),
            Stop::Skipped(_) => false,
        };
        let mut stops: Vec<&Stop> = results.iter().filter_map(|r| r.as_ref().err()).collect();
        stops.sort_by_key(|stop| is_consequence(stop));
        if let Some(stop) = stops.first() {
            return Err((*stop).clone());
        }
        Ok(results.into_iter().filter_map(Result::ok).collect())
    }

    /// Returns the communicators of all ranks, for use by one thread.
    pub fn communicators(&self) -> Result<Vec<Communicator>, Stop> {
        let id = UniqueId::create_for_one_host(&self.config)?;
        let nranks = self.nranks();
        let results: Vec<_> = std::thread::scope(|scope| {
            let init = |rank| {
                let config = self.config_of(rank);
                scope.spawn(move || Communicator::init(&id, rank, nranks, config))
            };
            let threads: Vec<_> = (0..nranks).map(init).collect();
            threads.into_iter().map(|thread| thread.join()).collect()
        });
        let mut comms = Vec::new();
        for result in results {
            comms.push(result.map_err(|_| Stop::Wrong("a rank panicked".into()))??);
        }
        Ok(comms)
    }

    /// Runs the cases in order, judges every rank's output while later cases run, and returns the
    /// number of cases.
    pub fn judge(&self, cases: &[Case]) -> Result<usize, Stop> {
        let nranks = self.nranks();
        let bytes = cases.iter().map(|case| case.bytes(nranks)).max();
        let arenas = self.arenas(bytes.unwrap_or(0))?;
        let (senders, receivers): (Vec<_>, Vec<_>) =
            (0..nranks).map(|_| sync_channel::<Outcome>(2)).unzip();
        let senders: Vec<_> = senders
            .into_iter()
            .map(|sender| std::sync::Mutex::new(Some(sender)))
            .collect();
        std::thread::scope(|scope| {
            let judge = scope.spawn(move || self.judge_all(cases, &receivers));
            let ran = self.run(|comm| {
                let slot = senders[comm.rank()].lock();
                let sender = slot.ok().and_then(|mut sender| sender.take());
                self.run_all(cases, comm, &arenas[comm.rank()], sender)
            });
            // A rank that could not join has not taken its sender. Dropping the sender here keeps
            // the thread that checks outputs from waiting for this rank.
            drop(senders);
            let judged = judge
                .join()
                .unwrap_or_else(|_| Stop::wrong("the judge panicked"));
            match (judged, ran) {
                (Ok(count), Ok(_)) => Ok(count),
                // A wrong output is the cause, so it is reported before the ranks' own errors. An
                // empty text means that a rank's own error is the cause.
                (Err(Stop::Wrong(why)), Err(stop)) if why.is_empty() => Err(stop),
                (Err(stop), _) | (Ok(_), Err(stop)) => Err(stop),
            }
        })
    }

    fn run_all(
        &self,
        cases: &[Case],
        comm: &Communicator,
        arena: &Arena,
        sender: Option<SyncSender<Outcome>>,
    ) -> Result<(), Stop> {
        let sender = sender.ok_or_else(|| Stop::Wrong("a rank came twice".into()))?;
        for case in cases {
            let input = case.input(comm.rank(), comm.nranks());
            let outcome = arena.run(case, comm, &input);
            let failed = outcome.as_ref().err().filter(|error| !refused(error));
            let failed = failed.map(|error| Stop::from(error.clone()).context(case));
            if sender.send(outcome).is_err() {
                return Stop::wrong("the judge has found something wrong");
            }
            if let Some(stop) = failed {
                return Err(stop);
            }
        }
        Ok(())
    }

    /// Checks each case after all ranks have sent its outcome. Returns `Wrong` with an empty text
    /// if a rank's own error describes the failure.
    fn judge_all(&self, cases: &[Case], ranks: &[Receiver<Outcome>]) -> Result<usize, Stop> {
        let nranks = self.nranks();
        for case in cases {
            let inputs = case.inputs(nranks);
            let mut done: Vec<Done> = Vec::new();
            for rank in ranks {
                match rank.recv_timeout(Duration::from_secs(60)) {
                    Ok(Ok(one)) => done.push(one),
                    Ok(Err(error)) if refused(&error) => {
                        return Stop::wrong(format!("{case}: {}", error.message()));
                    }
                    _ => return Stop::wrong(""),
                }
            }
            case.judge(&inputs, &done, 0.0).map_err(Stop::Wrong)?;
            for (rank, one) in done.iter().enumerate() {
                self.judge_report(case, rank, one)?;
            }
        }
        Ok(cases.len())
    }

    /// Fails unless the report names the algorithm, codec and transport that `case` demands.
    pub fn judge_report(&self, case: &Case, rank: usize, done: &Done) -> Result<(), Stop> {
        let judged = self.judge_choices(case, &done.report);
        judged.map_err(|why| Stop::Wrong(format!("{case}: rank {rank}: {why}: {:?}", done.report)))
    }

    fn judge_choices(&self, case: &Case, report: &Report) -> Result<(), String> {
        if self.nranks() == 1 || case.call.count == 0 {
            return Ok(());
        }
        if case.call.codec.is_some_and(|asked| report.codec != asked) {
            return Err("another codec ran".into());
        }
        if case
            .call
            .algorithm
            .is_some_and(|asked| asked != report.algorithm)
        {
            return Err("another algorithm ran".into());
        }
        let gpu = self.gpus[0].is_some();
        let expected = match self.hosts.iter().any(|host| *host != self.hosts[0]) {
            true => TransportKind::Tcp,
            false => TransportKind::Cuda,
        };
        // A send/recv between simulated hosts also has messages within a host, so its transport
        // varies.
        let message = case.call.collective == Collective::SendRecv && !self.hosts.is_empty();
        if report.wire_bytes > 0 && gpu && !message && report.transport != Some(expected) {
            return Err("another transport ran".into());
        }
        Ok(())
    }
}

/// Returns settings with short deadlines, so that a hang ends the run.
pub fn config() -> Config {
    Config {
        timeout: Duration::from_secs(10),
        init_timeout: Duration::from_secs(20),
        ..Config::default()
    }
}

/// Returns whether `error` only refused a call, so that the communicator is still usable.
fn refused(error: &cinch::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::InvalidArgument | ErrorKind::InvalidUsage | ErrorKind::Unsupported
    )
}

/// Fails unless `error` has this kind and a message with all of `words`.
pub fn expect_error(error: &cinch::Error, kind: ErrorKind, words: &[&str]) -> Result<(), Stop> {
    let text = error.message();
    ensure(
        error.kind() == kind && words.iter().all(|word| text.contains(word)),
        || {
            format!(
                "expected {kind:?} with {words:?}, got {:?}: {text}",
                error.kind()
            )
        },
    )
}
