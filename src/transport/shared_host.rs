//! Containers of one machine as one host.
//!
//! Ranks in different network namespaces begin as ranks of different hosts, because the abstract names of UNIX sockets
//! end at a network namespace. If these ranks have one /dev/shm, socket files in it pass shared memory nevertheless.
//! Before such ranks count as one host, each pair of them proves it: both ends connect through a socket file,
//! authenticate each other, and map each other's memory. All ranks take part in each round and decide alike.

use super::mesh::SocketMesh;
use super::shm;
use crate::bootstrap::auth::Listener;
use crate::bootstrap::{OutOfBand, OutOfBandRef, PeerInfo, ReconnectListener, shared_directory_id};
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Fault;
use crate::sys::log::{self, Level};
use crate::sys::memory::{PAGE, sealed_memfd};
use crate::sys::socket::{self, Address};
use crate::types::{SIGNATURE_WORDS, Subsystem};
use crate::wire::{Reader, Wire, WireResult, Writer};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Purpose of the sockets, in errors and in the key.
const PURPOSE: &str = "containers";

/// Longest time for the proof. Ranks that fail it stay on different hosts.
const PROOF_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns `exchange` with ranks of one host where containers share memory, and `exchange` itself where none do. All
/// ranks call it together.
///
/// # Errors
/// The errors of the exchange; mismatch if a rank's message has another format.
pub fn merge_hosts(exchange: OutOfBandRef, config: &Config, fault: &Fault) -> Result<OutOfBandRef> {
    let peers = exchange.peers();
    if peers.iter().all(|peer| peer.host_id == peers[0].host_id) {
        return Ok(exchange);
    }
    let me = exchange.rank();
    let own = Directory::open(config);
    let offer = own
        .as_ref()
        .map_or(DirectoryOffer::default(), |own| own.offer);
    let parts = exchange.all_gather(&offer.to_bytes())?;
    let offers = parts.iter().zip(peers).map(|(part, peer)| {
        DirectoryOffer::from_bytes(part).map_err(|_| super::contract::another_format(peer))
    });
    let offers: Vec<DirectoryOffer> = offers.collect::<Result<_>>()?;
    let groups = candidates(peers, &offers);
    if groups.is_empty() {
        return Ok(exchange);
    }
    let group = groups.iter().find(|group| group.contains(&me));
    let proof = match (group, own) {
        (Some(group), Some(own)) => own.prove(&*exchange, group, &offers, config, fault),
        _ => Ok(()),
    };
    let proofs = exchange.gather_results("share memory with other containers", &proof)?;
    let mut merged = peers.to_vec();
    let mut shares_directory = false;
    for group in &groups {
        let failure = group.iter().find_map(|&rank| proofs[rank].as_ref().err());
        let text = match failure {
            None => format!(
                "{} ranks of containers with one /dev/shm are one host",
                group.len()
            ),
            Some(error) => format!("containers stay different hosts: {}", error.message()),
        };
        if group.first() == Some(&me) {
            log::line_of(Subsystem::Net, Level::Info, format_args!("{text}"));
        }
        if failure.is_none() {
            shares_directory |= group.contains(&me);
            let host_id = peers[group[0]].host_id;
            group
                .iter()
                .for_each(|&rank| merged[rank].host_id = host_id);
        }
    }
    Ok(std::sync::Arc::new(MergedHosts {
        inner: exchange.clone(),
        peers: merged,
        shares_directory,
    }))
}

/// Returns the groups of ranks that may become one host: all ranks of two hosts or more, all of which have one
/// directory.
fn candidates(peers: &[PeerInfo], offers: &[DirectoryOffer]) -> Vec<Vec<usize>> {
    let mut of_hosts: HashMap<[u8; 16], Option<[u8; 16]>> = HashMap::new();
    for (peer, offer) in peers.iter().zip(offers) {
        let own = Some(offer.directory).filter(|id| *id != [0; 16]);
        let known = of_hosts.entry(peer.host_id).or_insert(own);
        *known = known.filter(|known| Some(*known) == own);
    }
    // Groups are in the order of their first ranks, which is equal on all ranks.
    let mut groups: Vec<([u8; 16], Vec<usize>)> = Vec::new();
    for (rank, peer) in peers.iter().enumerate() {
        let Some(id) = of_hosts[&peer.host_id] else {
            continue;
        };
        match groups.iter_mut().find(|(known, _)| *known == id) {
            Some((_, ranks)) => ranks.push(rank),
            None => groups.push((id, vec![rank])),
        }
    }
    let groups = groups.into_iter().map(|(_, ranks)| ranks);
    let has_hosts = |ranks: &Vec<usize>| {
        let first = peers[ranks[0]].host_id;
        ranks.iter().any(|&rank| peers[rank].host_id != first)
    };
    groups.filter(has_hosts).collect()
}

/// The directory of a rank, as other ranks know it; zeros without one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct DirectoryOffer {
    directory: [u8; 16],
    /// Name of the rank's socket file.
    name: [u8; 16],
}

impl Wire for DirectoryOffer {
    fn write(&self, writer: &mut Writer) {
        writer.put(&self.directory).put(&self.name);
    }

    fn read(reader: &mut Reader<'_>) -> WireResult<DirectoryOffer> {
        Ok(DirectoryOffer {
            directory: reader.take()?,
            name: reader.take()?,
        })
    }
}

/// The directory of this rank, and the socket on which it expects its peers.
struct Directory {
    offer: DirectoryOffer,
    listener: Listener,
}

impl Directory {
    /// Listens in the directory; `None` if the settings exclude shared memory, or if no socket listens there.
    fn open(config: &Config) -> Option<Directory> {
        if config.shm_disable {
            return None;
        }
        // Only jobs of containers make such files, so only they look for those of killed ones.
        socket::remove_stale_files();
        let mut name = [0; 16];
        getrandom::fill(&mut name).ok()?;
        Some(Directory {
            offer: DirectoryOffer {
                directory: shared_directory_id(config)?,
                name,
            },
            listener: Listener::bind_local(Address::Shared(name)).ok()?,
        })
    }

    /// Exchanges memory with all other ranks of `group`.
    fn prove(
        self,
        exchange: &dyn OutOfBand,
        group: &[usize],
        offers: &[DirectoryOffer],
        config: &Config,
        fault: &Fault,
    ) -> Result<()> {
        let others = group.iter().filter(|&&rank| rank != exchange.rank());
        let mesh = SocketMesh {
            purpose: PURPOSE,
            key: exchange.key(PURPOSE),
            encrypts: false,
            me: exchange.rank(),
            peers: exchange.peers(),
            listener: self.listener,
            addresses: others
                .map(|&rank| (rank, Address::Shared(offers[rank].name)))
                .collect(),
            nearer: Vec::new(),
            channels: 1,
            sockets: 1,
            fault,
            deadline: Instant::now() + PROOF_TIMEOUT.min(config.init_timeout / 4),
        };
        let memory = sealed_memfd(PAGE)?;
        let regions = shm::exchange(mesh, &memory, PAGE)?;
        match regions.len() + 1 == group.len() {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::Remote, "a container sent no memory")),
        }
    }
}

/// An exchange whose ranks are on other hosts than they reported.
#[derive(Debug)]
struct MergedHosts {
    inner: OutOfBandRef,
    peers: Vec<PeerInfo>,
    shares_directory: bool,
}

impl OutOfBand for MergedHosts {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn peers(&self) -> &[PeerInfo] {
        &self.peers
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.inner.all_gather(bytes)
    }

    fn limit_exchanges(&self, until: Option<Instant>) {
        self.inner.limit_exchanges(until);
    }

    fn barrier(&self) -> Result<()> {
        self.inner.barrier()
    }

    fn announce(&self, reason: &Error) {
        self.inner.announce(reason);
    }

    fn log_call(&self, signature: [u64; SIGNATURE_WORDS]) {
        self.inner.log_call(signature);
    }

    fn has_left(&self, rank: usize) -> bool {
        self.inner.has_left(rank)
    }

    fn is_lost(&self, rank: usize) -> bool {
        self.inner.is_lost(rank)
    }

    fn drop_connections(&self, listener: &Arc<ReconnectListener>) {
        self.inner.drop_connections(listener);
    }

    fn key(&self, purpose: &str) -> [u8; 32] {
        self.inner.key(purpose)
    }

    fn close(&self) {
        self.inner.close();
    }

    fn shares_directory(&self) -> bool {
        self.shares_directory
    }

    fn wait_closed(&self) -> Result<()> {
        self.inner.wait_closed()
    }

    fn leave(&self) {
        self.inner.leave();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::bootstrap::LocalOutOfBand;
    use crate::types::TransportKind;

    fn peers(hosts: &[u8]) -> Vec<PeerInfo> {
        let peer = |(rank, &host): (usize, &u8)| PeerInfo {
            rank,
            pid: 1,
            uid: 1,
            host: String::new(),
            host_id: [host; 16],
            process_id: [rank as u8; 16],
            address: [127, 0, 0, 1].into(),
        };
        hosts.iter().enumerate().map(peer).collect()
    }

    #[test]
    fn hosts_with_one_directory_on_all_ranks_are_candidates() {
        // Columns: host of each rank, directory of each rank, groups.
        for (hosts, directories, groups) in [
            (&[1, 1, 2][..], &[7, 7, 7][..], vec![vec![0, 1, 2]]),
            (&[1, 1, 2], &[7, 7, 8], vec![]),
            (&[1, 1, 2], &[7, 0, 7], vec![]),
            (&[1, 2], &[0, 0], vec![]),
            (
                &[1, 2, 3, 4, 5],
                &[8, 7, 7, 8, 9],
                vec![vec![0, 3], vec![1, 2]],
            ),
            (&[1, 2, 1, 3], &[7, 7, 8, 7], vec![vec![1, 3]]),
        ] {
            let offers: Vec<DirectoryOffer> = directories
                .iter()
                .map(|&directory| DirectoryOffer {
                    directory: [directory; 16],
                    name: [0; 16],
                })
                .collect();
            assert_eq!(
                candidates(&peers(hosts), &offers),
                groups,
                "{hosts:?} {directories:?}"
            );
        }
    }

    /// Returns the proofs of two ranks, each of which has received these names.
    fn proofs(names: impl Fn([[u8; 16]; 2]) -> [[u8; 16]; 2]) -> Vec<Result<()>> {
        let faults = [Fault::new(), Fault::new()];
        let world = LocalOutOfBand::world(2, &faults);
        let config = Config {
            init_timeout: Duration::from_secs(2),
            ..Config::default()
        };
        let own = [(); 2].map(|()| Directory::open(&config).unwrap());
        let names = names([own[0].offer.name, own[1].offer.name]);
        let offers = names.map(|name| DirectoryOffer {
            name,
            ..own[0].offer
        });
        std::thread::scope(|scope| {
            let threads: Vec<_> = own
                .into_iter()
                .zip(world.iter().zip(&faults))
                .map(|(own, (exchange, fault))| {
                    let (offers, config) = (&offers, &config);
                    scope.spawn(move || own.prove(&**exchange, &[0, 1], offers, config, fault))
                })
                .collect();
            let results = threads.into_iter().map(|thread| thread.join().unwrap());
            results.collect()
        })
    }

    #[test]
    fn ranks_prove_that_they_share_memory() {
        assert!(proofs(|names| names).iter().all(Result::is_ok));
        // A socket file that is not there, as in another directory, fails both ranks in time.
        let start = Instant::now();
        let failed = proofs(|_| [[1; 16]; 2]);
        assert!(failed.iter().all(Result::is_err), "{failed:?}");
        assert!(start.elapsed() < Duration::from_secs(5));
    }

    /// Names of socket files that a killed rank left, that are too young, that a rank listens at, and of a plain file.
    #[test]
    fn next_job_removes_the_socket_files_of_killed_ranks_alone() {
        use nix::sys::stat::{UtimensatFlags, utimensat};
        use nix::sys::time::{TimeSpec, TimeValLike};
        let named = |kind: u8| {
            let mut name = [kind; 16];
            name[..4].copy_from_slice(&std::process::id().to_be_bytes());
            let digits: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
            (
                Address::Shared(name),
                std::path::Path::new(socket::SHARED_DIRECTORY).join(format!("cinch-{digits}")),
            )
        };
        let age = |path: &std::path::Path| {
            let then = TimeSpec::seconds(1_000_000_000);
            utimensat(
                nix::fcntl::AT_FDCWD,
                path,
                &then,
                &then,
                UtimensatFlags::FollowSymlink,
            )
            .unwrap();
        };
        let [stale, young, alive, plain] = [1, 2, 3, 4].map(named);
        drop(socket::listen(&stale.0).unwrap());
        drop(socket::listen(&young.0).unwrap());
        let _listener = socket::listen(&alive.0).unwrap();
        std::fs::write(&plain.1, "").unwrap();
        for (_, path) in [&stale, &alive, &plain] {
            age(path);
        }
        let opened = Directory::open(&Config::default()).unwrap();
        let exists = [stale, young, alive, plain].map(|(_, path)| {
            let exists = path.exists();
            let _ = std::fs::remove_file(path);
            exists
        });
        assert_eq!(exists, [false, true, true, true]);
        drop(opened);
    }

    #[test]
    fn settings_exclude_shared_memory() {
        let of = |shm_disable, transport| {
            let config = Config {
                shm_disable,
                transport,
                ..Config::default()
            };
            Directory::open(&config).is_some()
        };
        assert!(of(false, None) && of(false, Some(TransportKind::Shm)));
        assert!(!of(true, None) && of(false, Some(TransportKind::Tcp)));
    }
}
