//! Bodies of fuzz targets that need private parts of this folder; see `fuzz/src/lib.rs`.
//!
//! A body panics if a property is broken. It returns `None` for an input that is refused. For other inputs it returns
//! whether they reached a structure that no seed of the corpus has, where `scripts/fuzz --self-test` plants a defect.

use super::PeerInfo;
use super::auth::{
    ConnectionRole, Encryption, Handshake, HandshakeConfig, HandshakeProgress, Peer, PeerIdentity,
};
use super::control::fuzz as control_fuzz;
use super::framed_stream::{Body, Frame, FramedStream};
use super::id::checksum;
use super::join::read_table;
use super::peer_stream::{PeerStream, StreamKeys};
use super::rank_entry::RankEntry;
use super::{UniqueId, keys};
use crate::error::Error;
use crate::sys::socket::{Address, Socket};
use crate::wire::{Reader, Wire, Writer};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;

/// Reads an id from bytes and from digits. Bit 0 of the first byte repairs format and checksum of the rest.
pub fn id(data: &[u8]) -> Option<bool> {
    let (&control, data) = data.split_first()?;
    let mut bytes = [0; 128];
    let held = data.len().min(bytes.len());
    bytes[..held].copy_from_slice(&data[..held]);
    if control & 1 == 0 {
        let _ = UniqueId::from_slice(data);
        let _ = UniqueId::from_hex(&String::from_utf8_lossy(data));
    } else {
        bytes[0] = 1;
        let sum = checksum(&bytes);
        bytes[112..].copy_from_slice(&sum);
    }
    let id = UniqueId::from_bytes(&bytes).ok()?;
    assert!(UniqueId::from_hex(&id.to_hex()) == Ok(id), "digits differ");
    let addresses = id.addresses();
    assert!(!addresses.is_empty(), "an id without addresses was read");
    let parent = keys::derive(&bytes, b"", "fuzz");
    let derived = UniqueId::from_public_part(&id.public_part(), &parent);
    let derived = derived.expect("the public part of an id was refused");
    assert_eq!(derived.addresses(), addresses);
    let _ = (id.fingerprint(), id.participants(), id.rendezvous_name());
    let is_local = id.local_socket().is_some();
    let all_ipv6 = addresses.iter().all(|address| address.is_ipv6());
    Some(is_local && addresses.len() == 2 && all_ipv6)
}

/// A change of the bytes between two sides: in which direction, where, and the bits that flip.
struct Change {
    from_connector: bool,
    at: usize,
    flips: u8,
}

/// Reads up to 7 changes of the first `bytes` bytes from the front of an input. Also returns whether the input
/// demands encryption.
fn changes(reader: &mut Reader<'_>, bytes: usize) -> (Vec<Change>, bool) {
    let first = reader.u8().unwrap_or(0);
    let (count, encrypts) = (first & 7, first & 8 != 0);
    let read = |_| {
        let (at, flips) = (reader.u16().ok()?, reader.u8().ok()?);
        Some(Change {
            from_connector: at & 1 == 0,
            at: usize::from(at >> 1) % bytes,
            flips,
        })
    };
    ((0..count).map_while(read).collect(), encrypts)
}

/// A path from one side to the other, which applies changes.
struct Relay {
    from: UnixStream,
    to: UnixStream,
    at: usize,
    changed: bool,
}

impl Relay {
    /// Passes at most `most` bytes on. Returns whether any byte moved.
    fn pass(&mut self, changes: &[Change], from_connector: bool, most: usize) -> bool {
        let mut bytes = [0; 4096];
        let most = most.clamp(1, bytes.len());
        let Ok(count @ 1..) = self.from.read(&mut bytes[..most]) else {
            return false;
        };
        let original = bytes;
        for change in changes {
            let own = change.from_connector == from_connector;
            if own && (self.at..self.at + count).contains(&change.at) {
                bytes[change.at - self.at] ^= change.flips;
            }
        }
        self.at += count;
        self.changed |= bytes != original;
        // A side that has refused the other reads no more, and its socket may be full.
        let _ = self.to.write(&bytes[..count]);
        true
    }
}

/// Returns a pair of connected sockets that do not block.
fn pair() -> [UnixStream; 2] {
    let (a, b) = UnixStream::pair().expect("no socket pair");
    for end in [&a, &b] {
        end.set_nonblocking(true).expect("no socket option");
    }
    [a, b]
}

fn clone(stream: &UnixStream) -> UnixStream {
    stream.try_clone().expect("no descriptor")
}

fn socket(stream: UnixStream) -> Socket {
    Socket::from(OwnedFd::from(stream))
}

/// Returns the keys of a connecting side, of the accepting side, and of one with another key. Deriving them takes
/// longer than a handshake.
fn handshake_configs() -> &'static [HandshakeConfig; 3] {
    static CONFIGS: OnceLock<[HandshakeConfig; 3]> = OnceLock::new();
    CONFIGS.get_or_init(|| {
        [(0, 1), (1, 1), (1, 2)].map(|(rank, key)| {
            let identity = PeerIdentity {
                role: ConnectionRole::Data,
                rank,
                word: 7,
            };
            HandshakeConfig::new(&[key; 32], identity).with_encryption(Encryption::On)
        })
    })
}

/// Runs a handshake of two sides over a path that changes bytes. A side that received a changed byte must not
/// finish; without changes both finish with one session key.
pub fn handshake(data: &[u8]) -> Option<bool> {
    let mut reader = Reader(data);
    let step = usize::from(reader.u8().unwrap_or(0)) + 1;
    let shares_key = !step.is_multiple_of(16);
    let (changes, encrypts) = changes(&mut reader, 96 + 32 + 1);
    // Connections over TCP alone are encrypted.
    let address = match encrypts {
        true => Address::Tcp(([127, 0, 0, 1], 1).into()),
        false => Address::Local([0; 16]),
    };
    let [connecting, accepting, foreign] = handshake_configs();
    let configs = [connecting, if shares_key { accepting } else { foreign }];
    let connector = Handshake::connector(configs[0], address).expect("no random numbers");
    let mut sides = [Some(connector), Some(Handshake::acceptor(address))];
    let ([a, near], [far, b]) = (pair(), pair());
    let sockets = [socket(a), socket(b)];
    let relay = |from: &UnixStream, to: &UnixStream| Relay {
        from: clone(from),
        to: clone(to),
        at: 0,
        changed: false,
    };
    let mut relays = [relay(&near, &far), relay(&far, &near)];
    let (mut done, mut purpose_refused) = ([false; 2], false);
    loop {
        for at in 0..2 {
            let Some(side) = &mut sides[at] else { continue };
            match side.advance(configs[at], &sockets[at]) {
                Ok(HandshakeProgress::Done) => done[at] = true,
                Ok(HandshakeProgress::Pending { .. }) => {}
                Err(why) => {
                    purpose_refused |= format!("{why:?}").contains("serves another purpose");
                    sides[at] = None;
                    done[at] = false;
                }
            }
        }
        let moved = relays[0].pass(&changes, true, step) | relays[1].pass(&changes, false, step);
        if !moved {
            break;
        }
    }
    // The first relay ends at the acceptor, the second at the connector.
    for (side, relay) in [(1, &relays[0]), (0, &relays[1])] {
        assert!(
            !(done[side] && relay.changed),
            "a changed byte was accepted"
        );
    }
    let changed = relays.iter().any(|relay| relay.changed);
    assert_eq!(done == [true; 2], shares_key && !changed, "{done:?}");
    let peers = sides.into_iter().zip(configs).zip(sockets);
    let sessions: Vec<[u8; 32]> = peers
        .filter_map(|((side, config), socket)| side?.into_peer(config, socket, address).ok())
        .map(|peer| peer.session)
        .collect();
    if done == [true; 2] {
        assert!(sessions.len() == 2 && sessions[0] == sessions[1]);
    }
    (done == [true; 2] || purpose_refused).then_some(purpose_refused)
}

/// Sends frames over a path that changes bytes, in pieces. The receiver gets the frames before the first change
/// and no other.
pub fn framed_stream(data: &[u8]) -> Option<bool> {
    let mut reader = Reader(data);
    let step = usize::from(reader.u8().unwrap_or(0)) + 1;
    let (changes, encrypts) = changes(&mut reader, 1 << 12);
    let ([a, near], [far, b]) = (pair(), pair());
    let keys = |connector: bool| {
        let [sending, receiving] = if connector { [1, 2] } else { [2, 1] };
        encrypts.then_some(StreamKeys {
            sending: [sending; 32],
            receiving: [receiving; 32],
        })
    };
    let framed = |stream, connector| {
        FramedStream::new(Peer {
            stream: PeerStream::new(socket(stream), keys(connector)),
            address: Address::Local([0; 16]),
            rank: 0,
            word: 0,
            session: [5; 32],
            connector,
        })
    };
    let (mut sender, mut receiver) = (framed(a, true), framed(b, false));
    let mut sent: Vec<(u8, Vec<u8>)> = Vec::new();
    while let (Ok(kind), Ok(length)) = (reader.u8(), reader.u8()) {
        let body = reader.bytes(usize::from(length).min(reader.0.len()));
        let body = body.unwrap_or_default().to_vec();
        sender.queue(kind, &Body::new(body.clone()));
        sent.push((kind, body));
    }
    let mut relay = Relay {
        from: near,
        to: far,
        at: 0,
        changed: false,
    };
    let (mut frames, mut end): (Vec<Frame>, Option<String>) = (Vec::new(), None);
    while end.is_none() {
        sender.flush();
        let moved = relay.pass(&changes, true, step);
        end = receiver.receive(&mut frames);
        if !moved && sender.is_flushed() {
            break;
        }
    }
    let received: Vec<_> = frames
        .into_iter()
        .map(|frame| (frame.kind, frame.body))
        .collect();
    assert!(sent.starts_with(&received), "other frames than were sent");
    if !relay.changed {
        assert!(received.len() == sent.len() && end.is_none(), "{end:?}");
    }
    let is_refused = end.is_some_and(|end| end.contains("seal is wrong"));
    (!received.is_empty()).then_some(is_refused && received.len() >= 3)
}

/// Reads entries and tables of the rendezvous, contributions, and errors. What is read must be written alike.
pub fn members(data: &[u8]) -> Option<bool> {
    let (&kind, body) = data.split_first()?;
    match kind & 3 {
        0 => {
            let entry = RankEntry::from_bytes(body).ok()?;
            assert_eq!(entry.to_bytes(), body, "an entry is written differently");
            Some(entry.info.address.is_ipv6() && entry.control_port >= 0x8000)
        }
        1 => table(body),
        2 => control_fuzz::contributions(body),
        _ => {
            let error = Error::from_bytes(body).ok()?;
            let again = Error::from_bytes(&error.to_bytes());
            assert_eq!(
                again.as_ref(),
                Ok(&error),
                "an error is written differently"
            );
            Some(false)
        }
    }
}

/// Describes a rank for bodies that need one.
pub(crate) fn peer(rank: usize) -> PeerInfo {
    PeerInfo {
        rank,
        pid: 1,
        uid: 0,
        host: "a".into(),
        host_id: [1; 16],
        process_id: [2; 16],
        address: [127, 0, 0, 1].into(),
    }
}

/// Reads a table of two ranks, whose first entry is this rank's.
fn table(body: &[u8]) -> Option<bool> {
    let own = RankEntry {
        info: peer(0),
        start_time: 3,
        pid_namespace: 4,
        control_port: 5,
    };
    // The input holds what follows this rank's entry.
    let mut writer = Writer::default();
    writer.bytes(&[0; 32]).u32(2).put(&own).bytes(body);
    let _ = read_table(body, &own, 2);
    let (members, _) = read_table(&writer.0, &own, 2).ok()?;
    assert!(members.len() == 2 && members[1].info.rank == 1);
    let _ = (own.state_of(&members[1]), members[1].place());
    Some(members[1].shares_process(&own))
}
