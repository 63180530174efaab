//! The FIFO of slots, whose peer writes any words into the shared memory.

use super::input::Input;
use cinch::mem::{Consumer, FifoPlaces, FifoShape, Header, LINE_BYTES, Producer, Region};
use std::sync::atomic::{AtomicU64, Ordering};

const SHAPE: FifoShape = FifoShape {
    depth: 4,
    slot_bytes: 128,
};

/// Bytes before and behind the FIFO, which nothing may change.
const GUARD_BYTES: usize = 256;
const GUARD_WORD: u64 = 0xfeed_face_dead_beef;

/// Returns the words before and behind a FIFO of `bytes` bytes.
fn guard_words(region: &Region, bytes: usize) -> impl Iterator<Item = &AtomicU64> {
    let behind = GUARD_BYTES + bytes;
    let places = (0..GUARD_BYTES).chain(behind..behind + GUARD_BYTES);
    places.step_by(8).map(|at| region.counter(at))
}

/// Drives both ends of a FIFO by a script. The peer writes random words, and plausible numbers of messages. The
/// ends must return errors, and never leave their slots.
pub fn slots(data: &[u8]) -> Option<bool> {
    let mut input = Input(data);
    let bytes = FifoPlaces::bytes(&SHAPE);
    let region = Region::heap(bytes + 2 * GUARD_BYTES).expect("no memory for a FIFO");
    let places = FifoPlaces::together(&region, GUARD_BYTES);
    guard_words(&region, bytes).for_each(|word| word.store(GUARD_WORD, Ordering::Relaxed));
    // SAFETY: the region is new, and has this producer and this consumer only.
    let (mut producer, mut consumer) = unsafe {
        (
            Producer::new(SHAPE, places.clone()),
            Consumer::new(SHAPE, places),
        )
    };
    let (mut sum, mut good, mut refused) = (0_u64, 0, false);
    let mut is_hostile = false;
    while !input.is_empty() {
        let op = input.u8();
        match op & 7 {
            // A word at any place, which is the head, a message number, or a header.
            0 => {
                let at = GUARD_BYTES + usize::from(input.u16()) % (bytes / 8) * 8;
                region.counter(at).store(input.u64(), Ordering::Relaxed);
                is_hostile = true;
            }
            // The number of a message near those that are due, in the word behind signature, bytes and CRC.
            1 => {
                let slot = usize::from(op >> 3) % SHAPE.depth;
                let at = GUARD_BYTES + 128 + slot * (LINE_BYTES + SHAPE.slot_bytes) + 48;
                let number = consumer.released() + u64::from(input.u8() & 7);
                region.counter(at).store(number, Ordering::Relaxed);
                is_hostile = true;
            }
            2 => match producer.free() {
                Ok(free) => {
                    assert!(free <= SHAPE.depth);
                    for ahead in 0..free {
                        producer.slot(ahead).fill(op);
                    }
                }
                Err(_) => refused = true,
            },
            3 => {
                let header = Header {
                    bytes: u32::from(input.u8()).min(SHAPE.slot_bytes as u32),
                    signature: [producer.published(); 5],
                    crc: 0,
                };
                match producer.ready() {
                    Ok(true) => {
                        producer.slot(0).fill(op);
                        sum += producer
                            .written()
                            .iter()
                            .map(|&byte| u64::from(byte))
                            .sum::<u64>();
                        producer.publish(header);
                    }
                    Ok(false) => {}
                    Err(_) => refused = true,
                }
            }
            4 => match consumer.ready() {
                Ok(true) => {
                    let header = consumer.header();
                    assert!(header.bytes as usize <= SHAPE.slot_bytes);
                    assert_eq!(consumer.payload().len(), header.bytes as usize);
                    sum += consumer
                        .payload()
                        .iter()
                        .map(|&byte| u64::from(byte))
                        .sum::<u64>();
                    assert!(is_hostile || header.signature == [consumer.released(); 5]);
                    consumer.release();
                    good += 1;
                }
                Ok(false) => {}
                Err(_) => refused = true,
            },
            _ => match consumer.available() {
                Ok(count) => {
                    assert!(count <= SHAPE.depth);
                    for ahead in 0..count {
                        match consumer.message(ahead) {
                            Ok((header, payload)) => {
                                assert_eq!(payload.len(), header.bytes as usize);
                                sum += payload.iter().map(|&byte| u64::from(byte)).sum::<u64>();
                            }
                            Err(_) => refused = true,
                        }
                    }
                }
                Err(_) => refused = true,
            },
        }
        assert!(is_hostile || !refused, "a good peer was refused");
    }
    std::hint::black_box(sum);
    let mut guards = guard_words(&region, bytes);
    let is_whole = guards.all(|word| word.load(Ordering::Relaxed) == GUARD_WORD);
    assert!(is_whole, "an end wrote beside its slots");
    (good > 0).then_some(refused && good >= 4)
}
