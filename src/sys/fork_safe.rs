//! What all threads of a process share, and a forked child finds whole. The standard library's locks
//! are not for that: to a child that was forked while another thread held one, or was about to
//! initialise something, that stays so for ever.

use super::fork::undisturbed;
use std::cell::UnsafeCell;
use std::fmt;
use std::sync::OnceLock;

/// A value that one thread at a time uses, for a moment, during which nobody forks.
pub struct ForkSafe<T>(UnsafeCell<T>);

// SAFETY: one thread at a time gets at the value: see `with`.
unsafe impl<T: Send> Sync for ForkSafe<T> {}

impl<T> ForkSafe<T> {
    /// For a static.
    pub const fn new(value: T) -> ForkSafe<T> {
        ForkSafe(UnsafeCell::new(value))
    }

    /// Runs `work`, which neither waits nor forks, uses nothing else of this kind, and neither opens
    /// nor closes a connection. What it allocates must be little: an allocator that is loaded after this
    /// library, and holds its own locks from its fork handler on, might wait for `work`, which waits for it.
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        // SAFETY: no other thread is in here, for whatever value; nor does `work` come back, which
        // would wait for itself.
        undisturbed(|| work(unsafe { &mut *self.0.get() }))
    }
}

impl<T> fmt::Debug for ForkSafe<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ForkSafe(..)")
    }
}

/// A value that the first of several threads gives. None waits for another.
#[derive(Debug)]
pub struct First<T>(OnceLock<T>);

impl<T> First<T> {
    /// For a static.
    pub const fn new() -> First<T> {
        First(OnceLock::new())
    }

    /// The value, if it is there.
    pub fn get(&self) -> Option<&T> {
        self.0.get()
    }

    /// Gives the value, unless it is there. Returns whether this call did.
    pub fn give(&self, value: T) -> bool {
        let mut value = Some(value);
        undisturbed(|| {
            // Drops nothing: whoever comes too late does that when others may fork again.
            if self.0.get().is_none() {
                value = value.take().and_then(|value| self.0.set(value).err());
            }
        });
        value.is_none()
    }

    /// The value, or what `make` gives. Threads that come together may all make one: the first of
    /// these counts.
    pub fn get_or_make(&self, make: impl FnOnce() -> T) -> &T {
        if self.get().is_none() {
            self.give(make());
        }
        self.get().expect("given above, here or by another thread")
    }
}

impl<T> Default for First<T> {
    fn default() -> First<T> {
        First::new()
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

    /// The thread that was at it is not there to be waited for.
    #[test]
    fn a_child_makes_what_its_parent_was_about_to_make() {
        let value = First::new();
        let (begun, forked) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                value.get_or_make(|| {
                    begun.store(true, Ordering::Relaxed);
                    wait_for(&forked);
                    1
                })
            });
            wait_for(&begun);
            let made = in_child(|| *value.get_or_make(|| 2) == 2 && !value.give(3));
            forked.store(true, Ordering::Relaxed);
            assert!(made);
        });
        assert_eq!(*value.get_or_make(|| 4), 1);
    }

    #[test]
    fn a_child_finds_whole_what_another_thread_was_changing() {
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
