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
//! A connection that breaks matters only to kernels that wait for it, and other ranks may have
//! left in good order. So it becomes the communicator's fault when calls have been in flight for
//! another 200 ms ([`GRACE`]), within which the control side tells of a better cause if there is
//! one. In a graph's replay only the rank that sends notices; one that receives has the control side
//! and the kernels' own deadline.

use super::bridge::Bridge;
use super::course::Courses;
use crate::bootstrap::ExchangeRef;
use crate::error::{Error, Result};
use crate::gpu::Event;
use crate::plan::Planner;
use crate::sync::Fault;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::sys::log::{Level, line};
use crate::transport::Waiter;
use crate::transport::cuda::Network;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
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
    thread: Option<JoinHandle<()>>,
    /// Hears of the end of the thread.
    ended: Receiver<()>,
}

#[derive(Debug)]
struct Shared {
    order: AtomicU32,
    /// Goes up before and after each launch: odd while one is being made.
    launches: AtomicU64,
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
    pub exchange: ExchangeRef,
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
        });
        let rank = parts.exchange.rank();
        let carrier = Carrier::new(parts, shared.clone())?;
        let (tells, ended) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("cinch-proxy".into())
            .spawn(move || carrier.live(tells))
            .map_err(|error| Error::system("starting a proxy thread", error))?;
        Ok(Proxy {
            rank,
            shared,
            thread: Some(thread),
            ended,
        })
    }

    /// Something is about to be launched, or was: called once before and once after.
    #[inline]
    pub fn wake(&self) {
        // Relaxed: a count that is seen late is seen at the next look, and unparking synchronises.
        self.shared.launches.fetch_add(1, Ordering::Relaxed);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    /// Ends the thread, and with it the connections: when all that kernels have sent has left, or
    /// after `patience`. No kernel sends any more.
    pub fn end(&mut self, patience: Duration) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        let told = |order| {
            self.shared.order.store(order, Ordering::Relaxed);
            thread.thread().unpark();
        };
        told(DRAIN);
        let mut ended = self.ended.recv_timeout(patience);
        if ended == Err(mpsc::RecvTimeoutError::Timeout) {
            told(END);
            ended = self.ended.recv_timeout(ENDING);
        }
        if ended == Err(mpsc::RecvTimeoutError::Timeout) {
            line(
                Level::Warn,
                format_args!(
                    "rank {}: the proxy of a communicator has not ended, so its connections stay",
                    self.rank
                ),
            );
            return;
        }
        // It has said that it has nothing left to do.
        let _ = thread.join();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.end(Duration::ZERO);
    }
}

/// The thread itself.
struct Carrier {
    bridges: Vec<Bridge>,
    waiter: Box<dyn Waiter>,
    courses: Courses,
    shared: Arc<Shared>,
    launched: Arc<Event>,
    fault: Arc<Fault>,
    exchange: ExchangeRef,
    /// Launches that have ended, as far as is known.
    settled: u64,
    /// When that was last asked.
    asked: Instant,
}

impl Carrier {
    fn new(parts: Parts, shared: Arc<Shared>) -> Result<Carrier> {
        let Network { mut links, staging } = parts.network;
        let mut bridges = Vec::new();
        for (peer, staging) in staging.iter().enumerate() {
            let Some(staging) = staging else {
                continue;
            };
            for lane in 0..links.channels {
                let index = lane * links.nranks + peer;
                let ends = (links.sends[index].take(), links.recvs[index].take());
                let (Some(send), Some(recv)) = ends else {
                    return Err(Error::internal(format!(
                        "no connection with rank {peer} on lane {lane}"
                    )));
                };
                // SAFETY: each lane of each peer comes up once, and the network is taken once.
                let boxes = unsafe { staging.ends(lane as u32) };
                bridges.push(Bridge::new((peer, lane), boxes, (send, recv)));
            }
        }
        Ok(Carrier {
            bridges,
            waiter: links.waiter,
            courses: Courses::new(parts.planner),
            shared,
            launched: parts.launched,
            fault: parts.fault,
            exchange: parts.exchange,
            settled: 0,
            asked: Instant::now(),
        })
    }

    /// Carries until it is told to end; in trouble, raises the fault and keeps the connections
    /// until then: peers should hear of the fault before they see them closed.
    fn live(mut self, tells: Sender<()>) {
        let carried = catch_unwind(AssertUnwindSafe(|| self.carry()));
        let trouble = match carried {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error),
            Err(_) => Some(Error::internal("the proxy panicked")),
        };
        if let Some(error) = trouble {
            self.fault.raise(error);
            if let Some(reason) = self.fault.reason() {
                self.exchange.announce(reason);
            }
        }
        while self.order() == CARRY {
            std::thread::park_timeout(GRACE);
        }
        drop(self);
        // The engine may have given up waiting.
        let _ = tells.send(());
    }

    fn carry(&mut self) -> Result<()> {
        let mut moved_at = Instant::now();
        let mut launches = 0;
        // Looks in a row that found nothing.
        let mut scans = 0;
        loop {
            if self.fault.is_raised() {
                return Ok(());
            }
            let moved = self.turn()?;
            let order = self.order();
            if order == END || order == DRAIN && !moved && !self.is_laden()? {
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
            if order == CARRY {
                self.look_for_cuts(now)?;
            }
            let lively = order == DRAIN
                || now.duration_since(moved_at) < LIVELY
                || self.in_flight(now)
                || self.is_laden()?;
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
        for bridge in &mut self.bridges {
            moved |= bridge.turn(&mut self.courses)?;
        }
        Ok(moved)
    }

    fn is_laden(&self) -> Result<bool> {
        for bridge in &self.bridges {
            if bridge.is_laden()? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether launches that the engine made may still run. Asks the driver once a beat at most.
    fn in_flight(&mut self, now: Instant) -> bool {
        let launches = self.shared.launches.load(Ordering::Relaxed);
        if launches == self.settled {
            return false;
        }
        // Of a launch that is being made the event may know nothing yet.
        if launches.is_multiple_of(2) && now.duration_since(self.asked) >= BEAT {
            self.asked = now;
            if self.launched.has_happened().unwrap_or(true) {
                self.settled = launches;
                return false;
            }
        }
        true
    }

    fn look_for_cuts(&mut self, now: Instant) -> Result<()> {
        let in_flight = self.in_flight(now);
        for bridge in &self.bridges {
            if let Some((since, error)) = bridge.cut(in_flight)?
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

#[cfg(test)]
#[path = "proxy_tests.rs"]
mod tests;
