//! Abort flag of a communicator, with the error of its first writer.

use super::atomic::{AtomicU8, Ordering};
use super::locks::{Mutex, OnceLock};
use crate::error::{Error, Result};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// State of a fault that no failure has reached.
const NONE: u8 = 0;
/// Another rank is gone: new work is refused, waits go on until the deadline.
const PENDING: u8 = 1;
/// The communicator has failed: every wait ends.
const RAISED: u8 = 2;

/// Time that a broken connection waits for the report of its cause. The connection of a rank that
/// gave up may break before the report of the rank that died, or that aborted, arrives.
pub const CAUSE_TIMEOUT: Duration = Duration::from_millis(300);

/// Failure of a communicator: raised by the thread that first detects it, checked by every wait.
///
/// A failure of this rank is raised and ends waits at once. A failure of another rank is raised with
/// a deadline, because its last bytes and other ranks' data may still be under way. Until the
/// deadline waits go on, so that calls which lack nothing complete. New work is refused in both
/// states.
///
/// Faults form a tree: the fault of a communicator raises the faults of communicators that are split
/// from it, until they are detached.
#[derive(Debug, Default)]
pub struct Fault {
    state: AtomicU8,
    reason: OnceLock<Error>,
    /// Time at which waits end after a failure of another rank.
    deadline: OnceLock<Instant>,
    children: Mutex<Vec<Weak<Fault>>>,
}

impl Fault {
    /// Returns a fault that is not raised.
    pub fn new() -> Arc<Fault> {
        Arc::default()
    }

    /// Returns a fault that is raised with `self`, until [`Fault::detach`].
    pub fn child(&self) -> Arc<Fault> {
        let child = Fault::new();
        if let Ok(mut children) = self.children.lock() {
            children.retain(|weak| weak.strong_count() > 0);
            children.push(Arc::downgrade(&child));
        }
        // This fault may have been raised just before the push, so its state is passed to the child.
        // SYNC POINT fault: pairs with the releases in `raise` and `raise_at`.
        match (self.state.load(Ordering::Acquire), self.deadline.get()) {
            (NONE, _) => false,
            (PENDING, Some(&deadline)) => child.raise_at(self.failure(), deadline),
            _ => child.raise(self.failure()),
        };
        child
    }

    /// Detaches `child`, so that raising this fault no longer raises it.
    pub fn detach(&self, child: &Arc<Fault>) {
        if let Ok(mut children) = self.children.lock() {
            children.retain(|weak| !std::ptr::eq(weak.as_ptr(), Arc::as_ptr(child)));
        }
    }

    /// Raises the fault, which ends all waits. `error` becomes the reason unless there is an
    /// earlier reason. Returns whether `error` is the reason.
    pub fn raise(&self, error: Error) -> bool {
        let first = self.reason.set(error).is_ok();
        // SYNC POINT fault: publishes `reason` to `check` and `ends_waits`.
        let before = self.state.swap(RAISED, Ordering::Release);
        if before != RAISED
            && let Some(reason) = self.reason()
        {
            for child in self.children() {
                child.raise(reason.clone());
            }
        }
        first
    }

    /// Refuses new work at once and ends all waits at `deadline`. `error` becomes the reason unless
    /// there is an earlier reason. Changes neither a raised fault nor an earlier deadline. Returns
    /// whether `error` is the reason.
    pub fn raise_at(&self, error: Error, deadline: Instant) -> bool {
        let first = self.reason.set(error).is_ok();
        let deadline = *self.deadline.get_or_init(|| deadline);
        // SYNC POINT fault: publishes `reason` and `deadline` to `check` and `ends_waits`.
        let pending =
            self.state
                .compare_exchange(NONE, PENDING, Ordering::Release, Ordering::Relaxed);
        if pending.is_ok()
            && let Some(reason) = self.reason()
        {
            for child in self.children() {
                child.raise_at(reason.clone(), deadline);
            }
        }
        first
    }

    /// Returns whether the fault is raised, at once or at a deadline. Wait loops can call it often,
    /// because it is a relaxed load.
    #[inline]
    pub fn is_raised(&self) -> bool {
        self.state.load(Ordering::Relaxed) != NONE
    }

    /// Returns the reason as an error once the fault is raised, even if its deadline has not
    /// passed. Callers check it before they start new work.
    #[inline]
    pub fn check(&self) -> Result<()> {
        // SYNC POINT fault: pairs with the releases in `raise` and `raise_at`.
        match self.state.load(Ordering::Acquire) {
            NONE => Ok(()),
            _ => Err(self.failure()),
        }
    }

    /// Returns the reason as an error once the fault ends waits: at once, or when its deadline has
    /// passed. Callers check it while they wait for work that has begun.
    #[inline]
    pub fn ends_waits(&self) -> Result<()> {
        if !self.is_raised() {
            return Ok(());
        }
        // SYNC POINT fault: pairs with the releases in `raise` and `raise_at`.
        if self.state.load(Ordering::Acquire) == PENDING {
            let deadline = self.deadline.get();
            if deadline.is_some_and(|deadline| Instant::now() < *deadline) {
                return Ok(());
            }
            // Children have the same deadline and raise themselves. A thread that acquires RAISED
            // may never have acquired PENDING: the release publishes `reason` again.
            let _ =
                self.state
                    .compare_exchange(PENDING, RAISED, Ordering::Release, Ordering::Relaxed);
        }
        Err(self.failure())
    }

    /// Returns the reason, if there is a failure.
    pub fn reason(&self) -> Option<&Error> {
        self.reason.get()
    }

    /// Waits up to `timeout` for a reason: the cause of a broken connection may be a failure whose
    /// report has not arrived.
    pub fn reason_within(&self, timeout: Duration) -> Option<Error> {
        let deadline = Instant::now() + timeout;
        loop {
            match self.check() {
                Err(reason) => return Some(reason),
                Ok(()) if Instant::now() >= deadline => return None,
                Ok(()) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    fn failure(&self) -> Error {
        self.reason()
            .cloned()
            .unwrap_or_else(|| Error::internal("a fault without a reason"))
    }

    fn children(&self) -> Vec<Arc<Fault>> {
        self.children.lock().map_or_else(
            |_| Vec::new(),
            |children| children.iter().filter_map(Weak::upgrade).collect(),
        )
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn first_reason_wins_and_reaches_children() {
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

    fn remote() -> Error {
        Error::new(ErrorKind::Remote, "rank 1 died")
    }

    #[test]
    fn fault_with_deadline_refuses_at_once_and_ends_waits_later() {
        let (parent, deadline) = (Fault::new(), Instant::now() + Duration::from_millis(60));
        let before = parent.child();
        assert!(parent.ends_waits().is_ok());
        assert!(parent.raise_at(remote(), deadline));
        let after = parent.child();
        // A second failure changes neither the reason nor the deadline.
        let later = deadline + Duration::from_secs(60);
        assert!(!parent.raise_at(Error::internal("late"), later));
        for fault in [&parent, &before, &after] {
            assert!(fault.is_raised());
            assert_eq!(fault.check().unwrap_err(), remote());
            assert!(fault.ends_waits().is_ok() || Instant::now() >= deadline);
        }
        std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
        for fault in [&before, &parent, &after] {
            assert_eq!(fault.ends_waits().unwrap_err(), remote());
            assert_eq!(fault.state.load(Ordering::Relaxed), RAISED);
        }
        assert_eq!(parent.child().state.load(Ordering::Relaxed), RAISED);
    }

    #[test]
    fn fault_raised_after_a_deadline_was_set_ends_waits_at_once() {
        let late = Instant::now() + Duration::from_secs(600);
        let parent = Fault::new();
        let child = parent.child();
        parent.raise_at(remote(), late);
        assert!(child.ends_waits().is_ok());
        assert!(!parent.raise(Error::new(ErrorKind::Aborted, "enough")));
        for fault in [&parent, &child] {
            assert_eq!(fault.ends_waits().unwrap_err(), remote());
        }
        // A deadline does not postpone a raised fault.
        let raised = Fault::new();
        raised.raise(Error::new(ErrorKind::Aborted, "enough"));
        assert!(!raised.raise_at(remote(), late));
        for fault in [&raised, &raised.child()] {
            assert_eq!(fault.ends_waits().unwrap_err().message(), "enough");
        }
    }

    #[test]
    fn detached_child_is_not_raised_with_its_parent() {
        let parent = Fault::new();
        let children = [parent.child(), parent.child()];
        parent.detach(&children[0]);
        parent.raise(Error::new(ErrorKind::Aborted, "the parent only"));
        assert!(!children[0].is_raised() && children[1].is_raised());
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use crate::error::ErrorKind;

    const OWN: &str = "own";
    const REMOTE: &str = "remote";

    fn raise(fault: &Fault) {
        fault.raise(Error::new(ErrorKind::Aborted, OWN));
    }

    /// Raises the fault with a deadline of one hour, which no run of the loom model checker reaches.
    fn raise_late(fault: &Fault) {
        let deadline = Instant::now() + Duration::from_secs(3600);
        fault.raise_at(Error::new(ErrorKind::Remote, REMOTE), deadline);
    }

    /// Returns the reason, which must be `OWN` or `REMOTE`.
    fn reason(result: Result<()>) -> Option<&'static str> {
        let error = result.err()?;
        let given = [OWN, REMOTE].into_iter();
        let given = given.filter(|reason| error.message() == *reason);
        Some(given.last().unwrap_or_else(|| panic!("{error}")))
    }

    /// Waits for the fault; loom reports a wait that never ends.
    fn wait(fault: &Fault) -> &'static str {
        loop {
            match reason(fault.ends_waits()) {
                Some(reason) => return reason,
                None => loom::thread::yield_now(),
            }
        }
    }

    /// Explores the interleavings of `body` with one thread for each of `acts`, which acts on the
    /// fault.
    fn model(
        acts: &'static [fn(&Fault)],
        body: fn(&Arc<Fault>, Vec<loom::thread::JoinHandle<()>>),
    ) {
        loom::model(move || {
            let fault = Fault::new();
            let threads = acts.iter().map(|act| {
                let fault = fault.clone();
                loom::thread::spawn(move || act(&fault))
            });
            let threads = threads.collect();
            body(&fault, threads);
        });
    }

    fn join(threads: Vec<loom::thread::JoinHandle<()>>) {
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
    }

    /// Raises a fault at once in one thread and at a deadline in another, in every order.
    #[test]
    fn loom_raised_fault_ends_waits_whatever_its_deadline() {
        model(&[raise, raise_late], |fault, threads| {
            let before = fault.child();
            let (mine, its) = (wait(fault), wait(&before));
            join(threads);
            // The fault and its children have one reason, which never changes.
            assert_eq!(mine, its);
            assert_eq!(reason(fault.check()), Some(mine));
            assert_eq!(reason(fault.child().ends_waits()), Some(mine));
        });
    }

    #[test]
    fn loom_fault_with_deadline_refuses_work_and_ends_no_wait() {
        model(&[raise_late], |fault, threads| {
            let child = fault.child();
            for one in [fault, &child] {
                while reason(one.check()).is_none() {
                    assert!(one.ends_waits().is_ok());
                    loom::thread::yield_now();
                }
                assert!(one.ends_waits().is_ok());
            }
            join(threads);
            assert_eq!(reason(fault.child().check()), Some(REMOTE));
            assert!(fault.child().ends_waits().is_ok() && fault.ends_waits().is_ok());
        });
    }

    /// Makes a child while its parent is raised: the child is raised as well.
    #[test]
    fn loom_child_made_meanwhile_is_raised_with_its_parent() {
        model(&[raise, raise_late], |fault, threads| {
            let child = fault.child();
            join(threads);
            assert_eq!(reason(child.ends_waits()), reason(fault.ends_waits()));
            assert!(reason(child.ends_waits()).is_some());
        });
        model(&[raise_late], |fault, threads| {
            let child = fault.child();
            join(threads);
            assert_eq!(reason(child.check()), Some(REMOTE));
            assert!(child.ends_waits().is_ok());
        });
    }
}
