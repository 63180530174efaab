//! Frames over an authenticated connection: bounded, numbered, sealed; never blocking.
//!
//! | bytes | content |
//! | --- | --- |
//! | 0..4 | length of the body |
//! | 4 | kind |
//! | 8..16 | number of the frame in its direction |
//! | 16.. | body |
//! | last 16 | start of HMAC-SHA256(session key of the direction, header, SHA-256(body)) |
//!
//! The seal covers the digest of the body, not the body. A root that sends one body to a thousand
//! ranks hashes it once.

use super::auth::{Peer, wait_ready};
use super::keys::{self, Authenticator};
use super::peer_stream::PeerStream;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Fault;
use crate::sys::socket::Socket;
use crate::wire::Damaged;
use nix::poll::PollFlags;
use nix::sys::socket::{Shutdown, shutdown};
use std::collections::VecDeque;
use std::io::{ErrorKind as Io, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Largest body, in bytes.
pub(super) const MAX_BODY: usize = 2 << 20;
const HEADER: usize = 16;
const SEAL: usize = 16;
/// Longest poll between two checks of the fault.
const FAULT_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Largest body that is copied after its header, in bytes: the frame is then one packet instead of
/// three.
const SMALL: usize = 16 << 10;
/// Largest number of bytes read from one connection before other connections are served.
const READ_LIMIT: usize = 1 << 20;

/// Describes the end of a connection that the other side closed.
pub(super) const CLOSED: &str = "closed";
/// Describes the end of a connection whose remote kernel no longer answers.
pub(super) const UNREACHABLE: &str = "unreachable";

/// Contents of a frame, shared between connections.
pub(super) struct Body {
    bytes: Vec<u8>,
    digest: keys::DerivedKey,
}

impl Body {
    pub(super) fn new(bytes: Vec<u8>) -> Arc<Body> {
        let digest = keys::digest(&[&bytes]);
        Arc::new(Body { bytes, digest })
    }
}

/// A received message: its kind, and its contents.
pub(super) struct Frame {
    pub(super) kind: u8,
    pub(super) body: Vec<u8>,
}

/// This side's end of a connection that carries frames.
pub(super) struct FramedStream {
    stream: PeerStream,
    sending: SealedDirection,
    receiving: SealedDirection,
    outbox: VecDeque<OutboxPiece>,
    /// Bytes of the first piece that have been sent.
    sent: usize,
    inbox: Vec<u8>,
    /// Error after which nothing can be sent.
    broken: Option<String>,
}

struct SealedDirection {
    authenticator: Authenticator,
    count: u64,
}

enum OutboxPiece {
    Owned(Vec<u8>),
    Shared(Arc<Body>),
}

impl OutboxPiece {
    fn bytes(&self) -> &[u8] {
        match self {
            OutboxPiece::Owned(bytes) => bytes,
            OutboxPiece::Shared(body) => &body.bytes,
        }
    }
}

impl FramedStream {
    pub(super) fn new(peer: Peer) -> FramedStream {
        let direction = |from_connector: bool| SealedDirection {
            authenticator: keys::authenticator(&keys::derive(
                &peer.session,
                &[u8::from(from_connector)],
                "control frames",
            )),
            count: 0,
        };
        FramedStream {
            sending: direction(peer.connector),
            receiving: direction(!peer.connector),
            stream: peer.stream,
            outbox: VecDeque::new(),
            sent: 0,
            inbox: Vec::new(),
            broken: None,
        }
    }

    /// Queues a frame. [`FramedStream::flush`] sends it.
    pub(super) fn queue(&mut self, kind: u8, body: &Arc<Body>) {
        if self.broken.is_some() {
            return;
        }
        debug_assert!(body.bytes.len() <= MAX_BODY);
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&(body.bytes.len() as u32).to_le_bytes());
        header[4] = kind;
        header[8..].copy_from_slice(&self.sending.count.to_le_bytes());
        self.sending.count += 1;
        let seal = keys::seal(&self.sending.authenticator, &[&header, &body.digest]);
        if body.bytes.len() <= SMALL {
            let frame = [&header, body.bytes.as_slice(), &seal[..SEAL]].concat();
            self.outbox.push_back(OutboxPiece::Owned(frame));
        } else {
            self.outbox.push_back(OutboxPiece::Owned(header.to_vec()));
            self.outbox.push_back(OutboxPiece::Shared(body.clone()));
            self.outbox
                .push_back(OutboxPiece::Owned(seal[..SEAL].to_vec()));
        }
    }

    /// Sends as much as the socket takes. If the connection is broken, ends it and drops the queued frames;
    /// `receive` reports the reason.
    pub(super) fn flush(&mut self) {
        if self.broken.is_none()
            && let Err(error) = self.stream.flush()
        {
            self.end(&error);
        }
        while let Some(piece) = self.outbox.front() {
            let piece = [IoSlice::new(&piece.bytes()[self.sent..])];
            match self.stream.write(&piece) {
                Ok(count) => {
                    self.sent += count;
                    if self.sent == self.outbox[0].bytes().len() {
                        self.sent = 0;
                        self.outbox.pop_front();
                    }
                }
                Err(error) if error.kind() == Io::WouldBlock => return,
                Err(error) if error.kind() == Io::Interrupted => {}
                Err(error) => self.end(&error),
            }
        }
    }

    /// Ends a connection that cannot send. Frames are lost even if the kernel could send later ones, and
    /// without this end neither side would notice before a deadline.
    fn end(&mut self, error: &std::io::Error) {
        self.broken = Some(name_end(error));
        self.outbox.clear();
        let _ = shutdown(self.socket().as_raw_fd(), Shutdown::Both);
    }

    /// Returns whether the kernel has taken all queued frames, or the connection has lost them.
    pub(super) fn is_flushed(&self) -> bool {
        self.outbox.is_empty() && (self.broken.is_some() || !self.stream.has_unsent())
    }

    /// Ends this direction of the stream.
    pub(super) fn finish(&mut self) {
        let _ = shutdown(self.socket().as_raw_fd(), Shutdown::Write);
    }

    /// Appends the frames that have arrived. Returns the reason once the connection has ended; the
    /// frames before its end are still appended.
    pub(super) fn receive(&mut self, frames: &mut Vec<Frame>) -> Option<String> {
        let mut end = None;
        let mut budget = READ_LIMIT;
        while budget > 0 && end.is_none() {
            let filled = self.inbox.len();
            // Heartbeats are small and frequent; a long body grows the buffer step by step.
            let room = if filled == 0 { 4 << 10 } else { 64 << 10 };
            self.inbox.resize(filled + room, 0);
            let mut parts = [IoSliceMut::new(&mut self.inbox[filled..])];
            let read = self.stream.read(&mut parts);
            self.inbox
                .truncate(filled + read.as_ref().map_or(0, |count| *count));
            match read {
                Ok(0) => end = Some(self.broken.take().unwrap_or_else(|| CLOSED.into())),
                Ok(count) => {
                    budget = budget.saturating_sub(count);
                    if let Err(error) = self.take_frames(frames) {
                        end = Some(format!("invalid data: {}", error.message()));
                    }
                    if count < room {
                        break;
                    }
                }
                Err(error) if error.kind() == Io::WouldBlock => break,
                Err(error) if error.kind() == Io::Interrupted => {}
                // A failed send explains more than the reset that followed it.
                Err(error) => end = Some(self.broken.take().unwrap_or_else(|| name_end(&error))),
            }
        }
        end
    }

    fn take_frames(&mut self, frames: &mut Vec<Frame>) -> Result<()> {
        let mut at = 0;
        while let Some(header) = self.inbox[at..].first_chunk::<HEADER>() {
            let length = u32::from_le_bytes([header[0], header[1], header[2], header[3]]) as usize;
            let count = u64::from_le_bytes(std::array::from_fn(|i| header[8 + i]));
            if length > MAX_BODY || count != self.receiving.count {
                return Err(Damaged.into());
            }
            let rest = &self.inbox[at + HEADER..];
            let (Some(body), Some(seal)) = (rest.get(..length), rest.get(length..length + SEAL))
            else {
                break;
            };
            let authenticator = &self.receiving.authenticator;
            if !keys::opens(authenticator, &[header, &keys::digest(&[body])], seal) {
                return Err(Error::new(ErrorKind::Remote, "a frame's seal is wrong"));
            }
            self.receiving.count += 1;
            frames.push(Frame {
                kind: header[4],
                body: body.to_vec(),
            });
            at += HEADER + length + SEAL;
        }
        self.inbox.drain(..at);
        if self.inbox.is_empty() {
            self.inbox.shrink_to(64 << 10);
        }
        Ok(())
    }

    /// Returns the events to poll for.
    pub(super) fn events(&self) -> PollFlags {
        if self.is_flushed() {
            PollFlags::POLLIN
        } else {
            PollFlags::POLLIN | PollFlags::POLLOUT
        }
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket().as_fd()
    }

    pub(super) fn socket(&self) -> &Socket {
        self.stream.socket()
    }

    /// Sends all queued frames and waits for one frame. The rendezvous uses this, because the
    /// control thread does not exist yet.
    ///
    /// # Errors
    /// Timeout; remote at the end of the connection; the fault's reason. The caller adds the other
    /// side's name.
    pub(super) fn exchange(&mut self, deadline: Instant, fault: &Fault) -> Result<Frame> {
        let mut frames = Vec::new();
        loop {
            // Reads the clock before the socket, so that a frame that arrived by the deadline is in
            // time.
            let now = Instant::now();
            self.flush();
            let end = self.receive(&mut frames);
            if !frames.is_empty() {
                return Ok(frames.swap_remove(0));
            }
            if let Some(end) = end {
                return Err(Error::new(
                    ErrorKind::Remote,
                    format!("the connection ended without an answer: {end}"),
                ));
            }
            fault.check()?;
            if now >= deadline {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    "no answer arrived before the deadline",
                ));
            }
            let limit = FAULT_POLL_INTERVAL.min(deadline - now);
            wait_ready(self.descriptor(), self.events(), limit);
        }
    }
}

fn name_end(error: &std::io::Error) -> String {
    match error.kind() {
        Io::TimedOut | Io::HostUnreachable | Io::NetworkUnreachable | Io::NetworkDown => {
            UNREACHABLE.into()
        }
        // A process that ends with unread data resets its connections.
        Io::ConnectionReset | Io::BrokenPipe => CLOSED.into(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::sys::socket::Address;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    pub(in crate::bootstrap) fn pair() -> (FramedStream, FramedStream) {
        let (a, b) = UnixStream::pair().unwrap();
        let framed = |stream: UnixStream, connector| {
            stream.set_nonblocking(true).unwrap();
            FramedStream::new(Peer {
                stream: Socket::from(OwnedFd::from(stream)).into(),
                address: Address::Local([0; 16]),
                rank: 0,
                word: 0,
                session: [5; 32],
                connector,
            })
        };
        (framed(a, true), framed(b, false))
    }

    fn drain(
        from: &mut FramedStream,
        to: &mut FramedStream,
        want: usize,
    ) -> (Vec<Frame>, Option<String>) {
        let (mut frames, mut end) = (Vec::new(), None);
        let until = Instant::now() + Duration::from_secs(10);
        while frames.len() < want && end.is_none() && Instant::now() < until {
            from.flush();
            end = to.receive(&mut frames);
        }
        (frames, end)
    }

    #[test]
    fn frames_of_all_sizes_arrive_in_order() {
        let (mut a, mut b) = pair();
        let sizes = [0, 1, 31, SMALL, SMALL + 1, MAX_BODY];
        for (at, &size) in sizes.iter().enumerate() {
            let bytes = (0..size).map(|byte| (byte * 7 + at) as u8).collect();
            a.queue(at as u8, &Body::new(bytes));
        }
        let (frames, end) = drain(&mut a, &mut b, sizes.len());
        assert_eq!((frames.len(), end), (sizes.len(), None));
        for (at, (frame, &size)) in frames.iter().zip(&sizes).enumerate() {
            assert_eq!((frame.kind as usize, frame.body.len()), (at, size));
            let right = |(byte, value): (usize, &u8)| *value == (byte * 7 + at) as u8;
            assert!(frame.body.iter().enumerate().all(right));
        }
        drop(a);
        let mut none = Vec::new();
        let end = loop {
            if let Some(end) = b.receive(&mut none) {
                break end;
            }
        };
        assert_eq!(end, "closed");
    }

    #[test]
    fn connection_that_cannot_send_ends_on_both_sides() {
        let (mut a, mut b) = pair();
        // From here on the kernel refuses to send.
        a.finish();
        a.queue(1, &Body::new(vec![1]));
        a.flush();
        assert!(a.is_flushed());
        let mut none = Vec::new();
        assert_eq!(a.receive(&mut none), Some(CLOSED.into()));
        b.queue(2, &Body::new(vec![2]));
        b.flush();
        assert_eq!(b.receive(&mut none), Some(CLOSED.into()));
        assert!(none.is_empty());
    }

    /// Covers a frame with each byte flipped in turn, a repeated frame, and a reflected frame.
    #[test]
    fn damaged_repeated_or_reflected_frame_is_refused() {
        let (mut a, _) = pair();
        a.queue(3, &Body::new(vec![1, 2, 3]));
        let good = a.outbox[0].bytes().to_vec();
        let delivered = |bytes: &[u8], connector: bool| {
            let (mut a, mut b) = pair();
            let (from, to) = if connector {
                (&mut a, &mut b)
            } else {
                (&mut b, &mut a)
            };
            from.outbox.push_back(OutboxPiece::Owned(bytes.to_vec()));
            from.flush();
            from.finish();
            let mut frames = Vec::new();
            let end = loop {
                if let Some(end) = to.receive(&mut frames) {
                    break end;
                }
            };
            (frames.len(), end)
        };
        assert_eq!(delivered(&good, true), (1, "closed".into()));
        assert_eq!(delivered(&good, false).0, 0);
        let (twice, end) = delivered(&[good.clone(), good.clone()].concat(), true);
        assert_eq!(twice, 1);
        assert!(end.contains("invalid data"), "{end}");
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x80;
            assert_eq!(delivered(&bad, true).0, 0, "byte {at}");
        }
    }
}
