//! A world of ranks that are threads, and their out-of-band exchange.

use crate::bootstrap::{OutOfBand, PeerInfo};
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Fault;
use crate::sys::ibverbs::Api;
use crate::sys::ibverbs::fake::{Fabric, FakeDevice};
use crate::sys::{cpu, numa};
use crate::testing::on_rdma_devices;
use crate::topology::RankPlace;
use crate::transport::{ConnectContext, Header, Links, RecvEnd, connect_all};
use crate::types::{SIGNATURE_WORDS, TransportKind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// Time after which a waiting test fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Returns settings for small slots over `kind`.
pub(crate) fn config(kind: TransportKind) -> Config {
    Config {
        slot_bytes: 4096,
        transport: Some(kind),
        ..Config::default()
    }
}

/// Sends one message.
pub(crate) fn send(
    links: &mut Links,
    to: usize,
    channel: usize,
    header: Header,
    fill: impl FnOnce(&mut [u8]),
) {
    let index = channel * links.nranks + to;
    wait(links, |links| {
        links.sends[index].as_mut().unwrap().ready().unwrap()
    });
    let end = links.sends[index].as_mut().unwrap();
    fill(end.slot());
    end.publish(header);
}

/// Receives one message.
pub(crate) fn recv(
    links: &mut Links,
    from: usize,
    channel: usize,
    check: impl FnOnce(&dyn RecvEnd),
) {
    let index = channel * links.nranks + from;
    wait(links, |links| {
        links.recvs[index].as_mut().unwrap().ready().unwrap()
    });
    let end = links.recvs[index].as_mut().unwrap();
    check(&**end);
    end.release();
}

/// Waits until `done` returns true, as the host engine does.
pub(crate) fn wait(links: &mut Links, mut done: impl FnMut(&mut Links) -> bool) {
    let mut scans = 0;
    let mut until = None;
    while !done(links) {
        links.waiter.idle(scans, Duration::from_millis(10)).unwrap();
        scans += 1;
        if scans.is_multiple_of(64) {
            let until = *until.get_or_insert_with(|| Instant::now() + PATIENCE);
            assert!(Instant::now() < until, "rank {} waits for ever", links.rank);
        }
    }
}

#[derive(Debug, Default)]
struct Round {
    number: u64,
    given: Vec<Option<Vec<u8>>>,
    taken: Vec<Vec<u8>>,
    reason: Option<Error>,
}

/// Ranks that are threads of one process.
#[derive(Debug)]
pub(crate) struct World {
    peers: Vec<PeerInfo>,
    round: Mutex<Round>,
    changed: Condvar,
    /// Simulated devices; `None` selects the devices of this machine.
    fabric: Option<Arc<Fabric>>,
    /// Place of each rank; all ranks without an entry have none.
    places: Vec<RankPlace>,
    /// Directory that describes devices as /sys does.
    sys: PathBuf,
}

/// Returns the transports that the suite tests. On a machine with RDMA devices it tests RDMA alone, because
/// other machines test the rest.
pub(crate) fn kinds() -> Vec<TransportKind> {
    match on_rdma_devices() {
        true => vec![TransportKind::Rdma],
        false => crate::transport::kinds().collect(),
    }
}

/// Returns settings for small slots over each transport, and over encrypted TCP.
pub(crate) fn configs() -> Vec<Config> {
    let mut all: Vec<Config> = kinds().into_iter().map(config).collect();
    if kinds().contains(&TransportKind::Tcp) {
        all.push(Config {
            encrypts: true,
            ..config(TransportKind::Tcp)
        });
    }
    all
}

impl World {
    /// Creates ranks that are threads of one process on one host.
    pub fn new(nranks: usize) -> Arc<World> {
        World::with(&vec![(1, 1); nranks])
    }

    /// Creates ranks on these hosts and in these processes, by the ids that they report: a pair of
    /// host and process for each rank.
    pub fn with(places: &[(u8, u8)]) -> Arc<World> {
        let roce = FakeDevice::roce;
        let fabric = || Fabric::new(vec![roce("fake0", 1), roce("fake1", 2)]);
        Arc::new(World::on(places, (!on_rdma_devices()).then(fabric)))
    }

    /// Creates ranks whose RDMA uses the devices of `fabric`; see [`World::with`].
    pub fn over(places: &[(u8, u8)], fabric: Arc<Fabric>) -> Arc<World> {
        Arc::new(World::on(places, Some(fabric)))
    }

    /// Creates ranks with a place each, on hosts that `sys` describes; see [`World::over`].
    pub fn placed(
        places: &[(u8, u8)],
        fabric: Arc<Fabric>,
        of_ranks: Vec<RankPlace>,
        sys: &Path,
    ) -> Arc<World> {
        Arc::new(World {
            places: of_ranks,
            sys: sys.into(),
            ..World::on(places, Some(fabric))
        })
    }

    fn on(places: &[(u8, u8)], fabric: Option<Arc<Fabric>>) -> World {
        let peer = |(rank, &(host, process)): (usize, &(u8, u8))| PeerInfo {
            rank,
            pid: std::process::id(),
            uid: nix::unistd::geteuid().as_raw(),
            host: format!("host{host}"),
            host_id: [host; 16],
            process_id: [process; 16],
            address: [127, 0, 0, 1].into(),
        };
        World {
            peers: places.iter().enumerate().map(peer).collect(),
            round: Mutex::new(Round {
                given: vec![None; places.len()],
                ..Round::default()
            }),
            changed: Condvar::new(),
            fabric,
            places: Vec::new(),
            sys: numa::SYS.into(),
        }
    }

    pub(crate) fn verbs(&self) -> Option<Arc<dyn Api>> {
        self.fabric.clone().map(|fabric| fabric as Arc<dyn Api>)
    }

    /// Returns the control plane of a rank.
    pub fn exchange(self: &Arc<World>, rank: usize) -> Arc<dyn OutOfBand> {
        Arc::new(Side {
            world: self.clone(),
            rank,
        })
    }

    /// Connects all ranks and runs `body` on each, in a thread.
    pub fn run(self: &Arc<World>, config: &Config, body: impl Fn(Links, &dyn OutOfBand) + Sync) {
        self.run_each(&vec![config.clone(); self.peers.len()], body);
    }

    /// Runs `body` with all ranks on one core, so that ranks sleep and need wake-ups; see [`World::run`].
    pub fn run_crowded(
        self: &Arc<World>,
        config: &Config,
        body: impl Fn(Links, &dyn OutOfBand) + Sync,
    ) {
        let cores = cpu::allowed();
        let first = (0..1024).find(|core| cores[core / 64] >> (core % 64) & 1 == 1);
        self.start(
            &vec![config.clone(); self.peers.len()],
            first,
            |links, exchange| {
                assert!(links.load.is_crowded(), "ranks share a core");
                body(links, exchange);
            },
        );
    }

    /// Runs `body` with settings for each rank; see [`World::run`].
    pub fn run_each(
        self: &Arc<World>,
        configs: &[Config],
        body: impl Fn(Links, &dyn OutOfBand) + Sync,
    ) {
        self.start(configs, None, body);
    }

    fn start(
        self: &Arc<World>,
        configs: &[Config],
        core: Option<usize>,
        body: impl Fn(Links, &dyn OutOfBand) + Sync,
    ) {
        std::thread::scope(|scope| {
            for (rank, config) in configs.iter().enumerate() {
                let body = &body;
                scope.spawn(move || {
                    if let Some(core) = core {
                        cpu::bind(core).unwrap();
                    }
                    let exchange = self.exchange(rank);
                    match self.connect(&*exchange, config) {
                        Ok(links) => body(links, &*exchange),
                        Err(error) => {
                            exchange.announce(&error);
                            panic!("rank {rank}: {error}");
                        }
                    }
                });
            }
        });
    }

    fn connect(&self, exchange: &dyn OutOfBand, config: &Config) -> Result<Links> {
        let place = self
            .places
            .get(exchange.rank())
            .copied()
            .unwrap_or_default();
        connect_from(exchange, config, self.verbs(), (place, &self.sys))
    }

    /// Tries to connect all ranks, each of which must fail. Returns the error of each rank.
    pub fn errors(self: &Arc<World>, configs: &[Config]) -> Vec<Error> {
        std::thread::scope(|scope| {
            let rank = |(rank, config): (usize, _)| {
                scope.spawn(move || self.connect(&*self.exchange(rank), config).map(|_| ()))
            };
            let threads: Vec<_> = configs.iter().enumerate().map(rank).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, Result<()>>| thread.join();
            let errors = threads.into_iter().map(join);
            errors.map(|error| error.unwrap().unwrap_err()).collect()
        })
    }
}

/// Connects one rank.
pub(crate) fn connect(
    exchange: &dyn OutOfBand,
    config: &Config,
    verbs: Option<Arc<dyn Api>>,
) -> Result<Links> {
    connect_from(
        exchange,
        config,
        verbs,
        (RankPlace::Unknown, Path::new(numa::SYS)),
    )
}

/// Connects one rank at a place of the host that `sys` describes.
fn connect_from(
    exchange: &dyn OutOfBand,
    config: &Config,
    verbs: Option<Arc<dyn Api>>,
    (place, sys): (RankPlace, &Path),
) -> Result<Links> {
    connect_all(&ConnectContext {
        exchange,
        config,
        fault: &Fault::new(),
        deadline: Instant::now() + PATIENCE,
        place,
        sys,
        verbs,
    })
}

#[derive(Debug)]
struct Side {
    world: Arc<World>,
    rank: usize,
}

impl OutOfBand for Side {
    fn rank(&self) -> usize {
        self.rank
    }

    fn peers(&self) -> &[PeerInfo] {
        &self.world.peers
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let until = Instant::now() + PATIENCE;
        let mut round = self.world.round.lock().unwrap();
        let number = round.number;
        round.given[self.rank] = Some(bytes.to_vec());
        if round.given.iter().all(Option::is_some) {
            round.taken = round.given.iter_mut().filter_map(Option::take).collect();
            round.number += 1;
            self.world.changed.notify_all();
        }
        while round.number == number {
            if let Some(reason) = &round.reason {
                return Err(reason.clone());
            }
            if Instant::now() > until {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    "a rank of the test is missing",
                ));
            }
            round = self.world.changed.wait_timeout(round, PATIENCE).unwrap().0;
        }
        Ok(round.taken.clone())
    }

    fn announce(&self, reason: &Error) {
        self.world.round.lock().unwrap().reason = Some(reason.clone());
        self.world.changed.notify_all();
    }

    fn log_call(&self, _: [u64; SIGNATURE_WORDS]) {}

    fn has_left(&self, _: usize) -> bool {
        false
    }

    fn key(&self, purpose: &str) -> [u8; 32] {
        let mut key = [5; 32];
        key[..purpose.len()].copy_from_slice(purpose.as_bytes());
        key
    }

    fn leave(&self) {}
}
