//! Steps whose payloads need no slot: bytes that travel as they lie in the user's buffers, over
//! connections that copy them in any case ([`SendFrom`], [`RecvInto`]).
//!
//! Such a step comes in parts: what it receives goes to its place in the output, what it computes
//! is written there, and from there, or from the input, it is sent. Between the parts other channels
//! run, which is no more than steps of other channels coming before or behind: channels work on different
//! parts of the buffers. The next step of the lane waits for the last part, so what a step sends is
//! out of the buffers when a later one overwrites it, as if it had been copied into a slot.
//!
//! A receiver puts into its slots what it has no step for yet, so that a sender gets as far ahead
//! of it as with slots.
//!
//! [`SendFrom`]: crate::transport::SendFrom
//! [`RecvInto`]: crate::transport::RecvInto

use super::host::HostEngine;
use super::run::{self, Run};
use super::state::Chunk;
use crate::error::Result;
use crate::schedule::{Op, Step, Visit};
use crate::transport::{Header, Links};
use crate::types::ReduceOp;

/// How far a step has come that goes without slots.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ZeroCopyProgress {
    /// What it receives is there, and what it sends is where it is sent from.
    pub arrived: bool,
    /// Bit i: it has sent to the i-th of its peers.
    pub sent: u8,
}

/// Which messages of a step need no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ZeroCopyPath {
    recv: bool,
    send: bool,
}

impl Run<'_> {
    /// Which messages of the step that lane `at` is at need no slot; `None` if all do. The same
    /// each time that it is asked about the step.
    pub(super) fn way(&self, links: &mut Links, at: usize, visit: Visit) -> Option<ZeroCopyPath> {
        let (plan, lane) = (&*self.plan, &self.channels[at]);
        let steps = &plan.schedule.steps;
        let step = &steps[visit.step];
        if step.more || visit.step > 0 && steps[visit.step - 1].more {
            return None;
        }
        let base = lane.channel * links.nranks;
        let as_it_lies = match step.op {
            // The product with a factor lies nowhere.
            Op::Send => !matches!(self.request.op, ReduceOp::PreMulSum(_)),
            Op::RecvCopySend | Op::RecvReduceCopySend => true,
            _ => false,
        };
        // What the report is to know of the input is found while a slot is filled.
        let seen = self.stats.wanted && plan.notes_input[visit.step];
        let send = as_it_lies && !seen && plan.codec_of(step.gives).is_none() && {
            let mut ends = step.send_to.iter().map(|&to| base + to as usize);
            ends.all(|index| match &mut links.sends[index] {
                Some(end) => end.zero_copy().is_some(),
                None => false,
            })
        };
        let kept = step.op == Op::Recv || step.op == Op::RecvCopySend && send;
        let recv = kept && plan.codec_of(step.takes).is_none() && {
            let from = step.recv_from.first();
            from.is_some_and(|&from| match &mut links.recvs[base + from as usize] {
                Some(end) => end.zero_copy().is_some(),
                None => false,
            })
        };
        (recv || send).then_some(ZeroCopyPath { recv, send })
    }

    /// Takes the step as far as it goes now; whether that is to its end.
    pub(super) fn advance_zero_copy(
        &mut self,
        engine: &mut HostEngine,
        at: usize,
        visit: Visit,
        step: &Step,
        way: ZeroCopyPath,
    ) -> Result<bool> {
        let channel = self.channels[at].channel;
        let chunk = self.chunk(engine.links.rank, channel, visit, step);
        if !self.channels[at].zero_copy.arrived {
            let arrived = match way.recv {
                true => self.receive(engine, channel, step, &chunk)?,
                false => self.bring_about(engine, at, visit, step)?,
            };
            if !arrived {
                return Ok(false);
            }
            self.channels[at].zero_copy.arrived = true;
        }
        if way.send && !self.send(engine, at, step, &chunk)? {
            return Ok(false);
        }
        self.channels[at].zero_copy = ZeroCopyProgress::default();
        Ok(true)
    }

    /// Brings what there is of the step's message to its place; whether that is all of it.
    fn receive(
        &mut self,
        engine: &mut HostEngine,
        channel: usize,
        step: &Step,
        chunk: &Chunk,
    ) -> Result<bool> {
        let from = step.recv_from[0] as usize;
        let index = channel * engine.links.nranks + from;
        let end = engine.links.recvs[index].as_mut();
        let Some(end) = end.and_then(|end| end.zero_copy()) else {
            return Ok(false);
        };
        let header = end.expect();
        let Some(header) = header.map_err(|error| engine.explain_break(error, step))? else {
            return Ok(false);
        };
        // Before any of it is written to the output.
        self.check_header(engine, from, &header, step, chunk)?;
        let to = chunk.output.unwrap_or(0) * self.plan.dtype.size();
        let place = self.buffers.output_mut(to, chunk.taken);
        let end = engine.links.recvs[index].as_mut();
        let Some(end) = end.and_then(|end| end.zero_copy()) else {
            return Ok(false);
        };
        let whole = end.recv_into(place);
        whole.map_err(|error| engine.explain_break(error, step))
    }

    /// Runs the part of the step that precedes sending; whether it could.
    fn bring_about(
        &mut self,
        engine: &mut HostEngine,
        at: usize,
        visit: Visit,
        step: &Step,
    ) -> Result<bool> {
        if step.op == Op::Send {
            return Ok(true);
        }
        let channel = self.channels[at].channel;
        let arrived = run::arrived(&mut engine.links, channel, step);
        if !arrived.map_err(|error| engine.explain_break(error, step))? {
            return Ok(false);
        }
        self.execute(engine, at, visit, step, true)?;
        Ok(true)
    }

    /// Sends as much as can leave to each peer; whether that is all to all.
    fn send(
        &mut self,
        engine: &mut HostEngine,
        at: usize,
        step: &Step,
        chunk: &Chunk,
    ) -> Result<bool> {
        let size = self.plan.dtype.size();
        let payload = match step.op {
            Op::Send => {
                let from = chunk.input.unwrap_or(0) * size;
                self.buffers.input(from, chunk.given)
            }
            _ => {
                let from = chunk.output.unwrap_or(0) * size;
                self.buffers.output(from, chunk.given)
            }
        };
        let header = Header {
            bytes: chunk.given as u32,
            signature: self.signature,
        };
        let base = self.channels[at].channel * engine.links.nranks;
        let zero_copy = &mut self.channels[at].zero_copy;
        let mut all = true;
        for (index, &to) in step.send_to.iter().enumerate() {
            if zero_copy.sent & 1 << index != 0 {
                continue;
            }
            let end = engine.links.sends[base + to as usize].as_mut();
            let Some(end) = end.and_then(|end| end.zero_copy()) else {
                continue;
            };
            let sent = end.send_from(header, payload);
            match sent.map_err(|error| engine.explain_break(error, step))? {
                true => {
                    zero_copy.sent |= 1 << index;
                    self.wire_bytes += chunk.given as u64;
                }
                false => all = false,
            }
        }
        Ok(all)
    }
}
