//! Stream sockets between authenticated ranks, encrypted if both ends have agreed on keys.
//!
//! An encrypted stream is a sequence of records. Each direction has a key of its own:
//!
//! | bytes | content |
//! | --- | --- |
//! | 0..4 | number of bytes of the ciphertext |
//! | 4.. | AES-256-GCM of 1 to 65,536 bytes; its nonce is the record's number under the key |
//! | last 16 | tag, which also covers the number of bytes |
//!
//! After 2^20 records the next key is derived from the last one, because the proofs of AES-GCM end long
//! before 2^40 blocks under one key (RFC 8446, section 5.5).

use super::keys::{self, DerivedKey};
use crate::sys::socket::{self, Socket};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, MAX_TAG_LEN, Nonce, UnboundKey};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::ops::Range;

/// Largest number of plaintext bytes of a record.
const RECORD: usize = 64 << 10;
const HEADER: usize = 4;
/// Number of records under one key.
const RECORDS_OF_A_KEY: u64 = 1 << 20;
/// Smallest and largest number of bytes that a read of the socket asks for. Most connections carry
/// small messages, and a root has thousands of connections.
const ROOM: [usize; 2] = [4 << 10, 2 * (HEADER + RECORD + MAX_TAG_LEN)];

/// Keys of the two directions of a connection.
pub(crate) struct StreamKeys {
    /// Key of the bytes that this side sends.
    pub sending: DerivedKey,
    /// Key of the bytes that this side receives.
    pub receiving: DerivedKey,
}

/// A connection to a rank: a non-blocking socket, and the state of its encryption.
pub(crate) struct PeerStream {
    socket: Socket,
    records: Option<Box<Records>>,
}

impl std::fmt::Debug for PeerStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PeerStream")
            .field("socket", &self.socket)
            .field("is_encrypted", &self.records.is_some())
            .finish()
    }
}

impl From<Socket> for PeerStream {
    fn from(socket: Socket) -> PeerStream {
        PeerStream::new(socket, None)
    }
}

impl PeerStream {
    /// Creates the stream over `socket`; with `keys` it is encrypted.
    pub(crate) fn new(socket: Socket, keys: Option<StreamKeys>) -> PeerStream {
        PeerStream {
            socket,
            records: keys.map(|keys| Box::new(Records::new(keys))),
        }
    }

    pub(crate) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Writes as much of `parts` as the stream takes, and returns the number of bytes. Less than all means
    /// that the kernel is full. Some bytes may wait in this process; see [`PeerStream::flush`].
    ///
    /// # Errors
    /// Would-block if the stream takes nothing; the system's errors.
    pub(crate) fn write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let Some(records) = &mut self.records else {
            return socket::write(&self.socket, parts);
        };
        let total: usize = parts.iter().map(|part| part.len()).sum();
        let mut taken = 0;
        while records.send(&self.socket)? {
            if taken == total {
                return Ok(taken);
            }
            taken += records.seal(parts, taken)?;
        }
        match taken {
            0 => Err(ErrorKind::WouldBlock.into()),
            _ => Ok(taken),
        }
    }

    /// Passes bytes that [`PeerStream::write`] took to the kernel. Returns whether it has all of them.
    ///
    /// # Errors
    /// The system's errors, but not would-block.
    pub(crate) fn flush(&mut self) -> io::Result<bool> {
        match &mut self.records {
            Some(records) => records.send(&self.socket),
            None => Ok(true),
        }
    }

    /// Returns whether bytes that [`PeerStream::write`] took wait for the kernel.
    pub(crate) fn has_unsent(&self) -> bool {
        let records = self.records.as_ref();
        records.is_some_and(|records| !records.outgoing.is_empty())
    }

    /// Reads as many bytes into `parts` as have arrived, and returns their number; 0 at the end of the
    /// stream. Less than all means that the kernel and this stream have nothing more.
    ///
    /// # Errors
    /// Would-block if nothing has arrived; invalid data if bytes were changed on the way; the system's
    /// errors.
    pub(crate) fn read(&mut self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let Some(records) = &mut self.records else {
            return socket::read(&self.socket, parts);
        };
        let total: usize = parts.iter().map(|part| part.len()).sum();
        let (mut got, mut is_dry) = (0, false);
        let stop = loop {
            got += records.copy_to(parts, got);
            if got == total {
                return Ok(got);
            }
            match records.open() {
                Ok(true) => continue,
                Ok(false) if is_dry => break Err(ErrorKind::WouldBlock.into()),
                Ok(false) => {}
                Err(error) => break Err(error),
            }
            match records.fill(&self.socket) {
                Ok(0) => break Ok(0),
                Ok(_) => is_dry = records.end < records.incoming.len(),
                Err(error) => break Err(error),
            }
        };
        // The next read meets the end or the error again.
        if got > 0 { Ok(got) } else { stop }
    }
}

/// Key of one direction, and the number of the next record under it.
struct DirectionKey {
    key: LessSafeKey,
    secret: DerivedKey,
    number: u64,
}

impl DirectionKey {
    fn new(secret: DerivedKey) -> DirectionKey {
        let key = UnboundKey::new(&AES_256_GCM, &secret);
        DirectionKey {
            key: LessSafeKey::new(key.expect("AES-256 takes 32 bytes")),
            secret,
            number: 0,
        }
    }

    /// Returns the nonce of the next record, whose key is then [`DirectionKey::key`].
    fn next(&mut self) -> Nonce {
        if self.number == RECORDS_OF_A_KEY {
            *self = DirectionKey::new(keys::derive(&self.secret, b"", "next key of records"));
        }
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&self.number.to_be_bytes());
        self.number += 1;
        Nonce::assume_unique_for_key(nonce)
    }
}

/// The records of a connection in both directions.
struct Records {
    sealing: DirectionKey,
    opening: DirectionKey,
    /// The record that the kernel has not taken as a whole; empty if there is none.
    outgoing: Vec<u8>,
    sent: usize,
    /// Bytes of the kernel: plaintext of the last record, then bytes from `begin` to `end`.
    incoming: Vec<u8>,
    plaintext: Range<usize>,
    begin: usize,
    end: usize,
    /// Number of bytes that the next read asks for.
    room: usize,
    is_damaged: bool,
}

impl Records {
    fn new(keys: StreamKeys) -> Records {
        Records {
            sealing: DirectionKey::new(keys.sending),
            opening: DirectionKey::new(keys.receiving),
            outgoing: Vec::new(),
            sent: 0,
            incoming: Vec::new(),
            plaintext: 0..0,
            begin: 0,
            end: 0,
            room: ROOM[0],
            is_damaged: false,
        }
    }

    /// Makes a record of the bytes of `parts` after the first `skip`, and returns their number. The
    /// previous record must have been sent.
    fn seal(&mut self, parts: &[IoSlice<'_>], mut skip: usize) -> io::Result<usize> {
        self.outgoing.resize(HEADER, 0);
        for part in parts {
            let from = skip.min(part.len());
            skip -= from;
            let room = HEADER + RECORD - self.outgoing.len();
            let until = part.len().min(from + room);
            self.outgoing.extend_from_slice(&part[from..until]);
        }
        let taken = self.outgoing.len() - HEADER;
        let (header, body) = self.outgoing.split_at_mut(HEADER);
        header.copy_from_slice(&(taken as u32).to_le_bytes());
        let nonce = self.sealing.next();
        let key = &self.sealing.key;
        let tag = key
            .seal_in_place_separate_tag(nonce, Aad::from(&*header), body)
            .map_err(|_| io::Error::other("a record could not be encrypted"))?;
        self.outgoing.extend_from_slice(tag.as_ref());
        Ok(taken)
    }

    /// Writes the record to the kernel. Returns whether the kernel has all of it.
    fn send(&mut self, socket: &Socket) -> io::Result<bool> {
        while self.sent < self.outgoing.len() {
            match socket::write(socket, &[IoSlice::new(&self.outgoing[self.sent..])]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.outgoing.clear();
        self.sent = 0;
        Ok(true)
    }

    /// Copies plaintext to `parts` after their first `skip` bytes, and returns the number of bytes.
    fn copy_to(&mut self, parts: &mut [IoSliceMut<'_>], mut skip: usize) -> usize {
        let before = self.plaintext.len();
        for part in parts {
            let from = skip.min(part.len());
            skip -= from;
            let count = (part.len() - from).min(self.plaintext.len());
            let source = self.plaintext.start..self.plaintext.start + count;
            part[from..from + count].copy_from_slice(&self.incoming[source]);
            self.plaintext.start += count;
        }
        before - self.plaintext.len()
    }

    /// Decrypts the next record, after the plaintext of the last one was copied. Returns false if the record has not
    /// arrived as a whole.
    fn open(&mut self) -> io::Result<bool> {
        let damaged = || {
            io::Error::new(
                ErrorKind::InvalidData,
                "an encrypted record was changed on the way",
            )
        };
        let Some(length) = self.length() else {
            return Ok(false);
        };
        if self.is_damaged || length == 0 || length > RECORD {
            self.is_damaged = true;
            return Err(damaged());
        }
        let whole = HEADER + length + MAX_TAG_LEN;
        if self.end - self.begin < whole {
            return Ok(false);
        }
        let record = &mut self.incoming[self.begin..self.begin + whole];
        let (header, body) = record.split_at_mut(HEADER);
        let nonce = self.opening.next();
        let key = &self.opening.key;
        if key.open_in_place(nonce, Aad::from(&*header), body).is_err() {
            self.is_damaged = true;
            return Err(damaged());
        }
        let from = self.begin + HEADER;
        self.plaintext = from..from + length;
        self.begin += whole;
        Ok(true)
    }

    /// Returns the length of the next record, once its header has arrived.
    fn length(&self) -> Option<usize> {
        let header = self.incoming[self.begin..self.end].first_chunk::<HEADER>()?;
        Some(u32::from_le_bytes(*header) as usize)
    }

    /// Reads from the socket, and returns the number of bytes. All plaintext must have been copied.
    fn fill(&mut self, socket: &Socket) -> io::Result<usize> {
        self.incoming.copy_within(self.begin..self.end, 0);
        (self.begin, self.end) = (0, self.end - self.begin);
        self.plaintext = 0..0;
        let whole = self
            .length()
            .map_or(0, |length| HEADER + length + MAX_TAG_LEN);
        let wanted = whole.max(self.end + self.room);
        // The buffer only grows, because a resize beyond its end writes zeros over all that was cut before.
        if self.incoming.len() < wanted {
            self.incoming.resize(wanted, 0);
        }
        let count = socket::read(
            socket,
            &mut [IoSliceMut::new(&mut self.incoming[self.end..wanted])],
        )?;
        self.end += count;
        if self.end == wanted {
            self.room = (2 * self.room).min(ROOM[1]);
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::{AsFd, OwnedFd};
    use std::os::unix::net::UnixStream;

    const KEYS: [DerivedKey; 2] = [[3; 32], [4; 32]];

    fn sides(encrypted: bool) -> [PeerStream; 2] {
        let (a, b) = UnixStream::pair().unwrap();
        let stream = |socket: UnixStream, [sending, receiving]: [DerivedKey; 2]| {
            socket.set_nonblocking(true).unwrap();
            let keys = StreamKeys { sending, receiving };
            PeerStream::new(
                Socket::from(OwnedFd::from(socket)),
                encrypted.then_some(keys),
            )
        };
        [stream(a, KEYS), stream(b, [KEYS[1], KEYS[0]])]
    }

    fn bytes(count: usize, seed: usize) -> Vec<u8> {
        (0..count)
            .map(|at| (at * 31 + at / 251 + seed) as u8)
            .collect()
    }

    /// Writes and reads in turn, with buffers of many lengths, until all bytes have arrived.
    #[test]
    fn bytes_arrive_in_order_however_they_are_cut() {
        for encrypted in [false, true] {
            let [mut from, mut to] = sides(encrypted);
            let sent = bytes(3 << 20, 0);
            let mut received = Vec::new();
            let (mut at, mut turn) = (0, 0usize);
            while received.len() < sent.len() {
                turn += 1;
                let first = (turn * 7919) % 200_000;
                let second = (turn * 104_729) % 90_000;
                let middle = sent.len().min(at + first);
                let until = sent.len().min(middle + second);
                let parts = [&sent[at..middle], &sent[middle..until]].map(IoSlice::new);
                match from.write(&parts) {
                    Ok(taken) => at += taken,
                    Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
                }
                let mut head = vec![0; 1 + turn % 40];
                let mut body = vec![0; (turn * 6151) % 150_000];
                let mut parts = [IoSliceMut::new(&mut head), IoSliceMut::new(&mut body)];
                match to.read(&mut parts) {
                    Ok(got) => {
                        head.append(&mut body);
                        received.extend_from_slice(&head[..got]);
                    }
                    Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
                }
            }
            assert!(received == sent);
            assert!(from.flush().unwrap() && !from.has_unsent());
            drop(from);
            assert_eq!(to.read(&mut [IoSliceMut::new(&mut [0])]).unwrap(), 0);
        }
    }

    /// Without this, each read beside payload would write up to 128 KiB of zeros.
    #[test]
    fn small_records_after_large_ones_leave_the_rest_of_the_buffer() {
        let [mut from, mut to] = sides(true);
        let mut pass_on = |sent: &[u8]| {
            let (mut at, mut received) = (0, vec![0; sent.len()]);
            assert_eq!(from.write(&[IoSlice::new(sent)]).unwrap(), sent.len());
            while at < sent.len() {
                let _ = from.flush().unwrap();
                at += to
                    .read(&mut [IoSliceMut::new(&mut received[at..])])
                    .unwrap_or(0);
            }
            assert!(received == sent);
            let incoming = &mut to.records.as_mut().unwrap().incoming;
            let (size, last) = (incoming.len(), incoming.last().copied());
            *incoming.last_mut().unwrap() = 0xa5;
            (size, last)
        };
        let mut grown = 0;
        for _ in 0..8 {
            (grown, _) = pass_on(&bytes(RECORD, 1));
        }
        for seed in 0..3 {
            assert_eq!(pass_on(&bytes(10, seed)), (grown, Some(0xa5)));
        }
    }

    /// The kernel holds less than a record after a short write; the rest is sent by `flush`.
    #[test]
    fn unsent_bytes_of_a_record_are_sent_by_flush() {
        let [mut from, mut to] = sides(true);
        let sent = bytes(RECORD, 5);
        let mut records = 0;
        while !from.has_unsent() {
            records += 1;
            assert_eq!(from.write(&[IoSlice::new(&sent)]).unwrap(), RECORD);
        }
        let blocked = from.write(&[IoSlice::new(&sent)]).unwrap_err();
        assert_eq!(blocked.kind(), ErrorKind::WouldBlock);
        let mut received = vec![0; records * RECORD];
        let mut at = 0;
        while at < received.len() {
            at += to
                .read(&mut [IoSliceMut::new(&mut received[at..])])
                .unwrap_or(0);
            from.flush().unwrap();
        }
        assert!(received.chunks(RECORD).all(|part| part == sent));
        assert!(!from.has_unsent());
    }

    /// Each bit of a record, a repeated record, a reflected record and a record of another number are
    /// refused, again and again.
    #[test]
    fn changed_records_are_refused() {
        let record = |number: usize| {
            let [mut from, _to] = sides(true);
            let records = from.records.as_mut().unwrap();
            for at in 0..=number {
                records.outgoing.clear();
                records.seal(&[IoSlice::new(&bytes(20, at))], 0).unwrap();
            }
            records.outgoing.clone()
        };
        let delivered = |bytes: &[u8], to: usize| {
            let mut sides = sides(true);
            let other = sides[1 - to].socket().as_fd().try_clone_to_owned().unwrap();
            UnixStream::from(other).write_all(bytes).unwrap();
            let mut place = [0; 64];
            let first = sides[to].read(&mut [IoSliceMut::new(&mut place)]);
            let second = sides[to].read(&mut [IoSliceMut::new(&mut place)]);
            (first, second.map_err(|error| error.kind()))
        };
        let good = record(0);
        assert_eq!(delivered(&good, 1).0.unwrap(), 20);
        let mut refused = vec![(record(1), 1), (good.clone(), 0)];
        for bit in 0..8 * good.len() {
            // Longer records are not whole yet.
            if !(5..8 * HEADER).contains(&bit) {
                let mut flipped = good.clone();
                flipped[bit / 8] ^= 1 << (bit % 8);
                let is_longer = flipped[0] > good[0];
                flipped.resize(good.len() + if is_longer { 32 } else { 0 }, 0);
                refused.push((flipped, 1));
            }
        }
        for (bytes, to) in refused {
            let (first, second) = delivered(&bytes, to);
            assert_eq!(first.unwrap_err().kind(), ErrorKind::InvalidData);
            assert_eq!(second.unwrap_err(), ErrorKind::InvalidData);
        }
        let twice = [good.clone(), good.clone()].concat();
        let (first, second) = delivered(&twice, 1);
        assert_eq!(first.unwrap(), 20);
        assert_eq!(second.unwrap_err(), ErrorKind::InvalidData);
    }

    /// Lengths beyond the largest record are refused before anything is allocated for them.
    #[test]
    fn impossible_lengths_allocate_nothing() {
        for length in [0, RECORD as u32 + 1, u32::MAX] {
            let [from, mut to] = sides(true);
            let other = from.socket().as_fd().try_clone_to_owned().unwrap();
            let mut other = UnixStream::from(other);
            other.write_all(&length.to_le_bytes()).unwrap();
            let read = to.read(&mut [IoSliceMut::new(&mut [0; 4])]);
            assert_eq!(read.unwrap_err().kind(), ErrorKind::InvalidData);
            assert!(to.records.unwrap().incoming.len() <= ROOM[0]);
        }
    }

    #[test]
    fn keys_change_after_their_last_record() {
        let [mut from, mut to] = sides(true);
        let last = RECORDS_OF_A_KEY - 1;
        from.records.as_mut().unwrap().sealing.number = last;
        to.records.as_mut().unwrap().opening.number = last;
        for turn in 0..3 {
            let sent = bytes(40, turn);
            assert_eq!(from.write(&[IoSlice::new(&sent)]).unwrap(), 40);
            let mut place = [0; 64];
            assert_eq!(to.read(&mut [IoSliceMut::new(&mut place)]).unwrap(), 40);
            assert_eq!(place[..40], sent);
        }
        let sealing = &from.records.as_ref().unwrap().sealing;
        assert_eq!(sealing.number, 2);
        assert_ne!(sealing.secret, KEYS[0]);
    }
}
