//! Connecting: it waits for other ranks, so the ranks of one thread connect on threads of their
//! own when their group ends, and those of a non-blocking communicator in the background.

use crate::boundary::Progress;
use crate::comm::{self, Comm};
use crate::group;
use crate::remains;
use crate::types::{ncclComm_t, store};
use cinch::sync::Fault;
use cinch::types::DeviceChoice;
use cinch::{Communicator, Error, Result};
use std::collections::HashSet;
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock, mpsc};

/// One communicator that is to be connected.
pub(crate) struct Job {
    /// The new communicator; none for a rank that takes part in a split and gets nothing.
    pub(crate) made: Option<Made>,
    /// The communicator that it is made from. Jobs of one parent run one after the other.
    pub(crate) parent: Option<Arc<Comm>>,
    pub(crate) blocking: bool,
    pub(crate) work: Box<dyn FnOnce() -> Result<Option<Communicator>> + Send>,
}

impl Job {
    /// Where the communicator is to be.
    fn device(&self) -> Option<DeviceChoice> {
        let made = self.made.as_ref().map(|made| &made.comm);
        Some(made.or(self.parent.as_ref())?.device())
    }
}

/// A new communicator, whose ticket the program has already.
pub(crate) struct Made {
    comm: Arc<Comm>,
    ticket: ncclComm_t,
    /// Where the program has it.
    place: *mut ncclComm_t,
}

impl Made {
    /// Gives `comm` a ticket, and writes it to `place`.
    ///
    /// # Safety
    /// `place` is writable until the job has run, or the thread's group has ended.
    pub(crate) unsafe fn new(comm: Comm, place: *mut ncclComm_t) -> Result<Made> {
        let comm = Arc::new(comm);
        let ticket = comm::register(comm.clone())?;
        // SAFETY: as the caller's.
        unsafe { store("newcomm", place, ticket)? };
        Ok(Made {
            comm,
            ticket,
            place,
        })
    }

    /// Undoes it: the program finds NULL.
    fn withdraw(&self) {
        // The program may have destroyed it meanwhile.
        if comm::remove(self.ticket).is_ok()
            && let Some(communicator) = self.comm.take()
        {
            remains::part_with(communicator);
        }
        // SAFETY: writable by the contract of `new`.
        let _ = unsafe { store("newcomm", self.place, null_mut()) };
    }
}

/// Runs the job, or records it if a group is open.
pub(crate) fn submit(job: Job) -> Result<Progress> {
    match group::record_job(job) {
        None => Ok(Progress::Done),
        Some(job) => run(vec![job]),
    }
}

/// Runs the jobs of a group, those of different parents at once.
pub(crate) fn run(jobs: Vec<Job>) -> Result<Progress> {
    let devices: HashSet<DeviceChoice> = jobs.iter().filter_map(Job::device).collect();
    remains::clear_away(&Vec::from_iter(devices));
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
    let lanes = lanes(jobs, &mut made);
    let result = if blocking == 0 {
        Ok(background(lanes))
    } else {
        foreground(lanes, &made).map(|()| Progress::Done)
    };
    if result.is_err() {
        made.iter().for_each(Made::withdraw);
    }
    result
}

/// Forgets jobs that will not run.
pub(crate) fn withdraw(jobs: &[Job]) {
    jobs.iter()
        .filter_map(|job| job.made.as_ref())
        .for_each(Made::withdraw);
}

/// What a thread does: the part of jobs that may leave the calling one.
struct Task {
    ends: Ends,
    work: Box<dyn FnOnce() -> Result<Option<Communicator>> + Send>,
}

impl Task {
    fn run(self) -> Result<()> {
        self.ends.tell(cinch::ffi::caught("connecting", self.work))
    }

    /// Fails it without running it.
    fn fail(self, error: &Error) {
        // Whoever tells it has the error.
        let _ = self.ends.tell(Err(error.clone()));
    }
}

/// Who hears how a task ended.
struct Ends {
    comm: Option<Arc<Comm>>,
    parent: Option<Arc<Comm>>,
    blocking: bool,
}

impl Ends {
    /// Returns the failure, if it is one. The parent is the last to hear: a program that sees it
    /// ready takes what was made of it for ready.
    fn tell(self, outcome: Result<Option<Communicator>>) -> Result<()> {
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
fn lanes(jobs: Vec<Job>, made: &mut Vec<Made>) -> Vec<Vec<Task>> {
    let mut lanes: Vec<(Option<usize>, Vec<Task>)> = Vec::new();
    for job in jobs {
        let key = job.parent.as_ref().map(|parent| Arc::as_ptr(parent).addr());
        if let Some(parent) = &job.parent {
            parent.begin(job.blocking);
        }
        let task = Task {
            ends: Ends {
                comm: job.made.as_ref().map(|made| made.comm.clone()),
                parent: job.parent,
                blocking: job.blocking,
            },
            work: job.work,
        };
        made.extend(job.made);
        let known = lanes
            .iter_mut()
            .find(|(other, _)| key.is_some() && *other == key);
        match known {
            Some((_, tasks)) => tasks.push(task),
            None => lanes.push((key, vec![task])),
        }
    }
    lanes.into_iter().map(|(_, tasks)| tasks).collect()
}

/// Runs the tasks of one lane; after a failure the rest fails with it.
fn run_lane(tasks: Vec<Task>) -> Result<()> {
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
fn foreground(lanes: Vec<Vec<Task>>, made: &[Made]) -> Result<()> {
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
    let mut lanes = lanes.into_iter();
    let own = lanes.next();
    std::thread::scope(|scope| {
        for lane in lanes {
            let (give, take) = mpsc::channel();
            let spawned = spawn().spawn_scoped(scope, move || {
                if let Ok(lane) = take.recv() {
                    let _ = run_lane(lane).inspect_err(failed);
                }
            });
            start(spawned, lane, &give, failed);
        }
        if let Some(own) = own {
            let _ = run_lane(own).inspect_err(failed);
        }
    });
    first.into_inner().map_or(Ok(()), Err)
}

/// Returns at once.
fn background(lanes: Vec<Vec<Task>>) -> Progress {
    let progress = match lanes.is_empty() {
        true => Progress::Done,
        false => Progress::Underway,
    };
    for lane in lanes {
        let (give, take) = mpsc::channel();
        let spawned = spawn().spawn(move || {
            if let Ok(lane) = take.recv() {
                // Whoever asks the communicators hears of it.
                let _ = run_lane(lane);
            }
        });
        start(spawned, lane, &give, &|_| {});
    }
    progress
}

/// Gives its lane to a thread, which takes it only now: it must not be lost with a thread that
/// does not start.
fn start<T>(
    spawned: std::io::Result<T>,
    lane: Vec<Task>,
    give: &mpsc::Sender<Vec<Task>>,
    failed: &dyn Fn(&Error),
) {
    let error = match spawned {
        Ok(_) => match give.send(lane) {
            Ok(()) => return,
            Err(_) => Error::internal("a thread that connects ended before it began"),
        },
        Err(cause) => {
            let error = Error::system("cannot start a thread that connects a communicator", cause);
            lane.into_iter().for_each(|task| task.fail(&error));
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
    use crate::config::Asked;
    use cinch::Config;
    use std::time::Duration;

    fn comm() -> Arc<Comm> {
        let asked = Asked {
            blocking: false,
            ..Asked::default()
        };
        let comm = Comm::connecting(asked, Config::default(), Fault::new());
        Arc::new(comm)
    }

    #[test]
    fn a_parent_is_ready_when_its_child_is() {
        for fails in [false, true] {
            let (parent, child) = (comm(), comm());
            let task = Task {
                ends: Ends {
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
