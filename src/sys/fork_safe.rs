//! Values that threads share and that a forked child finds consistent.
//!
//! The standard library's locks do not give this. If another thread holds such a lock or
//! initialises a value while a child is forked, the child waits for ever.

use super::fork::without_fork;
use std::cell::UnsafeCell;
use std::fmt;
use std::sync::OnceLock;

/// A value that one thread at a time uses for a short time, during which no thread forks.
pub struct ForkSafe<T>(UnsafeCell<T>);

// SAFETY: `with` lets one thread at a time access the value.
unsafe impl<T: Send> Sync for ForkSafe<T> {}

impl<T> ForkSafe<T> {
    /// Makes a value, typically for a static.
    pub const fn new(value: T) -> ForkSafe<T> {
        ForkSafe(UnsafeCell::new(value))
    }

    /// Runs `work` on the value. `work` must not wait, fork, use another `ForkSafe`, or open or
    /// close a [`super::fork::CloseOnFork`].
    ///
    /// `work` should allocate little. An allocator that was loaded after this library holds its own
    /// locks during a fork. It would wait for `work`, and `work` for it.
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        // SAFETY: `without_fork` holds a lock of the process, so no other thread is in here. `work`
        // does not call `with`, by its contract.
        without_fork(|| work(unsafe { &mut *self.0.get() }))
    }
}

impl<T> fmt::Debug for ForkSafe<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ForkSafe(..)")
    }
}

/// A value that the first of several threads sets. No thread waits for another.
#[derive(Debug)]
pub struct ForkSafeOnce<T>(OnceLock<T>);

impl<T> ForkSafeOnce<T> {
    /// Makes an empty cell, typically for a static.
    pub const fn new() -> ForkSafeOnce<T> {
        ForkSafeOnce(OnceLock::new())
    }

    /// Returns the value, or `None` if it is not set.
    pub fn get(&self) -> Option<&T> {
        self.0.get()
    }

    /// Sets the value if no value is set. Returns whether this call has set it.
    pub fn try_set(&self, value: T) -> bool {
        let mut value = Some(value);
        without_fork(|| {
            // A rejected value is dropped after the lock is released: a drop may take long, and
            // forks would wait for it.
            if self.0.get().is_none() {
                value = value.take().and_then(|value| self.0.set(value).err());
            }
        });
        value.is_none()
    }

    /// Returns the value; if none is set, first sets it to the result of `make`. Threads that
    /// arrive together may all call `make`; the first result is kept.
    pub fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
        if self.get().is_none() {
            self.try_set(make());
        }
        self.get().expect("set above, or by another thread")
    }
}

impl<T> Default for ForkSafeOnce<T> {
    fn default() -> ForkSafeOnce<T> {
        ForkSafeOnce::new()
    }
}

#[cfg(test)]
mod tests {
    use super::super::fork::tests::in_child;
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    fn wait_for(flag: &AtomicBool) {
        while !flag.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
    }

    /// The child does not wait for the thread that was making the value when it was forked.
    #[test]
    fn child_forked_during_init_makes_its_own_value() {
        let value = ForkSafeOnce::new();
        let (begun, forked) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                value.get_or_init(|| {
                    begun.store(true, Ordering::Relaxed);
                    wait_for(&forked);
                    1
                })
            });
            wait_for(&begun);
            let made = in_child(|| *value.get_or_init(|| 2) == 2 && !value.try_set(3));
            forked.store(true, Ordering::Relaxed);
            assert!(made);
        });
        assert_eq!(*value.get_or_init(|| 4), 1);
    }

    #[test]
    fn child_forked_during_with_finds_the_change_complete() {
        static PAIR: ForkSafe<(u32, u32)> = ForkSafe::new((0, 0));
        let begun = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                PAIR.with(|pair| {
                    pair.0 = 1;
                    begun.store(true, Ordering::Relaxed);
                    std::thread::sleep(Duration::from_millis(100));
                    pair.1 = 1;
                });
            });
            wait_for(&begun);
            assert!(in_child(|| PAIR.with(|pair| *pair) == (1, 1)));
        });
    }
}
