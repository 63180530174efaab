//! The proxy: a thread of a rank that carries messages between its kernels and ranks on other hosts.
//!
//! ```text
//!        GPU              pinned host memory                 proxy thread               network
//!
//!   kernel, sends --> outbox: slots, tail ------> ProxyChannel::carry_out -----> SendEnd ----> peer
//!                <--- inbox: head (credit) <----- StagedSend::release
//!
//!   kernel, recvs <-- inbox: slots, tail <------- ProxyChannel::carry_in <------ RecvEnd <---- peer
//!                ---> outbox: head (credit) ----> StagedRecv::ready
//!                                                       |
//!                         bytes of each message:  MessageCursor <- MessageSizesCache <- Planner
//!                         launches in flight?     CompletionPoller thread -> CUDA event
//! ```
//! Kernels see a peer whose memory is pinned host memory; they never wait for the network itself. A slot
//! does not state its length. The first message of a call carries the call's signature, from which the
//! proxy makes the same plan as the kernel and walks it ([`MessageSizesCache`]). So the engine submits
//! nothing to the proxy, and a graph's replay looks like any other launch.
//!
//! # Polling
//! Kernels move counters in memory, which no system call can wait for.
//! - While launches are in flight, or within [`ACTIVE_TIMEOUT`] of the last message, the thread spins for
//!   some 20 us and then sleeps at most [`ACTIVE_POLL_INTERVAL`] at a time. The network ends such a sleep; a
//!   kernel does not. A call whose peers are late costs a part of a core.
//! - Otherwise the thread polls every [`IDLE_POLL_INTERVAL`]. A launch wakes it immediately. A graph's replay
//!   bypasses the host, so the thread finds its first message up to one interval late.
//!
//! # Deadlock
//! The proxy thread never calls the driver. Another thread may hold the driver's locks until a kernel has
//! ended, for example to free memory or load a module, and that kernel may wait for the proxy. A second
//! thread, [`CompletionPoller`], queries the driver whether launches have ended, and may block there.
//!
//! # Broken connections
//! A broken connection only matters to kernels that wait for it. The break becomes the communicator's fault
//! if calls are still in flight after [`BROKEN_LINK_TIMEOUT`]. Within that time the control plane reports a
//! better cause, if there is one. During a graph's replay only the sending rank
//! detects the break; the receiver relies on the control plane and the kernel's own deadline. A peer that
//! has closed its communicator is no failure: a call in flight may already have all its messages.

use super::message_cursor::MessageSizesCache;
use super::proxy_channel::ProxyChannel;
use crate::bootstrap::OutOfBandRef;
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::Event;
use crate::gpu_links::Network;
use crate::plan::Planner;
use crate::sync::Fault;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::sys::log::{Level, line};
use crate::sys::numa;
use crate::sys::process::{block_signals, thread_error};
use crate::transport::Waiter;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long the thread keeps polling at short intervals after a message or a launch.
const ACTIVE_TIMEOUT: Duration = Duration::from_millis(10);
/// Longest sleep between two polls after a recent message or launch.
const ACTIVE_POLL_INTERVAL: Duration = Duration::from_micros(50);
/// Time between two polls when there was no recent message or launch.
const IDLE_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Time after which a broken connection that is still needed fails the communicator.
const BROKEN_LINK_TIMEOUT: Duration = Duration::from_millis(200);
/// How long a thread may take to end after the command to end.
const THREAD_EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// Value of [`ProxyShared::command`]: carry messages.
const CARRY: u32 = 0;
/// Value of [`ProxyShared::command`]: end once all messages that kernels have sent have left this
/// process.
const DRAIN: u32 = 1;
/// Value of [`ProxyShared::command`]: end now.
const END: u32 = 2;

/// The engine's handle of the two threads of the proxy.
#[derive(Debug)]
pub(super) struct Proxy {
    rank: usize,
    shared: Arc<ProxyShared>,
    /// The proxy thread and the completion poller; `None` after [`Proxy::end`].
    threads: Option<[ServiceThread; 2]>,
}

/// A thread, with a way to wait for its end with a deadline.
#[derive(Debug)]
struct ServiceThread {
    thread: JoinHandle<()>,
    /// Channel that disconnects when the thread ends, because the thread owns the sender.
    ended: Receiver<()>,
}

/// Counters and the command, which the engine and both threads share.
#[derive(Debug)]
struct ProxyShared {
    command: AtomicU32,
    /// Incremented before and after each launch: odd while a launch is being queued.
    launches: AtomicU64,
    /// Value of `launches` up to which all launches are known to have ended.
    completed: AtomicU64,
    /// Number of flush requests so far.
    flush_requests: AtomicU64,
    /// Number of the last flush request that is complete.
    flushed: AtomicU64,
}

/// Parts that a proxy is made from.
#[derive(Debug)]
pub(super) struct ProxyParts {
    /// Connections to other hosts, and the peer buffers that kernels use for them.
    pub network: Network,
    /// A planner that makes the plans that the engine makes.
    pub planner: Planner,
    /// Event behind the last launch.
    pub launched: Arc<Event>,
    /// The communicator's fault, which the proxy raises when a connection breaks.
    pub fault: Arc<Fault>,
    /// Announces the fault to the other ranks.
    pub exchange: OutOfBandRef,
    /// NUMA node that the GPU is near, where the threads run; `None` if it is unknown.
    pub numa_node: Option<usize>,
}

impl Proxy {
    /// Starts both threads.
    ///
    /// # Errors
    /// System if a thread cannot be made; internal if a connection is missing.
    pub fn start(parts: ProxyParts) -> Result<Proxy> {
        let shared = Arc::new(ProxyShared {
            command: AtomicU32::new(CARRY),
            launches: AtomicU64::new(0),
            completed: AtomicU64::new(0),
            flush_requests: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
        });
        let rank = parts.exchange.rank();
        let poller = CompletionPoller {
            shared: shared.clone(),
            launched: parts.launched.clone(),
            fault: parts.fault.clone(),
            exchange: parts.exchange.clone(),
        };
        let node = parts.numa_node;
        let poller = ServiceThread::spawn("cinch-proxy-ask", node, move || poller.run())?;
        let proxy = ProxyThread::new(parts, shared.clone(), poller.thread.thread().clone())
            .and_then(|proxy| ServiceThread::spawn("cinch-proxy", node, move || proxy.run()));
        match proxy {
            Ok(proxy) => Ok(Proxy {
                rank,
                shared,
                threads: Some([proxy, poller]),
            }),
            Err(error) => {
                shared.command.store(END, Ordering::Relaxed);
                poller.thread.thread().unpark();
                // Before the first launch the poller never calls the driver, so its thread ends
                // without delay.
                let _ = poller.thread.join();
                Err(error)
            }
        }
    }

    /// Counts a launch and wakes the proxy thread. The engine calls it once before and once after
    /// each launch.
    #[inline]
    pub fn wake(&self) {
        // SYNC POINT launches: pairs with the acquire in `CompletionPoller`; the launch's event was recorded
        // before. A thread that misses this count sees it at the next poll.
        self.shared.launches.fetch_add(1, Ordering::Release);
        if let Some([proxy, _]) = &self.threads {
            proxy.thread.thread().unpark();
        }
    }

    /// Waits until all messages that kernels have sent have left this process. No kernel runs any more.
    ///
    /// # Errors
    /// The fault's reason; timeout if messages are still here after `timeout`.
    pub fn flush(&self, timeout: Duration, fault: &Fault) -> Result<()> {
        let Some([proxy, _]) = &self.threads else {
            return Ok(());
        };
        let until = Instant::now() + timeout;
        // SYNC POINT flush: pairs with the acquire in `ProxyThread::carry`, which polls the staging memory
        // after it.
        let request = self.shared.flush_requests.fetch_add(1, Ordering::Release) + 1;
        proxy.thread.thread().unpark();
        while self.shared.flushed.load(Ordering::Relaxed) < request {
            fault.ends_waits()?;
            if Instant::now() >= until {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!(
                        "what rank {} has sent to other hosts has not left it within {:.1} s",
                        self.rank,
                        timeout.as_secs_f64()
                    ),
                ));
            }
            std::thread::sleep(ACTIVE_POLL_INTERVAL);
        }
        Ok(())
    }

    /// Ends the threads and closes the connections. Before that, waits at most `timeout` until all messages
    /// that kernels have sent have left this process. No kernel sends any more.
    ///
    /// Only the proxy thread has messages to send, so only its end is waited for. The driver may block the
    /// completion poller for as long as other kernels run; the poller ends when the driver returns.
    pub fn end(&mut self, timeout: Duration) {
        let Some([proxy, poller]) = self.threads.take() else {
            return;
        };
        let command = |command| {
            self.shared.command.store(command, Ordering::Relaxed);
            proxy.thread.thread().unpark();
            poller.thread.thread().unpark();
        };
        command(DRAIN);
        let mut ended = proxy.wait(timeout);
        if !ended {
            command(END);
            ended = proxy.wait(THREAD_EXIT_TIMEOUT);
        }
        if !ended {
            line(
                Level::Warn,
                format_args!(
                    "rank {}: the proxy of a communicator has not ended, so its connections stay",
                    self.rank
                ),
            );
            return;
        }
        // The thread has ended, so the join returns at once.
        let _ = proxy.thread.join();
        if poller.wait(THREAD_EXIT_TIMEOUT) {
            let _ = poller.thread.join();
        } else {
            line(
                Level::Info,
                format_args!(
                    "rank {}: the driver still keeps a thread of a proxy waiting, which ends when it \
                     answers",
                    self.rank
                ),
            );
        }
    }
}

impl ServiceThread {
    fn spawn(
        name: &str,
        node: Option<usize>,
        body: impl FnOnce() + Send + 'static,
    ) -> Result<ServiceThread> {
        let (sender, ended) = mpsc::channel();
        let body = move || {
            block_signals();
            if let Some(node) = node {
                numa::bind_thread(Path::new(numa::SYS), node);
            }
            body();
            drop(sender);
        };
        let thread = std::thread::Builder::new().name(name.into()).spawn(body);
        let thread = thread.map_err(|error| thread_error("starting a proxy thread", error))?;
        Ok(ServiceThread { thread, ended })
    }

    /// Waits at most `timeout` for the thread's end; returns whether it has ended.
    fn wait(&self, timeout: Duration) -> bool {
        // Nothing is ever sent on this channel. The thread drops the sender when it ends, even by a
        // panic.
        self.ended.recv_timeout(timeout) == Err(RecvTimeoutError::Disconnected)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.end(Duration::ZERO);
    }
}

/// State of the proxy thread, which carries messages.
struct ProxyThread {
    channels: Vec<ProxyChannel>,
    waiter: Box<dyn Waiter>,
    message_sizes: MessageSizesCache,
    shared: Arc<ProxyShared>,
    poller: Thread,
    fault: Arc<Fault>,
    exchange: OutOfBandRef,
    /// When this thread last woke the completion poller.
    polled_at: Instant,
}

impl ProxyThread {
    fn new(parts: ProxyParts, shared: Arc<ProxyShared>, poller: Thread) -> Result<ProxyThread> {
        let Network { mut links, staging } = parts.network;
        let mut channels = Vec::new();
        for (peer, staging) in staging.iter().enumerate() {
            let Some(staging) = staging else {
                continue;
            };
            for channel in 0..links.channels {
                let index = channel * links.nranks + peer;
                let ends = (links.sends[index].take(), links.recvs[index].take());
                let (Some(send), Some(recv)) = ends else {
                    return Err(Error::internal(format!(
                        "no connection with rank {peer} on channel {channel}"
                    )));
                };
                // SAFETY: the loops visit each channel of each peer once, and `parts` owns the network.
                let staged = unsafe { staging.ends(channel as u32) };
                let ends = (send, recv);
                channels.push(ProxyChannel::new(
                    (peer, parts.exchange.peers()[peer].to_string(), channel),
                    staged,
                    ends,
                    links.checks_data,
                ));
            }
        }
        Ok(ProxyThread {
            channels,
            waiter: links.waiter,
            message_sizes: MessageSizesCache::new(parts.planner),
            shared,
            poller,
            fault: parts.fault,
            exchange: parts.exchange,
            polled_at: Instant::now(),
        })
    }

    /// Carries messages until the command to end. After a failure, raises the fault and keeps the connections
    /// open until that command: peers should receive the fault before they see a closed connection.
    fn run(mut self) {
        let carried = catch_unwind(AssertUnwindSafe(|| self.carry()));
        let failure = match carried {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error),
            Err(_) => Some(Error::internal("the proxy panicked")),
        };
        if let Some(error) = failure {
            fail(&self.fault, &self.exchange, error);
        }
        while self.command() == CARRY {
            std::thread::park_timeout(BROKEN_LINK_TIMEOUT);
        }
    }

    fn carry(&mut self) -> Result<()> {
        let mut moved_at = Instant::now();
        let mut launches = 0;
        // Number of polls in a row that moved no message.
        let mut scans = 0;
        loop {
            if self.fault.ends_waits().is_err() {
                return Ok(());
            }
            // SYNC POINT flush: pairs with the release in `Proxy::flush`.
            let request = self.shared.flush_requests.load(Ordering::Acquire);
            let moved = self.progress()?;
            if request != self.shared.flushed.load(Ordering::Relaxed)
                && !moved
                && !self.has_pending()?
            {
                self.shared.flushed.store(request, Ordering::Relaxed);
            }
            let command = self.command();
            if command == END || command == DRAIN && !moved && !self.has_pending()? {
                return Ok(());
            }
            if moved {
                (moved_at, scans) = (Instant::now(), 0);
                continue;
            }
            let now = Instant::now();
            let seen = self.shared.launches.load(Ordering::Relaxed);
            if seen != launches {
                (moved_at, launches) = (now, seen);
            }
            self.check_connections(now, command != CARRY)?;
            let active = command == DRAIN
                || now.duration_since(moved_at) < ACTIVE_TIMEOUT
                || self.in_flight(now)
                || self.has_pending()?;
            if active {
                self.waiter.idle(scans, ACTIVE_POLL_INTERVAL)?;
                scans += 1;
            } else {
                scans = 0;
                std::thread::park_timeout(IDLE_POLL_INTERVAL);
            }
        }
    }

    /// Polls every channel once; returns whether any message moved.
    fn progress(&mut self) -> Result<bool> {
        let mut moved = false;
        for channel in &mut self.channels {
            moved |= channel.progress(&mut self.message_sizes)?;
        }
        Ok(moved)
    }

    /// Returns whether messages that kernels have sent are still in this process.
    fn has_pending(&self) -> Result<bool> {
        for channel in &self.channels {
            if channel.has_pending()? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns whether launches may still run. Wakes the completion poller to find out, at most once per idle
    /// interval.
    fn in_flight(&mut self, now: Instant) -> bool {
        let launches = self.shared.launches.load(Ordering::Relaxed);
        if launches == self.shared.completed.load(Ordering::Relaxed) {
            return false;
        }
        if now.duration_since(self.polled_at) >= IDLE_POLL_INTERVAL {
            self.polled_at = now;
            self.poller.unpark();
        }
        true
    }

    /// Fails if a connection that is still needed broke [`BROKEN_LINK_TIMEOUT`] ago. It is needed by messages
    /// that kernels have sent. Unless the thread is `draining`, it is also needed by kernels that may wait
    /// for messages.
    fn check_connections(&mut self, now: Instant, draining: bool) -> Result<()> {
        let in_flight = !draining && self.in_flight(now);
        for channel in &self.channels {
            let may_wait = in_flight && !self.exchange.has_left(channel.peer());
            if let Some((since, error)) = channel.broken(may_wait)?
                && now.duration_since(*since) >= BROKEN_LINK_TIMEOUT
            {
                return Err(error.clone());
            }
        }
        Ok(())
    }

    fn command(&self) -> u32 {
        self.shared.command.load(Ordering::Relaxed)
    }
}

/// State of the thread that queries the driver for completed launches, once per wake-up.
struct CompletionPoller {
    shared: Arc<ProxyShared>,
    launched: Arc<Event>,
    fault: Arc<Fault>,
    exchange: OutOfBandRef,
}

impl CompletionPoller {
    fn run(&self) {
        while self.shared.command.load(Ordering::Relaxed) == CARRY {
            std::thread::park();
            // SYNC POINT launches: pairs with the release in `Proxy::wake`. An older record of the event
            // would mark running launches as completed. The proxy thread woke this thread, so the wake-up
            // itself does not order the engine's writes.
            let launches = self.shared.launches.load(Ordering::Acquire);
            // While a launch is being queued, its event may not be recorded.
            if launches.is_multiple_of(2) && self.have_ended() {
                self.shared.completed.store(launches, Ordering::Relaxed);
            }
        }
    }

    /// Returns whether all launches have ended. A failed launch counts as ended, and raises the fault,
    /// because other ranks' kernels would wait for its messages until their deadline.
    fn have_ended(&self) -> bool {
        self.launched.has_happened().unwrap_or_else(|error| {
            // At process exit the driver ends all work; no call has failed.
            if !self.launched.context().driver().has_ended() {
                fail(
                    &self.fault,
                    &self.exchange,
                    error.context("a call on the GPU"),
                );
            }
            true
        })
    }
}

/// Raises the fault, and announces it to the other ranks.
fn fail(fault: &Fault, exchange: &OutOfBandRef, error: Error) {
    fault.raise(error);
    if let Some(reason) = fault.reason() {
        exchange.announce(reason);
    }
}

#[cfg(test)]
mod tests;
