//! The messages of a step: whether they have arrived, belong to the call, and have left this process.

use super::engine::HostEngine;
use super::state::ZeroCopyProgress;
use crate::error::{Error, ErrorKind, Result};
use crate::schedule::Step;
use crate::transport::{self, Header, Links};
use crate::types::{CallSignature, SIGNATURE_WORDS};

/// Place of a step in a running call, for sentences about missing messages.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepPlace {
    pub channel: usize,
    pub pass: usize,
    pub step: usize,
}

/// Returns whether every message that the step needs has arrived.
#[inline]
pub(super) fn arrived(links: &mut Links, channel: usize, step: &Step) -> Result<bool> {
    let base = channel * links.nranks;
    for &from in step.recv_from.iter() {
        if let Some(end) = &mut links.recvs[base + from as usize]
            && !end.ready()?
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns whether every message that the step needs has arrived, and every slot that it fills is free.
#[inline]
pub(super) fn is_runnable(links: &mut Links, channel: usize, step: &Step) -> Result<bool> {
    Ok(arrived(links, channel, step)? && has_room(links, channel, step)?)
}

/// Returns whether every slot that the step fills is free.
#[inline]
fn has_room(links: &mut Links, channel: usize, step: &Step) -> Result<bool> {
    let base = channel * links.nranks;
    for &to in step.send_to.iter() {
        if let Some(end) = &mut links.sends[base + to as usize]
            && !end.ready()?
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Adds the ranks for which a step waits, each with the missing message. A step that uses slots has the default
/// `progress`.
pub(super) fn missing_of_step(
    step: &Step,
    at: StepPlace,
    signature: &[u64; SIGNATURE_WORDS],
    progress: ZeroCopyProgress,
    links: &mut Links,
    found: &mut Vec<(usize, String)>,
) {
    let what = |verb: &str| {
        format!(
            "{verb} chunk {} in step {} of pass {} on channel {} of {}",
            step.chunk,
            at.step,
            at.pass,
            at.channel,
            CallSignature::describe(signature)
        )
    };
    let base = at.channel * links.nranks;
    let ZeroCopyProgress { arrived, sent } = progress;
    for &from in step.recv_from.iter().filter(|_| !arrived) {
        let end = links.recvs[base + from as usize].as_mut();
        if end.is_some_and(|end| !end.ready().unwrap_or(false)) {
            found.push((from as usize, what("to send")));
        }
    }
    for (index, &to) in step.send_to.iter().enumerate() {
        let end = links.sends[base + to as usize].as_mut();
        let unsent = arrived && sent & 1 << index == 0;
        if unsent || end.is_some_and(|end| !end.ready().unwrap_or(false)) {
            found.push((to as usize, what("to take")));
        }
    }
}

/// Adds the ranks that have not taken what a call has sent them.
pub(super) fn missing_flushes(
    signature: &[u64; SIGNATURE_WORDS],
    links: &mut Links,
    found: &mut Vec<(usize, String)>,
) {
    let nranks = links.nranks;
    for (index, end) in links.sends.iter_mut().enumerate() {
        let end = end.as_mut();
        if end.is_some_and(|end| !end.flushed().unwrap_or(false)) {
            let what = CallSignature::describe(signature);
            found.push((index % nranks, format!("to take what was sent in {what}")));
        }
    }
}

impl HostEngine {
    /// Checks that every message of a step belongs to the call with this signature, and has `taken` bytes.
    #[inline]
    pub(super) fn check_messages(
        &self,
        signature: &[u64; SIGNATURE_WORDS],
        channel: usize,
        step: &Step,
        taken: usize,
    ) -> Result<()> {
        let links = &self.links;
        for &from in step.recv_from.iter() {
            let Some(end) = &links.recvs[channel * links.nranks + from as usize] else {
                continue;
            };
            let header = end.header();
            self.check_header(from as usize, &header, signature, step, taken)?;
            if links.checks_data {
                self.check_payload(from as usize, &header, end.payload())?;
            }
        }
        Ok(())
    }

    /// Compares the CRC-32C of a payload from rank `from` with its header.
    fn check_payload(&self, from: usize, header: &Header, payload: &[u8]) -> Result<()> {
        let found = crc32c::crc32c(payload);
        if found == header.crc {
            return Ok(());
        }
        let kind = self.links.kinds[from].map_or("no transport", |kind| kind.name());
        Err(transport::damaged(
            &self.exchange.peers()[from],
            kind,
            header,
            found,
        ))
    }

    /// Checks that a message from rank `from` belongs to the call with this signature, and has `taken` bytes.
    #[inline]
    pub(super) fn check_header(
        &self,
        from: usize,
        header: &Header,
        signature: &[u64; SIGNATURE_WORDS],
        step: &Step,
        taken: usize,
    ) -> Result<()> {
        if header.signature != *signature {
            return Err(self.disagreement(from, &header.signature, signature));
        }
        if header.bytes as usize == taken {
            return Ok(());
        }
        let peers = self.exchange.peers();
        let what = format!(
            "{} sent {} bytes for chunk {} of {}, and {} expected {taken}",
            peers[from],
            header.bytes,
            step.chunk,
            CallSignature::describe(signature),
            peers[self.links.rank],
        );
        Err(Error::new(ErrorKind::Mismatch, what))
    }

    /// Returns whether all messages of these steps on the first `channels` channels have left this process.
    #[inline]
    pub(super) fn has_flushed(&mut self, steps: &[Step], channels: usize) -> Result<bool> {
        let nranks = self.links.nranks;
        for channel in 0..channels {
            for step in steps {
                for &to in step.send_to.iter() {
                    let Some(end) = &mut self.links.sends[channel * nranks + to as usize] else {
                        continue;
                    };
                    let flushed = end.flushed();
                    if !flushed.map_err(|error| self.explain_break(error, step))? {
                        return Ok(false);
                    }
                }
            }
        }
        Ok(true)
    }
}
