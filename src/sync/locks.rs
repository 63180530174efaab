//! Locks of code that has loom models: those of loom while its models run, otherwise those of the
//! standard library.

#[cfg(not(all(loom, test)))]
pub use std::sync::{Mutex, OnceLock};

#[cfg(all(loom, test))]
pub use loom::sync::Mutex;
#[cfg(all(loom, test))]
pub use once::OnceLock;

/// `OnceLock` for loom, which has none. A thread that finds the value, or that it is set, sees all
/// earlier writes of the writer. The standard type promises no more.
#[cfg(all(loom, test))]
mod once {
    use super::Mutex;
    use loom::cell::UnsafeCell;
    use loom::sync::atomic::{AtomicBool, Ordering};

    #[derive(Debug)]
    pub struct OnceLock<T> {
        is_set: AtomicBool,
        writers: Mutex<()>,
        value: UnsafeCell<Option<T>>,
    }

    // SAFETY: `set` writes `value` once, under the lock and before it releases `is_set`; `get` reads
    // it after it has acquired `is_set`. loom checks both.
    unsafe impl<T: Send + Sync> Sync for OnceLock<T> {}

    impl<T> Default for OnceLock<T> {
        fn default() -> OnceLock<T> {
            OnceLock {
                is_set: AtomicBool::new(false),
                writers: Mutex::new(()),
                value: UnsafeCell::new(None),
            }
        }
    }

    impl<T> OnceLock<T> {
        pub fn get(&self) -> Option<&T> {
            // SYNC POINT modelled once: pairs with the release in `set`.
            match self.is_set.load(Ordering::Acquire) {
                // SAFETY: `set` never writes again once `is_set` is true.
                true => self.value.with(|value| unsafe { (*value).as_ref() }),
                false => None,
            }
        }

        pub fn set(&self, value: T) -> Result<(), T> {
            let _writers = self.writers.lock().unwrap();
            if self.is_set.load(Ordering::Relaxed) {
                return Err(value);
            }
            // SAFETY: `writers` is locked, and `is_set` is false, so that `get` returns no reference.
            self.value.with_mut(|place| unsafe { *place = Some(value) });
            // SYNC POINT modelled once: publishes `value`.
            self.is_set.store(true, Ordering::Release);
            Ok(())
        }

        pub fn get_or_init(&self, value: impl FnOnce() -> T) -> &T {
            let _ = self.set(value());
            self.get().expect("set just now, or before")
        }
    }
}
