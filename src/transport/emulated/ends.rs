//! The ends of a connection over emulated links.

use super::rank_clock::RankClock;
use super::routes::RouteLink;
use super::times::{ArrivalTimes, LinkClocks};
use crate::error::Result;
use crate::sys::clock::monotonic_nanoseconds;
use crate::transport::{Header, RecvEnd, SendEnd};

/// Sends over emulated links.
#[derive(Debug)]
pub(super) struct EmulatedSend<E> {
    end: E,
    links: LinkClocks,
    route: Box<[RouteLink]>,
    arrivals: ArrivalTimes,
    clock: RankClock,
    /// Number of published messages.
    sent: u64,
    /// Time at which the last published message arrives.
    last_arrival: u64,
}

impl<E: SendEnd> EmulatedSend<E> {
    /// Wraps an end without a zero-copy interface. Messages cross the links of `route`; `arrivals` lie in the
    /// receiver's inbox.
    pub fn new(
        end: E,
        (links, route): (LinkClocks, Box<[RouteLink]>),
        arrivals: ArrivalTimes,
        clock: RankClock,
    ) -> EmulatedSend<E> {
        EmulatedSend {
            end,
            links,
            route,
            arrivals,
            clock,
            sent: 0,
            last_arrival: 0,
        }
    }
}

impl<E: SendEnd> SendEnd for EmulatedSend<E> {
    fn ready(&mut self) -> Result<bool> {
        self.end.ready()
    }

    fn slot(&mut self) -> &mut [u8] {
        self.end.slot()
    }

    fn written(&self) -> &[u8] {
        self.end.written()
    }

    fn publish(&mut self, header: Header) {
        let now = self.clock.publication();
        let arrival = self.links.reserve(&self.route, header.bytes, now);
        self.arrivals.set(self.sent, arrival);
        self.sent += 1;
        self.last_arrival = arrival;
        self.end.publish(header);
    }

    /// Messages leave when they arrive. A rank that has closed therefore has no message under way, which its peers
    /// would report as missing.
    fn flushed(&mut self) -> Result<bool> {
        if monotonic_nanoseconds() < self.last_arrival {
            self.clock.expect(self.last_arrival);
            return Ok(false);
        }
        self.clock.reset();
        self.end.flushed()
    }
}

/// Receives over emulated links.
#[derive(Debug)]
pub(super) struct EmulatedRecv<E> {
    end: E,
    arrivals: ArrivalTimes,
    clock: RankClock,
    /// Number of released messages.
    taken: u64,
    /// Whether the next message has arrived.
    has_arrived: bool,
}

impl<E: RecvEnd> EmulatedRecv<E> {
    /// Wraps an end without a zero-copy interface. `arrivals` lie in this rank's inbox.
    pub fn new(end: E, arrivals: ArrivalTimes, clock: RankClock) -> EmulatedRecv<E> {
        EmulatedRecv {
            end,
            arrivals,
            clock,
            taken: 0,
            has_arrived: false,
        }
    }
}

impl<E: RecvEnd> RecvEnd for EmulatedRecv<E> {
    fn ready(&mut self) -> Result<bool> {
        if self.has_arrived || !self.end.ready()? {
            return Ok(self.has_arrived);
        }
        let arrival = self.arrivals.get(self.taken);
        let now = monotonic_nanoseconds();
        self.has_arrived = now >= arrival;
        match self.has_arrived {
            true => self.clock.end_wait(arrival, now),
            false => self.clock.expect(arrival),
        }
        Ok(self.has_arrived)
    }

    fn header(&self) -> Header {
        self.end.header()
    }

    fn payload(&self) -> &[u8] {
        self.end.payload()
    }

    fn release(&mut self) {
        self.taken += 1;
        self.has_arrived = false;
        self.end.release();
    }
}
