//! Connecting: it waits for other ranks, so the ranks of one thread connect on threads of their
//! own when their group ends, and those of a non-blocking communicator in the background.

use crate::boundary::CallProgress;
use crate::comm::{self, Comm};
use crate::deferred_free;
use crate::group;
use crate::types::{ncclComm_t, store};
use cinch::sync::Fault;
use cinch::types::DeviceChoice;
use cinch::{Communicator, Error, Result};
use std::collections::HashSet;
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock, mpsc};

/// One communicator that is to be connected.
pub(crate) struct ConnectJob {
    /// The new communicator; none for a rank that takes part in a split and gets nothing.
    pub(crate) made: Option<NewComm>,
    /// The communicator that it is made from. Jobs of one parent run one after the other.
    pub(crate) parent: Option<Arc<Comm>>,
    pub(crate) blocking: bool,
    pub(crate) work: Box<dyn FnOnce() -> Result<Option<Communicator>> + Send>,
}

impl ConnectJob {
    /// Where the communicator is to be.
    fn device(&self) -> Option<DeviceChoice> {
        let made = self.made.as_ref().map(|made| &made.comm);
        Some(made.or(self.parent.as_ref())?.device())
    }
}

/// A new communicator, whose handle the program has already.
pub(crate) struct NewComm {
    comm: Arc<Comm>,
    handle: ncclComm_t,
    /// Where the program has it.
    place: *mut ncclComm_t,
}

impl NewComm {
    /// Gives `comm` a handle, and writes it to `place`.
    ///
    /// # Safety
    /// `place` is writable until the job has run, or the thread's group has ended.
    pub(crate) unsafe fn new(comm: Comm, place: *mut ncclComm_t) -> Result<NewComm> {
        let comm = Arc::new(comm);
        let handle = comm::register(comm.clone())?;
        // SAFETY: as the caller's.
        unsafe { store("newcomm", place, handle)? };
        Ok(NewComm {
            comm,
            handle,
            place,
        })
    }

    /// Undoes it: the program finds NULL.
    fn withdraw(&self) {
        // The program may have destroyed it meanwhile.
        if comm::remove(self.handle).is_ok()
            && let Some(communicator) = self.comm.take()
        {
            deferred_free::free_on_destroy(communicator);
        }
        // SAFETY: writable by the contract of `new`.
        let _ = unsafe { store("newcomm", self.place, null_mut()) };
    }
}

/// Runs the job, or records it if a group is open.
pub(crate) fn submit(job: ConnectJob) -> Result<CallProgress> {
    match group::record_job(job) {
        None => Ok(CallProgress::Done),
        Some(job) => run(vec![job]),
    }
}

/// Runs the jobs of a group, those of different parents at once.
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

/// Forgets jobs that will not run.
pub(crate) fn withdraw(jobs: &[ConnectJob]) {
    jobs.iter()
        .filter_map(|job| job.made.as_ref())
        .for_each(NewComm::withdraw);
}

/// What a thread does: the part of jobs that may leave the calling one.
struct ConnectTask {
    completion: TaskCompletion,
    work: Box<dyn FnOnce() -> Result<Option<Communicator>> + Send>,
}

impl ConnectTask {
    fn run(self) -> Result<()> {
        self.completion
            .report(cinch::capi::caught("connecting", self.work))
    }

    /// Fails it without running it.
    fn fail(self, error: &Error) {
        // Whoever tells it has the error.
        let _ = self.completion.report(Err(error.clone()));
    }
}

/// Who hears how a task ended.
struct TaskCompletion {
    comm: Option<Arc<Comm>>,
    parent: Option<Arc<Comm>>,
    blocking: bool,
}

impl TaskCompletion {
    /// Returns the failure, if it is one. The parent is the last to hear: a program that sees it
    /// ready takes what was made of it for ready.
    fn report(self, outcome: Result<Option<Communicator>>) -> Result<()> {
        let none = || Error::internal("a split gave no communicator");
        let said = match self.comm {
            Some(comm) => {
                let joined = outcome.and_then(|made| made.ok_or_else(none));
                let said = joined.as_ref().map(|_| ()).map_err(Error::clone);
                comm.joined(joined);
                said
            }
            None => outcome.map(drop),
        };
        if let Some(parent) = self.parent {
            parent.end(self.blocking);
        }
        said
    }
}

/// Sorts jobs by parent, in order. From here on the parents are busy.
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

/// Runs the tasks of one queue; after a failure the rest fails with it.
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

/// Returns when all are connected. A failure ends the others, too: they may wait for the ranks of
/// the one that failed.
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

/// Returns at once.
fn background(queues: Vec<Vec<ConnectTask>>) -> CallProgress {
    let progress = match queues.is_empty() {
        true => CallProgress::Done,
        false => CallProgress::Underway,
    };
    for queue in queues {
        let (give, take) = mpsc::channel();
        let spawned = spawn().spawn(move || {
            if let Ok(queue) = take.recv() {
                // Whoever asks the communicators hears of it.
                let _ = run_queue(queue);
            }
        });
        start(spawned, queue, &give, &|_| {});
    }
    progress
}

/// Gives its queue to a thread, which takes it only now: it must not be lost with a thread that
/// does not start.
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
    fn a_parent_is_ready_when_its_child_is() {
        for fails in [false, true] {
            let (parent, child) = (comm(), comm());
            let task = ConnectTask {
                completion: TaskCompletion {
                    comm: Some(child.clone()),
                    parent: Some(parent.clone()),
                    blocking: false,
                },
                work: Box::new(|| Err(Error::invalid_usage("no"))),
            };
            let held = child.hold();
            let runs = std::thread::spawn(move || match fails {
                true => task.fail(&Error::invalid_usage("no")),
                false => assert!(task.run().is_err()),
            });
            std::thread::sleep(Duration::from_millis(50));
            assert!(parent.is_in_progress());
            drop(held);
            runs.join().unwrap();
            assert!(!parent.is_in_progress() && !child.is_in_progress());
            assert!(child.failure().unwrap().message().ends_with("no"));
        }
    }
}
