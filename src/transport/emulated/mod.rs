//! Emulated links: shared memory in which a message arrives only when the links of a machine file would have
//! carried it. `cinch bench --emulate` thereby measures schedules on machines that are not at hand, with the
//! real engine and codecs.
//!
//! Each rank stands for a GPU of the file. A message occupies every link of the path between its ranks for
//! its bytes over the link's bandwidth, after the messages that were published before. It arrives when the last
//! of the links has carried it. Links forward bytes at once and store without limit, as in the predictions of
//! [`crate::topology`]. Latency is that of the real memory.
//!
//! Connections are wrapped as they are made, so other communicators pay nothing. The inbox of each rank ends with
//! the memory of the emulation:
//! ```text
//! arrival times of the incoming slots, by FIFO
//! time at which each link is free; only the inbox of rank 0 is used
//! ```

mod ends;
mod rank_clock;
mod routes;
mod times;
mod waiter;

#[cfg(all(test, not(loom)))]
mod tests;

use self::ends::{EmulatedRecv, EmulatedSend};
use self::rank_clock::RankClock;
use self::routes::Routes;
use self::times::{ArrivalTimes, LinkClocks, WORD_BYTES};
use self::waiter::EmulatedWaiter;
use super::inbox::InboxLayout;
use super::{RecvEnd, SendEnd, Waiter};
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::Region;
use std::sync::Arc;

/// The emulated links of a rank.
pub(super) struct Emulation {
    routes: Routes,
    clock: RankClock,
}

impl Emulation {
    /// Reads the machine of `config`; `None` if it names none.
    ///
    /// # Errors
    /// Invalid argument, naming the file, if it is malformed, has no GPU for one of `nranks` ranks, or has no path
    /// between two of them.
    pub fn new(config: &Config, nranks: usize) -> Result<Option<Emulation>> {
        let Some(machine) = config.emulated_machine() else {
            return Ok(None);
        };
        let routes = Routes::new(machine, nranks, config.p2p_disable);
        let routes =
            routes.map_err(|error| error.context(format!("--emulate {}", machine.file)))?;
        Ok(Some(Emulation {
            routes,
            clock: RankClock::new(),
        }))
    }

    /// Returns the bytes that the emulation needs in each inbox of `layout`.
    pub fn inbox_bytes(&self, layout: &InboxLayout) -> usize {
        clocks_at(layout, 0) + self.routes.links() * WORD_BYTES
    }

    /// Prepares the connections of rank `me` with all other ranks, whose inboxes are `peers`.
    ///
    /// # Errors
    /// Unsupported if a rank is missing in `peers`: another transport connects it.
    pub fn connect<'a>(
        &'a self,
        layout: &'a InboxLayout,
        (me, own): (usize, &'a Arc<Region>),
        peers: &[(usize, Arc<Region>)],
    ) -> Result<EmulatedInbox<'a>> {
        let region = |rank| {
            let mut peers = peers.iter();
            match rank == me {
                true => Some(own),
                false => peers.find(|peer| peer.0 == rank).map(|peer| &peer.1),
            }
        };
        let missing = (0..layout.nranks).find(|&rank| region(rank).is_none());
        let (None, Some(first)) = (missing, region(0)) else {
            return Err(unshared());
        };
        Ok(EmulatedInbox {
            emulation: self,
            layout,
            me,
            own,
            clocks: LinkClocks::new(first.clone(), clocks_at(layout, layout.tail_at())),
        })
    }

    /// Returns `waiter`, made to wake up for messages that arrive without a ring.
    pub fn waiter(&self, waiter: Box<dyn Waiter>) -> Box<dyn Waiter> {
        Box::new(EmulatedWaiter::new(waiter, self.clock.clone()))
    }
}

/// Returns the error for ranks that do not all share memory through one transport.
pub(super) fn unshared() -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "--emulate needs ranks of one host that are all processes or all threads of one process, with \
         shared memory between them (no CINCH_HOST_ID, CINCH_SHM_DISABLE or CINCH_TRANSPORT of a network)",
    )
}

/// Returns the place of the links' words in an inbox whose memory for the emulation begins at byte `tail`.
fn clocks_at(layout: &InboxLayout, tail: usize) -> usize {
    arrivals_at(layout, tail, layout.fifos())
}

/// Returns the place of the arrival times of a FIFO; see [`clocks_at`].
fn arrivals_at(layout: &InboxLayout, tail: usize, fifo: usize) -> usize {
    tail + fifo * layout.shape.depth * WORD_BYTES
}

/// The connections of a rank while they are made.
pub(super) struct EmulatedInbox<'a> {
    emulation: &'a Emulation,
    layout: &'a InboxLayout,
    me: usize,
    own: &'a Arc<Region>,
    clocks: LinkClocks,
}

impl EmulatedInbox<'_> {
    /// Wraps the ends to and from `peer` on `channel`; `region` is the inbox of the peer.
    pub fn wrap(
        &self,
        (peer, region): (usize, &Arc<Region>),
        channel: usize,
        send: impl SendEnd + 'static,
        recv: impl RecvEnd + 'static,
    ) -> (Box<dyn SendEnd>, Box<dyn RecvEnd>) {
        let arrivals = |region: &Arc<Region>, from: usize| {
            let fifo = self.layout.fifo(channel, from);
            let at = arrivals_at(self.layout, self.layout.tail_at(), fifo);
            ArrivalTimes::new(region.clone(), at, self.layout.shape.depth)
        };
        let clock = &self.emulation.clock;
        let route = self.emulation.routes.route(self.me, peer).into();
        let send = EmulatedSend::new(
            send,
            (self.clocks.clone(), route),
            arrivals(region, self.me),
            clock.clone(),
        );
        let recv = EmulatedRecv::new(recv, arrivals(self.own, peer), clock.clone());
        (Box::new(send), Box::new(recv))
    }
}
