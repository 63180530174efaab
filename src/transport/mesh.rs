//! Opens all sockets of a rank at once: connects to some peers while others connect to it.
//!
//! One thread, one poll: no rank waits for one peer while another waits for it, and a stranger
//! who connects and falls silent holds up nobody.

use super::handshake::{Handshake, Progress};
use crate::bootstrap::PeerInfo;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Fault;
use crate::sys::socket::{self, Address, Socket};
use std::collections::HashMap;
use std::io;
use std::time::{Duration, Instant};

/// How long one who connects may take to prove itself.
const PROOF_LIMIT: Duration = Duration::from_secs(2);

/// How often the fault is looked at while nothing happens.
const GLANCE: Duration = Duration::from_millis(20);

/// One socket of this rank, by what it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Link {
    /// Rank at the other end.
    pub peer: usize,
    /// Channel.
    pub channel: usize,
    /// Which of the channel's sockets.
    pub socket: usize,
}

/// The sockets to open.
pub(crate) struct Mesh<'a> {
    /// What they are for, in messages.
    pub purpose: &'static str,
    /// Only ranks of the communicator know it.
    pub key: [u8; 32],
    /// This rank.
    pub me: usize,
    /// All ranks.
    pub peers: &'a [PeerInfo],
    /// Where others connect to.
    pub listener: Socket,
    /// Whether the other ends are on this host and must run as our user.
    pub local: bool,
    /// Sockets that others open.
    pub accepts: Vec<Link>,
    /// Sockets that this rank opens.
    pub connects: Vec<(Link, Address)>,
    /// Watched while waiting.
    pub fault: &'a Fault,
    /// Give up after this.
    pub deadline: Instant,
}

/// A connection on its way.
struct Attempt<'a> {
    socket: Option<Socket>,
    handshake: Handshake<'a>,
    write: bool,
    /// Accepted: when it is dropped. Connected: when it may be tried again.
    time: Instant,
    tries: u32,
    last: Option<io::Error>,
}

/// What became of one who connected.
enum Heard {
    Waits,
    /// A rank, for this link.
    Proven(Link),
    /// Dropped without a word.
    Stranger,
}

impl Mesh<'_> {
    /// Opens them all, then closes the listener.
    ///
    /// # Errors
    /// Timeout, naming the ranks that are missing and why; the fault's reason; system if
    /// descriptors run out, with the limit.
    pub fn open(self) -> Result<HashMap<Link, Socket>> {
        let mut links = HashMap::new();
        let total = self.accepts.len() + self.connects.len();
        let mut calls = Vec::new();
        for &(link, address) in &self.connects {
            let handshake = Handshake::connector(&self.key, self.me, link)?;
            let attempt = Attempt {
                socket: None,
                handshake,
                write: true,
                time: Instant::now(),
                tries: 0,
                last: None,
            };
            calls.push((link, address, attempt));
        }
        let mut visitors: Vec<Attempt<'_>> = Vec::new();
        while links.len() < total {
            self.fault.check()?;
            let now = Instant::now();
            if now >= self.deadline {
                return Err(self.late(&links, &calls));
            }
            for (link, address, call) in &mut calls {
                if call.socket.is_none() && now >= call.time {
                    self.call(*link, address, call)?;
                }
            }
            self.wait(&calls, &visitors, now)?;

            let mut index = 0;
            while index < calls.len() {
                let (link, _, call) = &mut calls[index];
                match advance(call) {
                    Some(Ok(true)) => {
                        let (link, socket) = (*link, call.socket.take());
                        calls.swap_remove(index);
                        links.extend(socket.map(|socket| (link, socket)));
                        continue;
                    }
                    Some(Err(error)) => self.hang_up(*link, call, error)?,
                    _ => {}
                }
                index += 1;
            }
            // What has come counts, however late: only then do the late and the silent go.
            let mut index = 0;
            while index < visitors.len() {
                match self.hear(&mut visitors[index]) {
                    Heard::Waits if now < visitors[index].time => index += 1,
                    Heard::Proven(link) => {
                        links.extend(visitors.swap_remove(index).socket.map(|it| (link, it)));
                    }
                    _ => drop(visitors.swap_remove(index)),
                }
            }
            self.welcome(&mut visitors, &mut links)?;
        }
        Ok(links)
    }

    fn call<'a>(&'a self, link: Link, address: &Address, call: &mut Attempt<'a>) -> Result<()> {
        call.handshake = Handshake::connector(&self.key, self.me, link)?;
        call.write = true;
        call.tries += 1;
        match socket::connect(address).and_then(|socket| {
            if let Address::Tcp(_) = address {
                socket::no_delay(&socket).map_err(io::Error::other)?;
            }
            Ok(socket)
        }) {
            Ok(socket) => call.socket = Some(socket),
            Err(error) => self.hang_up(link, call, error)?,
        }
        Ok(())
    }

    /// Tries again later: the peer's queue may be full, or a stranger may have displaced us.
    fn hang_up(&self, link: Link, call: &mut Attempt<'_>, error: io::Error) -> Result<()> {
        if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) {
            return Err(self.no_descriptors(error));
        }
        call.socket = None;
        if error.kind() == io::ErrorKind::InvalidData {
            return Err(Error::new(
                ErrorKind::Remote,
                format!(
                    "whoever listens for {} in place of {} does not know the communicator's key",
                    self.purpose, self.peers[link.peer]
                ),
            ));
        }
        call.time = Instant::now() + Duration::from_millis(u64::from(call.tries.min(20)) * 5);
        call.last = Some(error);
        Ok(())
    }

    fn wait(
        &self,
        calls: &[(Link, Address, Attempt<'_>)],
        visitors: &[Attempt<'_>],
        now: Instant,
    ) -> Result<()> {
        let mut limit = GLANCE.min(self.deadline - now);
        let mut interests = vec![socket::interest(&self.listener, true, false)];
        for (.., call) in calls {
            if call.socket.is_none() {
                limit = limit.min(call.time.saturating_duration_since(now));
            }
        }
        for attempt in calls.iter().map(|(.., call)| call).chain(visitors) {
            if let Some(socket) = &attempt.socket {
                interests.push(socket::interest(socket, !attempt.write, attempt.write));
            }
        }
        socket::poll(&mut interests, limit).map(|_| ())
    }

    fn hear(&self, visitor: &mut Attempt<'_>) -> Heard {
        let outcome = advance(visitor);
        let known = visitor.handshake.link();
        match (outcome, known) {
            (_, Some(link)) if !self.accepts.contains(&link) => Heard::Stranger,
            (Some(Ok(true)), Some(link)) => Heard::Proven(link),
            (Some(Ok(false)), _) => Heard::Waits,
            _ => Heard::Stranger,
        }
    }

    /// Accepts what has queued up. A rank's hello is often there already.
    fn welcome<'a>(
        &'a self,
        visitors: &mut Vec<Attempt<'a>>,
        links: &mut HashMap<Link, Socket>,
    ) -> Result<()> {
        let most = 2 * self.accepts.len() + 64;
        // Bounded, so that a flood of strangers cannot keep us from the others.
        for _ in 0..most {
            let socket = match socket::accept(&self.listener) {
                Ok(Some(socket)) => socket,
                Ok(None) => return Ok(()),
                // Descriptors that strangers hold come back first.
                Err(_) if !visitors.is_empty() => {
                    displace(visitors);
                    return Ok(());
                }
                Err(error) => return Err(self.no_descriptors(error)),
            };
            let uid = nix::unistd::geteuid().as_raw();
            let welcome = if self.local {
                socket::peer_uid(&socket).is_ok_and(|found| found == uid)
            } else {
                socket::no_delay(&socket).is_ok()
            };
            if !welcome {
                continue;
            }
            let mut visitor = Attempt {
                socket: Some(socket),
                handshake: Handshake::acceptor(&self.key, self.me),
                write: false,
                time: Instant::now() + PROOF_LIMIT,
                tries: 0,
                last: None,
            };
            match self.hear(&mut visitor) {
                Heard::Waits => {
                    if visitors.len() >= most {
                        displace(visitors);
                    }
                    visitors.push(visitor);
                }
                Heard::Proven(link) => links.extend(visitor.socket.map(|it| (link, it))),
                Heard::Stranger => {}
            }
        }
        Ok(())
    }

    fn no_descriptors(&self, error: io::Error) -> Error {
        Error::system(
            format!(
                "{} needs {} sockets on rank {} and the process may hold {} descriptors \
                 (raise `ulimit -n`, or lower CINCH_CHANNELS or CINCH_TCP_SOCKETS)",
                self.purpose,
                self.accepts.len() + self.connects.len(),
                self.me,
                socket::descriptor_limit()
            ),
            error,
        )
    }

    fn late(&self, links: &HashMap<Link, Socket>, calls: &[(Link, Address, Attempt<'_>)]) -> Error {
        let mut missing: Vec<String> = calls
            .iter()
            .filter(|(link, ..)| link.channel == 0 && link.socket == 0)
            .map(|(link, address, call)| {
                let why = match &call.last {
                    Some(error) => error.to_string(),
                    None => "no answer".into(),
                };
                format!("{} at {address} ({why})", self.peers[link.peer])
            })
            .collect();
        let mut silent: Vec<usize> = self
            .accepts
            .iter()
            .filter(|link| !links.contains_key(link))
            .map(|link| link.peer)
            .collect();
        silent.sort_unstable();
        silent.dedup();
        missing.extend(
            silent
                .into_iter()
                .map(|peer| format!("{} has not connected to us", self.peers[peer])),
        );
        missing.truncate(8);
        Error::new(
            ErrorKind::Timeout,
            format!(
                "{} opened {} of {} sockets for {} before the deadline; missing: {}",
                self.peers[self.me],
                links.len(),
                self.accepts.len() + self.connects.len(),
                self.purpose,
                missing.join(", ")
            ),
        )
    }
}

/// Makes room for another visitor. Ranks say hello at once and come again if they are dropped:
/// whoever is silent for longest is most likely none, then whoever is here longest.
fn displace(visitors: &mut Vec<Attempt<'_>>) {
    let since = |visitor: &Attempt<'_>| (visitor.handshake.link().is_some(), visitor.time);
    let places = visitors.iter().enumerate();
    if let Some((place, _)) = places.min_by_key(|(_, visitor)| since(visitor)) {
        visitors.swap_remove(place);
    }
}

/// Goes on with a connection: whether it is done; None if it is not there.
fn advance(attempt: &mut Attempt<'_>) -> Option<io::Result<bool>> {
    let socket = attempt.socket.as_ref()?;
    if let Err(error) = socket::outcome(socket) {
        return Some(Err(error));
    }
    Some(match attempt.handshake.advance(socket) {
        Ok(Progress::Done) => Ok(true),
        Ok(Progress::Pending { write }) => {
            attempt.write = write;
            Ok(false)
        }
        Err(error) => Err(error),
    })
}

#[cfg(all(test, not(loom)))]
#[path = "mesh_tests.rs"]
mod tests;
