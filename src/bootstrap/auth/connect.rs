//! Outgoing connections: [`Connector`] never blocks, [`connect_to_any`] waits until a deadline.

use super::handshake::{HandshakeFailure, HandshakeProgress};
use super::*;
use crate::sync::Fault;
use crate::sys::socket;
use std::io::ErrorKind as Io;
use std::os::fd::AsFd;
use std::time::Instant;

/// Largest number of retries after connections that closed before their welcome. A flood of
/// unauthenticated connections may have displaced them.
const MAX_CLOSED_RETRIES: u32 = 8;

/// Shortest and longest wait for one of several addresses; the wait doubles from round to round.
const ADDRESS_TIMEOUTS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(4)];
/// Shortest and longest pause between two rounds over the addresses.
const RETRY_INTERVALS: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(250)];

/// Reaction to a refused connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::bootstrap) enum OnRefusal {
    /// Nothing listens: fail at once.
    Fail,
    /// The other side may not listen yet: retry until the deadline.
    Retry,
    /// The other side listens as long as its process lives, and closes connections until it serves
    /// them. Fails at once if nothing listens, and retries closed connections until the deadline.
    RetryClosed,
}

/// An outgoing connection whose handshake has not finished.
pub(crate) struct Connector {
    address: Address,
    socket: Socket,
    handshake: Handshake,
}

/// An error of a connection attempt, with its kind.
#[derive(Debug)]
pub(crate) struct ConnectFailure {
    pub kind: FailureKind,
    pub error: Error,
}

/// Kind of a failed connection attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FailureKind {
    /// Nothing listens at the address.
    Refused,
    /// The listener's queue is full, or the network has no route for now.
    Unready,
    /// The address cannot be reached.
    Unreachable,
    /// The connection closed before its welcome.
    Closed,
    /// No answer before the deadline.
    Late,
    /// The other side does not know the key, or runs another version.
    Foreign,
    /// This process cannot open sockets.
    System,
}

impl FailureKind {
    fn with(self, error: Error) -> ConnectFailure {
        ConnectFailure { kind: self, error }
    }

    fn remote(self, message: String) -> ConnectFailure {
        self.with(Error::new(ErrorKind::Remote, message))
    }
}

impl Connector {
    /// Starts to connect to `address`.
    pub(crate) fn start(
        address: Address,
        config: &HandshakeConfig,
    ) -> std::result::Result<Connector, ConnectFailure> {
        let handshake = Handshake::connector(config, address);
        let handshake = handshake.map_err(|error| FailureKind::System.with(error))?;
        let socket = socket::connect(&address).map_err(|cause| unreachable(address, cause))?;
        if let Address::Tcp(to) = address {
            // An ephemeral port that is tried again and again can end up connected to itself.
            if socket::local_address(&socket).is_ok_and(|own| own == to) {
                let refused = std::io::Error::from(Io::ConnectionRefused);
                return Err(unreachable(address, refused));
            }
            let _ = socket::no_delay(&socket);
        } else {
            check_owner(&socket)?;
        }
        Ok(Connector {
            address,
            socket,
            handshake,
        })
    }

    /// Returns the descriptor and the events to poll for.
    pub(crate) fn interest(&self) -> PollFd<'_> {
        PollFd::new(self.socket.as_fd(), self.handshake.events())
    }

    /// Goes on as far as the socket allows. Returns whether both sides are authenticated.
    pub(crate) fn advance(
        &mut self,
        config: &HandshakeConfig,
    ) -> std::result::Result<bool, ConnectFailure> {
        let address = self.address;
        if let Err(cause) = socket::connect_result(&self.socket) {
            return Err(match self.handshake.has_sent() {
                true => broken(address, cause),
                false => unreachable(address, cause),
            });
        }
        match self.handshake.advance(config, &self.socket) {
            Ok(progress) => Ok(progress == HandshakeProgress::Done),
            Err(HandshakeFailure::Closed) => Err(FailureKind::Closed.remote(format!(
                "{address} closed the connection during the handshake: it holds another secret, or \
                 is no rank of this job"
            ))),
            Err(HandshakeFailure::Broken(cause)) => Err(broken(address, cause)),
            Err(HandshakeFailure::Refused(why)) => {
                Err(FailureKind::Foreign.remote(format!("the listener at {address} {why}")))
            }
        }
    }

    /// Returns the authenticated connection, after [`Connector::advance`] returned true.
    ///
    /// # Errors
    /// Mismatch, naming both versions, if the peer runs another version of the library.
    pub(crate) fn finish(self, config: &HandshakeConfig) -> Result<Peer> {
        self.handshake.into_peer(config, self.socket, self.address)
    }
}

/// Connects to the first of the `addresses` of a listener that answers. Waits for several addresses
/// in turn, so that a silent address costs the others no time.
///
/// # Errors
/// Remote if nothing listens there, or if the listener does not know the key. Mismatch if the
/// listener runs another version. Timeout at `deadline`. The fault's reason once the fault is
/// raised.
pub(in crate::bootstrap) fn connect_to_any(
    addresses: &[impl Into<Address> + Copy],
    config: &HandshakeConfig,
    on_refusal: OnRefusal,
    deadline: Instant,
    fault: &Fault,
) -> Result<Peer> {
    let addresses: Vec<Address> = addresses.iter().map(|&address| address.into()).collect();
    let (mut timeout, mut interval) = (ADDRESS_TIMEOUTS[0], RETRY_INTERVALS[0]);
    let mut closed = 0;
    // The final error of each address.
    let mut errors: Vec<Option<Error>> = vec![None; addresses.len()];
    loop {
        for (at, &address) in addresses.iter().enumerate() {
            if errors[at].is_some() {
                continue;
            }
            let now = Instant::now();
            let until = match errors.iter().filter(|error| error.is_none()).count() {
                1 => deadline,
                // At most half of the time left is spent on this address; the rest stays for the
                // other addresses.
                _ => now + timeout.min(deadline.saturating_duration_since(now) / 2),
            };
            let failure = match attempt(address, config, until, fault) {
                Ok(peer) => return Ok(peer),
                Err(failure) => failure,
            };
            match failure.kind {
                FailureKind::Late if until < deadline => {}
                FailureKind::Refused | FailureKind::Unready if on_refusal == OnRefusal::Retry => {}
                FailureKind::Closed if on_refusal == OnRefusal::RetryClosed => {}
                FailureKind::Closed if closed < MAX_CLOSED_RETRIES => closed += 1,
                _ => errors[at] = Some(failure.error),
            }
            fault.check()?;
        }
        if errors.iter().all(Option::is_some) {
            let errors = errors.into_iter().flatten();
            // The error of an address that answered explains more than a timeout.
            let last = errors.max_by_key(|error| error.kind() != ErrorKind::Timeout);
            return Err(last.unwrap_or_else(|| Error::internal("no address to connect to")));
        }
        let until = (Instant::now() + interval).min(deadline);
        while Instant::now() < until {
            fault.check()?;
            let left = until.saturating_duration_since(Instant::now());
            std::thread::sleep(FAULT_POLL_INTERVAL.min(left));
        }
        if Instant::now() >= deadline {
            let names: Vec<String> = addresses.iter().map(Address::to_string).collect();
            let names = names.join(" and ");
            return Err(match errors.into_iter().flatten().next() {
                Some(error) => error.context(format!("no rank answered at {names}")),
                None if on_refusal == OnRefusal::RetryClosed => late(&names, "served no rank"),
                None => late(&names, "could not be reached"),
            });
        }
        [timeout, interval] =
            [(timeout, ADDRESS_TIMEOUTS), (interval, RETRY_INTERVALS)].map(double);
    }
}

/// Doubles `last` up to the longer of the two limits.
fn double((last, [_, longest]): (Duration, [Duration; 2])) -> Duration {
    (last * 2).min(longest)
}

fn attempt(
    address: Address,
    config: &HandshakeConfig,
    deadline: Instant,
    fault: &Fault,
) -> std::result::Result<Peer, ConnectFailure> {
    let foreign = |error| FailureKind::Foreign.with(error);
    let mut connector = Connector::start(address, config)?;
    loop {
        if connector.advance(config)? {
            return connector.finish(config).map_err(foreign);
        }
        fault.check().map_err(foreign)?;
        let now = Instant::now();
        if now >= deadline {
            let what = match connector.handshake.has_sent() {
                true => "did not answer the handshake",
                false => "could not be reached",
            };
            return Err(FailureKind::Late.with(late(&address.to_string(), what)));
        }
        poll_for(
            &mut [connector.interest()],
            FAULT_POLL_INTERVAL.min(deadline - now),
        );
    }
}

/// Refuses a local socket at which another user listens. Its name is known to all users of this host.
fn check_owner(socket: &Socket) -> std::result::Result<(), ConnectFailure> {
    let own = nix::unistd::geteuid().as_raw();
    match socket::peer_uid(socket) {
        Ok(owner) if owner == own => Ok(()),
        Ok(owner) => Err(FailureKind::Foreign.remote(format!(
            "user {owner} listens there, and this process runs as user {own}: ranks of several users \
             share a secret by CINCH_SECRET_FILE, or trust all users of this host with \
             CINCH_ALLOW_UNAUTHENTICATED=1"
        ))),
        Err(error) => Err(FailureKind::System.with(error)),
    }
}

fn broken(address: Address, cause: std::io::Error) -> ConnectFailure {
    if socket::is_shortage(&cause) {
        // No other attempt helps: the other side may have ended its part and listen no more.
        let error = Error::system(format!("the handshake with {address}"), cause);
        return FailureKind::System.with(error);
    }
    FailureKind::Closed.remote(format!(
        "the connection to {address} broke during the handshake: {cause}"
    ))
}

fn unreachable(address: Address, cause: std::io::Error) -> ConnectFailure {
    if socket::is_shortage(&cause) {
        let error = Error::system(format!("cannot connect to {address}"), cause);
        return FailureKind::System.with(error);
    }
    let kind = match cause.kind() {
        Io::ConnectionRefused => FailureKind::Refused,
        Io::ConnectionReset | Io::HostUnreachable | Io::NetworkUnreachable | Io::WouldBlock => {
            FailureKind::Unready
        }
        _ => FailureKind::Unreachable,
    };
    kind.remote(format!("cannot connect to {address}: {cause}"))
}

fn late(address: &str, what: &str) -> Error {
    Error::new(
        ErrorKind::Timeout,
        format!("{address} {what} before the deadline"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Doubles 10,000 times, as hours of refusals would: the value stays at its limit and does not
    /// overflow.
    #[test]
    fn timeouts_and_intervals_double_to_their_limits() {
        for limits in [ADDRESS_TIMEOUTS, RETRY_INTERVALS] {
            let mut last = limits[0];
            for _ in 0..10_000 {
                let next = double((last, limits));
                assert!(next >= last && next <= limits[1]);
                last = next;
            }
            assert_eq!(last, limits[1]);
        }
    }
}
