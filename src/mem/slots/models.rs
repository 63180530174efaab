use super::*;
use loom::cell::UnsafeCell;

const DEPTH: usize = 2;
const MESSAGES: u64 = 4;

struct ModelFifo {
    numbers: [AtomicU64; DEPTH],
    head: AtomicU64,
    slots: [UnsafeCell<u64>; DEPTH],
}

/// Passes values through slots. loom reports an access to a slot that the counters do not
/// order; the assertion finds a wrong value.
#[test]
fn loom_slots_are_handed_over_and_back() {
    loom::model(|| {
        let shared = Arc::new(ModelFifo {
            numbers: std::array::from_fn(|_| AtomicU64::new(0)),
            head: AtomicU64::new(0),
            slots: Default::default(),
        });
        let there = shared.clone();
        let sender = loom::thread::spawn(move || {
            let mut cursor = SendCursor::default();
            for value in 0..MESSAGES {
                while cursor.known(DEPTH) == 0 {
                    cursor.refresh(&there.head).unwrap();
                    loom::thread::yield_now();
                }
                let index = cursor.sent as usize & (DEPTH - 1);
                let slot = &there.slots[index];
                // SAFETY: loom fails the test if another thread accesses the slot.
                slot.with_mut(|slot| unsafe { *slot = value + 100 });
                cursor.publish(&there.numbers[index]);
            }
        });
        let mut cursor = RecvCursor::default();
        for value in 0..MESSAGES {
            let index = cursor.taken as usize & (DEPTH - 1);
            while !cursor.poll(&shared.numbers[index], DEPTH).unwrap() {
                loom::thread::yield_now();
            }
            let slot = &shared.slots[index];
            // SAFETY: loom fails the test if another thread accesses the slot.
            assert_eq!(slot.with(|slot| unsafe { *slot }), value + 100);
            cursor.release(&shared.head);
        }
        sender.join().unwrap();
    });
}
