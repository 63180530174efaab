//! The thread of a rank that carries messages between its kernels and the network.
//!
//! Kernels neither know of it nor wait for the network: they see a peer that lies in pinned host
//! memory. The proxy looks at the counters that they move there, which no system call can wait for,
//! and at the connections of a host transport. What it costs:
//!
//! - While calls are in flight, or messages moved in the last 10 ms ([`LIVELY`]), it spins for some
//!   20 us, then sleeps for at most 50 us at a time ([`NAP`]); the network ends such a sleep, a
//!   kernel does not. So a message waits for at most that long, and a call whose peers are late costs
//!   a part of a core.
//! - Otherwise it looks every millisecond ([`BEAT`]). A launch wakes it at once. The replay of a CUDA
//!   graph, of which the host hears nothing, is noticed by its first message: at most a millisecond
//!   late, on the side that sends and on the side that receives.
//!
//! It never calls the driver: another thread may hold the driver's locks until a kernel has ended
//! (to free memory, to load a module), and that kernel may wait for the proxy. Whether launches are
//! still in flight a second thread asks in its place ([`CompletionPoller`]), and may be kept waiting.
//!
//! A connection that breaks matters only to kernels that wait for it. So it becomes the
//! communicator's fault when calls have been in flight for another 200 ms ([`GRACE`]), within which
//! the control side tells of a better cause if there is one. In a graph's replay only the rank that
//! sends notices; one that receives has the control side and the kernels' own deadline. So it is
//! where the peer has left in good order, which it may as soon as its part of a call has left: a
//! call that is in flight then may have all that it wants of that rank, and wait for another.

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
use crate::sys::process::block_signals;
use crate::transport::Waiter;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long it stays lively after a message or a launch.
const LIVELY: Duration = Duration::from_millis(10);
/// Longest sleep while it is lively.
const NAP: Duration = Duration::from_micros(50);
/// Time between two looks otherwise.
const BEAT: Duration = Duration::from_millis(1);
/// From a connection that breaks to the fault of those who wait for it.
const GRACE: Duration = Duration::from_millis(200);
/// How long it may take to end once it was told to.
const ENDING: Duration = Duration::from_secs(1);

/// What the thread is to do.
const CARRY: u32 = 0;
/// To end when all that kernels have sent has left.
const DRAIN: u32 = 1;
/// To end.
const END: u32 = 2;

/// The thread, seen from the engine.
#[derive(Debug)]
pub(super) struct Proxy {
    rank: usize,
    shared: Arc<Shared>,
    /// The one that carries, and the one that asks the driver.
    threads: Option<[Ending; 2]>,
}

/// A thread, and what hears of its end.
#[derive(Debug)]
struct Ending {
    thread: JoinHandle<()>,
    /// Its other end goes with what the thread owns.
    ended: Receiver<()>,
}

#[derive(Debug)]
struct Shared {
    order: AtomicU32,
    /// Goes up before and after each launch: odd while one is being made.
    launches: AtomicU64,
    /// Launches, counted likewise, that have ended as far as is known.
    settled: AtomicU64,
    /// How often somebody has asked whether all has left that kernels have sent.
    asked: AtomicU64,
    /// The last of these questions whose answer is yes.
    flushed: AtomicU64,
}

/// What a proxy is made of.
#[derive(Debug)]
pub(super) struct Parts {
    /// The connections.
    pub network: Network,
    /// Plans as the engine does.
    pub planner: Planner,
    /// Behind the last launch.
    pub launched: Arc<Event>,
    /// Raised when a connection breaks.
    pub fault: Arc<Fault>,
    /// Tells the other ranks.
    pub exchange: OutOfBandRef,
}

impl Proxy {
    /// Starts to carry messages.
    ///
    /// # Errors
    /// System if there can be no thread; internal if a connection is missing.
    pub fn start(parts: Parts) -> Result<Proxy> {
        let shared = Arc::new(Shared {
            order: AtomicU32::new(CARRY),
            launches: AtomicU64::new(0),
            settled: AtomicU64::new(0),
            asked: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
        });
        let rank = parts.exchange.rank();
        let asks = CompletionPoller {
            shared: shared.clone(),
            launched: parts.launched.clone(),
            fault: parts.fault.clone(),
            exchange: parts.exchange.clone(),
        };
        let asker = Ending::spawn("cinch-proxy-ask", move || asks.live())?;
        let carrying = ProxyThread::new(parts, shared.clone(), asker.thread.thread().clone())
            .and_then(|carrier| Ending::spawn("cinch-proxy", move || carrier.live()));
        match carrying {
            Ok(carrier) => Ok(Proxy {
                rank,
                shared,
                threads: Some([carrier, asker]),
            }),
            Err(error) => {
                shared.order.store(END, Ordering::Relaxed);
                asker.thread.thread().unpark();
                // It only ever parks: nothing was launched yet.
                let _ = asker.thread.join();
                Err(error)
            }
        }
    }

    /// Something is about to be launched, or was: called once before and once after.
    #[inline]
    pub fn wake(&self) {
        // SYNC POINT launches: pairs with the acquire in `CompletionPoller`; the event of the launch was recorded
        // before. A count that is seen late is seen at the next look.
        self.shared.launches.fetch_add(1, Ordering::Release);
        if let Some([carrier, _]) = &self.threads {
            carrier.thread.thread().unpark();
        }
    }

    /// Returns when all has left this process that kernels have sent, none of which runs.
    ///
    /// # Errors
    /// The reason of the fault; timeout if it has not left after `patience`.
    pub fn flush(&self, patience: Duration, fault: &Fault) -> Result<()> {
        let Some([carrier, _]) = &self.threads else {
            return Ok(());
        };
        let until = Instant::now() + patience;
        // SYNC POINT flush: pairs with the acquire in `ProxyThread::carry`, which looks at the boxes after it.
        let question = self.shared.asked.fetch_add(1, Ordering::Release) + 1;
        carrier.thread.thread().unpark();
        while self.shared.flushed.load(Ordering::Relaxed) < question {
            fault.ends_waits()?;
            if Instant::now() >= until {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!(
                        "what rank {} has sent to other hosts has not left it within {:.1} s",
                        self.rank,
                        patience.as_secs_f64()
                    ),
                ));
            }
            std::thread::sleep(NAP);
        }
        Ok(())
    }

    /// Ends the threads, and with them the connections: when all that kernels have sent has left, or
    /// after `patience`. No kernel sends any more.
    ///
    /// What is to leave is the business of the thread that carries alone. The other one may be kept
    /// waiting by the driver for as long as other kernels run, which is no reason to wait here: it
    /// ends when the driver answers.
    pub fn end(&mut self, patience: Duration) {
        let Some([carrier, asker]) = self.threads.take() else {
            return;
        };
        let told = |order| {
            self.shared.order.store(order, Ordering::Relaxed);
            carrier.thread.thread().unpark();
            asker.thread.thread().unpark();
        };
        told(DRAIN);
        let mut carried = carrier.wait(patience);
        if !carried {
            told(END);
            carried = carrier.wait(ENDING);
        }
        if !carried {
            line(
                Level::Warn,
                format_args!(
                    "rank {}: the proxy of a communicator has not ended, so its connections stay",
                    self.rank
                ),
            );
            return;
        }
        // It has nothing left to do.
        let _ = carrier.thread.join();
        if asker.wait(ENDING) {
            let _ = asker.thread.join();
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

impl Ending {
    fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<Ending> {
        let (tells, ended) = mpsc::channel();
        let body = move || {
            block_signals();
            body();
            drop(tells);
        };
        let thread = std::thread::Builder::new().name(name.into()).spawn(body);
        let thread = thread.map_err(|error| Error::system("starting a proxy thread", error))?;
        Ok(Ending { thread, ended })
    }

    /// Whether it has ended, or does so within `patience`.
    fn wait(&self, patience: Duration) -> bool {
        // Nothing is ever sent: the channel closes, also where the thread panicked.
        self.ended.recv_timeout(patience) == Err(RecvTimeoutError::Disconnected)
    }
}
impl Drop for Proxy {
    fn drop(&mut self) {
        self.end(Duration::ZERO);
    }
}

/// The thread itself.
struct ProxyThread {
    proxy_channels: Vec<ProxyChannel>,
    waiter: Box<dyn Waiter>,
    message_sizes: MessageSizesCache,
    shared: Arc<Shared>,
    asker: Thread,
    fault: Arc<Fault>,
    exchange: OutOfBandRef,
    /// When it was last asked whether launches have ended.
    asked: Instant,
}

impl ProxyThread {
    fn new(parts: Parts, shared: Arc<Shared>, asker: Thread) -> Result<ProxyThread> {
        let Network { mut links, staging } = parts.network;
        let mut proxy_channels = Vec::new();
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
                // SAFETY: each channel of each peer comes up once, and the network is taken once.
                let boxes = unsafe { staging.ends(channel as u32) };
                proxy_channels.push(ProxyChannel::new((peer, channel), boxes, (send, recv)));
            }
        }
        Ok(ProxyThread {
            proxy_channels,
            waiter: links.waiter,
            message_sizes: MessageSizesCache::new(parts.planner),
            shared,
            asker,
            fault: parts.fault,
            exchange: parts.exchange,
            asked: Instant::now(),
        })
    }

    /// Carries until it is told to end; in trouble, raises the fault and keeps the connections
    /// until then: peers should hear of the fault before they see them closed.
    fn live(mut self) {
        let carried = catch_unwind(AssertUnwindSafe(|| self.carry()));
        let trouble = match carried {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error),
            Err(_) => Some(Error::internal("the proxy panicked")),
        };
        if let Some(error) = trouble {
            fail(&self.fault, &self.exchange, error);
        }
        while self.order() == CARRY {
            std::thread::park_timeout(GRACE);
        }
    }

    fn carry(&mut self) -> Result<()> {
        let mut moved_at = Instant::now();
        let mut launches = 0;
        // Looks in a row that found nothing.
        let mut scans = 0;
        loop {
            if self.fault.ends_waits().is_err() {
                return Ok(());
            }
            // SYNC POINT flush: pairs with the release in `Proxy::flush`.
            let question = self.shared.asked.load(Ordering::Acquire);
            let moved = self.turn()?;
            if question != self.shared.flushed.load(Ordering::Relaxed)
                && !moved
                && !self.has_pending()?
            {
                self.shared.flushed.store(question, Ordering::Relaxed);
            }
            let order = self.order();
            if order == END || order == DRAIN && !moved && !self.has_pending()? {
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
            self.check_connections(now, order == CARRY)?;
            let lively = order == DRAIN
                || now.duration_since(moved_at) < LIVELY
                || self.in_flight(now)
                || self.has_pending()?;
            if lively {
                self.waiter.idle(scans, NAP)?;
                scans += 1;
            } else {
                scans = 0;
                std::thread::park_timeout(BEAT);
            }
        }
    }

    fn turn(&mut self) -> Result<bool> {
        let mut moved = false;
        for proxy_channel in &mut self.proxy_channels {
            moved |= proxy_channel.turn(&mut self.message_sizes)?;
        }
        Ok(moved)
    }

    fn has_pending(&self) -> Result<bool> {
        for proxy_channel in &self.proxy_channels {
            if proxy_channel.has_pending()? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether launches that the engine made may still run. Has that asked once a beat at most.
    fn in_flight(&mut self, now: Instant) -> bool {
        let launches = self.shared.launches.load(Ordering::Relaxed);
        if launches == self.shared.settled.load(Ordering::Relaxed) {
            return false;
        }
        if now.duration_since(self.asked) >= BEAT {
            self.asked = now;
            self.asker.unpark();
        }
        true
    }

    /// Kernels wait for what comes only while they `run`; what they sent is to leave in any case.
    fn check_connections(&mut self, now: Instant, run: bool) -> Result<()> {
        let in_flight = run && self.in_flight(now);
        for proxy_channel in &self.proxy_channels {
            let may_wait = in_flight && !self.exchange.has_left(proxy_channel.peer());
            if let Some((since, error)) = proxy_channel.cut(may_wait)?
                && now.duration_since(*since) >= GRACE
            {
                return Err(error.clone());
            }
        }
        Ok(())
    }

    fn order(&self) -> u32 {
        self.shared.order.load(Ordering::Relaxed)
    }
}

/// The thread that asks the driver whether launches have ended, each time that it is woken.
struct CompletionPoller {
    shared: Arc<Shared>,
    launched: Arc<Event>,
    fault: Arc<Fault>,
    exchange: OutOfBandRef,
}

impl CompletionPoller {
    fn live(&self) {
        while self.shared.order.load(Ordering::Relaxed) == CARRY {
            std::thread::park();
            // SYNC POINT launches: pairs with the release in `Proxy::wake`: an older mark of the event
            // would settle launches that still run. This thread was woken by the other one, not by the
            // engine.
            let launches = self.shared.launches.load(Ordering::Acquire);
            // Of a launch that is being made the event may know nothing yet.
            if launches.is_multiple_of(2) && self.are_over() {
                self.shared.settled.store(launches, Ordering::Relaxed);
            }
        }
    }

    /// Whether launches have ended. One that failed has, and will not give other ranks its part: they
    /// are told, since their kernels would wait for it until their deadline.
    fn are_over(&self) -> bool {
        self.launched.has_happened().unwrap_or_else(|error| {
            // At the end of the process the driver ends, and all that ran with it: no call failed.
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

/// Fails the communicator, and tells the other ranks.
fn fail(fault: &Fault, exchange: &OutOfBandRef, error: Error) {
    fault.raise(error);
    if let Some(reason) = fault.reason() {
        exchange.announce(reason);
    }
}

#[cfg(test)]
#[path = "proxy_tests.rs"]
mod tests;
