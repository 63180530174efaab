//! Groups of calls that run together.
//!
//! The outermost end of a group connects the new communicators first. Then it runs the calls, and then
//! it ends the communicators that were finalized or destroyed.

use crate::boundary::CallProgress;
use crate::comm::Comm;
use crate::connect_job::{self, ConnectJob};
use crate::plugins::{self, GroupEvents};
use crate::teardown_job::{self, TeardownJob};
use crate::types::*;
use crate::versioned;
use cinch::capi::core::open_group::{self, OpenGroup};
use cinch::comm::Call;
use cinch::mem::Buffers;
use cinch::{Communicator, Error, Result};
use std::cell::RefCell;
use std::sync::Arc;

export! {
    /// Opens a group on this thread. Groups nest.
    fn ncclGroupStart | pncclGroupStart() {
        open_group::start()?;
        Ok(CallProgress::Done)
    }
}

export! {
    /// Closes this thread's innermost group. Closing the outermost group runs the recorded calls
    /// and jobs.
    fn ncclGroupEnd | pncclGroupEnd() {
        match RecordedGroup::end()? {
            Some(group) => group.run(),
            None => Ok(CallProgress::Done),
        }
    }
}

export! {
    /// Closes a group as `ncclGroupEnd` does, but runs nothing and predicts how long it would take.
    counted fn ncclGroupSimulateEnd | pncclGroupSimulateEnd(simInfo: *mut ncclSimInfo_t) {
        // Closes the group first, so that it closes even if `simInfo` is invalid.
        let group = RecordedGroup::end()?;
        // SAFETY: nccl.h requires of the program that `simInfo` is NULL or readable for the size
        // that it gives.
        let info = unsafe { read_sim_info(simInfo) };
        let Some(mut group) = group else {
            return info.map(|_| CallProgress::Done);
        };
        let mut info = info.inspect_err(|_| group.abandon())?;
        info.estimatedTime = group.predict()? as f32;
        let bytes = info.size.min(size_of::<ncclSimInfo_t>());
        // SAFETY: nccl.h requires of the program that `simInfo` is writable for its size, and
        // `bytes` is no more.
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
    /// The struct `ncclSimInfo_t` of nccl.h.
    struct ncclSimInfo_t, "NCCL_SIM_INFO_INITIALIZER", magic SIM_INFO_MAGIC;
    estimatedTime: f32 = -1.0, since 22200;
}

/// Returns the struct at `info`.
///
/// # Errors
/// Invalid argument if it is NULL or was not initialised.
///
/// # Safety
/// `info` is NULL, or readable for the size that it gives.
unsafe fn read_sim_info(info: *const ncclSimInfo_t) -> Result<ncclSimInfo_t> {
    check_out("simInfo", info.cast_mut())?;
    // SAFETY: the caller passes `info` as NULL or readable for the size that it gives.
    unsafe { versioned::read(info)? }.ok_or_else(|| Error::internal("a struct vanished"))
}

/// Jobs that this thread's open group has recorded besides its calls.
#[derive(Default)]
struct GroupJobs {
    connects: Vec<ConnectJob>,
    teardowns: Vec<TeardownJob>,
}

thread_local! {
    static JOBS: RefCell<GroupJobs> = RefCell::default();
}

/// A closed group with its recorded calls and jobs.
struct RecordedGroup {
    calls: OpenGroup,
    jobs: GroupJobs,
    events: GroupEvents,
}

impl RecordedGroup {
    /// Closes this thread's innermost group, and returns the group if it is the outermost.
    ///
    /// # Errors
    /// See [`open_group::end`].
    fn end() -> Result<Option<RecordedGroup>> {
        let calls = open_group::end("ncclGroupStart")?;
        Ok(calls.map(|calls| RecordedGroup {
            calls,
            jobs: JOBS.try_with(RefCell::take).unwrap_or_default(),
            events: plugins::take(),
        }))
    }

    /// Undoes the recorded calls and jobs.
    fn abandon(&mut self) {
        connect_job::withdraw(&self.jobs.connects);
        // Drops the recorded calls, because they would keep communicators that end now.
        self.calls.clear();
        let teardowns = self.jobs.teardowns.drain(..);
        teardowns.for_each(TeardownJob::withdraw);
    }

    /// Checks that no failure was recorded; undoes the recorded calls and jobs if one was.
    ///
    /// # Errors
    /// See [`OpenGroup::check`].
    fn check(&mut self) -> Result<()> {
        self.calls.check().inspect_err(|_| self.abandon())
    }

    fn run(mut self) -> Result<CallProgress> {
        self.check()?;
        let ran = connect_job::run(std::mem::take(&mut self.jobs.connects)).and_then(|progress| {
            // Ranks of an NCCL program may order the collectives and sends of a group differently,
            // so collectives run first.
            self.calls.collectives_first();
            let _events = self.events.start();
            self.calls.run()?;
            Ok(progress)
        });
        self.calls.clear();
        let teardowns = self.jobs.teardowns;
        match ran {
            Ok(CallProgress::Done) => teardown_job::run(teardowns),
            Ok(CallProgress::Underway) => {
                teardown_job::run(teardowns).map(|_| CallProgress::Underway)
            }
            Err(error) => {
                teardowns.into_iter().for_each(TeardownJob::withdraw);
                Err(error)
            }
        }
    }

    /// Returns the microseconds that the calls take, one after the other on each communicator.
    ///
    /// # Errors
    /// The first failure of the group; invalid usage if it creates or ends communicators.
    fn predict(mut self) -> Result<f64> {
        self.check()?;
        if !self.jobs.connects.is_empty() || !self.jobs.teardowns.is_empty() {
            self.abandon();
            return Err(Error::invalid_usage(
                "communicators cannot be connected or ended in a group that is simulated",
            ));
        }
        let mut seconds: Vec<(*const Communicator, f64)> = Vec::new();
        for (comm, call) in self.calls.calls() {
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

/// Runs a call, or records it in this thread's open group.
pub(crate) fn submit(
    comm: &Arc<Communicator>,
    call: &Call,
    buffers: Buffers<'static>,
) -> Result<CallProgress> {
    open_group::submit(comm, call, buffers).map(|_| CallProgress::Done)
}

/// Runs a call, or records it in this thread's open group, as [`submit`] does. `record` adds the call to the events of
/// this thread for the profiler.
pub(crate) fn submit_profiled(
    comm: &Arc<Communicator>,
    call: &Call,
    buffers: Buffers<'static>,
    record: impl FnOnce(),
) -> Result<CallProgress> {
    if open_group::is_open() {
        return submit(comm, call, buffers).inspect(|_| record());
    }
    record();
    let _events = plugins::take().start();
    submit(comm, call, buffers)
}

/// Connects a communicator, or records the job in this thread's open group.
pub(crate) fn connect(job: ConnectJob) -> Result<CallProgress> {
    if !open_group::is_open() {
        return connect_job::run(vec![job]);
    }
    let _ = JOBS.try_with(|jobs| jobs.borrow_mut().connects.push(job));
    Ok(CallProgress::Done)
}

/// Ends a communicator, or records the job in this thread's open group.
pub(crate) fn tear_down(job: TeardownJob) -> Result<CallProgress> {
    if !open_group::is_open() {
        return job.run();
    }
    let _ = JOBS.try_with(|jobs| jobs.borrow_mut().teardowns.push(job));
    Ok(CallProgress::Done)
}

/// Checks that `comm` may end in this thread's open group, if there is one.
///
/// # Errors
/// Invalid usage if the group splits, shrinks or grows `comm` in the background, which needs it for longer.
pub(crate) fn check_teardown(comm: &Arc<Comm>) -> Result<()> {
    let needs_it = |job: &ConnectJob| {
        let parent = job.parent.as_ref();
        !job.blocking && parent.is_some_and(|parent| Arc::ptr_eq(parent, comm))
    };
    let is_needed = JOBS.try_with(|jobs| jobs.borrow().connects.iter().any(needs_it));
    if is_needed.unwrap_or(false) {
        return Err(Error::invalid_usage(
            "the open group makes a non-blocking communicator of this one: end it when that is \
             ready",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collectives::ncclAllReduce;
    use crate::properties::ncclCommCount;

    fn start() -> ncclResult_t {
        // SAFETY: the function takes no arguments and reads no memory of the caller.
        unsafe { ncclGroupStart() }
    }

    fn end() -> ncclResult_t {
        // SAFETY: the function takes no arguments and reads no memory of the caller.
        unsafe { pncclGroupEnd() }
    }

    #[test]
    fn nested_group_closes_with_outermost_end() {
        assert_eq!(end(), ncclInvalidUsage);
        assert_eq!((start(), start()), (ncclSuccess, ncclSuccess));
        std::thread::spawn(|| assert_eq!(end(), ncclInvalidUsage))
            .join()
            .unwrap();
        assert_eq!((end(), end(), end()), (0, 0, ncclInvalidUsage));
    }

    #[test]
    fn failed_collective_fails_its_group() {
        let nothing = std::ptr::null_mut();
        // SAFETY: the lookup refuses NULL handles before the function uses another argument.
        let fail = || unsafe { ncclAllReduce(nothing, nothing, 1, 7, 0, nothing.cast(), nothing) };
        assert_eq!((start(), start()), (0, 0));
        assert_eq!((fail(), end()), (ncclInvalidArgument, ncclSuccess));
        assert_eq!(end(), ncclInvalidArgument);
        let text = crate::error::sentence();
        assert!(text.contains("so nothing ran: ncclAllReduce"), "{text}");
        // A failed group or call does not fail the next group.
        assert_eq!((start(), end()), (0, 0));
        assert_eq!(fail(), ncclInvalidArgument);
        assert_eq!((start(), end()), (0, 0));
    }

    /// As in NCCL, a group still runs after a query in it has failed and the program ignored the
    /// error.
    #[test]
    fn failed_query_does_not_fail_its_group() {
        let mut count = 0;
        assert_eq!(start(), 0);
        // SAFETY: the lookup refuses NULL handles before the function uses another argument.
        let code = unsafe { ncclCommCount(std::ptr::null_mut(), &mut count) };
        assert_eq!((code, end()), (ncclInvalidArgument, ncclSuccess));
    }

    #[test]
    fn empty_group_is_predicted_to_take_no_time() {
        use crate::versioned::NcclStruct;
        let mut info = ncclSimInfo_t {
            version: 22809,
            ..ncclSimInfo_t::unset()
        };
        assert_eq!(start(), 0);
        // SAFETY: the argument is NULL or a complete, initialised struct of this test.
        assert_eq!(unsafe { ncclGroupSimulateEnd(&mut info) }, ncclSuccess);
        assert_eq!((info.estimatedTime, size_of::<ncclSimInfo_t>()), (0.0, 24));
        // SAFETY: the argument is NULL or a complete, initialised struct of this test.
        let code = unsafe { ncclGroupSimulateEnd(&mut info) };
        assert_eq!(code, ncclInvalidUsage);
    }

    #[test]
    fn refused_simulation_closes_its_group() {
        use crate::versioned::NcclStruct;
        let mut info = ncclSimInfo_t {
            version: 22809,
            ..ncclSimInfo_t::unset()
        };
        info.magic = 1;
        for refused in [std::ptr::null_mut(), &mut info] {
            assert_eq!(start(), 0);
            // SAFETY: the argument is NULL or a complete, initialised struct of this test.
            let code = unsafe { ncclGroupSimulateEnd(refused) };
            assert_eq!(code, ncclInvalidArgument);
            assert_eq!(end(), ncclInvalidUsage);
            // Tests that a failed end of a nested group fails the whole group.
            assert_eq!((start(), start()), (0, 0));
            // SAFETY: the argument is NULL or a complete, initialised struct of this test.
            let code = unsafe { ncclGroupSimulateEnd(refused) };
            assert_eq!((code, end()), (ncclInvalidArgument, ncclInvalidArgument));
        }
    }
}
