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
use crate::error::{Error, Result};
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
/// Longest poll between two checks for rendezvous that were cancelled, failed or are late.
const REQUEST_POLL_INTERVAL: Duration = Duration::from_millis(50);

static QUEUE: ForkSafe<IdleQueue> = ForkSafe::new(IdleQueue {
    owner: None,
    added: Vec::new(),
    wake: None,
});

/// Rendezvous on their way to the thread that waits.
struct IdleQueue {
    /// The process whose thread waits. A forked child finds its parent here.
    owner: Option<ProcessId>,
    added: Vec<RendezvousServer>,
    /// A byte ends the thread's poll.
    wake: Option<Arc<UnixStream>>,
}

/// Serves a rendezvous on a free port of `ip`, for the id that `make` builds from the address.
///
/// # Errors
/// System if `ip` cannot be listened on, or the thread cannot start.
pub(super) fn open(
    ip: IpAddr,
    make: impl FnOnce(SocketAddr) -> UniqueId,
    config: &Config,
) -> Result<UniqueId> {
    let (listener, address) = Listener::bind(ip)?;
    let id = make(address);
    let server = RendezvousServer::new(&id, listener, config.init_timeout, None);
    wait(server).map(|()| id)
}

/// Waits in the background for the first connection to `server`.
fn wait(server: RendezvousServer) -> Result<()> {
    let mut server = Some(server);
    let this = ProcessId::this();
    let (wake, stale) = QUEUE.with(|queue| {
        let stale = match queue.owner.is_some_and(ProcessId::is_this) {
            true => Vec::new(),
            // Servers of the parent process belong to its thread.
            false => std::mem::take(&mut queue.added),
        };
        let starts = !queue.owner.replace(this).is_some_and(ProcessId::is_this);
        queue.added.extend(server.take());
        let wake = match starts {
            true => None,
            false => Some(queue.wake.clone()),
        };
        (wake, stale)
    });
    drop(stale);
    match wake {
        // An error is ignored: a full socket ends the poll as well.
        Some(Some(wake)) => drop((&*wake).write(&[1])),
        // Another thread is starting the thread, which takes the queue first.
        Some(None) => {}
        None => start().inspect_err(|_| {
            let lost = QUEUE.with(|queue| {
                (queue.owner, queue.wake) = (None, None);
                std::mem::take(&mut queue.added)
            });
            lost.into_iter().for_each(RendezvousServer::discard);
        })?,
    }
    Ok(())
}

fn start() -> Result<()> {
    let no_alarm =
        |cause| Error::system("cannot make the alarm of the thread for unique ids", cause);
    let (wake, alarm) = UnixStream::pair().map_err(no_alarm)?;
    wake.set_nonblocking(true).map_err(no_alarm)?;
    alarm.set_nonblocking(true).map_err(no_alarm)?;
    let wake = Arc::new(wake);
    let before = QUEUE.with(|queue| queue.wake.replace(wake));
    drop(before);
    std::thread::Builder::new()
        .name("cinch-ids".into())
        .stack_size(256 << 10)
        .spawn(move || wait_for_ranks(&alarm))
        .map(drop)
        .map_err(|cause| thread_error("cannot start the thread for unique ids", cause))
}

/// Serves the queue until no rendezvous is left.
fn wait_for_ranks(alarm: &UnixStream) {
    block_signals();
    let most = MOST_IDLE.min(descriptor_limit() / 4).max(1);
    let mut idle: Vec<RendezvousServer> = Vec::new();
    let mut has_warned = false;
    loop {
        let (added, wake) = QUEUE.with(|queue| {
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
