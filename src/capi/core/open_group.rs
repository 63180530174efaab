//! Groups of calls that a C program opens and closes on one thread.
//!
//! Between start and end, calls are checked and recorded with their pointers; the outermost end runs
//! them. The first error that counts fails the group: nothing of it runs, and its end returns that
//! error. Any failing function of cinch.h counts; in the drop-in those that NCCL counts.

use crate::comm::{Call, Communicator, Group, Report};
use crate::error::{Error, Result};
use crate::mem::Buffers;
use std::cell::RefCell;
use std::sync::Arc;

thread_local! {
    static OPEN: RefCell<Option<OpenGroup>> = const { RefCell::new(None) };
}

/// The recorded calls of a group, and its first failure.
#[derive(Default)]
pub struct OpenGroup {
    depth: u32,
    failure: Option<Error>,
    /// Borrows the communicators that `calls` owns. Fields drop in order, so `group` is declared
    /// before `calls`.
    group: Group<'static>,
    calls: Vec<(Arc<Communicator>, Call)>,
}

impl OpenGroup {
    fn add(
        &mut self,
        comm: Arc<Communicator>,
        call: &Call,
        buffers: Buffers<'static>,
    ) -> Result<()> {
        // SAFETY: `calls` owns the communicator, which does not move, for as long as `group` has the
        // call: `run` and `clear` empty `group` first.
        let borrowed: &'static Communicator = unsafe { &*Arc::as_ptr(&comm) };
        match buffers {
            Buffers::Host(buffers) => self.group.add(borrowed, call, buffers)?,
            Buffers::Gpu(buffers) => self.group.add_on(borrowed, call, buffers)?,
        }
        self.calls.push((comm, *call));
        Ok(())
    }

    /// Checks that no failure was recorded while the group was open.
    ///
    /// # Errors
    /// The first failure.
    pub fn check(&mut self) -> Result<()> {
        self.failure.take().map_or(Ok(()), |error| {
            Err(error.context("a call inside the group failed, so nothing ran"))
        })
    }

    /// Returns the recorded calls with their communicators.
    pub fn calls(&self) -> &[(Arc<Communicator>, Call)] {
        &self.calls
    }

    /// Runs the collectives of each communicator before its sends and receives: NCCL's programs may
    /// make them in an order of each rank's own. Reports then come in the new order.
    pub fn collectives_first(&mut self) {
        self.group.collectives_first();
    }

    /// Runs the recorded calls and returns their reports.
    ///
    /// # Errors
    /// See [`Group::run`].
    pub fn run(&mut self) -> Result<Vec<Report>> {
        let ran = if self.calls.is_empty() {
            Ok(Vec::new())
        } else {
            std::mem::take(&mut self.group).run()
        };
        self.clear();
        ran
    }

    /// Forgets the recorded calls and releases their communicators.
    pub fn clear(&mut self) {
        self.group = Group::default();
        self.calls.clear();
    }
}

/// Runs `body` on this thread's open group and returns its result.
///
/// Returns `None` if no group is open. At the exit of a program the thread's storage may be gone;
/// then no group is open and calls run at once.
fn with_open<T>(body: impl FnOnce(&mut OpenGroup) -> T) -> Option<T> {
    let run = |open: &RefCell<Option<OpenGroup>>| Some(body(open.try_borrow_mut().ok()?.as_mut()?));
    OPEN.try_with(run).ok().flatten()
}

/// Opens a group on this thread, or a nested one inside the open group.
///
/// # Errors
/// Invalid usage at a depth that no program reaches.
pub fn start() -> Result<()> {
    let nested = OPEN.try_with(|open| {
        let mut open = open.borrow_mut();
        let group = open.get_or_insert_default();
        group.depth = group
            .depth
            .checked_add(1)
            .ok_or_else(|| Error::invalid_usage("groups nest 4294967295 deep"))?;
        Ok(())
    });
    nested.unwrap_or(Ok(()))
}

/// Closes this thread's innermost group, and returns the group if it is the outermost.
///
/// The thread has no open group while the caller runs it, even if that panics. `start` is the
/// function that opens a group, for the error sentence.
///
/// # Errors
/// Invalid usage if no group is open.
pub fn end(start: &str) -> Result<Option<OpenGroup>> {
    let closed = OPEN.try_with(|open| {
        let mut open = open.borrow_mut();
        let Some(group) = open.as_mut() else {
            return Err(Error::invalid_usage(format!(
                "no group is open on this thread; {start} opens one"
            )));
        };
        group.depth -= 1;
        Ok(if group.depth == 0 { open.take() } else { None })
    });
    closed.unwrap_or(Ok(None))
}

/// Returns whether this thread has an open group.
pub fn is_open() -> bool {
    with_open(|_| ()).is_some()
}

/// Fails this thread's open group, if there is one. The group keeps only its first error.
pub fn fail(error: &Error) {
    with_open(|group| {
        group.failure.get_or_insert_with(|| error.clone());
    });
}

/// Runs a call and returns its report, or records it in this thread's open group and returns `None`.
///
/// # Errors
/// See [`Communicator::call`] and [`Group::add`].
pub fn submit(
    comm: &Arc<Communicator>,
    call: &Call,
    buffers: Buffers<'static>,
) -> Result<Option<Report>> {
    if is_open() {
        let added = with_open(|group| group.add(comm.clone(), call, buffers));
        return added.unwrap_or(Ok(())).map(|()| None);
    }
    match buffers {
        Buffers::Host(buffers) => comm.call(call, buffers),
        Buffers::Gpu(buffers) => comm.call_on(call, buffers),
    }
    .map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_group_closes_with_outermost_end() {
        assert!(end("start").is_err());
        start().unwrap();
        start().unwrap();
        std::thread::spawn(|| assert!(end("start").is_err()))
            .join()
            .unwrap();
        assert!(end("start").unwrap().is_none() && is_open());
        assert!(end("start").unwrap().is_some() && !is_open());
        let error = end("cinch_group_start").err().unwrap();
        assert!(error.message().contains("cinch_group_start opens one"));
    }

    #[test]
    fn failed_group_returns_first_error_once() {
        fail(&Error::invalid_usage("outside of any group"));
        start().unwrap();
        for text in ["first", "second"] {
            fail(&Error::invalid_argument(text));
        }
        let mut group = end("start").unwrap().unwrap();
        let error = group.check().unwrap_err();
        assert!(error.message().ends_with("so nothing ran: first"));
        start().unwrap();
        assert!(end("start").unwrap().unwrap().check().is_ok());
    }
}
