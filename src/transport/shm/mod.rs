//! Ranks that are processes of one host: each hands its inbox, a sealed memfd, to its peers over UNIX
//! sockets.
//!
//! Both sides first prove that they belong to the communicator. Memory has no name in a file system. The
//! abstract name of a socket is random, ends with the listener, and is worth nothing without the key. The
//! process at the other end must run as the same user. Between containers with network namespaces of their own, which
//! abstract names do not cross, sockets are files in /dev/shm while ranks connect; see `shared_host`.

use super::contract::{Caps, Connected, Peers, Prepared, Setup, Transport};
use super::inbox::InboxMemory;
use super::mesh::SocketMesh;
use crate::bootstrap::PeerInfo;
use crate::bootstrap::auth::Listener;
use crate::bootstrap::peer_stream::PeerStream;
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::Region;
use crate::sys::socket;
use crate::types::TransportKind;
use crate::wire::Wire;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Purpose of the sockets, in errors and in the key.
const PURPOSE: &str = "shm";

/// Interval at which a rank that waits for descriptors checks the fault.
const FAULT_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Interval between attempts to send a descriptor while the kernel accepts no more. The kernel does not
/// report when it accepts descriptors again.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// The transport between processes of one host.
pub(super) struct Shm;

/// Costs fitted to `benches/baselines/host-allreduce-vs-openmpi.jsonl`. Only proportions matter.
pub(super) const CAPS: Caps = Caps {
    inbox: InboxMemory::Shareable,
    moves_beside: false,
    may_decline: false,
    hop_seconds: 0.25e-6,
    message_seconds: 0.1e-6,
    byte_seconds: 0.02e-9,
};

/// Returns why ranks of different hosts share no memory; `None` on one host.
pub(super) fn on_other_host(own: &PeerInfo, peer: &PeerInfo) -> Option<&'static str> {
    (own.host_id != peer.host_id)
        .then_some("they do not share a host, its network namespace or /dev/shm, and CINCH_HOST_ID")
}

impl Transport for Shm {
    fn kind(&self) -> TransportKind {
        TransportKind::Shm
    }

    fn caps(&self) -> &'static Caps {
        &CAPS
    }

    fn obstruction(
        &self,
        own: &PeerInfo,
        peer: &PeerInfo,
        config: &Config,
    ) -> Option<&'static str> {
        on_other_host(own, peer).or(config.shm_disable.then_some("CINCH_SHM_DISABLE=1"))
    }

    fn descriptors(&self, _: &Config) -> usize {
        1
    }

    fn probe(&self, _: &Config) -> Result<&'static str> {
        Region::shareable(4096)?;
        UnixStream::pair().map_err(|error| Error::system("UNIX sockets", error))?;
        Ok("sealed memfd over UNIX sockets")
    }

    fn prepare(&self, setup: &Setup<'_>) -> Result<Box<dyn Prepared>> {
        let exchange = setup.context.exchange;
        let mut name = [0; 16];
        getrandom::fill(&mut name)
            .map_err(|error| Error::internal(format!("no random numbers: {error}")))?;
        Ok(Box::new(ShmListener {
            name,
            listener: Some(Listener::bind_local(exchange.local_address(name))?),
        }))
    }
}

/// The UNIX socket on which this rank expects its peers.
struct ShmListener {
    name: [u8; 16],
    listener: Option<Listener>,
}

impl Prepared for ShmListener {
    fn offer(&self) -> Vec<u8> {
        self.name.to_bytes()
    }

    fn connect(&mut self, setup: &Setup<'_>, peers: &Peers<'_>) -> Result<Option<Connected>> {
        let inbox = setup.inbox()?;
        let (Some(listener), Some(memory)) = (self.listener.take(), inbox.memory()) else {
            return Err(Error::internal("shared memory was not prepared"));
        };
        let each = peers.served.iter();
        let control = setup.context.exchange;
        let addresses = each.map(|&rank| {
            let name = peers.offer(setup, rank)?;
            Ok((rank, control.local_address(name)))
        });
        let addresses = addresses.collect::<Result<_>>()?;
        let mesh = setup.mesh(PURPOSE, listener, addresses, (1, 1));
        let regions = exchange(mesh, memory, inbox.bytes())?;
        setup.connect_inbox(peers, regions).map(Some)
    }
}

/// Sends `memory` to the peers of `mesh`, and returns the region of each with its rank.
///
/// Linux limits the descriptors in flight between processes of a user to the number that one process may
/// hold. n ranks send n(n-1) descriptors. A rank therefore repeats a rejected send, and goes on receiving
/// meanwhile, which takes descriptors out of flight.
///
/// # Errors
/// As for [`SocketMesh::open`]; remote, naming the peer, if it exits; mismatch if its memory is not sealed
/// at `bytes` bytes.
pub(crate) fn exchange(
    mesh: SocketMesh<'_>,
    memory: &OwnedFd,
    bytes: usize,
) -> Result<Vec<(usize, Arc<Region>)>> {
    let (send, receive) = (socket::send_descriptor, socket::receive_descriptor);
    exchange_by(mesh, memory, bytes, send, receive)
}

/// A peer with which descriptors are exchanged.
struct SharingPeer {
    rank: usize,
    stream: PeerStream,
    is_sent: bool,
    region: Option<Arc<Region>>,
}

/// Returns the error for a peer whose socket failed. A lack of memory or descriptors is this rank's own.
fn lost(peer: &PeerInfo, error: &io::Error) -> Error {
    if let (true, Some(code)) = (socket::is_shortage(error), error.raw_os_error()) {
        let cause = io::Error::from_raw_os_error(code);
        return Error::system(format!("sharing memory with {peer}"), cause);
    }
    Error::new(
        ErrorKind::Remote,
        format!("{peer} went away while shared memory was handed over: {error}"),
    )
}

/// Exchanges descriptors by `send` and `receive`, which tests replace; see [`exchange`].
fn exchange_by(
    mesh: SocketMesh<'_>,
    memory: &OwnedFd,
    bytes: usize,
    send: impl Fn(&OwnedFd, &OwnedFd) -> io::Result<()>,
    receive: impl Fn(&OwnedFd) -> io::Result<OwnedFd>,
) -> Result<Vec<(usize, Arc<Region>)>> {
    let (peers, fault, deadline) = (mesh.peers, mesh.fault, mesh.deadline);
    let sockets = mesh.open()?.into_iter();
    let mut open: Vec<SharingPeer> = sockets
        .map(|(id, stream)| SharingPeer {
            rank: id.peer,
            stream,
            is_sent: false,
            region: None,
        })
        .collect();
    loop {
        let rejected = send_to_all(&mut open, peers, |socket| send(socket, memory))?;
        for peer in open.iter_mut().filter(|peer| peer.region.is_none()) {
            let info = &peers[peer.rank];
            match receive(peer.stream.socket()) {
                Ok(theirs) => {
                    let region = Region::of(&theirs, bytes);
                    peer.region = Some(region.map_err(|error| error.context(info))?);
                }
                Err(error) if is_repeated(&error) => {}
                Err(error) => return Err(lost(info, &error)),
            }
        }
        let mut missing = open.iter().filter(|peer| peer.region.is_none()).peekable();
        let first = missing.peek().map(|peer| peer.rank);
        if first.is_none() && rejected.is_none() {
            break;
        }
        fault.check()?;
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::new(
                ErrorKind::Timeout,
                late(rejected, first.map(|rank| &peers[rank])),
            ));
        }
        let mut interests: Vec<_> = missing
            .map(|peer| socket::interest(peer.stream.socket(), true, false))
            .collect();
        let limit = match rejected {
            Some(_) => RETRY_INTERVAL,
            None => FAULT_POLL_INTERVAL,
        };
        socket::poll(&mut interests, left.min(limit))?;
    }
    let regions = open.into_iter();
    Ok(regions
        .filter_map(|peer| Some((peer.rank, peer.region?)))
        .collect())
}

/// Sends this rank's descriptor to each peer that does not have it. Stops at the first send that the kernel
/// rejects for now, and returns the kernel's reason.
fn send_to_all(
    open: &mut [SharingPeer],
    peers: &[PeerInfo],
    send: impl Fn(&OwnedFd) -> io::Result<()>,
) -> Result<Option<io::Error>> {
    for peer in open.iter_mut().filter(|peer| !peer.is_sent) {
        match send(peer.stream.socket()) {
            Ok(()) => peer.is_sent = true,
            Err(error) if is_temporary(&error) => return Ok(Some(error)),
            Err(error) => return Err(lost(&peers[peer.rank], &error)),
        }
    }
    Ok(None)
}

/// Returns whether a send may succeed later: too many descriptors of this user are in flight.
fn is_temporary(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ETOOMANYREFS) || is_repeated(error)
}

/// Returns whether the call is repeated after the next poll.
fn is_repeated(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

/// Returns the reason of a timeout, as text.
fn late(rejected: Option<io::Error>, missing: Option<&PeerInfo>) -> String {
    match (rejected, missing) {
        (None, Some(peer)) => format!("{peer} has not handed over its shared memory"),
        (rejected, _) => format!(
            "the system takes no more descriptors to hand over shared memory ({}): other programs \
             of this user have some on the way; raise `ulimit -n`, which is {}",
            rejected.map_or(String::new(), |error| error.to_string()),
            socket::descriptor_limit()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Fault;
    use crate::sys::memory::sealed_memfd;
    use crate::sys::socket::Address;
    use std::sync::Mutex;

    const RANKS: usize = 5;
    const BYTES: usize = 4096;

    fn peers() -> Vec<PeerInfo> {
        let peer = |rank| PeerInfo {
            rank,
            pid: 1,
            uid: nix::unistd::getuid().as_raw(),
            host: "here".into(),
            host_id: [1; 16],
            process_id: [1; 16],
            address: [127, 0, 0, 1].into(),
        };
        (0..RANKS).map(peer).collect()
    }

    fn name(rank: usize) -> [u8; 16] {
        let mut name = *b"shared memory of";
        name[0] = rank as u8;
        name[1..5].copy_from_slice(&std::process::id().to_le_bytes());
        name
    }

    /// The simulated kernel rejects a descriptor while another one is in flight.
    #[test]
    fn rejected_descriptor_is_sent_after_others_have_arrived() {
        let (peers, fault) = (peers(), Fault::new());
        let in_flight = Mutex::new((0, 0));
        let send = |socket: &OwnedFd, memory: &OwnedFd| {
            let mut in_flight = in_flight.lock().unwrap();
            if in_flight.0 > 0 {
                in_flight.1 += 1;
                return Err(io::Error::from_raw_os_error(libc::ETOOMANYREFS));
            }
            in_flight.0 += 1;
            socket::send_descriptor(socket, memory)
        };
        let receive = |socket: &OwnedFd| {
            let received = socket::receive_descriptor(socket)?;
            in_flight.lock().unwrap().0 -= 1;
            Ok(received)
        };
        let listeners =
            (0..RANKS).map(|rank| Listener::bind_local(Address::Local(name(rank))).unwrap());
        let listeners: Vec<_> = listeners.collect();
        std::thread::scope(|scope| {
            for (me, listener) in listeners.into_iter().enumerate() {
                let others = (0..RANKS).filter(|&rank| rank != me);
                let mesh = SocketMesh {
                    purpose: PURPOSE,
                    key: [5; 32],
                    encrypts: false,
                    me,
                    peers: &peers,
                    listener,
                    addresses: others
                        .map(|rank| (rank, Address::Local(name(rank))))
                        .collect(),
                    nearer: Vec::new(),
                    channels: 1,
                    sockets: 1,
                    fault: &fault,
                    deadline: Instant::now() + Duration::from_secs(60),
                };
                scope.spawn(move || {
                    let memory = sealed_memfd(BYTES).unwrap();
                    let found = exchange_by(mesh, &memory, BYTES, send, receive).unwrap();
                    let mut ranks: Vec<usize> = found.iter().map(|(rank, _)| *rank).collect();
                    ranks.sort_unstable();
                    let others: Vec<usize> = (0..RANKS).filter(|&rank| rank != me).collect();
                    assert_eq!(ranks, others);
                });
            }
        });
        let (left, refusals) = *in_flight.lock().unwrap();
        assert_eq!(left, 0);
        assert!(refusals > 0, "nothing was refused");
    }
}
