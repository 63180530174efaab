use super::*;
use crate::bootstrap::auth::{Handshake, HandshakeProgress};
use crate::sys::socket::Socket;
use std::io::{IoSlice, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

fn peers() -> Vec<PeerInfo> {
    let peer = |rank| PeerInfo {
        rank,
        pid: 1,
        uid: 0,
        host: "here".into(),
        host_id: [1; 16],
        process_id: [1; 16],
        address: [127, 0, 0, 1].into(),
    };
    (0..2).map(peer).collect()
}

fn listener() -> (Listener, SocketAddr) {
    Listener::bind([127, 0, 0, 1].into()).unwrap()
}

fn id(peer: usize, index: usize) -> SocketId {
    SocketId {
        index,
        ..SocketId::only(peer)
    }
}

/// Arguments of one rank that opens `count` sockets: rank 1 connects, rank 0 accepts.
struct Side<'a> {
    peers: &'a [PeerInfo],
    fault: &'a Fault,
    count: usize,
    key: u8,
    seconds: f64,
}

impl<'a> Side<'a> {
    /// Returns the arguments of ranks that both know one key and have time.
    fn new(peers: &'a [PeerInfo], fault: &'a Fault, count: usize) -> Side<'a> {
        Side {
            peers,
            fault,
            count,
            key: 3,
            seconds: 20.0,
        }
    }

    fn open(
        &self,
        me: usize,
        at: Listener,
        to: SocketAddr,
    ) -> Result<HashMap<SocketId, PeerStream>> {
        SocketMesh {
            purpose: "tcp",
            key: [self.key; 32],
            encrypts: false,
            me,
            peers: self.peers,
            listener: at,
            addresses: vec![(1 - me, Address::Tcp(to))],
            nearer: Vec::new(),
            channels: 1,
            sockets: self.count,
            fault: self.fault,
            deadline: Instant::now() + Duration::from_secs_f64(self.seconds),
        }
        .open()
    }
}

#[test]
fn socket_id_of_another_target_is_refused() {
    let sent = SocketId {
        peer: 3,
        channel: 65_535,
        index: 7,
    };
    let peer = |word| {
        let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
        Peer {
            stream: Socket::from(std::os::fd::OwnedFd::from(socket)).into(),
            address: Address::Local([0; 16]),
            rank: 9,
            word,
            session: [0; 32],
            connector: false,
        }
    };
    let received = SocketId { peer: 9, ..sent };
    assert_eq!(SocketId::accepted(&peer(sent.word()), 3), Some(received));
    assert_eq!(SocketId::accepted(&peer(sent.word()), 2), None);
}

#[test]
fn unauthenticated_connections_neither_join_nor_delay() {
    let (peers, fault) = (peers(), Fault::new());
    let side = Side {
        seconds: 30.0,
        ..Side::new(&peers, &fault, 6)
    };
    let (at, to) = listener();
    let (other, _) = listener();
    // More silent, garbage and closed connections than there are places arrive before the ranks.
    let mut crowd = Vec::new();
    for index in 0..120 {
        let mut stream = TcpStream::connect(to).unwrap();
        match index % 3 {
            0 => {}
            1 => {
                let _ = stream.write_all(&[b'G'; 500]);
            }
            _ => continue,
        }
        crowd.push(stream);
    }
    std::thread::scope(|scope| {
        let accepting = scope.spawn(|| side.open(0, at, to));
        let connecting = scope.spawn(|| side.open(1, other, to));
        let here = accepting.join().unwrap().unwrap();
        let there = connecting.join().unwrap().unwrap();
        assert_eq!((here.len(), there.len()), (6, 6));
        for socket in 0..6 {
            let text = format!("over socket {socket}");
            let parts = [IoSlice::new(text.as_bytes())];
            socket::write(there[&id(0, socket)].socket(), &parts).unwrap();
            let mut stream = TcpStream::from(here[&id(1, socket)].socket().try_clone().unwrap());
            stream.set_nonblocking(false).unwrap();
            let mut found = vec![0; text.len()];
            stream.read_exact(&mut found).unwrap();
            assert_eq!(found, text.as_bytes());
        }
    });
}

#[test]
fn missing_rank_is_named_at_the_deadline() {
    let (peers, fault) = (peers(), Fault::new());
    let side = Side {
        seconds: 0.1,
        ..Side::new(&peers, &fault, 2)
    };
    let (at, to) = listener();
    let error = side.open(0, at, to).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(error.message().contains("rank 1 (host here"), "{error}");
    assert!(error.message().contains("0 of 2 sockets"), "{error}");
    // The listener is closed by now, so connections are refused.
    let (at, _) = listener();
    let error = side.open(1, at, to).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(error.message().contains("refused"), "{error}");
}

#[test]
fn listener_of_another_key_is_refused() {
    let (peers, fault) = (peers(), Fault::new());
    let side = |key| Side {
        key,
        seconds: 1.0,
        ..Side::new(&peers, &fault, 1)
    };
    let (at, to) = listener();
    let (other, _) = listener();
    let (accepting, connecting) = (side(3), side(4));
    std::thread::scope(|scope| {
        let accepting = scope.spawn(move || accepting.open(0, at, to));
        let error = connecting.open(1, other, to).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Remote);
        assert!(error.message().contains("another secret"), "{error}");
        assert!(accepting.join().unwrap().is_err());
    });
}

#[test]
fn raised_fault_ends_the_attempts() {
    let (peers, fault) = (peers(), Arc::clone(&Fault::new()));
    let side = Side {
        seconds: 1000.0,
        ..Side::new(&peers, &fault, 1)
    };
    let (at, to) = listener();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| side.open(0, at, to));
        fault.raise(Error::new(ErrorKind::Aborted, "enough"));
        assert_eq!(waiting.join().unwrap().unwrap_err().message(), "enough");
    });
}

/// The acceptor counts a connection as open whose last step is lost on the way, and closes its
/// listener. The connector does not try until its deadline.
#[test]
fn connection_lost_when_the_listener_closes_is_an_error_at_once() {
    let (peers, fault) = (peers(), Fault::new());
    let side = Side::new(&peers, &fault, 1);
    let at = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let to = at.local_addr().unwrap();
    let (other, _) = listener();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (mut stream, _) = at.accept().unwrap();
            stream.read_exact(&mut [0]).unwrap();
            drop(at);
        });
        let error = side.open(1, other, to).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Remote, "{error}");
        let words = "the tcp connection to rank 0 (host here, pid 1) was lost";
        assert!(error.message().starts_with(words), "{error}");
    });
    assert!(begun.elapsed() < Duration::from_secs(10));
}

/// A rank that is stopped between hello and proof for longer than the timeout finds its connection
/// dropped, and connects again.
#[test]
fn connector_with_a_late_proof_connects_again() {
    let (peers, fault) = (peers(), Fault::new());
    let side = Side::new(&peers, &fault, 1);
    let (at, to) = listener();
    let (other, _) = listener();
    let identity = PeerIdentity {
        role: ConnectionRole::Data,
        rank: 1,
        word: id(0, 0).word(),
    };
    let config = HandshakeConfig::new(&[3; 32], identity);
    std::thread::scope(|scope| {
        let socket = socket::connect(&Address::Tcp(to)).unwrap();
        let mut handshake = Handshake::connector(&config, Address::Tcp(to)).unwrap();
        let mut wait = |write: bool| {
            let mut interest = [socket::interest(&socket, !write, write)];
            socket::poll(&mut interest, Duration::from_secs(10)).unwrap();
            assert!(interest[0].revents != 0);
            handshake.advance(&config, &socket)
        };
        // The acceptor's queue still holds the hello. The connecting side finds the acceptor's
        // proof, and after it the end of the stream.
        assert_eq!(
            wait(true).unwrap(),
            HandshakeProgress::Pending { write: false }
        );
        let accepting = scope.spawn(|| side.open(0, at, to));
        let mut gone = socket::interest(&socket, false, false);
        gone.events = libc::POLLRDHUP;
        let limit = Duration::from_secs(10);
        assert!(socket::poll(std::slice::from_mut(&mut gone), limit).unwrap() > 0);
        let end = loop {
            match wait(false) {
                Ok(HandshakeProgress::Pending { .. }) => {}
                end => break end,
            }
        };
        assert!(end.is_err(), "{end:?}, though the acceptor is gone");
        let there = side.open(1, other, to).unwrap();
        let here = accepting.join().unwrap().unwrap();
        assert_eq!((here.len(), there.len()), (1, 1));
    });
}

/// Opens unauthenticated connections faster than the acceptor can accept them.
#[test]
fn flood_of_unauthenticated_connections_displaces_no_rank() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let (peers, fault) = (peers(), Fault::new());
    for round in 0..5 {
        let side = Side::new(&peers, &fault, 4);
        let (at, to) = listener();
        let (other, _) = listener();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    // The number of connections is bounded by the descriptors that both ends of a
                    // test may hold.
                    let mut held = std::collections::VecDeque::new();
                    while !stop.load(Ordering::Relaxed) {
                        held.extend(TcpStream::connect(to));
                        held.drain(..held.len().saturating_sub(100));
                        if held.is_empty() {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(50));
            let accepting = scope.spawn(|| side.open(0, at, to));
            let there = side.open(1, other, to);
            let here = accepting.join().unwrap();
            stop.store(true, Ordering::Relaxed);
            for links in [here, there] {
                assert_eq!(links.map(|links| links.len()), Ok(4), "round {round}");
            }
        });
    }
}
