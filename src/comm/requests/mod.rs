//! Calls that return at once: a thread of the library runs them in order, and a [`CallRequest`] stands for the
//! result.

mod call_thread;
mod start;

pub(super) use call_thread::CallThread;
pub use start::StartedArrays;

use crate::error::{Error, Result};
use crate::sys::fork::ProcessId;
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};

/// A call that may still run, on host memory. It is a future, and can be waited for without a runtime.
///
/// The call runs to its end if the request is dropped.
pub struct CallRequest<T> {
    owner: ProcessId,
    state: Arc<RequestState<T>>,
}

/// Part of a request that its call and its waiters share.
struct RequestState<T> {
    progress: Mutex<RequestProgress<T>>,
    done: Condvar,
    /// Descriptor that becomes readable when the call has ended, if the program wants one. It is made under the
    /// lock of `progress`.
    event: OnceLock<EventFd>,
}

struct RequestProgress<T> {
    outcome: Option<Result<T>>,
    /// Whether the call has ended. Stays set when the outcome has been taken.
    has_ended: bool,
    waker: Option<Waker>,
    /// Threads that wait for any of several requests.
    waiters: Vec<Arc<AnySignal>>,
}

/// Wakes a thread that waits for any of several requests.
#[derive(Default)]
pub struct AnySignal {
    is_set: Mutex<bool>,
    changed: Condvar,
}

impl AnySignal {
    fn set(&self) {
        *self.is_set.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    fn wait(&self) {
        let set = self.is_set.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_while(set, |is_set| !*is_set);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

impl<T> RequestState<T> {
    fn lock(&self) -> MutexGuard<'_, RequestProgress<T>> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the outcome of the call and wakes all waiters.
    fn complete(&self, outcome: Result<T>) {
        let mut progress = self.lock();
        if progress.has_ended {
            return;
        }
        progress.outcome = Some(outcome);
        progress.has_ended = true;
        let waker = progress.waker.take();
        let waiters = std::mem::take(&mut progress.waiters);
        drop(progress);
        self.done.notify_all();
        waiters.iter().for_each(|waiter| waiter.set());
        if let Some(event) = self.event.get() {
            // The counter is 0 before, so the write does not block.
            let _ = event.write(1);
        }
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// The end of a request that its call holds. Dropped without an outcome, as by a panic, it completes the request
/// with an error, so that nobody waits for ever.
pub(super) struct RequestCompleter<T>(Arc<RequestState<T>>);

impl<T> RequestCompleter<T> {
    pub(super) fn complete(self, outcome: Result<T>) {
        self.0.complete(outcome);
    }
}

impl<T> Drop for RequestCompleter<T> {
    fn drop(&mut self) {
        self.0
            .complete(Err(Error::internal("the call ended without a result")));
    }
}

impl<T> CallRequest<T> {
    /// Makes a request, and the end that completes it.
    pub(super) fn pair() -> (CallRequest<T>, RequestCompleter<T>) {
        let state = Arc::new(RequestState {
            progress: Mutex::new(RequestProgress {
                outcome: None,
                has_ended: false,
                waker: None,
                waiters: Vec::new(),
            }),
            done: Condvar::new(),
            event: OnceLock::new(),
        });
        let request = CallRequest {
            owner: ProcessId::this(),
            state: state.clone(),
        };
        (request, RequestCompleter(state))
    }

    /// Returns whether the call has ended. Does not wait.
    ///
    /// # Errors
    /// Invalid usage in a process that was forked after the call was started.
    pub fn is_done(&self) -> Result<bool> {
        self.owner.check()?;
        Ok(self.state.lock().has_ended)
    }

    /// Waits until the call has ended, and returns its result.
    ///
    /// # Errors
    /// The errors of the call; invalid usage in a process that was forked after the call was started.
    pub fn wait(self) -> Result<T> {
        self.take()
    }

    /// Waits until the call has ended, and returns its result to the first caller.
    ///
    /// # Errors
    /// As [`CallRequest::wait`]; invalid usage for further callers.
    pub(crate) fn take(&self) -> Result<T> {
        self.owner.check()?;
        let progress = self.state.lock();
        let ended = self.state.done.wait_while(progress, |it| !it.has_ended);
        let outcome = ended.unwrap_or_else(PoisonError::into_inner).outcome.take();
        outcome.unwrap_or_else(|| Err(result_taken()))
    }

    /// Returns a descriptor that is readable once the call has ended, for `poll` and its like. It is closed when
    /// the request is dropped, and must not be read.
    ///
    /// # Errors
    /// System if no descriptor is left; invalid usage in a process that was forked after the call was started.
    pub fn descriptor(&self) -> Result<BorrowedFd<'_>> {
        self.owner.check()?;
        let progress = self.state.lock();
        if self.state.event.get().is_none() {
            let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
            let first = u32::from(progress.has_ended);
            let event = EventFd::from_value_and_flags(first, flags)
                .map_err(|errno| Error::system("the descriptor of a request", errno))?;
            let _ = self.state.event.set(event);
        }
        drop(progress);
        let event = self.state.event.get();
        let event = event.ok_or_else(|| Error::internal("a request has lost its descriptor"))?;
        Ok(event.as_fd())
    }
}

/// A call that may still run, whatever its result: see [`wait_any`].
pub trait PendingCall: private::Waitable {}

impl<T> PendingCall for CallRequest<T> {}

mod private {
    use super::{AnySignal, CallRequest};
    use crate::error::Result;
    use std::sync::Arc;

    pub trait Waitable {
        /// Returns whether the call has ended; if it has not, `signal` is set when it does.
        fn watch(&self, signal: &Arc<AnySignal>) -> Result<bool>;
    }

    impl<T> Waitable for CallRequest<T> {
        fn watch(&self, signal: &Arc<AnySignal>) -> Result<bool> {
            self.owner.check()?;
            let mut progress = self.state.lock();
            if !progress.has_ended {
                // Signals of waits that have ended are dropped here, so that their number stays small.
                progress
                    .waiters
                    .retain(|waiter| Arc::strong_count(waiter) > 1);
                progress.waiters.push(signal.clone());
            }
            Ok(progress.has_ended)
        }
    }
}

/// Waits until one of the calls has ended, and returns its index. If several have, it is the first.
///
/// # Errors
/// Invalid argument without calls; invalid usage in a process that was forked after a call was started.
pub fn wait_any(calls: &[&dyn PendingCall]) -> Result<usize> {
    if calls.is_empty() {
        return Err(Error::invalid_argument("there is no request to wait for"));
    }
    loop {
        let signal = Arc::new(AnySignal::default());
        for (index, call) in calls.iter().enumerate() {
            if call.watch(&signal)? {
                return Ok(index);
            }
        }
        signal.wait();
    }
}

fn result_taken() -> Error {
    Error::invalid_usage("the result of this request was taken before")
}

impl<T> Future for CallRequest<T> {
    type Output = Result<T>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T>> {
        if let Err(error) = self.owner.check() {
            return Poll::Ready(Err(error));
        }
        let mut progress = self.state.lock();
        if progress.has_ended {
            let outcome = progress.outcome.take();
            return Poll::Ready(outcome.unwrap_or_else(|| Err(result_taken())));
        }
        progress.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

impl<T> fmt::Debug for CallRequest<T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("CallRequest")
            .field("is_done", &self.is_done().ok())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
