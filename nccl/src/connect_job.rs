//! Jobs that connect communicators.
//!
//! Connecting waits for other ranks. So the end of a group runs each of its jobs on a thread of its own. Jobs
//! of non-blocking communicators run in the background.

use crate::boundary::CallProgress;
use crate::comm::{self, Comm};
use crate::deferred_free;
use crate::types::{ncclComm_t, store};
use cinch::capi::core::guard::caught;
use cinch::sync::Fault;
use cinch::types::DeviceChoice;
use cinch::{Communicator, Error, Result};
use std::collections::HashSet;
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock, mpsc};

/// Job that connects one communicator.
pub(crate) struct ConnectJob {
    /// The new communicator; `None` for a rank that takes part in a split but joins no new
    /// communicator.
    pub(crate) made: Option<NewComm>,
    /// The parent, which is split, shrunk or grown. Jobs of one parent run one after the other.
    pub(crate) parent: Option<Arc<Comm>>,
    /// Whether the call returns only when the communicator is connected.
    pub(crate) blocking: bool,
    /// Connects and returns the communicator; `None` if this rank gets none.
    pub(crate) work: Box<dyn FnOnce() -> Result<Option<Communicator>> + Send>,
}

impl ConnectJob {
    /// Returns the device of the new communicator.
    fn device(&self) -> Option<DeviceChoice> {
        let made = self.made.as_ref().map(|made| &made.comm);
        Some(made.or(self.parent.as_ref())?.device())
    }
}

/// A new communicator whose handle the program already has.
pub(crate) struct NewComm {
    comm: Arc<Comm>,
    handle: ncclComm_t,
    /// Address of the program's variable for the handle.
    place: *mut ncclComm_t,
}

impl NewComm {
    /// Creates a handle for `comm` and writes it to `place`.
    ///
    /// # Errors
    /// Invalid argument if `place` is NULL.
    ///
    /// # Safety
    /// `place` is writable until the job has run, or the thread's group has ended.
    pub(crate) unsafe fn new(comm: Comm, place: *mut ncclComm_t) -> Result<NewComm> {
        let comm = Arc::new(comm);
        let handle = comm::register(comm.clone())?;
        // SAFETY: the caller passes `place` as NULL or writable; `store` refuses NULL.
        unsafe { store("newcomm", place, handle)? };
        Ok(NewComm {
            comm,
            handle,
            place,
        })
    }

    /// Removes the handle, and writes NULL to the program's variable.
    fn withdraw(&self) {
        // The program may have destroyed the handle meanwhile.
        if comm::remove(self.handle).is_ok()
            && let Some(communicator) = self.comm.take()
        {
            deferred_free::free_on_destroy(communicator);
        }
        // SAFETY: the caller of `new` keeps it writable.
        let _ = unsafe { store("newcomm", self.place, null_mut()) };
    }
}

/// Creates the communicators of `jobs`. Jobs whose parent communicators differ run concurrently.
///
/// # Errors
/// If a job fails, all jobs fail with the first error. Invalid argument if the jobs mix blocking and
/// non-blocking communicators.
pub(crate) fn run(jobs: Vec<ConnectJob>) -> Result<CallProgress> {
    let devices: HashSet<DeviceChoice> = jobs.iter().filter_map(ConnectJob::device).collect();
    deferred_free::reap_devices(&Vec::from_iter(devices));
    let blocking = jobs.iter().filter(|job| job.blocking).count();
    if blocking != 0 && blocking != jobs.len() {
        withdraw(&jobs);
        return Err(Error::invalid_argument(format!(
            "a group connects {blocking} blocking and {} non-blocking communicators: let all be \
             of one kind",
            jobs.len() - blocking
        )));
    }
    let mut made = Vec::new();
    let queues = queues(jobs, &mut made);
    let result = if blocking == 0 {
        Ok(background(queues))
    } else {
        foreground(queues, &made).map(|()| CallProgress::Done)
    };
    if result.is_err() {
        made.iter().for_each(NewComm::withdraw);
    }
    result
}

/// Withdraws the handles of jobs that will not run.
pub(crate) fn withdraw(jobs: &[ConnectJob]) {
    jobs.iter()
        .filter_map(|job| job.made.as_ref())
        .for_each(NewComm::withdraw);
}

/// The part of a job that may run on another thread.
struct ConnectTask {
    completion: TaskCompletion,
    work: Box<dyn FnOnce() -> Result<Option<Communicator>> + Send>,
}

impl ConnectTask {
    fn run(self) -> Result<()> {
        self.completion.report(caught("connecting", self.work))
    }

    /// Reports `error` as the task's outcome, without running the task.
    fn fail(self, error: &Error) {
        // The error is ignored here because the caller reports it.
        let _ = self.completion.report(Err(error.clone()));
    }
}

/// The new communicator and its parent, to which the outcome of a task is reported.
struct TaskCompletion {
    comm: Option<Arc<Comm>>,
    parent: Option<Arc<Comm>>,
    blocking: bool,
}

impl TaskCompletion {
    /// Reports the outcome to the communicators, and returns it as an error if it is a failure.
    fn report(self, outcome: Result<Option<Communicator>>) -> Result<()> {
        let none = || Error::internal("a split gave no communicator");
        if let Some(comm) = self.comm {
            let joined = outcome.and_then(|made| made.ok_or_else(none));
            let result = joined.as_ref().map(|_| ()).map_err(Error::clone);
            if let Ok(communicator) = &joined {
                comm.open_plugins(communicator);
            }
            if let Some(unused) = comm.joined(joined, self.parent.as_deref()) {
                deferred_free::free_in_background(unused);
            }
            return result;
        }
        if let Some(parent) = self.parent {
            parent.end(self.blocking);
        }
        outcome.map(drop)
    }
}

/// Sorts jobs into one queue for each parent, and counts a running call of the parent for each job.
fn queues(jobs: Vec<ConnectJob>, made: &mut Vec<NewComm>) -> Vec<Vec<ConnectTask>> {
    let mut queues: Vec<(Option<usize>, Vec<ConnectTask>)> = Vec::new();
    for job in jobs {
        let key = job.parent.as_ref().map(|parent| Arc::as_ptr(parent).addr());
        if let Some(parent) = &job.parent {
            parent.begin(job.blocking);
        }
        let task = ConnectTask {
            completion: TaskCompletion {
                comm: job.made.as_ref().map(|made| made.comm.clone()),
                parent: job.parent,
                blocking: job.blocking,
            },
            work: job.work,
        };
        made.extend(job.made);
        let known = queues
            .iter_mut()
            .find(|(other, _)| key.is_some() && *other == key);
        match known {
            Some((_, tasks)) => tasks.push(task),
            None => queues.push((key, vec![task])),
        }
    }
    queues.into_iter().map(|(_, tasks)| tasks).collect()
}

/// Runs the tasks of one queue; a failure fails the remaining tasks.
fn run_queue(tasks: Vec<ConnectTask>) -> Result<()> {
    let mut failure: Option<Error> = None;
    for task in tasks {
        match &failure {
            None => failure = task.run().err(),
            Some(error) => task.fail(error),
        }
    }
    failure.map_or(Ok(()), Err)
}

/// Runs the queues and returns when all communicators are connected. A failure raises the faults of all
/// communicators, because they may wait for the ranks of the failed one.
fn foreground(queues: Vec<Vec<ConnectTask>>, made: &[NewComm]) -> Result<()> {
    let faults: Vec<Arc<Fault>> = made.iter().map(|made| made.comm.fault.clone()).collect();
    let first = OnceLock::new();
    let failed = |error: &Error| {
        if first.set(error.clone()).is_ok() {
            let reason = error
                .clone()
                .context("another call of the same group failed");
            for fault in &faults {
                fault.raise(reason.clone());
            }
        }
    };
    let failed = &failed;
    let mut queues = queues.into_iter();
    let own = queues.next();
    std::thread::scope(|scope| {
        for queue in queues {
            let (give, take) = mpsc::channel();
            let spawned = spawn().spawn_scoped(scope, move || {
                if let Ok(queue) = take.recv() {
                    let _ = run_queue(queue).inspect_err(failed);
                }
            });
            start(spawned, queue, &give, failed);
        }
        if let Some(own) = own {
            let _ = run_queue(own).inspect_err(failed);
        }
    });
    first.into_inner().map_or(Ok(()), Err)
}

/// Starts the queues in the background.
fn background(queues: Vec<Vec<ConnectTask>>) -> CallProgress {
    let progress = if queues.is_empty() {
        CallProgress::Done
    } else {
        CallProgress::Underway
    };
    for queue in queues {
        let (give, take) = mpsc::channel();
        let spawned = spawn().spawn(move || {
            if let Ok(queue) = take.recv() {
                // The error is not lost: `ncclCommGetAsyncError` of the communicators returns it.
                let _ = run_queue(queue);
            }
        });
        start(spawned, queue, &give, &|_| {});
    }
    progress
}

/// Sends `queue` to the thread that was spawned for it. If the thread does not start, the caller
/// still has the queue.
fn start<T>(
    spawned: std::io::Result<T>,
    queue: Vec<ConnectTask>,
    give: &mpsc::Sender<Vec<ConnectTask>>,
    failed: &dyn Fn(&Error),
) {
    let error = match spawned {
        Ok(_) => match give.send(queue) {
            Ok(()) => return,
            Err(_) => Error::internal("a thread that connects ended before it began"),
        },
        Err(cause) => {
            let error = Error::system("cannot start a thread that connects a communicator", cause);
            queue.into_iter().for_each(|task| task.fail(&error));
            error
        }
    };
    failed(&error);
}

fn spawn() -> std::thread::Builder {
    std::thread::Builder::new().name("cinch-connect".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::CommOptions;
    use cinch::Config;
    use std::time::Duration;

    fn comm() -> Arc<Comm> {
        let options = CommOptions {
            blocking: false,
            ..CommOptions::default()
        };
        let comm = Comm::connecting(options, Config::default(), Fault::new());
        Arc::new(comm)
    }

    #[test]
    fn parent_and_child_become_ready_at_once() {
        for (fails, holds_parent) in [(false, false), (true, false), (false, true), (true, true)] {
            let (parent, child) = (comm(), comm());
            let task = ConnectTask {
                completion: TaskCompletion {
                    comm: Some(child.clone()),
                    parent: Some(parent.clone()),
                    blocking: false,
                },
                work: Box::new(|| Err(Error::invalid_usage("no"))),
            };
            let (held, other) = if holds_parent {
                (parent.hold(), child.clone())
            } else {
                (child.hold(), parent.clone())
            };
            let runs = std::thread::spawn(move || {
                if fails {
                    task.fail(&Error::invalid_usage("no"));
                } else {
                    assert!(task.run().is_err());
                }
            });
            let (gives, seen) = mpsc::channel();
            let waits = std::thread::spawn(move || {
                while other.is_in_progress() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                gives.send(()).unwrap();
            });
            assert!(seen.recv_timeout(Duration::from_millis(50)).is_err());
            drop(held);
            seen.recv().unwrap();
            waits.join().unwrap();
            runs.join().unwrap();
            assert!(!parent.is_in_progress() && !child.is_in_progress());
            assert!(child.failure().unwrap().message().ends_with("no"));
        }
    }

    #[test]
    fn communicator_aborted_while_connecting_is_freed() {
        let comm = comm();
        assert!(comm.take().is_none());
        let config = Config::default();
        let id = cinch::UniqueId::create_for_one_host(&config).unwrap();
        let joined = Communicator::init(&id, 0, 1, config).unwrap();
        assert!(comm.joined(Ok(joined), None).is_some());
        assert!(comm.communicator().is_none());
    }
}
