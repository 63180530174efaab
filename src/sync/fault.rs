//! The abort word of a communicator, with the reason that the first writer left.

use super::atomic::{AtomicU8, Ordering};
use super::locks::{Mutex, OnceLock};
use crate::error::{Error, Result};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Nothing has happened.
const NONE: u8 = 0;
/// Another rank is gone: nothing begins any more, waits go on for a moment.
const HEARD: u8 = 1;
/// The communicator has failed: every wait ends.
const RAISED: u8 = 2;

/// How long what broke waits for news of what really happened: the connection of a rank that gave up
/// may break before the news of the rank that died, or of the one that aborted, arrives.
pub const GRACE: Duration = Duration::from_millis(300);

/// Set by whoever first sees the communicator fail; watched by every wait.
///
/// What happens here is raised, and ends waits at once. Of a rank that is gone this one hears,
/// while the last bytes of that rank and the rest of the others' data may still be on their way:
/// calls that have all they need complete, so waits go on until a deadline. Only waits: new work
/// is refused in both states.
///
/// Faults form a tree: a fault of a communicator reaches those split from it, until they are detached.
#[derive(Debug, Default)]
pub struct Fault {
    state: AtomicU8,
    reason: OnceLock<Error>,
    /// Until when waits go on after the news.
    until: OnceLock<Instant>,
    children: Mutex<Vec<Weak<Fault>>>,
}

impl Fault {
    /// A fault that has not happened.
    pub fn new() -> Arc<Fault> {
        Arc::default()
    }

    /// A fault that also happens when `self` does, until [`Fault::detach`].
    pub fn child(&self) -> Arc<Fault> {
        let child = Fault::new();
        if let Ok(mut children) = self.children.lock() {
            children.retain(|weak| weak.strong_count() > 0);
            children.push(Arc::downgrade(&child));
        }
        // A fault that happened between the caller's last check and the push must not be lost.
        // SYNC POINT fault: pairs with the releases in `raise` and `hear`.
        match (self.state.load(Ordering::Acquire), self.until.get()) {
            (NONE, _) => false,
            (HEARD, Some(&until)) => child.hear(self.failure(), until),
            _ => child.raise(self.failure()),
        };
        child
    }

    /// From here on `child` no longer happens when `self` does.
    pub fn detach(&self, child: &Arc<Fault>) {
        if let Ok(mut children) = self.children.lock() {
            children.retain(|weak| !std::ptr::eq(weak.as_ptr(), Arc::as_ptr(child)));
        }
    }

    /// Ends all waits, with `error` unless a reason is there already. Returns whether this call
    /// gave the reason.
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

    /// Ends all waits at `until`, with `error` unless a reason is there already, and refuses new
    /// work at once. Neither ends what was raised, nor moves a deadline that is there. Returns
    /// whether this call gave the reason.
    pub fn hear(&self, error: Error, until: Instant) -> bool {
        let first = self.reason.set(error).is_ok();
        let until = *self.until.get_or_init(|| until);
        // SYNC POINT fault: publishes `reason` and `until` to `check` and `ends_waits`.
        let heard = self
            .state
            .compare_exchange(NONE, HEARD, Ordering::Release, Ordering::Relaxed);
        if heard.is_ok()
            && let Some(reason) = self.reason()
        {
            for child in self.children() {
                child.hear(reason.clone(), until);
            }
        }
        first
    }

    /// Whether anything has happened, raised or heard. One relaxed load: for wait loops.
    #[inline]
    pub fn is_raised(&self) -> bool {
        self.state.load(Ordering::Relaxed) != NONE
    }

    /// The reason, as an error, once anything has happened: for what would begin now.
    #[inline]
    pub fn check(&self) -> Result<()> {
        // SYNC POINT fault: pairs with the releases in `raise` and `hear`.
        match self.state.load(Ordering::Acquire) {
            NONE => Ok(()),
            _ => Err(self.failure()),
        }
    }

    /// The reason, as an error, once it ends what began before: for waits.
    #[inline]
    pub fn ends_waits(&self) -> Result<()> {
        if !self.is_raised() {
            return Ok(());
        }
        // SYNC POINT fault: pairs with the releases in `raise` and `hear`.
        if self.state.load(Ordering::Acquire) == HEARD {
            if self
                .until
                .get()
                .is_some_and(|until| Instant::now() < *until)
            {
                return Ok(());
            }
            // Children have the same deadline and see to themselves. Whoever reads this state has
            // seen no other: the release passes on what was acquired above.
            let _ =
                self.state
                    .compare_exchange(HEARD, RAISED, Ordering::Release, Ordering::Relaxed);
        }
        Err(self.failure())
    }

    /// The reason, if anything has happened.
    pub fn reason(&self) -> Option<&Error> {
        self.reason.get()
    }

    /// The reason, if anything has happened or does within `patience`: what broke here may have a
    /// cause of which this rank is yet to hear.
    pub fn reason_within(&self, patience: Duration) -> Option<Error> {
        let deadline = Instant::now() + patience;
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

    fn remote() -> Error {
        Error::new(ErrorKind::Remote, "rank 1 died")
    }

    #[test]
    fn what_is_heard_refuses_at_once_and_ends_waits_later() {
        let (parent, until) = (Fault::new(), Instant::now() + Duration::from_millis(60));
        let before = parent.child();
        assert!(parent.ends_waits().is_ok());
        assert!(parent.hear(remote(), until));
        let after = parent.child();
        // Neither the reason nor the deadline moves.
        assert!(!parent.hear(Error::internal("late"), until + Duration::from_secs(60)));
        for fault in [&parent, &before, &after] {
            assert!(fault.is_raised());
            assert_eq!(fault.check().unwrap_err(), remote());
            assert!(fault.ends_waits().is_ok() || Instant::now() >= until);
        }
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
        for fault in [&before, &parent, &after] {
            assert_eq!(fault.ends_waits().unwrap_err(), remote());
            assert_eq!(fault.state.load(Ordering::Relaxed), RAISED);
        }
        assert_eq!(parent.child().state.load(Ordering::Relaxed), RAISED);
    }

    #[test]
    fn what_happens_here_ends_waits_in_spite_of_what_was_heard() {
        let late = Instant::now() + Duration::from_secs(600);
        let parent = Fault::new();
        let child = parent.child();
        parent.hear(remote(), late);
        assert!(child.ends_waits().is_ok());
        assert!(!parent.raise(Error::new(ErrorKind::Aborted, "enough")));
        for fault in [&parent, &child] {
            assert_eq!(fault.ends_waits().unwrap_err(), remote());
        }
        // What is heard gives no time to what was raised.
        let raised = Fault::new();
        raised.raise(Error::new(ErrorKind::Aborted, "enough"));
        assert!(!raised.hear(remote(), late));
        for fault in [&raised, &raised.child()] {
            assert_eq!(fault.ends_waits().unwrap_err().message(), "enough");
        }
    }

    #[test]
    fn a_detached_child_outlives_its_parent() {
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
    const HEARD_OF: &str = "heard";

    fn raise(fault: &Fault) {
        fault.raise(Error::new(ErrorKind::Aborted, OWN));
    }

    fn hear(fault: &Fault, until: Instant) {
        fault.hear(Error::new(ErrorKind::Remote, HEARD_OF), until);
    }

    /// The end of a grace that lasts as long as any model.
    fn grace() -> Instant {
        Instant::now() + Duration::from_secs(3600)
    }

    /// One of the reasons that somebody gave, if there is one: never that none was given.
    fn reason(result: Result<()>) -> Option<&'static str> {
        let error = result.err()?;
        let given = [OWN, HEARD_OF].into_iter();
        let given = given.filter(|reason| error.message() == *reason);
        Some(given.last().unwrap_or_else(|| panic!("{error}")))
    }

    /// A wait that never ends is one that loom reports.
    fn wait(fault: &Fault) -> &'static str {
        loop {
            match reason(fault.ends_waits()) {
                Some(reason) => return reason,
                None => loom::thread::yield_now(),
            }
        }
    }

    /// Explores `body`, with a thread that acts on its fault in each of these ways.
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

    /// A fault of one's own ends waits, whatever is heard before, meanwhile or after.
    #[test]
    fn loom_a_raised_fault_ends_waits_in_spite_of_what_is_heard() {
        model(&[raise, |fault| hear(fault, grace())], |fault, threads| {
            let before = fault.child();
            let (mine, its) = (wait(fault), wait(&before));
            join(threads);
            // One reason, for good and for all.
            assert_eq!(mine, its);
            assert_eq!(reason(fault.check()), Some(mine));
            assert_eq!(reason(fault.child().ends_waits()), Some(mine));
        });
    }

    /// What is heard refuses new work, and leaves waits alone as long as its grace lasts.
    #[test]
    fn loom_a_heard_fault_is_not_lost_and_ends_no_wait_before_its_time() {
        model(&[|fault| hear(fault, grace())], |fault, threads| {
            let child = fault.child();
            for one in [fault, &child] {
                while reason(one.check()).is_none() {
                    assert!(one.ends_waits().is_ok());
                    loom::thread::yield_now();
                }
                assert!(one.ends_waits().is_ok());
            }
            join(threads);
            assert_eq!(reason(fault.child().check()), Some(HEARD_OF));
            assert!(fault.child().ends_waits().is_ok() && fault.ends_waits().is_ok());
        });
    }

    /// A child that is made while its parent fails fails too, and as that does.
    #[test]
    fn loom_no_child_misses_what_happens_while_it_is_made() {
        model(&[raise, |fault| hear(fault, grace())], |fault, threads| {
            let child = fault.child();
            join(threads);
            assert_eq!(reason(child.ends_waits()), reason(fault.ends_waits()));
            assert!(reason(child.ends_waits()).is_some());
        });
        model(&[|fault| hear(fault, grace())], |fault, threads| {
            let child = fault.child();
            join(threads);
            assert_eq!(reason(child.check()), Some(HEARD_OF));
            assert!(child.ends_waits().is_ok());
        });
    }
}
