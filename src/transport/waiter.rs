//! How a rank waits for its peers over all its transports.

use super::Waiter;
use super::contract::Pollable;
use crate::error::Result;
use crate::mem::Sleeper;
use crate::sync::{Backoff, Pause};
use crate::sys::socket::{self, Interest};
use std::time::{Duration, Instant};

/// Longest poll of descriptors by a rank whose peers may ring its doorbell: a ring does not end
/// such a poll.
const DOORBELL_CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// Interval at which a sleeping rank checks that the hosts of its peers still answer.
const PEER_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Number of pause instructions between two looks for a message, which is noticed up to that much later. One takes
/// 40 to 140 cycles, by processor.
const PAUSES: u32 = 1;

/// Number of looks for a message before the first [`Waiter::idle`]. They take some microseconds, in which a peer that makes
/// the same call has usually sent its message.
const SPINS: u32 = 64;

/// Waits on the doorbell of the inbox and on the descriptors of all transports.
#[derive(Debug)]
pub(super) struct RankWaiter {
    /// Sleeps on the doorbell; `None` without an inbox.
    sleeper: Option<Sleeper>,
    /// Transports whose descriptors the waiter polls.
    pollables: Vec<Box<dyn Pollable>>,
    /// Whether some transport must be polled while the rank spins.
    is_polled: bool,
    /// Whether events since the last scan end a sleep.
    armed: bool,
    interests: Vec<Interest>,
    /// For each pollable, the index at which its part of `interests` ends.
    parts: Vec<usize>,
    backoff: Backoff,
    next_peer_check: Instant,
}

impl RankWaiter {
    /// Creates the waiter of a rank. `crowded` is true if ranks of its host share cores.
    pub fn new(
        sleeper: Option<Sleeper>,
        pollables: Vec<Box<dyn Pollable>>,
        crowded: bool,
    ) -> RankWaiter {
        let is_polled = pollables.iter().any(|pollable| pollable.is_polled());
        let backoff = Backoff::new(crowded);
        RankWaiter {
            sleeper,
            pollables,
            is_polled,
            armed: false,
            interests: Vec::new(),
            parts: Vec::new(),
            backoff: match is_polled {
                true => backoff.with_system_calls(),
                false => backoff,
            },
            next_peer_check: Instant::now(),
        }
    }

    /// Waits until a descriptor is ready, and lets its transport handle the event. Readiness is
    /// level-triggered: an event before the wait ends it at once.
    fn poll(&mut self, limit: Duration) -> Result<()> {
        self.interests.clear();
        self.parts.clear();
        for pollable in &mut self.pollables {
            pollable.interests(&mut self.interests)?;
            self.parts.push(self.interests.len());
        }
        if socket::poll(&mut self.interests, limit)? == 0 {
            return Ok(());
        }
        let mut begin = 0;
        for (pollable, &end) in self.pollables.iter_mut().zip(&self.parts) {
            let part = &self.interests[begin..end];
            if part.iter().any(|interest| interest.revents != 0) {
                pollable.handle(part);
            }
            begin = end;
        }
        Ok(())
    }

    fn sleep(&mut self, limit: Duration) -> Result<()> {
        if self.pollables.is_empty() {
            match &mut self.sleeper {
                Some(sleeper) => sleeper.sleep(limit.min(self.backoff.sleep_timeout())),
                // A rank without peers waits for nothing, but must not burn a core.
                None => std::thread::sleep(limit.min(DOORBELL_CHECK_INTERVAL)),
            }
            return Ok(());
        }
        if !std::mem::replace(&mut self.armed, true) {
            let mut must_scan = false;
            for pollable in &mut self.pollables {
                must_scan |= pollable.arm();
            }
            if must_scan {
                return Ok(());
            }
        }
        self.armed = false;
        let now = Instant::now();
        if now >= self.next_peer_check {
            self.next_peer_check = now + PEER_CHECK_INTERVAL;
            self.pollables
                .iter_mut()
                .for_each(|pollable| pollable.check_peers());
        }
        self.poll(match self.sleeper {
            Some(_) => limit.min(DOORBELL_CHECK_INTERVAL),
            None => limit,
        })
    }
}

impl Waiter for RankWaiter {
    fn idle(&mut self, scans: u32, limit: Duration) -> Result<()> {
        if scans == 0 {
            self.armed = false;
            if let Some(sleeper) = &mut self.sleeper {
                sleeper.stay_awake();
            }
        }
        match self.backoff.pause(scans) {
            Pause::Spin => {
                for _ in 0..PAUSES {
                    std::hint::spin_loop();
                }
            }
            Pause::Yield => std::thread::yield_now(),
            Pause::Sleep => return self.sleep(limit),
        }
        for pollable in &mut self.pollables {
            pollable.progress();
        }
        match self.is_polled {
            true => self.poll(Duration::ZERO),
            false => Ok(()),
        }
    }

    fn leaves_core(&self, scans: u32) -> bool {
        self.backoff.pause(scans) != Pause::Spin
    }

    fn spins(&self) -> u32 {
        match self.pollables.is_empty() && !self.leaves_core(SPINS) {
            true => SPINS,
            false => 0,
        }
    }
}
