//! The abort word of a communicator, with the reason that the first writer left.

use crate::error::{Error, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

/// Set once, by whoever first sees the communicator fail; watched by every wait.
///
/// Faults form a tree: a fault raised on a communicator reaches the communicators split from it.
#[derive(Debug, Default)]
pub struct Fault {
    raised: AtomicBool,
    reason: OnceLock<Error>,
    children: Mutex<Vec<Weak<Fault>>>,
}

impl Fault {
    /// A fault that has not happened.
    pub fn new() -> Arc<Fault> {
        Arc::default()
    }

    /// A fault that also happens when `self` does.
    pub fn child(&self) -> Arc<Fault> {
        let child = Fault::new();
        if let Ok(mut children) = self.children.lock() {
            children.retain(|weak| weak.strong_count() > 0);
            children.push(Arc::downgrade(&child));
        }
        // A fault raised between the caller's last check and the push must not be lost.
        if let Some(reason) = self.reason() {
            child.raise(reason.clone());
        }
        child
    }

    /// Records `error` unless a reason is there already. Returns whether this call was first.
    pub fn raise(&self, error: Error) -> bool {
        let first = self.reason.set(error).is_ok();
        // SYNC POINT fault: publishes `reason` to `check`.
        self.raised.store(true, Ordering::Release);
        if first && let Some(reason) = self.reason() {
            let children = self
                .children
                .lock()
                .map(|children| children.clone())
                .unwrap_or_default();
            for child in children.iter().filter_map(Weak::upgrade) {
                child.raise(reason.clone());
            }
        }
        first
    }

    /// Whether the fault has happened. One relaxed load: for wait loops.
    #[inline]
    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Relaxed)
    }

    /// The reason, as an error, once the fault has happened.
    #[inline]
    pub fn check(&self) -> Result<()> {
        // SYNC POINT fault: pairs with the release in `raise`.
        if self.raised.load(Ordering::Acquire) {
            Err(self
                .reason()
                .cloned()
                .unwrap_or_else(|| Error::internal("a fault without a reason")))
        } else {
            Ok(())
        }
    }

    /// The reason, if the fault has happened.
    pub fn reason(&self) -> Option<&Error> {
        self.reason.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn the_first_reason_wins_and_reaches_children() {
        let parent = Fault::new();
        let child = parent.child();
        assert!(child.check().is_ok());
        assert!(parent.raise(Error::new(ErrorKind::Remote, "rank 1 died")));
        assert!(!parent.raise(Error::new(ErrorKind::Aborted, "late")));
        assert_eq!(child.check().unwrap_err().message(), "rank 1 died");
        assert!(parent.child().is_raised());
        let orphan = Fault::new();
        let branch = orphan.child();
        branch.raise(Error::new(ErrorKind::Timeout, "branch only"));
        assert!(!orphan.is_raised());
    }
}
