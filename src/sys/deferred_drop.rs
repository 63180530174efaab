//! Letting go of things on a thread of its own, one for all: what a callback must not drop where it
//! runs, and what has to stay until something has ended for which nobody waits.
//!
//! The thread is there while something is left to it. A process ends without waiting for it; a forked
//! child has none, and what was left before the fork is lost there.

use super::fork::ProcessId;
use super::fork_safe::ForkSafe;
use super::loader;
use super::log::{Level, line};
use super::process::block_signals;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// Time between two looks at what may not go yet.
const PAUSE: Duration = Duration::from_millis(10);

/// Drops what it holds if that may go; whether it did.
type Thing = Box<dyn FnMut() -> bool + Send>;

/// What is left to the thread.
struct Left {
    /// The process that left it.
    owner: Option<ProcessId>,
    /// Whether there is the thread.
    is_served: bool,
    things: Vec<Thing>,
}

static LEFT: ForkSafe<Left> = ForkSafe::new(Left {
    owner: None,
    is_served: false,
    things: Vec::new(),
});

/// Drops `thing` soon, on another thread. Where there can be none it stays, until there is one.
pub fn release<T: Send + 'static>(thing: T) {
    drop_when(thing, || true);
}

/// The same once `may_go` says so, which is asked on that thread every now and then.
pub fn drop_when<T: Send + 'static>(thing: T, mut may_go: impl FnMut() -> bool + Send + 'static) {
    let mut thing = Some(thing);
    leave(Box::new(move || {
        let goes = may_go();
        if goes {
            drop(thing.take());
        }
        goes
    }));
}

fn leave(thing: Thing) {
    let owner = Some(ProcessId::this());
    let is_served = LEFT.with(|left| {
        if left.owner != owner {
            std::mem::forget(std::mem::take(&mut left.things));
            (left.owner, left.is_served) = (owner, false);
        }
        left.things.push(thing);
        std::mem::replace(&mut left.is_served, true)
    });
    if is_served {
        return;
    }
    let thread = std::thread::Builder::new().name("cinch-release".into());
    if let Err(error) = thread.spawn(serve) {
        LEFT.with(|left| left.is_served = false);
        line(
            Level::Warn,
            format_args!("no thread to release what is used no more, so it stays: {error}"),
        );
    }
}

/// The thread.
fn serve() {
    block_signals();
    loader::stay_loaded();
    let mut things: Vec<Thing> = Vec::new();
    loop {
        let is_over = LEFT.with(|left| {
            things.append(&mut left.things);
            left.is_served = !things.is_empty();
            things.is_empty()
        });
        if is_over {
            return;
        }
        let before = things.len();
        things.retain_mut(|thing| !goes(thing));
        if things.len() == before {
            std::thread::sleep(PAUSE);
        }
    }
}

/// What panics while it goes is gone.
fn goes(thing: &mut Thing) -> bool {
    catch_unwind(AssertUnwindSafe(thing)).unwrap_or(true)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::{Sender, channel};
    use std::thread::ThreadId;

    /// Tells who drops it.
    struct Told(Sender<ThreadId>);

    impl Drop for Told {
        fn drop(&mut self) {
            self.0.send(std::thread::current().id()).unwrap();
        }
    }

    #[test]
    fn what_may_not_go_yet_holds_nothing_else_up() {
        let (tells, dropped) = channel();
        let (held_tells, held) = channel();
        let may_go = Arc::new(AtomicBool::new(false));
        let asked = may_go.clone();
        drop_when(Told(held_tells), move || asked.load(Ordering::Relaxed));
        for _ in 0..100 {
            release(Told(tells.clone()));
        }
        drop_when((), || panic!("a thing that cannot be asked"));
        // While there is something to do the thread stays.
        let threads: HashSet<ThreadId> = dropped.iter().take(100).collect();
        assert_eq!(threads.len(), 1);
        assert!(!threads.contains(&std::thread::current().id()));
        assert!(held.try_recv().is_err());
        may_go.store(true, Ordering::Relaxed);
        held.recv().unwrap();
        release(Told(tells));
        dropped.recv().unwrap();
    }
}
