//! How a rank waits for its peers, whatever carries their messages.

use super::Waiter;
use super::rdma::Endpoint;
use super::tcp::SharedPump;
use crate::error::Result;
use crate::mem::Sleeper;
use crate::sync::{Backoff, Pause};
use crate::sys::socket::{self, Interest};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A doorbell does not end a poll of descriptors, so a rank that has both looks up this often.
const BOTH: Duration = Duration::from_millis(1);

/// How often a rank that sleeps asks whether the hosts it is connected to still answer.
const LIFE: Duration = Duration::from_millis(500);

/// Pauses in one spin: long enough to spare the other hardware thread, short beside a message.
const PAUSES: u32 = 4;

/// Waits on the doorbell of the own region, on all sockets, and on completions of devices.
#[derive(Debug)]
pub(super) struct RankWaiter {
    /// If any peer is on this host.
    sleeper: Option<Sleeper>,
    pumps: Vec<SharedPump>,
    /// If any peer is reached by RDMA.
    verbs: Option<Arc<Endpoint>>,
    /// Whether completions since the last scan will end a sleep.
    armed: bool,
    interests: Vec<Interest>,
    /// Index of the pump that each interest belongs to.
    owners: Vec<usize>,
    backoff: Backoff,
    /// When to ask next.
    next_check: Instant,
}

impl RankWaiter {
    /// Waits as `backoff` says.
    pub fn new(
        sleeper: Option<Sleeper>,
        pumps: Vec<SharedPump>,
        verbs: Option<Arc<Endpoint>>,
        backoff: Backoff,
    ) -> RankWaiter {
        RankWaiter {
            sleeper,
            verbs,
            armed: false,
            interests: Vec::new(),
            owners: Vec::new(),
            pumps,
            backoff,
            next_check: Instant::now(),
        }
    }

    /// Waits until sockets can be moved along, and moves those, or until a device has completed
    /// something. Reading is level-triggered: what
    /// came before the wait ends it at once.
    fn poll(&mut self, limit: Duration) -> Result<()> {
        self.interests.clear();
        self.owners.clear();
        for (index, pump) in self.pumps.iter().enumerate() {
            pump.interests(&mut self.interests)?;
            self.owners.resize(self.interests.len(), index);
        }
        if let Some(verbs) = &self.verbs {
            verbs.interests(&mut self.interests);
        }
        if socket::poll(&mut self.interests, limit)? == 0 {
            return Ok(());
        }
        let mut last = None;
        for (interest, &owner) in self.interests.iter().zip(&self.owners) {
            if interest.revents != 0 && last != Some(owner) {
                self.pumps[owner].progress();
                last = Some(owner);
            }
        }
        // Those of devices come last, and have no owner.
        let devices = &self.interests[self.owners.len()..];
        if let Some(verbs) = &self.verbs
            && devices.iter().any(|interest| interest.revents != 0)
        {
            verbs.wake();
        }
        Ok(())
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
            Pause::Sleep => {
                if let Some(verbs) = &self.verbs
                    && !std::mem::replace(&mut self.armed, true)
                {
                    // What completed before this shows in the scan that follows.
                    verbs.arm();
                    return Ok(());
                }
                if !self.pumps.is_empty() || self.verbs.is_some() {
                    self.armed = false;
                    let limit = match self.sleeper {
                        Some(_) => limit.min(BOTH),
                        None => limit,
                    };
                    let now = Instant::now();
                    if now >= self.next_check {
                        self.next_check = now + LIFE;
                        self.pumps.iter().for_each(SharedPump::listen_for_life);
                        if let Some(verbs) = &self.verbs {
                            verbs.listen_for_life();
                        }
                    }
                    return self.poll(limit);
                }
                match &mut self.sleeper {
                    Some(sleeper) => sleeper.sleep(limit.min(self.backoff.sleep_timeout())),
                    // No peers: nothing to wait for, but a caller that does must not burn a core.
                    None => std::thread::sleep(limit.min(BOTH)),
                }
                return Ok(());
            }
        }
        if let Some(verbs) = &self.verbs {
            verbs.progress();
        }
        if self.pumps.is_empty() {
            return Ok(());
        }
        self.poll(Duration::ZERO)
    }
}
