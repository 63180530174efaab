//! Accepting: many strangers at once, none of whom can hold up the others.

use super::*;
use crate::sync::Fault;
use std::collections::VecDeque;
use std::io::{ErrorKind as Io, Read, Write};
use std::net::{IpAddr, TcpListener};
use std::os::fd::AsFd;
use std::time::Instant;

/// How long a stranger may take to prove itself.
const PROOF_TIME: Duration = Duration::from_secs(2);
/// How long a socket is left alone that cannot accept for want of descriptors or memory: a poll of it
/// would not wait.
const REST: Duration = Duration::from_millis(20);
/// How long that is tried before it is an error.
const SHORTAGE: Duration = Duration::from_secs(3);
/// How often a wait looks at its fault.
const GLANCE: Duration = Duration::from_millis(50);

/// Listens, and hands out connections whose other side has proven that it knows the key.
///
/// Strangers cost at most 128 bytes, two seconds and one of `2 x ranks + 64` places each; the
/// oldest that has said nothing of use gives its place to the newest.
#[derive(Debug)]
pub struct Listener {
    sockets: Vec<CloseOnFork<TcpListener>>,
    pub(super) waiting: VecDeque<PendingPeer>,
    places: usize,
    proven: VecDeque<Result<Peer>>,
    shortage: Option<Shortage>,
}

/// Why connections that wait in the kernel are not accepted.
#[derive(Debug)]
struct Shortage {
    since: Instant,
    /// When to try again.
    next: Instant,
}

impl Listener {
    /// Listens on a free port of `ip`.
    ///
    /// # Errors
    /// System, with the address.
    pub fn bind(ip: IpAddr) -> Result<(Listener, SocketAddr)> {
        Listener::bind_to(SocketAddr::new(ip, 0))
    }

    /// Listens on this very address.
    ///
    /// # Errors
    /// System, with the address.
    pub fn bind_to(address: SocketAddr) -> Result<(Listener, SocketAddr)> {
        let (socket, bound) = listen(address).map_err(|cause| cannot_listen(address, cause))?;
        Ok((Listener::of(vec![socket]), bound))
    }

    /// Listens on those of `addresses` that are this host's. Returns these, as they are bound.
    ///
    /// # Errors
    /// System, with the address, if none is or one cannot be listened on.
    pub(in crate::bootstrap) fn bind_to_own(
        addresses: &[SocketAddr],
    ) -> Result<(Listener, Vec<SocketAddr>)> {
        let mut found = Vec::new();
        let mut foreign = None;
        for &address in addresses {
            match listen(address) {
                Ok(socket) => found.push(socket),
                // Not this host's, or of a family that it does not have, or of a link that is not named.
                Err(cause)
                    if matches!(
                        cause.raw_os_error(),
                        Some(
                            nix::libc::EADDRNOTAVAIL | nix::libc::EAFNOSUPPORT | nix::libc::EINVAL
                        )
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
        Ok((Listener::of(sockets), bound))
    }

    fn of(sockets: Vec<CloseOnFork<TcpListener>>) -> Listener {
        Listener {
            sockets,
            waiting: VecDeque::new(),
            places: 64,
            proven: VecDeque::new(),
            shortage: None,
        }
    }

    /// Another one at the same address, for one meeting of several that take turns there.
    ///
    /// # Errors
    /// System if there are no descriptors left.
    pub(in crate::bootstrap) fn again(&self) -> Result<Listener> {
        let sockets = self.sockets.iter();
        let sockets = sockets.map(|socket| CloseOnFork::open(|| socket.try_clone()));
        let sockets = sockets
            .collect::<std::io::Result<_>>()
            .map_err(|cause| Error::system("a socket that listens cannot be shared", cause))?;
        Ok(Listener {
            places: self.places,
            ..Listener::of(sockets)
        })
    }

    /// Keeps places for this many ranks beside the strangers.
    pub fn expect_ranks(&mut self, ranks: usize) {
        self.places = 2 * ranks + 64;
    }

    /// The next connection whose other side proved that it knows `key`. Strangers who do not
    /// are dropped without a word.
    ///
    /// # Errors
    /// Mismatch if a rank with the key runs another version of the library; timeout at
    /// `deadline`; the fault's reason once it is raised.
    pub fn accept(
        &mut self,
        key: &[u8; 32],
        me: PeerIdentity,
        deadline: Instant,
        fault: &Fault,
    ) -> Result<Peer> {
        self.accept_until(&HandshakeConfig::new(key, me), deadline, fault)?
            .ok_or_else(|| {
                Error::new(
                    ErrorKind::Timeout,
                    format!("rank {} waited in vain for a connection", me.rank),
                )
            })
    }

    /// As [`Listener::accept`]; `None` at the deadline.
    pub(in crate::bootstrap) fn accept_until(
        &mut self,
        terms: &HandshakeConfig,
        deadline: Instant,
        fault: &Fault,
    ) -> Result<Option<Peer>> {
        loop {
            if let Some(peer) = self.proven.pop_front() {
                return peer.map(Some);
            }
            fault.check()?;
            let now = Instant::now();
            if now >= deadline {
                return Ok(None);
            }
            let limit = self.patience(now).min(GLANCE).min(deadline - now);
            let ready: Vec<bool> = {
                let mut fds: Vec<PollFd<'_>> = self.descriptors().collect();
                poll_for(&mut fds, limit);
                fds.iter().map(|fd| fd.any().unwrap_or(true)).collect()
            };
            self.serve(terms, &ready)?;
        }
    }

    /// What to poll: the sockets, then every stranger. For [`Listener::serve`].
    pub(in crate::bootstrap) fn descriptors(&self) -> impl Iterator<Item = PollFd<'_>> {
        let strangers = self.waiting.iter().map(|stranger| stranger.stream.as_fd());
        let strangers = strangers.map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        let awaited = match self.rest(Instant::now()) {
            Some(_) => PollFlags::empty(),
            None => PollFlags::POLLIN,
        };
        let sockets = self.sockets.iter().map(|socket| socket.as_fd());
        let sockets = sockets.map(move |fd| PollFd::new(fd, awaited));
        sockets.chain(strangers)
    }

    /// How long the sockets are left alone.
    fn rest(&self, now: Instant) -> Option<Duration> {
        let next = self.shortage.as_ref()?.next;
        (now < next).then(|| next - now)
    }

    /// How long a poll may sleep before a stranger's time is up, or a socket is tried again.
    pub(in crate::bootstrap) fn patience(&self, now: Instant) -> Duration {
        let patience = self.waiting.front().map_or(PROOF_TIME, |oldest| {
            oldest.until.saturating_duration_since(now)
        });
        self.rest(now).map_or(patience, |rest| rest.min(patience))
    }

    /// The next proven connection, if [`Listener::serve`] found one.
    pub(in crate::bootstrap) fn next(&mut self) -> Option<Result<Peer>> {
        self.proven.pop_front()
    }

    /// Moves along whatever `ready` says, in the order of [`Listener::descriptors`].
    ///
    /// # Errors
    /// System if a socket itself fails.
    pub(in crate::bootstrap) fn serve(
        &mut self,
        terms: &HandshakeConfig,
        ready: &[bool],
    ) -> Result<()> {
        let now = Instant::now();
        let (sockets, strangers) = ready.split_at(self.sockets.len().min(ready.len()));
        let mut kept = VecDeque::with_capacity(self.waiting.len());
        for (at, mut stranger) in std::mem::take(&mut self.waiting).into_iter().enumerate() {
            let step = if strangers.get(at).is_some_and(|ready| *ready) {
                stranger.advance(terms)
            } else {
                Step::Waits
            };
            match step {
                Step::Waits if now < stranger.until => kept.push_back(stranger),
                Step::Waits | Step::Refused => {}
                Step::Proven(hello, session) => {
                    self.proven
                        .push_back(stranger.settle(terms, hello, session));
                }
            }
        }
        self.waiting = kept;
        if self.rest(now).is_none() {
            for (at, _) in sockets.iter().enumerate().filter(|(_, ready)| **ready) {
                self.welcome(at, terms, now)?;
            }
        }
        Ok(())
    }

    /// Accepts what has queued up at a socket, a bounded number at a time.
    fn welcome(&mut self, at: usize, terms: &HandshakeConfig, now: Instant) -> Result<()> {
        for _ in 0..64 {
            let mut from = None;
            let accepted = CloseOnFork::open(|| -> std::io::Result<TcpStream> {
                let (stream, address) = self.sockets[at].accept()?;
                from = Some(address);
                Ok(stream)
            });
            let (stream, address) = match accepted.map(|stream| from.map(|from| (stream, from))) {
                Ok(Some(pair)) => pair,
                Ok(None) => continue,
                Err(error) => match error.raw_os_error() {
                    _ if error.kind() == Io::WouldBlock => {
                        self.shortage = None;
                        return Ok(());
                    }
                    // Out of descriptors: the oldest stranger has to go, or poll would spin.
                    Some(nix::libc::EMFILE | nix::libc::ENFILE) if !self.waiting.is_empty() => {
                        self.waiting.pop_front();
                        continue;
                    }
                    Some(
                        nix::libc::EMFILE
                        | nix::libc::ENFILE
                        | nix::libc::ENOBUFS
                        | nix::libc::ENOMEM,
                    ) => return self.fall_short(now, error),
                    Some(nix::libc::EBADF | nix::libc::EINVAL) => {
                        return Err(Error::system("cannot accept connections of ranks", error));
                    }
                    // The stranger is gone already, or a signal came.
                    _ => continue,
                },
            };
            self.shortage = None;
            if stream.set_nonblocking(true).is_err() || stream.set_nodelay(true).is_err() {
                continue;
            }
            if self.waiting.len() >= self.places {
                // Whoever knows the fingerprint is most likely a rank about to prove itself.
                let silent = self.waiting.iter().position(|one| one.heard.is_none());
                self.waiting.remove(silent.unwrap_or(0));
            }
            let mut stranger = PendingPeer {
                stream,
                address,
                until: now + PROOF_TIME,
                input: [0; HELLO_BYTES + PROOF_BYTES],
                filled: 0,
                heard: None,
            };
            // The hello is often there already.
            match stranger.advance(terms) {
                Step::Waits => self.waiting.push_back(stranger),
                Step::Refused => {}
                Step::Proven(hello, session) => {
                    self.proven
                        .push_back(stranger.settle(terms, hello, session));
                }
            }
        }
        Ok(())
    }

    /// A connection could not be accepted: it stays where it is, for what is lacking may be given back
    /// soon.
    fn fall_short(&mut self, now: Instant, cause: std::io::Error) -> Result<()> {
        // Another one, if nobody has tried for a while.
        let known = self.shortage.as_ref();
        let since = match known.filter(|known| now < known.next + 10 * REST) {
            Some(known) => known.since,
            None => now,
        };
        let next = Instant::now() + REST;
        self.shortage = Some(Shortage { since, next });
        if now.duration_since(since) < SHORTAGE {
            return Ok(());
        }
        let tried = format!(
            "cannot accept connections of ranks, and tried for {:.1} s",
            now.duration_since(since).as_secs_f64()
        );
        Err(Error::system(tried, cause))
    }
}

/// A socket that listens on `address`, and where that is.
fn listen(address: SocketAddr) -> std::io::Result<(CloseOnFork<TcpListener>, SocketAddr)> {
    let socket = CloseOnFork::open(|| TcpListener::bind(address))?;
    // The standard library's backlog of 128 is too short for a thousand ranks that come at once: a
    // dropped SYN costs a second.
    nix::sys::socket::listen(&socket, nix::sys::socket::Backlog::MAXCONN)?;
    socket.set_nonblocking(true)?;
    let bound = socket.local_addr()?;
    Ok((socket, bound))
}

fn cannot_listen(address: SocketAddr, cause: std::io::Error) -> Error {
    Error::system(format!("cannot listen for ranks at {address}"), cause)
}

/// A connection before its proof.
pub(super) struct PendingPeer {
    stream: CloseOnFork<TcpStream>,
    address: SocketAddr,
    until: Instant,
    input: [u8; HELLO_BYTES + PROOF_BYTES],
    filled: usize,
    heard: Option<(Hello, Transcript)>,
}

enum Step {
    Waits,
    Refused,
    Proven(Hello, Key),
}

impl PendingPeer {
    fn advance(&mut self, terms: &HandshakeConfig) -> Step {
        loop {
            let goal = match self.heard {
                None => HELLO_BYTES,
                Some(_) => HELLO_BYTES + PROOF_BYTES,
            };
            while self.filled < goal {
                match self.stream.read(&mut self.input[self.filled..goal]) {
                    Ok(0) => return Step::Refused,
                    Ok(count) => self.filled += count,
                    Err(error) if error.kind() == Io::WouldBlock => return Step::Waits,
                    Err(error) if error.kind() == Io::Interrupted => {}
                    Err(_) => return Step::Refused,
                }
            }
            match self.heard.take() {
                None => match self.answer(terms) {
                    Some(heard) => self.heard = Some(heard),
                    None => return Step::Refused,
                },
                Some((hello, transcript)) => {
                    let proof = &self.input[HELLO_BYTES..];
                    return if terms.proves(Side::Connector, &transcript, proof)
                        && matches!((&*self.stream).write(&[WELCOME]), Ok(1))
                    {
                        Step::Proven(hello, terms.session(&transcript))
                    } else {
                        Step::Refused
                    };
                }
            }
        }
    }

    /// Our hello and proof, once theirs looks right. A fresh socket has room for both.
    fn answer(&mut self, terms: &HandshakeConfig) -> Option<(Hello, Transcript)> {
        let connector = *self.input.first_chunk()?;
        let hello = parse_hello(&connector, terms, Side::Connector).ok()?;
        let acceptor = terms.hello(Side::Acceptor).ok()?;
        let transcript = Transcript {
            connector,
            acceptor,
        };
        let mut message = [0; HELLO_BYTES + PROOF_BYTES];
        message[..HELLO_BYTES].copy_from_slice(&acceptor);
        message[HELLO_BYTES..].copy_from_slice(&terms.proof(Side::Acceptor, &transcript));
        let sent = (&*self.stream).write(&message).ok()?;
        (sent == message.len()).then_some((hello, transcript))
    }

    fn settle(self, terms: &HandshakeConfig, hello: Hello, session: Key) -> Result<Peer> {
        terms.check_version(&hello, self.address)?;
        self.stream
            .set_nonblocking(false)
            .map_err(|cause| Error::system("cannot configure a connection", cause))?;
        Ok(Peer {
            stream: self.stream,
            address: self.address,
            rank: hello.rank,
            word: hello.word,
            session,
            connector: false,
        })
    }
}

impl std::fmt::Debug for PendingPeer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PendingPeer({})", self.address)
    }
}
