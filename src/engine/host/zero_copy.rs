//! Steps without slots: a transport sends raw messages directly from the caller's buffers, or receives into
//! them ([`SendFrom`], [`RecvInto`]). A slot would cost one more copy.
//!
//! Such a step runs in parts: it receives into the output, or computes its result there; then it sends from
//! the output or the input. Other channels run between the parts, which is safe because channels work on
//! different ranges of the buffers. The channel's next step waits for the last part, so a later step never
//! overwrites bytes that are still to be sent.
//!
//! A receiver stores messages for which no step waits yet in its slots. So a sender can run as far ahead as
//! it can with slots.
//!
//! [`SendFrom`]: crate::transport::SendFrom
//! [`RecvInto`]: crate::transport::RecvInto

use super::engine::HostEngine;
use super::messages;
use super::run::Run;
use super::state::{Chunk, ZeroCopyProgress};
use crate::error::Result;
use crate::schedule::{Op, Step, Visit};
use crate::transport::{Header, Links};

/// The messages of a step that need no slot: received messages, sent messages, or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ZeroCopyPath {
    recv: bool,
    send: bool,
}

impl Run<'_> {
    /// Returns which messages of channel `at`'s current step need no slot; `None` if all messages use slots.
    /// The result for one step is always the same.
    pub(super) fn zero_copy_path(
        &self,
        links: &mut Links,
        at: usize,
        visit: Visit,
    ) -> Option<ZeroCopyPath> {
        let (plan, run) = (&*self.plan, &self.channels[at]);
        let steps = &plan.schedule.steps;
        let step = &steps[visit.step];
        if step.more || visit.step > 0 && steps[visit.step - 1].more {
            return None;
        }
        let base = run.channel * links.nranks;
        let sends_buffer = match step.op {
            // With a factor, the message is the product of input and factor, which no buffer holds.
            Op::Send => !self.arithmetic.own.scales(),
            Op::RecvCopySend | Op::RecvReduceCopySend => true,
            _ => false,
        };
        // Only filling a slot collects the input statistics for the report, so such a step must use
        // slots.
        let observes = self.stats.wanted && plan.notes_input[visit.step];
        let send = sends_buffer && !observes && plan.codec_of(step.gives).is_none() && {
            let mut ends = step.send_to.iter().map(|&to| base + to as usize);
            ends.all(|index| match &mut links.sends[index] {
                Some(end) => end.zero_copy().is_some(),
                None => false,
            })
        };
        let recvs_buffer = step.op == Op::Recv || step.op == Op::RecvCopySend && send;
        let recv = recvs_buffer && plan.codec_of(step.takes).is_none() && {
            let from = step.recv_from.first();
            from.is_some_and(|&from| match &mut links.recvs[base + from as usize] {
                Some(end) => end.zero_copy().is_some(),
                None => false,
            })
        };
        (recv || send).then_some(ZeroCopyPath { recv, send })
    }

    /// Runs as many parts of the step as can run now. Returns whether the step is complete.
    pub(super) fn advance_zero_copy(
        &mut self,
        engine: &mut HostEngine,
        at: usize,
        visit: Visit,
        step: &Step,
        path: ZeroCopyPath,
    ) -> Result<bool> {
        let channel = self.channels[at].channel;
        let chunk = self.chunk(engine.links.rank, channel, visit, step);
        if !self.channels[at].zero_copy.arrived {
            let arrived = if path.recv {
                self.recv_into_output(engine, channel, step, &chunk)?
            } else {
                self.execute_without_sending(engine, at, visit, step)?
            };
            if !arrived {
                return Ok(false);
            }
            self.channels[at].zero_copy.arrived = true;
        }
        if path.send && !self.send_from_buffers(engine, at, step, &chunk)? {
            return Ok(false);
        }
        self.channels[at].zero_copy = ZeroCopyProgress::default();
        Ok(true)
    }

    /// Receives the bytes that have arrived of the step's message into the output. Returns whether the
    /// message is complete.
    fn recv_into_output(
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
        // The header is checked before the first write to the output.
        engine.check_header(from, &header, &self.signature, step, chunk.taken)?;
        let to = chunk.output.unwrap_or(0) * self.plan.dtype.size();
        let output = self.buffers.output_mut(to, chunk.taken);
        let end = engine.links.recvs[index].as_mut();
        let Some(end) = end.and_then(|end| end.zero_copy()) else {
            return Ok(false);
        };
        let complete = end.recv_into(output);
        complete.map_err(|error| engine.explain_break(error, step))
    }

    /// Executes the step except for its sends. Returns whether its messages had arrived.
    fn execute_without_sending(
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
        let arrived = messages::arrived(&mut engine.links, channel, step);
        if !arrived.map_err(|error| engine.explain_break(error, step))? {
            return Ok(false);
        }
        self.execute(engine, at, visit, step, false)?;
        Ok(true)
    }

    /// Sends as much as possible to each peer. Returns whether all peers have been sent the whole
    /// message.
    fn send_from_buffers(
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
            crc: 0,
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
            if sent.map_err(|error| engine.explain_break(error, step))? {
                zero_copy.sent |= 1 << index;
                self.wire_bytes += chunk.given as u64;
            } else {
                all = false;
            }
        }
        Ok(all)
    }
}
