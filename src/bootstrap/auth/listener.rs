//! Accepted connections: any number of pending handshakes at once, none of which delays another.

use super::handshake::HandshakeProgress;
use super::*;
use crate::sync::Fault;
use crate::sys::socket::{self, SocketFile};
use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::time::Instant;

/// Longest time from accepting a connection to its proof.
const PROOF_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause after accepting failed because descriptors or memory are short. The socket stays readable
/// meanwhile, so polling it would spin.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// Longest time without descriptors or memory before accepting fails.
const SHORTAGE_TIMEOUT: Duration = Duration::from_secs(3);
/// Largest number of connections that one socket accepts before pending connections are served.
const ACCEPTS_PER_TURN: usize = 64;

/// Listens on TCP or UNIX sockets, and returns connections whose other end knows the key.
///
/// An unauthenticated connection costs at most 128 bytes, [`PROOF_TIMEOUT`] and one of
/// `2 x ranks + 64` places. A new connection displaces the oldest one without a valid hello. The
/// other end of a UNIX socket must also run as the same user.
#[derive(Debug)]
pub(crate) struct Listener {
    sockets: Vec<Socket>,
    /// File of the socket, if it has one.
    _file: Option<SocketFile>,
    pub(super) pending: VecDeque<PendingPeer>,
    places: usize,
    authenticated: VecDeque<Result<Peer>>,
    shortage: Option<Shortage>,
}

/// A shortage of descriptors or memory, during which connections stay in the kernel's queue.
#[derive(Debug)]
struct Shortage {
    since: Instant,
    next_attempt: Instant,
}

impl Listener {
    /// Listens on a free port of `ip`.
    ///
    /// # Errors
    /// System, with the address.
    pub(crate) fn bind(ip: IpAddr) -> Result<(Listener, SocketAddr)> {
        let address = SocketAddr::new(ip, 0);
        let (socket, bound) = listen(address).map_err(|cause| cannot_listen(address, cause))?;
        Ok((Listener::with(vec![socket]), bound))
    }

    /// Listens on a free port of `ip` as well; `None` if no socket can listen there.
    pub(crate) fn add(&mut self, ip: IpAddr) -> Option<SocketAddr> {
        let (socket, bound) = listen(SocketAddr::new(ip, 0)).ok()?;
        self.sockets.push(socket);
        Some(bound)
    }

    /// Listens on a UNIX socket, for processes of this host and user. A socket file is removed with the listener.
    ///
    /// # Errors
    /// System.
    pub(crate) fn bind_local(address: Address) -> Result<Listener> {
        let socket = socket::listen(&address)
            .map_err(|cause| Error::system("cannot listen on a local socket", cause))?;
        Ok(Listener {
            _file: SocketFile::of(&address),
            ..Listener::with(vec![socket])
        })
    }

    /// Listens on those of `addresses` that belong to this host, and returns them as bound.
    ///
    /// # Errors
    /// System, with the address, if none belongs to this host or one is taken.
    pub(in crate::bootstrap) fn bind_to_own(
        addresses: &[SocketAddr],
    ) -> Result<(Listener, Vec<SocketAddr>)> {
        use nix::libc::{EADDRNOTAVAIL, EAFNOSUPPORT, EINVAL};
        let mut found = Vec::new();
        let mut foreign = None;
        for &address in addresses {
            match listen(address) {
                Ok(socket) => found.push(socket),
                // The address is another host's, its family has no support, or its link has no scope.
                Err(cause)
                    if matches!(
                        cause.raw_os_error(),
                        Some(EADDRNOTAVAIL | EAFNOSUPPORT | EINVAL)
                    ) =>
                {
                    foreign.get_or_insert(cannot_listen(address, cause));
                }
                Err(cause) => return Err(cannot_listen(address, cause)),
            }
        }
        if found.is_empty() {
            let none = || Error::internal("no address to listen on");
            return Err(foreign.unwrap_or_else(none));
        }
        let (sockets, bound) = found.into_iter().unzip();
        Ok((Listener::with(sockets), bound))
    }

    fn with(sockets: Vec<Socket>) -> Listener {
        Listener {
            sockets,
            _file: None,
            pending: VecDeque::new(),
            places: 64,
            authenticated: VecDeque::new(),
            shortage: None,
        }
    }

    /// Duplicates the sockets, for one of several rendezvous at this address.
    ///
    /// # Errors
    /// System if there are no descriptors left.
    pub(in crate::bootstrap) fn duplicate(&self) -> Result<Listener> {
        let sockets = self.sockets.iter();
        let sockets = sockets.map(|socket| Socket::open(|| socket.try_clone()));
        let sockets = sockets
            .collect::<io::Result<_>>()
            .map_err(|cause| Error::system("a socket that listens cannot be shared", cause))?;
        Ok(Listener {
            places: self.places,
            ..Listener::with(sockets)
        })
    }

    /// Returns the descriptors on which connections arrive.
    pub(in crate::bootstrap) fn socket_descriptors(&self) -> impl Iterator<Item = PollFd<'_>> {
        let sockets = self.sockets.iter();
        sockets.map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLIN))
    }

    /// Closes a bounded number of connections that have arrived.
    ///
    /// # Errors
    /// The system's errors, such as a lack of descriptors.
    pub(in crate::bootstrap) fn drop_arrivals(&self) -> io::Result<()> {
        for socket in &self.sockets {
            for _ in 0..ACCEPTS_PER_TURN {
                if socket::accept(socket)?.is_none() {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Reserves places for this many connections of ranks, in addition to the places for
    /// unauthenticated connections.
    pub(crate) fn expect_connections(&mut self, connections: usize) {
        self.places = 2 * connections + 64;
    }

    /// Waits for the next authenticated connection; `None` at the deadline. Drops connections that
    /// fail the handshake without an answer.
    ///
    /// # Errors
    /// Mismatch if a rank with the key runs another version of the library; the fault's reason once
    /// it is raised; system if the sockets fail.
    pub(in crate::bootstrap) fn accept_until(
        &mut self,
        config: &HandshakeConfig,
        deadline: Instant,
        fault: &Fault,
    ) -> Result<Option<Peer>> {
        loop {
            if let Some(peer) = self.authenticated.pop_front() {
                return peer.map(Some);
            }
            fault.check()?;
            let now = Instant::now();
            if now >= deadline {
                return Ok(None);
            }
            let limit = self.poll_limit(now);
            let limit = limit.min(FAULT_POLL_INTERVAL).min(deadline - now);
            let ready: Vec<bool> = {
                let mut fds: Vec<PollFd<'_>> = self.descriptors().collect();
                poll_for(&mut fds, limit);
                fds.iter().map(|fd| fd.any().unwrap_or(true)).collect()
            };
            self.serve(config, &ready)?;
        }
    }

    /// Returns the descriptors to poll for [`Listener::serve`]: sockets, then pending connections.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = PollFd<'_>> {
        let pending = self
            .pending
            .iter()
            .map(|peer| PollFd::new(peer.socket.as_fd(), peer.handshake.events()));
        let awaited = match self.shortage_left(Instant::now()) {
            Some(_) => PollFlags::empty(),
            None => PollFlags::POLLIN,
        };
        let sockets = self.sockets.iter().map(|socket| socket.as_fd());
        let sockets = sockets.map(move |fd| PollFd::new(fd, awaited));
        sockets.chain(pending)
    }

    /// Returns the time until the next attempt to accept, or `None` if accepting is allowed.
    fn shortage_left(&self, now: Instant) -> Option<Duration> {
        let next = self.shortage.as_ref()?.next_attempt;
        (now < next).then(|| next - now)
    }

    /// Returns how long a poll may wait before a pending connection expires or accepting is retried.
    pub(crate) fn poll_limit(&self, now: Instant) -> Duration {
        let limit = self.pending.front().map_or(PROOF_TIMEOUT, |oldest| {
            oldest.deadline.saturating_duration_since(now)
        });
        self.shortage_left(now)
            .map_or(limit, |left| left.min(limit))
    }

    /// Returns the next connection that [`Listener::serve`] has authenticated.
    pub(crate) fn next(&mut self) -> Option<Result<Peer>> {
        self.authenticated.pop_front()
    }

    /// Advances the descriptors that `ready` marks, in the order of [`Listener::descriptors`], and accepts.
    ///
    /// # Errors
    /// System if a socket fails, or if descriptors or memory lack for [`SHORTAGE_TIMEOUT`].
    pub(crate) fn serve(&mut self, config: &HandshakeConfig, ready: &[bool]) -> Result<()> {
        let now = Instant::now();
        let (sockets, pending) = ready.split_at(self.sockets.len().min(ready.len()));
        // Bytes that have arrived are read before a late connection is dropped, because this thread
        // rather than the peer may be late.
        for (at, peer) in std::mem::take(&mut self.pending).into_iter().enumerate() {
            match pending.get(at).is_some_and(|ready| *ready) {
                true => self.advance(peer, config, now),
                false if now < peer.deadline => self.pending.push_back(peer),
                false => {}
            }
        }
        if self.shortage_left(now).is_none() {
            for (at, _) in sockets.iter().enumerate().filter(|(_, ready)| **ready) {
                self.accept(at, config, now)?;
            }
        }
        Ok(())
    }

    /// Advances one pending connection, and keeps it unless it fails or is too late.
    fn advance(&mut self, mut peer: PendingPeer, config: &HandshakeConfig, now: Instant) {
        match peer.handshake.advance(config, &peer.socket) {
            Ok(HandshakeProgress::Done) => {
                let peer = peer.handshake.into_peer(config, peer.socket, peer.address);
                self.authenticated.push_back(peer);
            }
            Ok(HandshakeProgress::Pending { .. }) if now < peer.deadline => {
                if self.pending.len() >= self.places {
                    self.displace();
                }
                self.pending.push_back(peer);
            }
            _ => {}
        }
    }

    /// Accepts a bounded number of connections, so that a flood cannot starve pending connections.
    fn accept(&mut self, at: usize, config: &HandshakeConfig, now: Instant) -> Result<()> {
        for _ in 0..ACCEPTS_PER_TURN {
            let socket = match socket::accept(&self.sockets[at]) {
                Ok(Some(socket)) => socket,
                Ok(None) => {
                    self.shortage = None;
                    return Ok(());
                }
                Err(error) if is_out_of_descriptors(&error) && !self.pending.is_empty() => {
                    self.displace();
                    continue;
                }
                Err(error) if socket::is_shortage(&error) => {
                    return self.record_shortage(now, error);
                }
                Err(error) if is_unusable(&error) => {
                    return Err(Error::system("cannot accept connections of ranks", error));
                }
                // A firewall refused this connection; others may come.
                Err(_) => continue,
            };
            self.shortage = None;
            let Some(address) = check_user(&socket) else {
                continue;
            };
            let peer = PendingPeer {
                socket,
                address,
                deadline: now + PROOF_TIMEOUT,
                handshake: Handshake::acceptor(address),
            };
            // The hello has often arrived already.
            self.advance(peer, config, now);
        }
        Ok(())
    }

    /// Drops the oldest connection without a valid hello, or else the oldest one. A rank sends its
    /// hello at once, and connects again if it is displaced.
    fn displace(&mut self) {
        let silent = |peer: &PendingPeer| !peer.handshake.has_hello();
        let oldest = self.pending.iter().position(silent);
        self.pending.remove(oldest.unwrap_or(0));
    }

    /// Records a shortage and keeps connections in the kernel's queue. Fails if the shortage has
    /// lasted for [`SHORTAGE_TIMEOUT`].
    fn record_shortage(&mut self, now: Instant, cause: io::Error) -> Result<()> {
        // A failure long after the last attempt begins a new shortage.
        let known = self.shortage.as_ref();
        let known = known.filter(|known| now < known.next_attempt + 10 * ACCEPT_RETRY_INTERVAL);
        let since = known.map_or(now, |known| known.since);
        let next_attempt = Instant::now() + ACCEPT_RETRY_INTERVAL;
        self.shortage = Some(Shortage {
            since,
            next_attempt,
        });
        if now.duration_since(since) < SHORTAGE_TIMEOUT {
            return Ok(());
        }
        let tried = format!(
            "cannot accept connections of ranks, after attempts for {:.1} s",
            now.duration_since(since).as_secs_f64()
        );
        Err(Error::system(tried, cause))
    }
}

/// Prepares an accepted socket and returns the address of its other end; `None` for another user's
/// process, or if the connection has ended.
fn check_user(socket: &Socket) -> Option<Address> {
    let address = socket::peer_address(socket).ok()?;
    let trusted = match address {
        Address::Local(_) | Address::Shared(_) => {
            let user = nix::unistd::geteuid().as_raw();
            socket::peer_uid(socket).is_ok_and(|found| found == user)
        }
        Address::Tcp(_) => socket::no_delay(socket).is_ok(),
    };
    trusted.then_some(address)
}

fn is_out_of_descriptors(error: &io::Error) -> bool {
    use nix::libc::{EMFILE, ENFILE};
    matches!(error.raw_os_error(), Some(EMFILE | ENFILE))
}

fn is_unusable(error: &io::Error) -> bool {
    use nix::libc::{EBADF, EINVAL};
    matches!(error.raw_os_error(), Some(EBADF | EINVAL))
}

/// Listens on `address`, and returns the address as bound.
fn listen(address: SocketAddr) -> io::Result<(Socket, SocketAddr)> {
    let socket = socket::listen(&Address::Tcp(address))?;
    let bound = socket::local_address(&socket)?;
    Ok((socket, bound))
}

fn cannot_listen(address: SocketAddr, cause: io::Error) -> Error {
    Error::system(format!("cannot listen for ranks at {address}"), cause)
}

/// An accepted connection before its proof.
pub(super) struct PendingPeer {
    socket: Socket,
    address: Address,
    deadline: Instant,
    handshake: Handshake,
}

impl std::fmt::Debug for PendingPeer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PendingPeer({})", self.address)
    }
}
