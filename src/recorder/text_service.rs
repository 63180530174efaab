//! A service that answers lines of text over TCP on this host, in a protocol that the front end brings.
//!
//! A client may be anyone on this host, so it costs little: the number of clients, the length of a line and the time
//! without progress are bounded, and a line changes nothing but the answers to its own client. All processes of a job
//! listen at one address, and the kernel hands each client to one of them. If that process ends, the others remain.

use super::gather::{JobSnapshot, gather};
use super::snapshot::ProcessSnapshot;
use crate::sys::log::{self, Level};
use crate::sys::socket::{self, Interest, Socket};
use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Largest number of clients. One more closes the connection of the client that was silent longest.
const MAX_CLIENTS: usize = 32;
/// Largest number of bytes of a line, its end included.
const MAX_LINE_BYTES: usize = 1024;
/// Longest time for which a client may neither send nor take anything.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval between attempts to listen at an address that another program uses.
const LISTEN_INTERVAL: Duration = Duration::from_secs(5);
/// Pause after a system call that failed for lack of something.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(20);

/// The answer to a line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextReply {
    /// Text to send.
    pub text: String,
    /// Whether the connection ends after the text.
    pub is_last: bool,
}

/// The protocol's state of one client.
pub trait TextSession: Send {
    /// Returns the answer to a line, which has no end of line. `gather` returns the state of the job's processes on
    /// this host, and waits for them as long as its argument.
    fn answer(&mut self, line: &str, gather: &dyn Fn(Duration) -> JobSnapshot) -> TextReply;
}

/// Where the text service listens, and what it answers.
#[derive(Clone)]
pub struct TextServiceSettings {
    /// The address, as the user wrote it.
    pub name: String,
    /// Addresses to listen at. At least one must be free.
    pub addresses: Vec<SocketAddr>,
    /// Makes the state of a new client.
    pub session: Arc<dyn Fn() -> Box<dyn TextSession> + Send + Sync>,
}

impl std::fmt::Debug for TextServiceSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TextServiceSettings({})", self.name)
    }
}

struct TextClient {
    socket: Socket,
    session: Box<dyn TextSession>,
    /// Bytes that have arrived behind the last whole line.
    input: Vec<u8>,
    output: VecDeque<u8>,
    /// Whether the connection ends once `output` is sent.
    is_ending: bool,
    /// Time at which bytes last moved.
    moved: Instant,
}

/// The addresses at which a text service listens.
pub(super) struct TextListeners {
    sockets: Vec<Socket>,
    /// Addresses that other programs have.
    missing: Vec<SocketAddr>,
    next_try: Instant,
    has_warned: bool,
}

impl TextListeners {
    /// Listens at the addresses that are free, so that clients can connect from now on.
    pub(super) fn open(settings: &TextServiceSettings) -> TextListeners {
        let mut opened = TextListeners {
            sockets: Vec::new(),
            missing: settings.addresses.clone(),
            next_try: Instant::now(),
            has_warned: false,
        };
        opened.listen(settings);
        opened
    }

    /// Tries the missing addresses. The first failure is logged.
    fn listen(&mut self, settings: &TextServiceSettings) {
        self.next_try = Instant::now() + LISTEN_INTERVAL;
        let mut failure = None;
        for address in std::mem::take(&mut self.missing) {
            match socket::listen_shared(address) {
                Ok(listener) => self.sockets.push(listener),
                Err(error) => {
                    // This host may have one of two families only.
                    let is_lack = error.kind() == ErrorKind::AddrNotAvailable
                        || error.raw_os_error() == Some(libc::EAFNOSUPPORT);
                    if !is_lack || settings.addresses.len() == 1 {
                        self.missing.push(address);
                        failure = failure.or(Some((address, error)));
                    }
                }
            }
        }
        if let (false, Some((address, error))) = (self.has_warned, failure) {
            self.has_warned = true;
            log::line(
                Level::Warn,
                format_args!(
                    "the state of this process cannot be shown at {address} ({}): {error}; cinch tries again every {} s",
                    settings.name,
                    LISTEN_INTERVAL.as_secs()
                ),
            );
        }
    }

    /// Tries the missing addresses if it is time, and returns the time until the next try.
    fn listen_if_due(&mut self, settings: &TextServiceSettings) -> Duration {
        if self.missing.is_empty() {
            return Duration::MAX;
        }
        if Instant::now() >= self.next_try {
            self.listen(settings);
        }
        self.next_try.saturating_duration_since(Instant::now())
    }
}

/// Serves clients until the other side of `end` is closed. `own` returns the snapshot of this process.
pub(super) fn serve(
    settings: &TextServiceSettings,
    mut opened: TextListeners,
    own: &dyn Fn() -> ProcessSnapshot,
    end: &OwnedFd,
) {
    let mut clients: Vec<TextClient> = Vec::new();
    let collect = |timeout: Duration| gather(own(), timeout, end);
    loop {
        let until_try = opened.listen_if_due(settings);
        let listeners = &opened.sockets;
        let mut interests = vec![socket::interest(end, true, false)];
        interests.extend(
            listeners
                .iter()
                .map(|one| socket::interest(one, true, false)),
        );
        interests.extend(clients.iter().map(TextClient::interest));
        let limit = match clients.is_empty() {
            true => until_try,
            false => until_try.min(CLIENT_TIMEOUT / 4),
        };
        if socket::poll(&mut interests, limit).is_err() {
            std::thread::sleep(SHORTAGE_PAUSE);
            continue;
        }
        if interests[0].revents != 0 {
            return;
        }
        let (of_listeners, of_clients) = interests[1..].split_at(listeners.len());
        let mut events = of_clients.iter();
        // An answer to one client may take long, in which the bytes of others wait.
        let now = Instant::now();
        clients.retain_mut(|client| {
            let has_event = events.next().is_some_and(|event| event.revents != 0);
            let is_silent = now.saturating_duration_since(client.moved) >= CLIENT_TIMEOUT;
            (!has_event || client.advance(&collect)) && !is_silent
        });
        for (listener, event) in listeners.iter().zip(of_listeners) {
            if event.revents != 0 {
                accept(listener, settings, &mut clients);
            }
        }
    }
}

fn accept(listener: &Socket, settings: &TextServiceSettings, clients: &mut Vec<TextClient>) {
    match socket::accept(listener) {
        Ok(Some(socket)) => {
            if clients.len() == MAX_CLIENTS {
                let silent = (0..clients.len()).min_by_key(|&at| clients[at].moved);
                silent.map(|at| clients.remove(at));
            }
            clients.push(TextClient {
                socket,
                session: (settings.session)(),
                input: Vec::new(),
                output: VecDeque::new(),
                is_ending: false,
                moved: Instant::now(),
            });
        }
        Ok(None) => {}
        // Without descriptors the client stays in the queue; without a pause this thread would spin.
        Err(_) => std::thread::sleep(SHORTAGE_PAUSE),
    }
}

impl TextClient {
    /// Returns the events to wait for. A client that does not take its answer is not read.
    fn interest(&self) -> Interest {
        let has_output = !self.output.is_empty();
        socket::interest(&self.socket, !has_output, has_output)
    }

    /// Reads, answers and writes as far as possible without waiting for the client. Returns whether the connection
    /// goes on.
    fn advance(&mut self, collect: &dyn Fn(Duration) -> JobSnapshot) -> bool {
        if self.output.is_empty() && !self.read() {
            return false;
        }
        loop {
            if !self.write() {
                return false;
            }
            // The next line waits until the client has taken the answer.
            if !self.output.is_empty() {
                return true;
            }
            if self.is_ending {
                return false;
            }
            let Some(line) = self.next_line() else {
                return self.input.len() < MAX_LINE_BYTES;
            };
            let reply = self.session.answer(&line, collect);
            self.output.extend(reply.text.bytes());
            self.is_ending = reply.is_last;
        }
    }

    /// Reads at most a line's length. Returns whether the connection stands.
    fn read(&mut self) -> bool {
        let mut part = [0; MAX_LINE_BYTES];
        let room = MAX_LINE_BYTES - self.input.len();
        match socket::read(&self.socket, &mut [IoSliceMut::new(&mut part[..room])]) {
            Ok(0) => false,
            Ok(count) => {
                self.input.extend(&part[..count]);
                self.moved = Instant::now();
                true
            }
            Err(error) => is_transient(error.kind()),
        }
    }

    fn write(&mut self) -> bool {
        while !self.output.is_empty() {
            let (front, _) = self.output.as_slices();
            match socket::write(&self.socket, &[IoSlice::new(front)]) {
                Ok(count) => {
                    self.output.drain(..count);
                    self.moved = Instant::now();
                }
                Err(error) => return is_transient(error.kind()),
            }
        }
        true
    }

    /// Removes and returns the next whole line, without its end.
    fn next_line(&mut self) -> Option<String> {
        let end = self.input.iter().position(|&byte| byte == b'\n')?;
        let bytes: Vec<u8> = self.input.drain(..=end).collect();
        let line = String::from_utf8_lossy(&bytes[..end]).into_owned();
        Some(match line.strip_suffix('\r') {
            Some(line) => line.to_string(),
            None => line,
        })
    }
}

fn is_transient(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
