//! The thread that runs a communicator's started calls, one after the other.

use crate::error::Result;
use crate::sys::process::thread_error;
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, ThreadId};

/// A started call. It completes its request itself.
type QueuedCall = Box<dyn FnOnce() + Send>;

/// The thread that runs a communicator's started calls in order. It begins with the first call, and ends when the
/// communicator is dropped.
#[derive(Default)]
pub struct CallThread {
    shared: Arc<SharedCalls>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct SharedCalls {
    queue: Mutex<CallBacklog>,
    changed: Condvar,
    /// Number of calls that have not ended. Written under the lock; calls that find 0 need no lock.
    pending: AtomicUsize,
}

#[derive(Default)]
struct CallBacklog {
    calls: VecDeque<QueuedCall>,
    /// The thread that runs a call now.
    running: Option<ThreadId>,
    is_closed: bool,
}

impl SharedCalls {
    fn lock(&self) -> MutexGuard<'_, CallBacklog> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut backlog = self.lock();
        loop {
            let Some(call) = backlog.calls.pop_front() else {
                if backlog.is_closed {
                    return;
                }
                let waited = self.changed.wait(backlog);
                backlog = waited.unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            backlog.running = Some(thread::current().id());
            drop(backlog);
            // A call that panics fails its communicator and completes its request; later calls return that failure.
            let _ = catch_unwind(AssertUnwindSafe(call));
            backlog = self.lock();
            backlog.running = None;
            // SYNC POINT started calls, release: publishes what the call wrote to callers that find 0.
            self.pending.fetch_sub(1, Ordering::Release);
            self.changed.notify_all();
        }
    }
}

impl CallThread {
    /// Adds a call behind all others.
    ///
    /// # Errors
    /// System, with the limit, if the thread cannot be started.
    pub fn push(&self, call: QueuedCall) -> Result<()> {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            let shared = self.shared.clone();
            let started = thread::Builder::new()
                .name("cinch-calls".into())
                .spawn(move || shared.run());
            *thread = Some(started.map_err(|cause| thread_error("started calls", cause))?);
        }
        let mut backlog = self.shared.lock();
        self.shared.pending.fetch_add(1, Ordering::Relaxed);
        backlog.calls.push_back(call);
        drop(backlog);
        self.shared.changed.notify_all();
        Ok(())
    }

    /// Waits until all added calls have ended. Returns at once in a call that this thread runs.
    #[inline]
    pub fn wait_idle(&self) {
        // SYNC POINT started calls, acquire.
        if self.shared.pending.load(Ordering::Acquire) > 0 {
            self.wait_for_calls();
        }
    }

    #[cold]
    fn wait_for_calls(&self) {
        let mut backlog = self.shared.lock();
        while backlog.running.is_some() || !backlog.calls.is_empty() {
            if backlog.running == Some(thread::current().id()) {
                return;
            }
            let waited = self.shared.changed.wait(backlog);
            backlog = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for CallThread {
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.changed.notify_all();
        let thread = self
            .thread
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.take()
            // The last call may hold the last reference to its communicator: then this is its thread.
            && thread.thread().id() != thread::current().id()
        {
            // Calls hold references to the communicator, so none is left, and the thread ends at once.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for CallThread {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let waiting = self.shared.lock().calls.len();
        out.debug_struct("CallThread")
            .field("waiting", &waiting)
            .finish_non_exhaustive()
    }
}
