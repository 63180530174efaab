//! Calls that run together.
//!
//! A group belongs to a thread. Between start and end, calls are checked and recorded with their
//! pointers; the outermost end connects the communicators that were asked for, then runs the calls,
//! and then teardowns the communicators that were finalized or destroyed. An error in between poisons
//! the group: the end returns that error, and nothing runs.

use crate::boundary::CallProgress;
use crate::comm::Comm;
use crate::connect_job::{self, ConnectJob};
use crate::teardown::{self, Teardown};
use crate::types::*;
use crate::versioned;
use cinch::comm::{Call, Group};
use cinch::mem::Buffers;
use cinch::{Communicator, Error, Result};
use std::cell::RefCell;
use std::sync::Arc;

export! {
    /// Opens a group on this thread; groups nest.
    fn ncclGroupStart | pncclGroupStart() {
        with_open(|open| {
            let group = open.get_or_insert_default();
            group.depth = group
                .depth
                .checked_add(1)
                .ok_or_else(|| Error::invalid_usage("groups nest 4294967295 deep"))?;
            Ok(CallProgress::Done)
        })
        .unwrap_or(Ok(CallProgress::Done))
    }
}

export! {
    /// Closes this thread's innermost group; the outermost close runs what was recorded.
    fn ncclGroupEnd | pncclGroupEnd() {
        // The group teardowns the thread's storage before it runs: a panic in it closes it.
        match with_open(close).unwrap_or(Ok(None))? {
            Some(group) => group.run(),
            None => Ok(CallProgress::Done),
        }
    }
}

export! {
    /// Closes a group as `ncclGroupEnd` does, but runs nothing: says how long it would take.
    counted fn ncclGroupSimulateEnd | pncclGroupSimulateEnd(simInfo: *mut ncclSimInfo_t) {
        // First of all: whatever is wrong with the rest, the group does not stay open.
        let group = with_open(close).unwrap_or(Ok(None))?;
        // SAFETY: NULL, or readable for the size that it says.
        let info = unsafe { read_sim_info(simInfo) };
        let Some(mut group) = group else {
            return info.map(|_| CallProgress::Done);
        };
        let mut info = info.inspect_err(|_| group.abandon())?;
        info.estimatedTime = group.predict()? as f32;
        let bytes = info.size.min(size_of::<ncclSimInfo_t>());
        // SAFETY: writable for the size that it says.
        unsafe {
            std::ptr::copy_nonoverlapping(
                std::ptr::from_ref(&info).cast::<u8>(),
                simInfo.cast::<u8>(),
                bytes,
            );
        }
        Ok(CallProgress::Done)
    }
}

versioned! {
    /// `ncclSimInfo_t`.
    struct ncclSimInfo_t, "NCCL_SIM_INFO_INITIALIZER", magic SIM_INFO_MAGIC;
    estimatedTime: f32 = -1.0, since 22200;
}

/// # Safety
/// `info` is NULL, or readable for the size that it says.
unsafe fn read_sim_info(info: *const ncclSimInfo_t) -> Result<ncclSimInfo_t> {
    check_out("simInfo", info.cast_mut())?;
    // SAFETY: as the caller's.
    unsafe { versioned::read(info)? }.ok_or_else(|| Error::internal("a struct vanished"))
}

thread_local! {
    static OPEN: RefCell<Option<OpenGroup>> = const { RefCell::new(None) };
}

/// What `body` returns of the thread's open group. `None` where the thread ends and its storage is gone, as
/// on the main thread when functions run that a program left for its exit: no group is open then, and
/// calls run as they are made.
fn with_open<T>(body: impl FnOnce(&mut Option<OpenGroup>) -> T) -> Option<T> {
    OPEN.try_with(|open| body(&mut open.borrow_mut())).ok()
}

fn is_open() -> bool {
    with_open(|open| open.is_some()).unwrap_or(false)
}

#[derive(Default)]
struct OpenGroup {
    depth: u32,
    failure: Option<Error>,
    /// Borrows the communicators of `calls`; declared, and so dropped, before it.
    group: Group<'static>,
    calls: Vec<(Arc<Communicator>, Call)>,
    jobs: Vec<ConnectJob>,
    teardowns: Vec<Teardown>,
}

impl OpenGroup {
    fn add(
        &mut self,
        comm: Arc<Communicator>,
        call: &Call,
        buffers: Buffers<'static>,
    ) -> Result<()> {
        // SAFETY: `calls` holds the communicator, which does not move, for longer than `group`
        // lives.
        let borrowed: &'static Communicator = unsafe { &*Arc::as_ptr(&comm) };
        self.calls.push((comm, *call));
        let added = match buffers {
            Buffers::Host(buffers) => self.group.add(borrowed, call, buffers),
            Buffers::Gpu(buffers) => self.group.add_on(borrowed, call, buffers),
        };
        added.inspect_err(|_| {
            self.calls.pop();
        })
    }

    /// Undoes what was recorded, none of which will run.
    fn abandon(&mut self) {
        connect_job::withdraw(&self.jobs);
        // What ends now is not held by calls that will not run.
        self.group = Group::default();
        self.calls.clear();
        self.teardowns.drain(..).for_each(Teardown::withdraw);
    }

    /// What failed while it was open.
    fn check(&mut self) -> Result<()> {
        let Some(error) = self.failure.take() else {
            return Ok(());
        };
        self.abandon();
        Err(error.context("a call inside the group failed, so nothing ran"))
    }

    fn run(mut self) -> Result<CallProgress> {
        self.check()?;
        // The last to be dropped: the group borrows from it.
        let calls = self.calls;
        let OpenGroup {
            mut group,
            jobs,
            teardowns,
            ..
        } = self;
        let ran = connect_job::run(jobs).and_then(|progress| {
            if !calls.is_empty() {
                // As NCCL has it, whose programs may make both in whatever order.
                group.collectives_first();
                group.run()?;
            }
            Ok(progress)
        });
        drop(calls);
        match ran {
            Ok(CallProgress::Done) => teardown::run(teardowns),
            Ok(CallProgress::Underway) => teardown::run(teardowns).map(|_| CallProgress::Underway),
            Err(error) => {
                teardowns.into_iter().for_each(Teardown::withdraw);
                Err(error)
            }
        }
    }

    /// Microseconds that the calls take one after the other on each communicator.
    fn predict(mut self) -> Result<f64> {
        self.check()?;
        if !self.jobs.is_empty() || !self.teardowns.is_empty() {
            self.abandon();
            return Err(Error::invalid_usage(
                "communicators cannot be connected or ended in a group that is simulated",
            ));
        }
        let mut seconds: Vec<(*const Communicator, f64)> = Vec::new();
        for (comm, call) in &self.calls {
            let own = comm.predict(call)?;
            let key = Arc::as_ptr(comm);
            match seconds.iter_mut().find(|(other, _)| *other == key) {
                Some((_, sum)) => *sum += own,
                None => seconds.push((key, own)),
            }
        }
        let longest = seconds.iter().map(|(_, sum)| *sum).fold(0.0, f64::max);
        Ok(longest * 1e6)
    }
}

fn close(open: &mut Option<OpenGroup>) -> Result<Option<OpenGroup>> {
    let Some(group) = open else {
        return Err(Error::invalid_usage(
            "no group is open on this thread; ncclGroupStart opens one",
        ));
    };
    group.depth -= 1;
    Ok(if group.depth == 0 { open.take() } else { None })
}

/// Runs a call, or records it if a group is open.
pub(crate) fn submit(
    comm: Arc<Communicator>,
    call: &Call,
    buffers: Buffers<'static>,
) -> Result<CallProgress> {
    if is_open() {
        let added = with_open(|open| open.get_or_insert_default().add(comm, call, buffers));
        return added.unwrap_or(Ok(())).map(|()| CallProgress::Done);
    }
    match buffers {
        Buffers::Host(buffers) => comm.call(call, buffers)?,
        Buffers::Gpu(buffers) => comm.call_on(call, buffers)?,
    };
    Ok(CallProgress::Done)
}

/// Records a job if a group is open; gives it back if none is.
pub(crate) fn record_job(job: ConnectJob) -> Option<ConnectJob> {
    if !is_open() {
        return Some(job);
    }
    with_open(|open| open.get_or_insert_default().jobs.push(job));
    None
}

/// Records the end of a communicator if a group is open; gives it back if none is.
pub(crate) fn record_teardown(teardown: Teardown) -> Option<Teardown> {
    if !is_open() {
        return Some(teardown);
    }
    with_open(|open| open.get_or_insert_default().teardowns.push(teardown));
    None
}

/// Whether `comm` may end in the thread's group, if one is open.
///
/// # Errors
/// Invalid usage if the group makes another one of it in the background, which needs it for longer.
pub(crate) fn check_teardown(comm: &Arc<Comm>) -> Result<()> {
    let needed = |job: &ConnectJob| {
        let parent = job.parent.as_ref();
        !job.blocking && parent.is_some_and(|parent| Arc::ptr_eq(parent, comm))
    };
    let refused = with_open(|open| {
        let group = open.as_ref();
        group.is_some_and(|group| group.jobs.iter().any(needed))
    });
    match refused.unwrap_or(false) {
        true => Err(Error::invalid_usage(
            "the open group makes a non-blocking communicator of this one: end it when that is \
             ready",
        )),
        false => Ok(()),
    }
}

/// Makes the first failure of what is a part of the thread's open group, if one is, the group's.
pub(crate) fn fail(error: &Error) {
    let _ = OPEN.try_with(|open| {
        if let Ok(mut open) = open.try_borrow_mut()
            && let Some(group) = open.as_mut()
        {
            group.failure.get_or_insert_with(|| error.clone());
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start() -> ncclResult_t {
        // SAFETY: no arguments.
        unsafe { ncclGroupStart() }
    }

    fn end() -> ncclResult_t {
        // SAFETY: no arguments.
        unsafe { pncclGroupEnd() }
    }

    #[test]
    fn groups_nest_and_belong_to_their_thread() {
        assert_eq!(end(), ncclInvalidUsage);
        assert_eq!((start(), start()), (ncclSuccess, ncclSuccess));
        std::thread::spawn(|| assert_eq!(end(), ncclInvalidUsage))
            .join()
            .unwrap();
        assert_eq!((end(), end(), end()), (0, 0, ncclInvalidUsage));
    }

    #[test]
    fn the_first_failure_is_the_groups() {
        assert_eq!((start(), start()), (0, 0));
        for said in ["first", "second"] {
            fail(&Error::invalid_argument(said));
        }
        assert_eq!(end(), ncclSuccess);
        assert_eq!(end(), ncclInvalidArgument);
        assert!(crate::error::sentence().ends_with("so nothing ran: first"));
        // Over: the next one is clean.
        assert_eq!((start(), end()), (0, 0));
        fail(&Error::invalid_argument("outside"));
        assert_eq!((start(), end()), (0, 0));
    }

    #[test]
    fn an_empty_group_takes_no_time() {
        use crate::versioned::Versioned;
        let mut info = ncclSimInfo_t {
            version: 22809,
            ..ncclSimInfo_t::unset()
        };
        assert_eq!(start(), 0);
        // SAFETY: a whole struct.
        assert_eq!(unsafe { ncclGroupSimulateEnd(&mut info) }, ncclSuccess);
        assert_eq!((info.estimatedTime, size_of::<ncclSimInfo_t>()), (0.0, 24));
        // SAFETY: as above.
        let code = unsafe { ncclGroupSimulateEnd(&mut info) };
        assert_eq!(code, ncclInvalidUsage);
    }

    #[test]
    fn a_refused_simulation_closes_its_group() {
        use crate::versioned::Versioned;
        let mut info = ncclSimInfo_t {
            version: 22809,
            ..ncclSimInfo_t::unset()
        };
        info.magic = 1;
        for refused in [std::ptr::null_mut(), &mut info] {
            assert_eq!(start(), 0);
            // SAFETY: NULL, or a whole struct.
            let code = unsafe { ncclGroupSimulateEnd(refused) };
            assert_eq!(code, ncclInvalidArgument);
            assert_eq!(end(), ncclInvalidUsage);
            // An inner one fails the group.
            assert_eq!((start(), start()), (0, 0));
            // SAFETY: as above.
            let code = unsafe { ncclGroupSimulateEnd(refused) };
            assert_eq!((code, end()), (ncclInvalidArgument, ncclInvalidArgument));
        }
    }
}
