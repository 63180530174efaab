//! Processes of one host: a rank's region is a sealed memfd, handed to the others over a UNIX
//! socket after both sides have proven that they belong to the communicator.
//!
//! Nothing has a name in a file system. The sockets' abstract name is random, goes with the
//! listener, and is worth nothing without the key; the process at the other end must run as the
//! same user.

use super::mesh::SocketMesh;
use crate::bootstrap::PeerInfo;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::Region;
use crate::sys::socket::{self, Socket};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What the sockets are for, in messages and in the key.
pub(super) const PURPOSE: &str = "shm";

/// How often the fault is looked at while nothing happens.
const GLANCE: Duration = Duration::from_millis(20);

/// From one try to send to the next, where the system takes no more descriptors for now. Nothing
/// tells when it does again.
const RETRY: Duration = Duration::from_millis(1);

/// Gives `memory` to the peers of `mesh`, and returns the region of each, by rank.
///
/// Linux takes no more descriptors on the way between processes of a user than a process may
/// hold, whoever sends them. n ranks have n(n-1) to send, so what is refused waits until others
/// have received theirs, and this rank goes on receiving meanwhile, as all do.
///
/// # Errors
/// As for [`SocketMesh::open`]; remote, naming the peer, if it goes away; mismatch if its memory does
/// not have `bytes` bytes for good.
pub(crate) fn exchange(
    mesh: SocketMesh<'_>,
    memory: OwnedFd,
    bytes: usize,
) -> Result<Vec<(usize, Arc<Region>)>> {
    let (send, receive) = (socket::send_descriptor, socket::receive_descriptor);
    exchange_by(mesh, memory, bytes, send, receive)
}

/// One peer on the way.
struct SharingPeer {
    rank: usize,
    socket: Socket,
    told: bool,
    region: Option<Arc<Region>>,
}

/// As [`exchange`], by these functions.
fn exchange_by(
    mesh: SocketMesh<'_>,
    memory: OwnedFd,
    bytes: usize,
    send: impl Fn(&OwnedFd, &OwnedFd) -> io::Result<()>,
    receive: impl Fn(&OwnedFd) -> io::Result<OwnedFd>,
) -> Result<Vec<(usize, Arc<Region>)>> {
    let (peers, fault, deadline) = (mesh.peers, mesh.fault, mesh.deadline);
    let sockets = mesh.open()?.into_iter();
    let mut open: Vec<SharingPeer> = sockets
        .map(|(id, socket)| SharingPeer {
            rank: id.peer,
            socket,
            told: false,
            region: None,
        })
        .collect();
    let lost = |rank: usize, error: io::Error| {
        let peer = &peers[rank];
        Error::new(
            ErrorKind::Remote,
            format!("{peer} went away while shared memory was handed over: {error}"),
        )
    };
    loop {
        let mut refused = None;
        for peer in open.iter_mut().filter(|peer| !peer.told) {
            match send(&peer.socket, &memory) {
                Ok(()) => peer.told = true,
                Err(error) if takes_none_now(&error) => {
                    refused = Some(error);
                    break;
                }
                Err(error) => return Err(lost(peer.rank, error)),
            }
        }
        for peer in open.iter_mut().filter(|peer| peer.region.is_none()) {
            match receive(&peer.socket) {
                Ok(theirs) => {
                    let region = Region::of(&theirs, bytes);
                    peer.region = Some(region.map_err(|error| error.context(&peers[peer.rank]))?);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(lost(peer.rank, error)),
            }
        }
        let mut missing = open.iter().filter(|peer| peer.region.is_none()).peekable();
        let first = missing.peek().map(|peer| peer.rank);
        if first.is_none() && refused.is_none() {
            break;
        }
        fault.check()?;
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::new(
                ErrorKind::Timeout,
                late(refused, first.map(|rank| &peers[rank])),
            ));
        }
        let mut interests: Vec<_> = missing
            .map(|peer| socket::interest(&peer.socket, true, false))
            .collect();
        let limit = if refused.is_some() { RETRY } else { GLANCE };
        socket::poll(&mut interests, left.min(limit))?;
    }
    let regions = open.into_iter();
    Ok(regions
        .filter_map(|peer| Some((peer.rank, peer.region?)))
        .collect())
}

/// Whether a send may work later: too many descriptors of this user are on the way.
fn takes_none_now(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ETOOMANYREFS) || error.kind() == io::ErrorKind::WouldBlock
}

/// What was waited for in vain.
fn late(refused: Option<io::Error>, missing: Option<&PeerInfo>) -> String {
    match (refused, missing) {
        (None, Some(peer)) => format!("{peer} has not handed over its shared memory"),
        (refused, _) => format!(
            "the system takes no more descriptors to hand over shared memory ({}): other programs \
             of this user have some on the way; raise `ulimit -n`, which is {}",
            refused.map_or(String::new(), |error| error.to_string()),
            socket::descriptor_limit()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::auth::Listener;
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

    /// Linux refuses a descriptor while too many are on the way, and says when by nothing: here
    /// while there is one.
    #[test]
    fn descriptors_that_are_refused_wait_until_others_have_arrived() {
        let (peers, fault) = (peers(), Fault::new());
        let on_the_way = Mutex::new((0, 0));
        let send = |socket: &OwnedFd, memory: &OwnedFd| {
            let mut on_the_way = on_the_way.lock().unwrap();
            if on_the_way.0 > 0 {
                on_the_way.1 += 1;
                return Err(io::Error::from_raw_os_error(libc::ETOOMANYREFS));
            }
            on_the_way.0 += 1;
            socket::send_descriptor(socket, memory)
        };
        let receive = |socket: &OwnedFd| {
            let received = socket::receive_descriptor(socket)?;
            on_the_way.lock().unwrap().0 -= 1;
            Ok(received)
        };
        let listeners = (0..RANKS).map(|rank| Listener::bind_local(name(rank)).unwrap());
        let listeners: Vec<_> = listeners.collect();
        std::thread::scope(|scope| {
            for (me, listener) in listeners.into_iter().enumerate() {
                let others = (0..RANKS).filter(|&rank| rank != me);
                let mesh = SocketMesh {
                    purpose: PURPOSE,
                    key: [5; 32],
                    me,
                    peers: &peers,
                    listener,
                    addresses: others
                        .map(|rank| (rank, Address::Local(name(rank))))
                        .collect(),
                    channels: 1,
                    sockets: 1,
                    fault: &fault,
                    deadline: Instant::now() + Duration::from_secs(60),
                };
                scope.spawn(move || {
                    let memory = sealed_memfd(BYTES).unwrap();
                    let found = exchange_by(mesh, memory, BYTES, send, receive).unwrap();
                    let mut ranks: Vec<usize> = found.iter().map(|(rank, _)| *rank).collect();
                    ranks.sort_unstable();
                    let others: Vec<usize> = (0..RANKS).filter(|&rank| rank != me).collect();
                    assert_eq!(ranks, others);
                });
            }
        });
        let (left, refusals) = *on_the_way.lock().unwrap();
        assert_eq!(left, 0);
        assert!(refusals > 0, "nothing was refused");
    }
}
