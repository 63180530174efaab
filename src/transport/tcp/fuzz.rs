//! Bodies of the fuzz targets `pump` and `members` that read what a peer sends over TCP.

use super::networks::AddressOffer;
use super::{TcpRecv, TcpSend, join};
use crate::bootstrap::peer_stream::PeerStream;
use crate::mem::FifoShape;
use crate::sys::socket::Socket;
use crate::transport::frame::encode;
use crate::transport::{Header, RecvEnd, RecvInto, SendEnd, SendFrom};
use crate::wire::{Reader, Wire};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

const SHAPE: FifoShape = FifoShape {
    depth: 4,
    slot_bytes: 128,
};

/// Reads the addresses of two ranks. What is read must be written alike.
pub(in crate::transport) fn addresses(body: &[u8]) -> Option<bool> {
    let (one, two) = body.split_at(body.len() / 2);
    let [one, two] = [one, two].map(|half| AddressOffer::from_bytes(half).ok());
    let (one, two) = (one?, two?);
    let again = AddressOffer::from_bytes(&one.to_bytes());
    assert_eq!(
        again.as_ref(),
        Ok(&one),
        "addresses are written differently"
    );
    let _ = one.port();
    for turn in 1..one.0.len() {
        let _ = one.nearer(&two, turn);
    }
    // In turn 0 only a network that is nearer takes the place of the first.
    Some(one.nearer(&two, 0).is_some())
}

/// A connection, its remote sockets, and what the remote side has done.
struct PumpWorld {
    far: Vec<Option<UnixStream>>,
    send: TcpSend,
    recv: TcpRecv,
    /// Messages that the remote side has written whole, and those that have been received.
    written: u64,
    received: u64,
    /// Whether the remote side has written anything else, or closed a socket.
    is_hostile: bool,
    /// Lengths of the messages, by number.
    lengths: Vec<u8>,
    /// The message in progress into the caller's memory.
    expected: Option<Header>,
    place: [u8; 128],
    /// The message in progress from the caller's memory.
    lent: Option<(Header, Vec<u8>)>,
}

/// Returns byte `at` of message `number`.
fn payload(number: u64, at: usize) -> u8 {
    (number as u8).wrapping_mul(31) ^ at as u8
}

/// Drives a pump by a script, in which the remote side writes frames and any bytes.
pub fn pump(data: &[u8]) -> Option<bool> {
    let mut reader = Reader(data);
    let sockets = usize::from(reader.u8().unwrap_or(0) % 3) + 1;
    let (mut far, mut near) = (Vec::new(), Vec::<PeerStream>::new());
    for _ in 0..sockets {
        let (there, here) = UnixStream::pair().expect("no socket pair");
        for end in [&there, &here] {
            end.set_nonblocking(true).expect("no socket option");
        }
        far.push(Some(there));
        near.push(Socket::from(OwnedFd::from(here)).into());
    }
    let joined = join(SHAPE, near, "rank 1 (host there, pid 2)");
    let (send, recv, pump) = joined.expect("no memory for a FIFO");
    let mut world = PumpWorld {
        far,
        send,
        recv,
        written: 0,
        received: 0,
        is_hostile: false,
        lengths: Vec::new(),
        expected: None,
        place: [0; 128],
        lent: None,
    };
    let mut failure = String::new();
    while let Ok(op) = reader.u8() {
        let result = match op & 7 {
            0 | 1 => world.write_message(reader.u8().unwrap_or(0)),
            2 => world.write_bytes(op >> 3, &mut reader),
            3 => world.receive(),
            4 => world.receive_in_place(),
            5 => world.publish(op),
            6 => world.send_in_place(op),
            _ => {
                pump.progress();
                world.close_or_read(op >> 3);
                Ok(())
            }
        };
        if let Err(error) = result {
            assert!(world.is_hostile, "{error}");
            failure = error.to_string();
            break;
        }
    }
    while !world.is_hostile && world.received < world.written {
        let before = world.received;
        let received = match world.expected {
            Some(_) => world.receive_in_place(),
            None => world.receive(),
        };
        received.expect("a message of a good peer failed");
        assert!(world.received > before, "a message was lost");
    }
    let is_refused = failure.contains("impossible frame");
    (world.received > 0).then_some(world.received >= 4 && sockets == 3 && is_refused)
}

impl PumpWorld {
    fn write_message(&mut self, length: u8) -> crate::Result<()> {
        // A peer has as many messages on the way as its slots and the sockets hold.
        if self.written.saturating_sub(self.received) >= 64 {
            return Ok(());
        }
        let (number, length) = (self.written, length.min(SHAPE.slot_bytes as u8));
        let header = Header {
            bytes: length.into(),
            signature: [number, 1, 2, 3, 4],
            crc: 0,
        };
        let mut bytes = encode(&header, number).to_vec();
        bytes.extend((0..usize::from(length)).map(|at| payload(number, at)));
        let index = (number % self.far.len() as u64) as usize;
        let far = self.far[index].as_mut();
        let taken = far.and_then(|far| far.write(&bytes).ok());
        if taken == Some(bytes.len()) {
            self.written += 1;
            self.lengths.push(length);
        } else {
            self.is_hostile = true;
        }
        Ok(())
    }

    fn write_bytes(&mut self, index: u8, reader: &mut Reader<'_>) -> crate::Result<()> {
        let length = usize::from(reader.u8().unwrap_or(0)).min(reader.0.len());
        let bytes = reader.bytes(length).unwrap_or_default();
        let index = usize::from(index) % self.far.len();
        if let Some(far) = &mut self.far[index] {
            self.is_hostile = true;
            let _ = far.write(bytes);
        }
        Ok(())
    }

    /// Checks a received message of a good peer, and counts it.
    fn check(&mut self, header: Header, bytes: &[u8]) {
        assert_eq!(bytes.len(), header.bytes as usize);
        assert!(bytes.len() <= SHAPE.slot_bytes);
        let number = self.received;
        self.received += 1;
        if !self.is_hostile {
            assert_eq!(header.signature, [number, 1, 2, 3, 4]);
            assert_eq!(bytes.len(), usize::from(self.lengths[number as usize]));
            let is_right = |(at, &byte): (usize, &u8)| byte == payload(number, at);
            assert!(bytes.iter().enumerate().all(is_right), "message {number}");
        }
    }

    fn receive(&mut self) -> crate::Result<()> {
        if self.expected.is_some() {
            return self.receive_in_place();
        }
        if self.recv.ready()? {
            let (header, bytes) = (self.recv.header(), self.recv.payload().to_vec());
            self.check(header, &bytes);
            self.recv.release();
        }
        Ok(())
    }

    fn receive_in_place(&mut self) -> crate::Result<()> {
        if self.expected.is_none() {
            self.expected = self.recv.expect()?;
        }
        let Some(header) = self.expected else {
            return Ok(());
        };
        let length = header.bytes as usize;
        if self.recv.recv_into(&mut self.place[..length])? {
            self.expected = None;
            let bytes = self.place[..length].to_vec();
            self.check(header, &bytes);
        }
        Ok(())
    }

    fn publish(&mut self, op: u8) -> crate::Result<()> {
        if self.lent.is_none() && self.send.ready()? {
            self.send.slot().fill(op);
            let header = Header {
                bytes: u32::from(op >> 1),
                ..Header::default()
            };
            self.send.publish(header);
        }
        Ok(())
    }

    fn send_in_place(&mut self, op: u8) -> crate::Result<()> {
        let (header, bytes) = self.lent.take().unwrap_or_else(|| {
            let header = Header {
                bytes: u32::from(op >> 1),
                ..Header::default()
            };
            (header, vec![op; usize::from(op >> 1)])
        });
        if !self.send.send_from(header, &bytes)? {
            self.lent = Some((header, bytes));
        }
        Ok(())
    }

    /// Closes a socket of the remote side if bit 0 is set, or reads what this side has sent.
    fn close_or_read(&mut self, choice: u8) {
        let index = usize::from(choice >> 1) % self.far.len();
        if choice & 1 != 0 {
            self.is_hostile = true;
            self.far[index] = None;
        } else if let Some(far) = &mut self.far[index] {
            let _ = far.read(&mut [0; 4096]);
        }
    }
}
