//! Locks of what has a model: the standard ones, or loom's when its models run.

#[cfg(not(all(loom, test)))]
pub use std::sync::{Mutex, OnceLock};

#[cfg(all(loom, test))]
pub use loom::sync::Mutex;
#[cfg(all(loom, test))]
pub use once::OnceLock;

/// loom has no `OnceLock`: the standard one's promises, kept by what loom has. Whoever finds the
/// value, or that it is there already, sees what its writer did before; no more is promised.
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

    // SAFETY: `value` is written once, under the lock and before `is_set` is released; read only
    // by who has acquired that. loom checks both.
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
                // SAFETY: nobody writes any more.
                true => self.value.with(|value| unsafe { (*value).as_ref() }),
                false => None,
            }
        }

        pub fn set(&self, value: T) -> Result<(), T> {
            let _writers = self.writers.lock().unwrap();
            if self.is_set.load(Ordering::Relaxed) {
                return Err(value);
            }
            // SAFETY: under the lock, and nobody has acquired `is_set`.
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
