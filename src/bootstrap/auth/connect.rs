//! Connecting, within a deadline and under a fault.

use super::*;
use crate::sync::Fault;
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage};
use std::io::{ErrorKind as Io, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::time::Instant;

/// How often a wait looks at its fault.
const GLANCE: Duration = Duration::from_millis(50);
/// How often a connection that ends before its welcome is tried again: a flood of strangers may
/// have taken its place.
const RETRIES: u32 = 8;

/// How long one address of several is waited for in the first round, and at most.
const TURNS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(4)];
/// The pause behind the first round, and the longest one.
const PAUSES: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(250)];

/// What a refused connection means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::bootstrap) enum Patience {
    /// Nobody listens: an error at once.
    None,
    /// The other side may not be there yet: try until the deadline.
    UntilDeadline,
}

/// Connects to a [`Listener`] and proves knowledge of `key` both ways.
///
/// # Errors
/// Remote if nobody listens there, or if the other side does not know the key; mismatch if it
/// runs another version; timeout at `deadline`; the fault's reason once it is raised.
pub fn connect(
    address: SocketAddr,
    key: &[u8; 32],
    me: PeerIdentity,
    deadline: Instant,
    fault: &Fault,
) -> Result<Peer> {
    connect_with(
        address,
        &HandshakeConfig::new(key, me),
        Patience::None,
        deadline,
        fault,
    )
}

/// [`connect`], with a choice of what refusal means.
pub(in crate::bootstrap) fn connect_with(
    address: SocketAddr,
    terms: &HandshakeConfig,
    patience: Patience,
    deadline: Instant,
    fault: &Fault,
) -> Result<Peer> {
    connect_to_any(&[address], terms, patience, deadline, fault)
}

/// The same to the first of some addresses of one listener that answers, in turns: none of them is
/// waited for until the deadline while another one might answer.
pub(in crate::bootstrap) fn connect_to_any(
    addresses: &[SocketAddr],
    terms: &HandshakeConfig,
    patience: Patience,
    deadline: Instant,
    fault: &Fault,
) -> Result<Peer> {
    let (mut turn, mut pause) = (TURNS[0], PAUSES[0]);
    let mut turned_away = 0;
    // Why an address is not tried again.
    let mut given_up: Vec<Option<Error>> = vec![None; addresses.len()];
    loop {
        for (at, &address) in addresses.iter().enumerate() {
            if given_up[at].is_some() {
                continue;
            }
            let now = Instant::now();
            let until = match given_up.iter().filter(|error| error.is_none()).count() {
                1 => deadline,
                // However little is left, some of it is the others'.
                _ => now + turn.min(deadline.saturating_duration_since(now) / 2),
            };
            match attempt(address, terms, until, fault) {
                Ok(peer) => return Ok(peer),
                Err(Trouble::Late(_)) if until < deadline => {}
                Err(Trouble::Refused(_)) if patience == Patience::UntilDeadline => {}
                Err(Trouble::TurnedAway(_)) if turned_away < RETRIES => turned_away += 1,
                Err(
                    Trouble::Final(error)
                    | Trouble::Late(error)
                    | Trouble::Refused(error)
                    | Trouble::TurnedAway(error),
                ) => given_up[at] = Some(error),
            }
            fault.check()?;
        }
        if given_up.iter().all(Option::is_some) {
            let errors = given_up.into_iter().flatten();
            // Of several, one that answered says more than one that did not.
            let last = errors.max_by_key(|error| error.kind() != ErrorKind::Timeout);
            return Err(last.unwrap_or_else(|| Error::internal("no address to connect to")));
        }
        let until = (Instant::now() + pause).min(deadline);
        while Instant::now() < until {
            fault.check()?;
            std::thread::sleep(GLANCE.min(until.saturating_duration_since(Instant::now())));
        }
        if Instant::now() >= deadline {
            let names: Vec<String> = addresses.iter().map(SocketAddr::to_string).collect();
            let names = names.join(" and ");
            return Err(match given_up.into_iter().flatten().next() {
                Some(error) => error.context(format!("no rank answered at {names}")),
                None => late(&names, "could not be reached"),
            });
        }
        [turn, pause] = [(turn, TURNS), (pause, PAUSES)].map(longer);
    }
}

/// What comes after `last` between the first and the longest of its kind.
fn longer((last, [_, longest]): (Duration, [Duration; 2])) -> Duration {
    (last * 2).min(longest)
}

enum Trouble {
    /// Trying again is no use.
    Final(Error),
    /// No answer in time.
    Late(Error),
    /// Nobody listens.
    Refused(Error),
    /// The connection ended before its welcome.
    TurnedAway(Error),
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Trouble {
        Trouble::Final(error)
    }
}

fn attempt(
    address: SocketAddr,
    terms: &HandshakeConfig,
    deadline: Instant,
    fault: &Fault,
) -> std::result::Result<Peer, Trouble> {
    let mut stream = open(address, deadline, fault)?;
    let connector = terms.hello(Side::Connector)?;
    let lost = |cause| broken(address, cause);
    stream.write_all(&connector).map_err(lost)?;

    let mut input = [0; HELLO_BYTES + PROOF_BYTES];
    hear(&mut stream, &mut input, address, deadline, fault)?;
    let acceptor = *input.first_chunk().expect("the input begins with a hello");
    let hello = parse_hello(&acceptor, terms, Side::Acceptor).map_err(|why| {
        Error::new(
            ErrorKind::Remote,
            format!("what listens at {address} {why}"),
        )
    })?;
    let transcript = Transcript {
        connector,
        acceptor,
    };
    if !terms.proves(Side::Acceptor, &transcript, &input[HELLO_BYTES..]) {
        return Err(Trouble::Final(Error::new(
            ErrorKind::Remote,
            format!("what listens at {address} could not prove that it knows the job's secret"),
        )));
    }
    stream
        .write_all(&terms.proof(Side::Connector, &transcript))
        .map_err(lost)?;
    let mut welcome = [0];
    hear(&mut stream, &mut welcome, address, deadline, fault)?;
    if welcome != [WELCOME] {
        let error = format!("what listens at {address} does not speak cinch's protocol");
        return Err(Error::new(ErrorKind::Remote, error).into());
    }
    terms.check_version(&hello, address)?;
    stream
        .set_nonblocking(false)
        .map_err(|cause| Error::system("cannot configure a connection", cause))?;
    Ok(Peer {
        stream,
        address,
        rank: hello.rank,
        word: hello.word,
        session: terms.session(&transcript),
        connector: true,
    })
}

/// Reads exactly `input.len()` bytes.
fn hear(
    stream: &mut TcpStream,
    input: &mut [u8],
    address: SocketAddr,
    deadline: Instant,
    fault: &Fault,
) -> std::result::Result<(), Trouble> {
    let mut filled = 0;
    while filled < input.len() {
        match stream.read(&mut input[filled..]) {
            Ok(0) => {
                return Err(Trouble::TurnedAway(Error::new(
                    ErrorKind::Remote,
                    format!(
                        "{address} closed the connection during the handshake: it holds another \
                         secret, or is no rank of this job"
                    ),
                )));
            }
            Ok(count) => filled += count,
            Err(error) if error.kind() == Io::WouldBlock => {
                fault.check()?;
                let now = Instant::now();
                if now >= deadline {
                    let error = late(&address.to_string(), "did not answer the handshake");
                    return Err(Trouble::Late(error));
                }
                let limit = GLANCE.min(deadline - now);
                wait_ready(stream.as_fd(), PollFlags::POLLIN, limit);
            }
            Err(error) if error.kind() == Io::Interrupted => {}
            Err(error) => return Err(broken(address, error)),
        }
    }
    Ok(())
}

fn broken(address: SocketAddr, cause: std::io::Error) -> Trouble {
    Trouble::TurnedAway(Error::new(
        ErrorKind::Remote,
        format!("the connection to {address} broke during the handshake: {cause}"),
    ))
}

/// A non-blocking connected stream.
fn open(
    address: SocketAddr,
    deadline: Instant,
    fault: &Fault,
) -> std::result::Result<CloseOnFork<TcpStream>, Trouble> {
    let failed = |cause: Errno| Error::system(format!("cannot connect to {address}"), cause);
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::Inet,
        SocketAddr::V6(_) => AddressFamily::Inet6,
    };
    let stream = CloseOnFork::open(|| {
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        nix::sys::socket::socket(family, SockType::Stream, flags, None).map(TcpStream::from)
    })
    .map_err(failed)?;
    let started = nix::sys::socket::connect(stream.as_raw_fd(), &SockaddrStorage::from(address));
    match started {
        Ok(()) | Err(Errno::EINPROGRESS | Errno::EINTR) => {}
        Err(errno) => return Err(unreachable(address, errno.into())),
    }
    while !wait_ready(stream.as_fd(), PollFlags::POLLOUT, GLANCE) {
        fault.check()?;
        if Instant::now() >= deadline {
            let error = late(&address.to_string(), "could not be reached");
            return Err(Trouble::Late(error));
        }
    }
    match stream.take_error() {
        Ok(None) => {}
        Ok(Some(cause)) | Err(cause) => return Err(unreachable(address, cause)),
    }
    // Trying a free port again and again, a socket can end up connected to itself.
    if stream.local_addr().ok() == Some(address) {
        return Err(unreachable(address, Errno::ECONNREFUSED.into()));
    }
    let _ = stream.set_nodelay(true);
    Ok(stream)
}

fn unreachable(address: SocketAddr, cause: std::io::Error) -> Trouble {
    let refused = matches!(
        cause.kind(),
        Io::ConnectionRefused | Io::ConnectionReset | Io::HostUnreachable | Io::NetworkUnreachable
    );
    let error = Error::new(
        ErrorKind::Remote,
        format!("cannot connect to {address}: {cause}"),
    );
    if refused {
        Trouble::Refused(error)
    } else {
        Trouble::Final(error)
    }
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

    /// Hours of refusals are no reason to stop waiting.
    #[test]
    fn turns_and_pauses_grow_to_their_limits() {
        for of in [TURNS, PAUSES] {
            let mut last = of[0];
            for _ in 0..10_000 {
                let next = longer((last, of));
                assert!(next >= last && next <= of[1]);
                last = next;
            }
            assert_eq!(last, of[1]);
        }
    }
}
