use super::handshake::{HandshakeFailure, HandshakeProgress};
use super::*;
use crate::sync::Fault;
use crate::sys::socket;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const KEY: [u8; 32] = [7; 32];

fn identity(rank: usize, word: u64) -> PeerIdentity {
    PeerIdentity {
        role: ConnectionRole::Data,
        rank,
        word,
    }
}

/// Connects once, and fails at once if nothing listens at `address`.
fn connect(
    address: SocketAddr,
    key: &[u8; 32],
    me: PeerIdentity,
    deadline: Instant,
    fault: &Fault,
) -> Result<Peer> {
    let config = HandshakeConfig::new(key, me);
    connect_to_any(&[address], &config, OnRefusal::Fail, deadline, fault)
}

/// Waits for one connection; fails with a timeout if none arrives.
fn accept(
    listener: &mut Listener,
    me: PeerIdentity,
    deadline: Instant,
    fault: &Fault,
) -> Result<Peer> {
    let accepted = listener.accept_until(&HandshakeConfig::new(&KEY, me), deadline, fault)?;
    accepted.ok_or_else(|| Error::new(ErrorKind::Timeout, "no connection"))
}

/// Returns the hello of a connector that does not encrypt.
fn first_hello(config: &HandshakeConfig) -> [u8; HELLO_BYTES] {
    config.hello(HandshakeSide::Connector, false, keys::random().unwrap())
}

/// Listens at `address` and at no other address.
fn listen_at(address: SocketAddr) -> Listener {
    Listener::bind_to_own(&[address]).unwrap().0
}

fn blocking(peer: Peer) -> TcpStream {
    let stream = TcpStream::from(peer.stream.socket().try_clone().unwrap());
    stream.set_nonblocking(false).unwrap();
    stream
}

fn soon(milliseconds: u64) -> Instant {
    Instant::now() + Duration::from_millis(milliseconds)
}

/// Accepts as rank 0 with `config` on another thread.
fn acceptor(
    config: HandshakeConfig,
    wait: u64,
) -> (SocketAddr, std::thread::JoinHandle<Result<Option<Peer>>>) {
    let (mut listener, address) = Listener::bind(LOCAL).unwrap();
    let thread =
        std::thread::spawn(move || listener.accept_until(&config, soon(wait), &Fault::new()));
    (address, thread)
}

#[test]
fn handshake_identifies_both_sides_and_derives_a_session() {
    let (mut listener, address) = Listener::bind(LOCAL).unwrap();
    let fault = Fault::new();
    let client = std::thread::spawn(move || {
        connect(
            address,
            &KEY,
            identity(3, 0x0102_0304_0506_0708),
            soon(5000),
            &Fault::new(),
        )
        .unwrap()
    });
    let peer = accept(&mut listener, identity(0, 9), soon(5000), &fault).unwrap();
    let other = client.join().unwrap();
    assert_eq!((peer.rank, peer.word), (3, 0x0102_0304_0506_0708));
    assert_eq!((other.rank, other.word), (0, 9));
    assert_eq!(peer.session, other.session);
    assert!(other.connector && !peer.connector);
    // Bytes after the handshake stay in the socket.
    blocking(other).write_all(b"payload").unwrap();
    let mut read = [0; 7];
    blocking(peer).read_exact(&mut read).unwrap();
    assert_eq!(&read, b"payload");
}

#[test]
fn session_differs_between_connections() {
    let (mut listener, address) = Listener::bind(LOCAL).unwrap();
    let mut sessions = Vec::new();
    for _ in 0..2 {
        let client = std::thread::spawn(move || {
            connect(address, &KEY, identity(1, 0), soon(5000), &Fault::new()).unwrap()
        });
        let peer = accept(&mut listener, identity(0, 0), soon(5000), &Fault::new()).unwrap();
        client.join().unwrap();
        sessions.push(peer.session);
    }
    assert_ne!(sessions[0], sessions[1]);
}

#[test]
fn peer_of_another_secret_or_role_is_refused_on_both_sides() {
    for (key, role) in [
        ([8; 32], ConnectionRole::Data),
        (KEY, ConnectionRole::Control),
    ] {
        let (address, server) = acceptor(HandshakeConfig::new(&KEY, identity(0, 0)), 1500);
        let me = PeerIdentity {
            role,
            rank: 1,
            word: 0,
        };
        let error = connect(address, &key, me, soon(4000), &Fault::new()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Remote, "{error}");
        assert!(server.join().unwrap().unwrap().is_none());
    }
}

#[test]
fn peer_of_another_version_is_refused_by_rank_on_both_sides() {
    let other = HandshakeConfig::new(&KEY, identity(0, 0)).with_library([9, 8, 7]);
    let (address, server) = acceptor(other, 4000);
    let mine = connect(address, &KEY, identity(3, 0), soon(4000), &Fault::new()).unwrap_err();
    let theirs = server.join().unwrap().unwrap_err();
    for error in [&mine, &theirs] {
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        for word in ["rank 0", "rank 3", "cinch 9.8.7", crate::VERSION] {
            assert!(error.message().contains(word), "{error} lacks {word}");
        }
    }
}

/// An acceptor that knows the fingerprint but not the secret cannot prove itself to a connector.
#[test]
fn acceptor_without_the_secret_is_refused() {
    let config = HandshakeConfig::new(&KEY, identity(0, 0));
    let mut fake = HandshakeConfig::new(&[0; 32], identity(0, 0));
    fake.fingerprint = config.fingerprint;
    let (address, server) = acceptor(fake, 1500);
    let error = connect(address, &KEY, identity(1, 0), soon(4000), &Fault::new()).unwrap_err();
    assert!(error.message().contains("could not prove"), "{error}");
    assert!(server.join().unwrap().unwrap().is_none());
}

/// A connector that knows only the fingerprint returns the acceptor's own proof or garbage, and
/// gets no welcome.
#[test]
fn connector_without_the_secret_is_refused() {
    for reflect in [true, false] {
        let (address, server) = acceptor(HandshakeConfig::new(&KEY, identity(0, 0)), 400);
        let hello = first_hello(&HandshakeConfig::new(&KEY, identity(1, 0)));
        let mut stream = TcpStream::connect(address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(2)))
            .unwrap();
        stream.write_all(&hello).unwrap();
        let mut input = [0; HELLO_BYTES + PROOF_BYTES];
        stream.read_exact(&mut input).unwrap();
        let proof = if reflect {
            &input[HELLO_BYTES..]
        } else {
            &[0; PROOF_BYTES]
        };
        stream.write_all(proof).unwrap();
        assert_ne!(stream.read(&mut [0; 1]).unwrap_or(0), 1, "no welcome");
        assert!(server.join().unwrap().unwrap().is_none());
    }
}

/// A false acceptor sends the connector's own bytes back, and the connector refuses them.
#[test]
fn echo_is_refused() {
    let socket = TcpListener::bind((LOCAL, 0)).unwrap();
    let address = socket.local_addr().unwrap();
    let echo = std::thread::spawn(move || {
        let (mut stream, _) = socket.accept().unwrap();
        let mut hello = [0; HELLO_BYTES];
        stream.read_exact(&mut hello).unwrap();
        stream.write_all(&hello).unwrap();
        hello[10] = HandshakeSide::Acceptor as u8;
        stream.write_all(&hello[..PROOF_BYTES]).unwrap();
        stream
    });
    let error = connect(address, &KEY, identity(1, 0), soon(4000), &Fault::new()).unwrap_err();
    assert!(error.message().contains("does not speak"), "{error}");
    echo.join().unwrap();
}

#[test]
fn missing_listener_fails_at_once_or_is_awaited() {
    let (listener, address) = Listener::bind(LOCAL).unwrap();
    drop(listener);
    let config = HandshakeConfig::new(&KEY, identity(1, 0));
    let error = connect_to_any(
        &[address],
        &config,
        OnRefusal::Fail,
        soon(60_000),
        &Fault::new(),
    );
    assert!(error.unwrap_err().message().contains("refused"));

    let server = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        let mut listener = listen_at(address);
        accept(&mut listener, identity(0, 0), soon(5000), &Fault::new())
    });
    let fault = Fault::new();
    connect_to_any(&[address], &config, OnRefusal::Retry, soon(5000), &fault).unwrap();
    server.join().unwrap().unwrap();
}

/// Passes one address of another host and two of this host; only the latter are bound.
#[test]
fn listener_binds_the_addresses_of_its_host() {
    let addresses = ["192.0.2.1:0", "127.0.0.2:0", "127.0.0.3:0"].map(|one| one.parse().unwrap());
    let (listener, bound) = Listener::bind_to_own(&addresses).unwrap();
    let ips: Vec<_> = bound.iter().map(|one| one.ip().to_string()).collect();
    assert_eq!(ips, ["127.0.0.2", "127.0.0.3"]);
    let mut listener = listener.duplicate().unwrap();
    let fault = Fault::new();
    for (rank, &address) in bound.iter().enumerate() {
        let me = identity(rank, 0);
        let other =
            std::thread::spawn(move || connect(address, &KEY, me, soon(5000), &Fault::new()));
        let peer = accept(&mut listener, identity(9, 0), soon(5000), &fault);
        assert_eq!(peer.unwrap().rank, rank);
        other.join().unwrap().unwrap();
    }
    let taken = Listener::bind_to_own(&[addresses[1], bound[1]]).unwrap_err();
    assert!(taken.message().contains(&bound[1].to_string()), "{taken}");
    let none = Listener::bind_to_own(&addresses[..1]).unwrap_err();
    assert!(none.message().contains("192.0.2.1"), "{none}");
}

/// The first address refuses connections, and the second accepts them but never answers.
#[test]
fn connector_tries_all_addresses_within_the_deadline() {
    let silent = TcpListener::bind(("127.0.0.2", 0)).unwrap();
    let port = silent.local_addr().unwrap().port();
    let addresses = [4, 2, 3].map(|last| SocketAddr::from(([127, 0, 0, last], port)));
    let config = HandshakeConfig::new(&KEY, identity(1, 0));
    let fault = Fault::new();
    let server = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        let mut listener = listen_at(addresses[2]);
        accept(&mut listener, identity(0, 0), soon(20_000), &Fault::new())
    });
    let on_refusal = OnRefusal::Retry;
    let peer = connect_to_any(&addresses, &config, on_refusal, soon(20_000), &fault).unwrap();
    assert_eq!(peer.address, Address::Tcp(addresses[2]));
    server.join().unwrap().unwrap();
    let late = connect_to_any(&addresses[..2], &config, on_refusal, soon(300), &fault);
    let late = late.unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Timeout, "{late}");
    let refused = connect_to_any(
        &addresses[..1],
        &config,
        OnRefusal::Fail,
        soon(9000),
        &fault,
    );
    assert!(refused.unwrap_err().message().contains("refused"));
}

/// A silent address does not delay the other addresses, however long the attempts have taken.
#[test]
fn silent_address_costs_others_no_time() {
    let silent = TcpListener::bind(("127.0.0.2", 0)).unwrap();
    let port = silent.local_addr().unwrap().port();
    let addresses = [2, 3].map(|last| SocketAddr::from(([127, 0, 0, last], port)));
    let config = HandshakeConfig::new(&KEY, identity(1, 0));
    let server = std::thread::spawn(move || {
        // Starts to listen only after the connector has tried each address once.
        std::thread::sleep(Duration::from_millis(1200));
        let mut listener = listen_at(addresses[1]);
        accept(&mut listener, identity(0, 0), soon(2000), &Fault::new())
    });
    let on_refusal = OnRefusal::Retry;
    let fault = Fault::new();
    let peer = connect_to_any(&addresses, &config, on_refusal, soon(2800), &fault).unwrap();
    assert_eq!(peer.address, Address::Tcp(addresses[1]));
    server.join().unwrap().unwrap();
}

#[test]
fn waits_end_at_the_deadline_or_with_the_fault() {
    let (mut listener, address) = Listener::bind(LOCAL).unwrap();
    let timeout = accept(&mut listener, identity(0, 0), soon(30), &Fault::new());
    assert_eq!(timeout.unwrap_err().kind(), ErrorKind::Timeout);
    let fault = Fault::new();
    fault.raise(Error::new(ErrorKind::Aborted, "enough"));
    let aborted = accept(&mut listener, identity(0, 0), soon(60_000), &fault);
    assert_eq!(aborted.unwrap_err().message(), "enough");
    // The listener's kernel queue accepts the connection, but no thread answers it.
    let aborted = connect(address, &KEY, identity(1, 0), soon(60_000), &fault);
    assert_eq!(aborted.unwrap_err().message(), "enough");
    let late = connect(address, &KEY, identity(1, 0), soon(30), &Fault::new());
    assert_eq!(late.unwrap_err().kind(), ErrorKind::Timeout);
}

/// Opens more silent connections than the listener has places, then connects a rank that sends one
/// byte at a time.
#[test]
fn silent_or_slow_connections_delay_no_rank() {
    let (mut listener, address) = Listener::bind(LOCAL).unwrap();
    let crowd: Vec<TcpStream> = (0..80)
        .map(|_| TcpStream::connect(address).unwrap())
        .collect();
    let client = std::thread::spawn(move || {
        let config = HandshakeConfig::new(&KEY, identity(1, 0));
        let mut stream = TcpStream::connect(address).unwrap();
        let connector = first_hello(&config);
        for byte in connector {
            stream.write_all(&[byte]).unwrap();
        }
        let mut input = [0; HELLO_BYTES + PROOF_BYTES];
        stream.read_exact(&mut input).unwrap();
        let transcript = Transcript {
            connector,
            acceptor: *input.first_chunk().unwrap(),
        };
        for byte in config.prove(HandshakeSide::Connector, &transcript) {
            stream.write_all(&[byte]).unwrap();
        }
        stream.read_exact(&mut input[..1]).unwrap();
        assert_eq!(input[0], WELCOME);
        stream
    });
    let peer = accept(&mut listener, identity(0, 0), soon(5000), &Fault::new()).unwrap();
    assert_eq!(peer.rank, 1);
    assert!(listener.pending.len() <= 64);
    client.join().unwrap();
    drop(crowd);
    // Silent connections expire after two seconds; closed ones are dropped at once.
    let nothing = listener.accept_until(
        &HandshakeConfig::new(&KEY, identity(0, 0)),
        soon(100),
        &Fault::new(),
    );
    assert!(nothing.unwrap().is_none());
    assert_eq!(listener.pending.len(), 0);
}

/// A rank that has sent its hello keeps its place during a flood of silent connections.
#[test]
fn flood_of_silent_connections_displaces_no_rank() {
    let (mut listener, address) = Listener::bind(LOCAL).unwrap();
    let config = HandshakeConfig::new(&KEY, identity(0, 0));
    let mine = HandshakeConfig::new(&KEY, identity(1, 0));
    let mut stream = TcpStream::connect(address).unwrap();
    let connector = first_hello(&mine);
    stream.write_all(&connector).unwrap();
    let mut crowd = Vec::new();
    for _ in 0..5 {
        crowd.extend((0..100).map(|_| TcpStream::connect(address).unwrap()));
        let nobody = listener.accept_until(&config, soon(20), &Fault::new());
        assert!(nobody.unwrap().is_none());
    }
    let mut input = [0; HELLO_BYTES + PROOF_BYTES];
    stream.read_exact(&mut input).unwrap();
    let transcript = Transcript {
        connector,
        acceptor: *input.first_chunk().unwrap(),
    };
    stream
        .write_all(&mine.prove(HandshakeSide::Connector, &transcript))
        .unwrap();
    let peer = listener.accept_until(&config, soon(5000), &Fault::new());
    assert_eq!(peer.unwrap().unwrap().rank, 1);
}

/// Address of UNIX sockets in tests of the state machine.
const UNIX: Address = Address::Local([0; 16]);

fn local_sockets() -> (OwnedFd, OwnedFd) {
    let (one, two) = UnixStream::pair().unwrap();
    one.set_nonblocking(true).unwrap();
    two.set_nonblocking(true).unwrap();
    (one.into(), two.into())
}

#[test]
fn handshake_over_a_local_socket_authenticates_both_sides() {
    let [mine, theirs] = [1, 0].map(|rank| HandshakeConfig::new(&KEY, identity(rank, 5)));
    let (here, there) = local_sockets();
    let mut connector = Handshake::connector(&mine, UNIX).unwrap();
    let mut acceptor = Handshake::acceptor(UNIX);
    let mut ends = [false; 2];
    while ends != [true; 2] {
        ends = [
            connector.advance(&mine, &here).unwrap() == HandshakeProgress::Done,
            acceptor.advance(&theirs, &there).unwrap() == HandshakeProgress::Done,
        ];
    }
    let connected = connector.into_peer(&mine, here.into(), UNIX).unwrap();
    let accepted = acceptor.into_peer(&theirs, there.into(), UNIX).unwrap();
    assert_eq!((connected.rank, accepted.rank), (0, 1));
    assert_eq!(connected.session, accepted.session);
}

/// Returns the results of both sides of a connection over TCP, with their choices of encryption.
fn encrypted(connector: Encryption, acceptor: Encryption) -> [Result<Peer>; 2] {
    let config = HandshakeConfig::new(&KEY, identity(0, 0)).with_encryption(acceptor);
    let (address, server) = self::acceptor(config, 5000);
    let config = HandshakeConfig::new(&KEY, identity(1, 0)).with_encryption(connector);
    let fault = Fault::new();
    let connected = connect_to_any(&[address], &config, OnRefusal::Fail, soon(5000), &fault);
    let accepted = server.join().unwrap();
    [connected, accepted.map(|peer| peer.expect("in time"))]
}

#[test]
fn both_sides_encrypt_or_neither() {
    use Encryption::{AsConnector, Off, On};
    for (connector, acceptor) in [(On, On), (On, AsConnector), (Off, AsConnector), (Off, Off)] {
        let [mut one, mut other] = encrypted(connector, acceptor).map(Result::unwrap);
        assert_eq!(one.session, other.session);
        let mut place = [0; 40];
        for _ in 0..2 {
            let (from, to) = (&mut one, &mut other);
            assert_eq!(from.stream.write(&[IoSlice::new(b"payload")]).unwrap(), 7);
            wait_ready(
                to.stream.socket().as_fd(),
                PollFlags::POLLIN,
                Duration::from_secs(5),
            );
            let wire = TcpStream::from(to.stream.socket().try_clone().unwrap());
            let on_the_wire = wire.peek(&mut [0; 64]).unwrap();
            assert_eq!(on_the_wire, 7 + if connector == On { 20 } else { 0 });
            let read = to.stream.read(&mut [IoSliceMut::new(&mut place)]);
            assert_eq!((read.unwrap(), &place[..7]), (7, &b"payload"[..]));
            std::mem::swap(&mut one, &mut other);
        }
    }
    for (connector, acceptor) in [(On, Off), (Off, On)] {
        let on = |encryption| u8::from(encryption == On);
        let [connected, accepted] = encrypted(connector, acceptor);
        for (result, [theirs, own], [their, mine]) in [
            (connected, [acceptor, connector], [0, 1]),
            (accepted, [connector, acceptor], [1, 0]),
        ] {
            let error = result.unwrap_err();
            let right = format!(
                "rank {their} at 127.0.0.1 has CINCH_ENCRYPT={}, rank {mine} has CINCH_ENCRYPT={}: \
                 set one value on all ranks",
                on(theirs),
                on(own)
            );
            assert_eq!(
                (error.kind(), error.message()),
                (ErrorKind::Mismatch, &*right)
            );
        }
    }
}

/// A local connection stays in the host, so nothing encrypts it.
#[test]
fn local_connections_are_not_encrypted() {
    let configs = [1, 0].map(|rank| {
        let config = HandshakeConfig::new(&KEY, identity(rank, 0));
        config.with_encryption(Encryption::On)
    });
    let (here, there) = local_sockets();
    let mut connector = Handshake::connector(&configs[0], UNIX).unwrap();
    let mut acceptor = Handshake::acceptor(UNIX);
    while connector.advance(&configs[0], &here).unwrap() != HandshakeProgress::Done {
        acceptor.advance(&configs[1], &there).unwrap();
    }
    let mut peer = connector.into_peer(&configs[0], here.into(), UNIX).unwrap();
    peer.stream.write(&[IoSlice::new(b"payload")]).unwrap();
    let mut bytes = [0; 64];
    let count = socket::read(&there, &mut [IoSliceMut::new(&mut bytes)]).unwrap();
    assert_eq!(&bytes[..count], b"payload");
}

#[test]
fn connector_without_its_welcome_is_not_done() {
    let [mine, theirs] = [1, 0].map(|rank| HandshakeConfig::new(&KEY, identity(rank, 0)));
    for (welcome, right) in [(&[][..], false), (&[WELCOME], true), (b"x", false)] {
        let (here, there) = local_sockets();
        let mut connector = Handshake::connector(&mine, UNIX).unwrap();
        let mut acceptor = Handshake::acceptor(UNIX);
        let pending = HandshakeProgress::Pending { write: false };
        assert_eq!(connector.advance(&mine, &here).unwrap(), pending);
        assert_eq!(acceptor.advance(&theirs, &there).unwrap(), pending);
        // The connector sends its proof, which the acceptor has not read.
        assert_eq!(connector.advance(&mine, &here).unwrap(), pending);
        if !welcome.is_empty() {
            socket::write(&there, &[IoSlice::new(welcome)]).unwrap();
        }
        drop(there);
        match connector.advance(&mine, &here) {
            Ok(progress) => assert!(right && progress == HandshakeProgress::Done),
            // A closed connection is tried again; a wrong welcome is refused.
            Err(HandshakeFailure::Refused(_)) => assert!(!right && !welcome.is_empty()),
            Err(_) => assert!(!right && welcome.is_empty()),
        }
    }
}

/// A false acceptor returns every byte that it reads, and offers a part of these bytes as its
/// proof.
#[test]
fn mirror_of_a_local_socket_is_refused() {
    let config = HandshakeConfig::new(&KEY, identity(1, 0));
    let mut connector = Handshake::connector(&config, UNIX).unwrap();
    let (here, there) = local_sockets();
    let failure = loop {
        if let Err(failure) = connector.advance(&config, &here) {
            break failure;
        }
        let mut bytes = [0; 200];
        if let Ok(count) = socket::read(&there, &mut [IoSliceMut::new(&mut bytes)]) {
            socket::write(&there, &[IoSlice::new(&bytes[..count])]).unwrap();
            socket::write(&there, &[IoSlice::new(&bytes[..PROOF_BYTES])]).unwrap();
        }
    };
    assert!(
        matches!(failure, HandshakeFailure::Refused(_)),
        "{failure:?}"
    );
}

#[test]
fn garbage_is_dropped_after_one_hello() {
    let config = HandshakeConfig::new(&KEY, identity(0, 0));
    let (here, there) = local_sockets();
    socket::write(&here, &[IoSlice::new(&[65; 1000])]).unwrap();
    let mut acceptor = Handshake::acceptor(UNIX);
    let failure = acceptor.advance(&config, &there).unwrap_err();
    assert!(matches!(failure, HandshakeFailure::Refused(_)));
    assert_eq!(acceptor.received, HELLO_BYTES);
}

#[test]
fn garbage_is_dropped_at_once() {
    let (mut listener, address) = Listener::bind(LOCAL).unwrap();
    let config = HandshakeConfig::new(&KEY, identity(0, 0));
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(&[0xff; 4096]).unwrap();
    let nothing = listener.accept_until(&config, soon(50), &Fault::new());
    assert!(nothing.unwrap().is_none());
    assert_eq!(listener.pending.len(), 0, "garbage is dropped at once");
}

/// Opens a socket while descriptors are left. The returned closure connects the socket to `to`.
pub(in crate::bootstrap) fn unauthenticated_peer(to: SocketAddr) -> impl FnOnce() {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, connect, socket};
    use std::os::fd::AsRawFd;
    let flags = SockFlag::SOCK_CLOEXEC;
    let socket = socket(AddressFamily::Inet, SockType::Stream, flags, None).unwrap();
    move || {
        connect(socket.as_raw_fd(), &SockaddrStorage::from(to)).unwrap();
        std::mem::forget(socket);
    }
}

#[test]
fn listener_without_descriptors_fails_and_does_not_spin() {
    use crate::sys::fork::tests::{limit_descriptors, processor_time};
    assert!(crate::sys::fork::tests::in_child(|| {
        let (mut listener, address) = Listener::bind(LOCAL).unwrap();
        let connect = unauthenticated_peer(address);
        limit_descriptors(3);
        connect();
        let deadline = Instant::now() + Duration::from_secs(10);
        let config = HandshakeConfig::new(&KEY, identity(0, 0));
        let mut found = None;
        let spent = processor_time(|| {
            found = listener
                .accept_until(&config, deadline, &Fault::new())
                .err();
        });
        let found = found.unwrap();
        let patient = found.message().contains("after attempts for ");
        patient && found.message().contains("os error 24") && spent < Duration::from_millis(300)
    }));
}
