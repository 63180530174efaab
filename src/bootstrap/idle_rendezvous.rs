//! Rendezvous that no rank has reached yet. One thread of the process waits for the first connection of
//! each, and then starts the thread that serves it.
//!
//! A process may create ids that nobody uses. Each holds a socket until [`Config::init_timeout`], which
//! is an hour in the drop-in. So their number is bounded, and the oldest one ends first.

use super::UniqueId;
use super::auth::{Listener, poll_for};
use super::rendezvous_server::RendezvousServer;
use super::warning_hook::WarningHook;
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::sys::fork::ProcessId;
use crate::sys::fork_safe::ForkSafe;
use crate::sys::process::{block_signals, thread_error};
use crate::sys::socket::descriptor_limit;
use nix::poll::{PollFd, PollFlags};
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

/// Largest number of ids that wait for a rank, with enough descriptors.
const MOST_IDLE: usize = 4096;
/// Rendezvous that may be on their way to the thread that waits. Each holds descriptors, and those of the oldest are free only
/// once that thread runs. So threads that add more wait for it.
const MOST_ADDED: usize = 16;

/// Longest poll between two checks for rendezvous that were cancelled, failed or are late.
const REQUEST_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Interval at which a thread checks whether another one has started the thread that waits, or whether that one has taken
/// what was added.
const START_POLL_INTERVAL: Duration = Duration::from_millis(1);

static QUEUE: ForkSafe<IdleQueue> = ForkSafe::new(IdleQueue::new());

/// Rendezvous on their way to the thread that waits.
struct IdleQueue {
    /// The process whose thread waits. A forked child finds its parent here.
    owner: Option<ProcessId>,
    added: Vec<RendezvousServer>,
    /// A byte ends the thread's poll.
    wake: Option<Arc<UnixStream>>,
    /// The process in which a thread starts the thread that waits. Other threads add nothing meanwhile, so that a
    /// failed start ends the rendezvous of its caller alone.
    starting: Option<ProcessId>,
}

impl IdleQueue {
    const fn new() -> IdleQueue {
        IdleQueue {
            owner: None,
            added: Vec::new(),
            wake: None,
            starting: None,
        }
    }

    /// Records that no thread waits for the queue. Returns what this thread would have served and its alarm, to be dropped
    /// outside the lock.
    fn give_up(&mut self) -> (Vec<RendezvousServer>, Option<Arc<UnixStream>>) {
        self.owner = None;
        (std::mem::take(&mut self.added), self.wake.take())
    }
}

/// State of the thread that waits, as a thread with a new rendezvous finds it.
enum WaiterState {
    /// Another thread starts the thread that waits.
    Starting,
    /// The thread has not yet taken what was added, and wakes by a byte here.
    Behind(Option<Arc<UnixStream>>),
    /// The thread waits, and wakes by a byte here.
    Running(Option<Arc<UnixStream>>),
    /// This thread must start it.
    Idle,
}

/// Serves a rendezvous on a free port of `ip`, for the id that `make` builds from the address.
///
/// # Errors
/// System if `ip` cannot be listened on, or the thread cannot start; timeout if it starts and does not run.
pub(super) fn open(
    ip: IpAddr,
    make: impl FnOnce(SocketAddr) -> UniqueId,
    config: &Config,
) -> Result<UniqueId> {
    let (listener, address) = Listener::bind(ip)?;
    let id = make(address);
    let server = RendezvousServer::new(&id, listener, config.init_timeout, None);
    wait(&QUEUE, server, start).map(|()| id)
}

/// Waits in the background for the first connection to `server`. `start` starts the thread that does so, with the
/// queue.
fn wait(
    queue: &'static ForkSafe<IdleQueue>,
    server: RendezvousServer,
    start: impl FnOnce(&'static ForkSafe<IdleQueue>) -> Result<()>,
) -> Result<()> {
    let mut server = Some(server);
    let this = ProcessId::this();
    let wake = loop {
        let (state, stale) = queue.with(|queue| {
            if queue.starting.is_some_and(ProcessId::is_this) {
                return (WaiterState::Starting, Vec::new());
            }
            if queue.owner.is_some_and(ProcessId::is_this) {
                let wake = queue.wake.clone();
                if queue.added.len() >= MOST_ADDED {
                    return (WaiterState::Behind(wake), Vec::new());
                }
                queue.added.extend(server.take());
                return (WaiterState::Running(wake), Vec::new());
            }
            // Servers of the parent process belong to its thread.
            let stale = std::mem::take(&mut queue.added);
            (queue.owner, queue.starting) = (Some(this), Some(this));
            queue.added.extend(server.take());
            (WaiterState::Idle, stale)
        });
        drop(stale);
        match state {
            WaiterState::Starting => std::thread::sleep(START_POLL_INTERVAL),
            WaiterState::Behind(wake) => {
                if let Some(late) = server.take_if(|server| server.is_due()) {
                    late.discard();
                    return Err(Error::new(
                        ErrorKind::Timeout,
                        "the thread that ends unused unique ids has not run within the timeout of an init",
                    ));
                }
                ring(wake);
                std::thread::sleep(START_POLL_INTERVAL);
            }
            WaiterState::Running(wake) => break wake,
            WaiterState::Idle => return start_for(queue, start),
        }
    };
    ring(wake);
    Ok(())
}

/// Ends the poll of the thread that waits. An error is ignored: a full socket ends it as well.
fn ring(wake: Option<Arc<UnixStream>>) {
    if let Some(wake) = wake {
        let _ = (&*wake).write(&[1]);
    }
}

/// Starts the thread for the server that this thread has added. Without the thread, the server ends.
fn start_for(
    queue: &'static ForkSafe<IdleQueue>,
    start: impl FnOnce(&'static ForkSafe<IdleQueue>) -> Result<()>,
) -> Result<()> {
    let started = start(queue);
    let lost = queue.with(|queue| {
        queue.starting = None;
        match &started {
            Ok(()) => (Vec::new(), None),
            Err(_) => queue.give_up(),
        }
    });
    lost.0.into_iter().for_each(RendezvousServer::discard);
    started
}

fn start(queue: &'static ForkSafe<IdleQueue>) -> Result<()> {
    let no_alarm =
        |cause| Error::system("cannot make the alarm of the thread for unique ids", cause);
    let (wake, alarm) = UnixStream::pair().map_err(no_alarm)?;
    wake.set_nonblocking(true).map_err(no_alarm)?;
    alarm.set_nonblocking(true).map_err(no_alarm)?;
    let wake = Arc::new(wake);
    let before = queue.with(|queue| queue.wake.replace(wake));
    drop(before);
    std::thread::Builder::new()
        .name("cinch-ids".into())
        .stack_size(256 << 10)
        .spawn(move || wait_for_ranks(queue, &alarm))
        .map(drop)
        .map_err(|cause| thread_error("cannot start the thread for unique ids", cause))
}

/// Serves the queue until no rendezvous is left.
fn wait_for_ranks(queue: &ForkSafe<IdleQueue>, alarm: &UnixStream) {
    block_signals();
    let _end = EndOfWaiter(queue);
    let most = MOST_IDLE.min(descriptor_limit() / 4).max(1);
    let mut idle: Vec<RendezvousServer> = Vec::new();
    let mut has_warned = false;
    loop {
        let (added, wake) = queue.with(|queue| {
            let added = std::mem::take(&mut queue.added);
            match idle.is_empty() && added.is_empty() {
                false => (Some(added), None),
                true => {
                    queue.owner = None;
                    (None, queue.wake.take())
                }
            }
        });
        drop(wake);
        let Some(added) = added else { return };
        idle.extend(added);
        has_warned |= end_oldest(&mut idle, most, !has_warned);
        let ready = poll(alarm, &idle);
        let polled = std::mem::take(&mut idle).into_iter().zip(ready);
        for (server, is_ready) in polled {
            if server.is_cancelled() {
                server.discard();
            } else if is_ready || server.is_due() {
                if let Err(error) = server.start() {
                    WarningHook::log().warn(&format!("ranks of a unique id cannot join: {error}"));
                }
            } else {
                idle.push(server);
            }
        }
    }
}

/// Gives up the queue of a thread that panics, so that the next id starts another thread.
struct EndOfWaiter<'q>(&'q ForkSafe<IdleQueue>);

impl Drop for EndOfWaiter<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let lost = self.0.with(IdleQueue::give_up);
            lost.0.into_iter().for_each(RendezvousServer::discard);
        }
    }
}

/// Ends the oldest rendezvous if there are more than `most`, and returns whether there are.
fn end_oldest(idle: &mut Vec<RendezvousServer>, most: usize, warns: bool) -> bool {
    let excess = idle.len().saturating_sub(most);
    if excess > 0 && warns {
        WarningHook::log().warn(&format!(
            "this process holds more than {most} unused unique ids; the oldest end"
        ));
    }
    idle.drain(..excess).for_each(RendezvousServer::discard);
    excess > 0
}

/// Waits for connections, and returns which servers have one.
fn poll(alarm: &UnixStream, idle: &[RendezvousServer]) -> Vec<bool> {
    let mut fds = vec![PollFd::new(alarm.as_fd(), PollFlags::POLLIN)];
    let mut counts = Vec::with_capacity(idle.len());
    for server in idle {
        let before = fds.len();
        fds.extend(server.arrivals());
        counts.push(fds.len() - before);
    }
    poll_for(&mut fds, REQUEST_POLL_INTERVAL);
    let mut bytes = [0; 64];
    while matches!((&*alarm).read(&mut bytes), Ok(1..)) {}
    let mut ready = fds.iter().skip(1).map(|fd| fd.any().unwrap_or(true));
    let of_server = counts.into_iter();
    of_server
        .map(|count| ready.by_ref().take(count).fold(false, |any, one| any | one))
        .collect()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::address;
    use super::super::id::assemble;
    use super::super::rendezvous_server::cancel;
    use super::*;
    use std::sync::mpsc;

    /// The thread that waits runs only once the queue is full, and no more are added until then.
    #[test]
    fn ids_wait_for_a_thread_that_is_behind() {
        static SHARED: ForkSafe<IdleQueue> = ForkSafe::new(IdleQueue::new());
        let mut alarms = None;
        let ids: Vec<_> = (0..=MOST_ADDED)
            .map(|at| new_server(100 + at as u8))
            .collect();
        let (mut kept, mut last) = (Vec::new(), None);
        for (at, (id, server)) in ids.into_iter().enumerate() {
            kept.push(id);
            match at == MOST_ADDED {
                true => last = Some(server),
                false => wait(&SHARED, server, |queue| {
                    let (wake, alarm) = UnixStream::pair().unwrap();
                    wake.set_nonblocking(true).unwrap();
                    alarm.set_nonblocking(true).unwrap();
                    queue.with(|queue| queue.wake = Some(Arc::new(wake)));
                    alarms = Some(alarm);
                    Ok(())
                })
                .unwrap(),
            }
        }
        std::thread::scope(|scope| {
            let late = scope.spawn(|| wait(&SHARED, last.unwrap(), |_| unreachable!()));
            std::thread::sleep(Duration::from_millis(100));
            assert!(!late.is_finished());
            assert_eq!(SHARED.with(|queue| queue.added.len()), MOST_ADDED);
            let alarm = alarms.take().unwrap();
            let waiter = scope.spawn(move || wait_for_ranks(&SHARED, &alarm));
            late.join().unwrap().unwrap();
            assert!(kept.iter().all(cancel), "an id has ended");
            waiter.join().unwrap();
        });
    }

    /// Makes an id and the server of its rendezvous.
    fn new_server(nonce: u8) -> (UniqueId, RendezvousServer) {
        let (listener, at) = Listener::bind(address::for_one_host()).unwrap();
        let id = assemble(0, &[1; 32], &[nonce; 16], &[at]);
        let server = RendezvousServer::new(&id, listener, Duration::from_secs(20), None);
        (id, server)
    }

    /// A thread cannot start the thread that waits. Meanwhile a second thread adds its id, which must live.
    #[test]
    fn failed_start_ends_the_id_of_its_own_caller_alone() {
        static SHARED: ForkSafe<IdleQueue> = ForkSafe::new(IdleQueue::new());
        let ((lost, first), (kept, second)) = (new_server(91), new_server(92));
        let (begun, has_begun) = mpsc::channel();
        std::thread::scope(|scope| {
            let refused = scope.spawn(move || {
                wait(&SHARED, first, |_| {
                    begun.send(()).unwrap();
                    // The second thread arrives in this time.
                    std::thread::sleep(Duration::from_millis(100));
                    Err(Error::new(ErrorKind::System, "no thread"))
                })
            });
            has_begun.recv().unwrap();
            wait(&SHARED, second, start).unwrap();
            assert_eq!(refused.join().unwrap().unwrap_err().message(), "no thread");
        });
        assert!(!cancel(&lost), "the id whose thread failed is served");
        assert!(cancel(&kept), "the id of another thread has ended");
    }
}
