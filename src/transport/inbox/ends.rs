//! The ends of a connection through inboxes.

use super::store_choice::{LEAST_BYTES, StoreChoice, is_streamed, is_timed};
use crate::cpu::copy_streaming;
use crate::error::Result;
use crate::mem::{Consumer, FifoPlaces, FifoShape, Fill, Header, Producer, Ringer, StoreHints};
use crate::sys::clock::monotonic_nanoseconds;
use crate::transport::{RecvEnd, SendEnd};

/// Sends into the inbox of a peer.
#[derive(Debug)]
pub(in crate::transport) struct InboxSend {
    producer: Producer,
    ringer: Ringer,
    hints: StoreHints,
    who: Box<str>,
}

impl InboxSend {
    /// Makes the end to the peer `who`.
    ///
    /// # Safety
    /// As for [`Producer::new`].
    pub unsafe fn new(
        shape: FifoShape,
        places: FifoPlaces,
        ringer: Ringer,
        who: &str,
    ) -> InboxSend {
        let hints = StoreHints::new(&places);
        InboxSend {
            // SAFETY: the caller's promise.
            producer: unsafe { Producer::new(shape, places) },
            ringer,
            hints,
            who: who.into(),
        }
    }
}

impl InboxSend {
    /// Copies a large payload to the free slot in the way that the receiver requests, and publishes it.
    #[inline(never)]
    fn put_as_hinted(&mut self, header: &Header, payload: &[u8]) {
        let (hints, bytes) = (self.hints.get(), payload.len());
        let streams = is_streamed(hints, bytes);
        let begun = is_timed(hints, bytes).then(monotonic_nanoseconds);
        let slot = &mut self.producer.slot(0)[..bytes];
        match streams {
            false => slot.copy_from_slice(payload),
            true => copy_streaming(slot, payload),
        }
        let nanoseconds = begun.map_or(0, |begun| {
            let taken = monotonic_nanoseconds().saturating_sub(begun);
            taken.clamp(1, u64::from(u32::MAX)) as u32
        });
        self.producer.note(Fill {
            nanoseconds,
            streamed: u32::from(streams),
        });
        self.producer.publish(*header);
    }
}

impl SendEnd for InboxSend {
    #[inline]
    fn ready(&mut self) -> Result<bool> {
        self.producer
            .ready()
            .map_err(|error| error.context(&self.who))
    }

    #[inline]
    fn slot(&mut self) -> &mut [u8] {
        self.producer.slot(0)
    }

    #[inline]
    fn written(&self) -> &[u8] {
        self.producer.written()
    }

    #[inline]
    fn publish(&mut self, header: Header) {
        if header.bytes as usize >= LEAST_BYTES {
            self.producer.note(Fill::default());
        }
        self.producer.publish(header);
        self.ringer.ring();
    }

    #[inline]
    fn prefers_put(&self, bytes: usize) -> bool {
        bytes >= LEAST_BYTES && {
            let hints = self.hints.get();
            is_streamed(hints, bytes) || is_timed(hints, bytes)
        }
    }

    #[inline]
    fn put(&mut self, header: &Header, payload: &[u8]) {
        if payload.len() < LEAST_BYTES {
            self.producer.slot(0)[..payload.len()].copy_from_slice(payload);
            self.producer.publish(*header);
        } else {
            self.put_as_hinted(header, payload);
        }
        self.ringer.ring();
    }

    #[inline]
    fn flushed(&mut self) -> Result<bool> {
        Ok(true)
    }

    fn is_immediate(&self) -> bool {
        true
    }
}

/// Receives from a peer through this rank's inbox.
#[derive(Debug)]
pub(in crate::transport) struct InboxRecv {
    consumer: Consumer,
    ringer: Ringer,
    hints: StoreHints,
    choice: StoreChoice,
    /// Time at which the next message was last seen, if its write was measured.
    seen: Option<u64>,
    who: Box<str>,
}

impl InboxRecv {
    /// Makes the end from the peer `who`.
    ///
    /// # Safety
    /// As for [`Consumer::new`].
    pub unsafe fn new(
        shape: FifoShape,
        places: FifoPlaces,
        ringer: Ringer,
        who: &str,
    ) -> InboxRecv {
        let (hints, choice) = (StoreHints::new(&places), StoreChoice::new());
        hints.set(choice.hints());
        InboxRecv {
            // SAFETY: the caller's promise.
            consumer: unsafe { Consumer::new(shape, places) },
            ringer,
            hints,
            choice,
            seen: None,
            who: who.into(),
        }
    }

    /// Counts the large message that is released, and sends the sender new hints if they change.
    #[inline(never)]
    fn count(&mut self) {
        let bytes = self.consumer.header().bytes as usize;
        let fill = self.consumer.fill();
        let seen = self.seen.take();
        let taken = seen.map(|seen| {
            let read = monotonic_nanoseconds().saturating_sub(seen);
            u64::from(fill.nanoseconds) + read
        });
        if let Some(hints) = self.choice.count(bytes, fill.streamed != 0, taken) {
            self.hints.set(hints);
        }
    }

    /// Returns whether the next message, which has arrived, is one whose way may be chosen.
    #[inline]
    fn is_large(&self) -> bool {
        self.consumer.header().bytes as usize >= LEAST_BYTES
    }
}

impl RecvEnd for InboxRecv {
    #[inline]
    fn ready(&mut self) -> Result<bool> {
        let ready = self.consumer.ready();
        let ready = ready.map_err(|error| error.context(&self.who))?;
        // The last of several looks counts: a step may wait for other messages after it has seen this one.
        if ready && self.is_large() && self.consumer.fill().nanoseconds != 0 {
            self.seen = Some(monotonic_nanoseconds());
        }
        Ok(ready)
    }

    #[inline]
    fn header(&self) -> Header {
        self.consumer.header()
    }

    #[inline]
    fn payload(&self) -> &[u8] {
        self.consumer.payload()
    }

    #[inline]
    fn release(&mut self) {
        if self.is_large() {
            self.count();
        }
        self.consumer.release();
        self.ringer.ring();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::cpu::CAN_STREAM;
    use crate::mem::{DOORBELL_BYTES, Region};
    use std::sync::Arc;

    const SHAPE: FifoShape = FifoShape {
        depth: 4,
        slot_bytes: 16 << 10,
    };

    fn ends() -> (InboxSend, InboxRecv) {
        let region = Region::heap(DOORBELL_BYTES + FifoPlaces::bytes(&SHAPE)).unwrap();
        let ringer = Ringer::new(Arc::clone(&region), 0, false);
        let places = FifoPlaces::together(&region, DOORBELL_BYTES.next_multiple_of(128));
        // SAFETY: the region is new, and these are the only ends.
        unsafe {
            (
                InboxSend::new(SHAPE, places.clone(), ringer.clone(), "a peer"),
                InboxRecv::new(SHAPE, places, ringer, "a peer"),
            )
        }
    }

    /// Requests that payloads of all sizes go past the caches, or none.
    fn request(send: &InboxSend, streams: bool, timed: bool) {
        let all = |wanted: bool| if wanted { u64::from(u32::MAX) } else { 0 };
        send.hints.set(all(streams) | all(timed) << 32);
    }

    #[test]
    fn payloads_are_equal_by_both_ways_and_carry_their_note() {
        let (mut send, mut recv) = ends();
        let mut message = 0_usize;
        for bytes in [0, 1, 2047, 2048, 2049, 4096, 10_007, 16 << 10] {
            for (streams, timed) in [(false, false), (true, false), (false, true), (true, true)] {
                request(&send, streams, timed);
                let is_large = bytes >= LEAST_BYTES;
                assert_eq!(send.prefers_put(bytes), is_large && (streams || timed));
                let payload: Vec<u8> = (0..bytes).map(|at| (at * 7 + message) as u8).collect();
                let header = Header {
                    bytes: bytes as u32,
                    signature: [message as u64; 5],
                    crc: 3,
                };
                assert!(send.send(&header, &payload).unwrap());
                assert!(recv.ready().unwrap());
                if is_large {
                    let fill = recv.consumer.fill();
                    assert_eq!(
                        (fill.streamed != 0, fill.nanoseconds != 0),
                        (streams, timed)
                    );
                }
                assert_eq!(recv.header(), header);
                assert!(
                    recv.payload() == payload,
                    "{bytes} bytes, {streams}, {timed}"
                );
                recv.release();
                message += 1;
            }
        }
        // A slot that the caller fills has no note of an earlier message.
        request(&send, true, true);
        assert!(send.ready().unwrap());
        send.slot()[..4096].fill(9);
        send.publish(Header {
            bytes: 4096,
            ..Header::default()
        });
        assert!(recv.ready().unwrap());
        assert_eq!(recv.consumer.fill(), Fill::default());
        assert!(recv.payload().iter().all(|&byte| byte == 9));
    }

    #[test]
    fn receiver_requests_times_until_it_has_compared_both_ways() {
        let (mut send, mut recv) = ends();
        let payload = vec![5; 8 << 10];
        let header = Header {
            bytes: 8 << 10,
            ..Header::default()
        };
        assert_eq!(is_timed(send.hints.get(), payload.len()), CAN_STREAM);
        let mut messages = 0;
        while is_timed(send.hints.get(), payload.len()) {
            assert!(send.send(&header, &payload).unwrap());
            assert!(recv.ready().unwrap() && recv.ready().unwrap());
            recv.release();
            messages += 1;
            assert!(messages < 2000, "the comparison does not end");
        }
        assert!(!CAN_STREAM || messages >= 32, "{messages} messages");
        // Other sizes wait for messages of their own.
        assert_eq!(is_timed(send.hints.get(), 2048), CAN_STREAM);
    }
}
