//! Deferred drop: values that must not be dropped yet, or not on the calling thread.
//!
//! [`DeferredQueue`] holds values until a sweep decides that they may go. [`drop_when`] sweeps such a
//! queue on a background thread, which runs while the queue has values. The process ends without
//! waiting for that thread. A forked child has no such thread, and never drops values of its parent.

use super::fork::ProcessId;
use super::fork_safe::ForkSafe;
use super::loader;
use super::log::{Level, line};
use super::process::block_signals;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Interval at which the background thread sweeps values that may not be dropped yet.
const SWEEP_INTERVAL: Duration = Duration::from_millis(10);

/// A queue of values that must be dropped later.
#[derive(Debug)]
pub struct DeferredQueue<T> {
    state: ForkSafe<QueueState<T>>,
    /// Number of sweeps that have begun.
    sweeps: AtomicU64,
    /// Returns whether two values are equal. Among equal values the queue keeps only the first.
    is_same: fn(&T, &T) -> bool,
}

struct QueueState<T> {
    /// Queued values, each with the process that queued it.
    values: Vec<(ProcessId, T)>,
    /// Process whose background thread sweeps the queue.
    server: Option<ProcessId>,
}

impl<T> DeferredQueue<T> {
    /// Creates an empty queue, for a static. Among values that `is_same` calls equal the queue
    /// keeps the first.
    pub const fn new(is_same: fn(&T, &T) -> bool) -> DeferredQueue<T> {
        DeferredQueue {
            state: ForkSafe::new(QueueState {
                values: Vec::new(),
                server: None,
            }),
            sweeps: AtomicU64::new(0),
            is_same,
        }
    }

    /// Queues `value`, unless the queue already has an equal value.
    pub fn push(&self, value: T) {
        let mut entry = Some((ProcessId::this(), value));
        self.state.with(|state| {
            let is_queued = |value: &T| {
                let mut values = state.values.iter();
                values.any(|(_, queued)| (self.is_same)(queued, value))
            };
            // A value that is not queued is dropped outside of the lock.
            if let Some(entry) = entry.take_if(|(_, value)| !is_queued(value)) {
                state.values.push(entry);
            }
        });
    }

    /// Returns the number of queued values for which `counts` returns true.
    pub fn count(&self, counts: impl Fn(&T) -> bool) -> usize {
        self.state.with(|state| {
            state
                .values
                .iter()
                .filter(|(_, value)| counts(value))
                .count()
        })
    }

    /// Calls `step` with each value; it drops the value, or returns it for a later sweep.
    ///
    /// The sweep repeats if another thread has swept meanwhile: that thread missed the value that
    /// this thread was holding. The sweep leaks values that a parent process queued, because only
    /// the parent may drop them.
    pub fn sweep(&self, mut step: impl FnMut(T) -> Option<T>) {
        let mut seen = self.sweeps.fetch_add(1, Ordering::SeqCst) + 1;
        loop {
            for _ in 0..self.count(|_| true) {
                let first = |state: &mut QueueState<T>| {
                    (!state.values.is_empty()).then(|| state.values.remove(0))
                };
                let Some((owner, value)) = self.state.with(first) else {
                    break;
                };
                if !owner.is_this() {
                    std::mem::forget(value);
                } else if let Some(kept) = step(value) {
                    self.push(kept);
                }
            }
            let last = self.sweeps.load(Ordering::SeqCst);
            if std::mem::replace(&mut seen, last) == last {
                return;
            }
        }
    }
}

/// A closure that drops its value if the value may be dropped now, and returns whether it did.
type TryDrop = Box<dyn FnMut() -> bool + Send>;

/// Values that the background thread drops.
static BACKGROUND: DeferredQueue<TryDrop> = DeferredQueue::new(|_, _| false);

/// Drops `value` on the background thread. If no thread can start, the value is leaked.
pub fn drop_in_background<T: Send + 'static>(value: T) {
    drop_when(value, || true);
}

/// Drops `value` on the background thread once `may_drop`, which that thread polls, returns true.
pub fn drop_when<T: Send + 'static>(value: T, mut may_drop: impl FnMut() -> bool + Send + 'static) {
    let mut value = Some(value);
    let try_drop: TryDrop = Box::new(move || {
        let may_drop = may_drop();
        if may_drop {
            drop(value.take());
        }
        may_drop
    });
    BACKGROUND.push(try_drop);
    let this = Some(ProcessId::this());
    let server = |state: &mut QueueState<TryDrop>| std::mem::replace(&mut state.server, this);
    if BACKGROUND.state.with(server) == this {
        return;
    }
    let thread = std::thread::Builder::new().name("cinch-release".into());
    if let Err(error) = thread.spawn(serve) {
        BACKGROUND.state.with(|state| state.server = None);
        line(
            Level::Warn,
            format_args!(
                "unused resources stay until the process ends, because no thread can start: {error}"
            ),
        );
    }
}

/// Runs the background thread until its queue is empty.
fn serve() {
    block_signals();
    loader::stay_loaded();
    loop {
        let mut has_dropped = false;
        BACKGROUND.sweep(|mut try_drop| {
            // If a drop panics, the value counts as dropped.
            let dropped = catch_unwind(AssertUnwindSafe(&mut try_drop)).unwrap_or(true);
            has_dropped |= dropped;
            (!dropped).then_some(try_drop)
        });
        let is_empty = BACKGROUND.state.with(|state| {
            if state.values.is_empty() {
                state.server = None;
            }
            state.values.is_empty()
        });
        if is_empty {
            return;
        }
        if !has_dropped {
            std::thread::sleep(SWEEP_INTERVAL);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::{Sender, channel};
    use std::thread::ThreadId;

    /// Reports, when it is dropped, the thread that drops it.
    struct ReportDrop(Sender<ThreadId>);

    impl Drop for ReportDrop {
        fn drop(&mut self) {
            self.0.send(std::thread::current().id()).unwrap();
        }
    }

    #[test]
    fn value_that_may_not_be_dropped_delays_no_other() {
        let (sender, dropped) = channel();
        let (held_sender, held) = channel();
        let may_drop = Arc::new(AtomicBool::new(false));
        let polled = may_drop.clone();
        drop_when(ReportDrop(held_sender), move || {
            polled.load(Ordering::Relaxed)
        });
        for _ in 0..100 {
            drop_in_background(ReportDrop(sender.clone()));
        }
        drop_when((), || panic!("a predicate that fails"));
        // The background thread does not end while the queue has values, so one thread dropped all
        // of them.
        let threads: HashSet<ThreadId> = dropped.iter().take(100).collect();
        assert_eq!(threads.len(), 1);
        assert!(!threads.contains(&std::thread::current().id()));
        assert!(held.try_recv().is_err());
        may_drop.store(true, Ordering::Relaxed);
        held.recv().unwrap();
        drop_in_background(ReportDrop(sender));
        dropped.recv().unwrap();
    }

    #[test]
    fn sweep_repeats_after_sweep_of_another_thread() {
        let queue = DeferredQueue::new(|one, other| one == other);
        for value in [1, 2, 2] {
            queue.push(value);
        }
        let mut steps = 0;
        queue.sweep(|value| {
            steps += 1;
            if steps == 1 {
                // The inner sweep sees only the second value, because the outer sweep holds the
                // first.
                let mut seen = Vec::new();
                queue.sweep(|other| {
                    seen.push(other);
                    Some(other)
                });
                assert_eq!(seen, [2]);
            }
            (steps < 3).then_some(value)
        });
        // The first pass calls the closure twice and keeps both values; the repeated pass drops
        // both.
        assert_eq!((steps, queue.count(|_| true)), (4, 0));
    }
}
