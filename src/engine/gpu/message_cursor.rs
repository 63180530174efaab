//! Message sizes of a call, and the proxy's position among the call's messages.
//!
//! A slot does not state how many of its bytes are used: a peer's kernel runs the same plan and knows. The
//! first message of a launch on each channel and connection carries the call's signature. From it the proxy
//! makes the plan that the engine uses, and walks the plan in the kernel's order ([`crate::schedule::walk`]).
//! So the engine submits no calls to the proxy, and a graph's replay needs no special case.

use super::pack::PackedSchedule;
use crate::error::{Error, ErrorKind, Result};
use crate::plan::{Plan, Planner, Request};
use crate::types::{CallSignature, CodecSetting, Fused, ReduceOp, SIGNATURE_WORDS};
use std::collections::HashMap;
use std::sync::Arc;

/// Number of calls whose message sizes are kept. A program with more different calls makes some
/// plans again.
const KEPT_CALLS: usize = 1024;

/// The messages that this rank sends and receives in a call of one shape.
#[derive(Debug)]
pub(super) struct MessageSizes {
    plan: Arc<Plan>,
    stages: usize,
    /// Messages to each rank; the index is the rank.
    sends: Vec<Vec<StageAndPart>>,
    /// Messages from each rank; the index is the rank.
    recvs: Vec<Vec<StageAndPart>>,
}

/// Stage and part of one message of a pass. The messages of a connection are sorted from the latest stage to
/// the first, because at any time the oldest pass goes first. Messages of one stage keep the order of its
/// steps.
type StageAndPart = (usize, usize);

impl MessageSizes {
    /// Lists the messages of `plan`.
    ///
    /// # Errors
    /// See [`PackedSchedule::launches`].
    pub fn new(plan: Arc<Plan>) -> Result<MessageSizes> {
        // All messages of a connection are in one launch.
        let launches = PackedSchedule::launches(&plan.schedule, &plan.pattern)?;
        let [mut sends, mut recvs] = [(); 2].map(|()| vec![Vec::new(); plan.pattern.nranks]);
        for packed in &launches {
            let rank = |peer: u8| usize::from(packed.ranks[usize::from(peer)]);
            for step in &packed.steps {
                let message = (usize::from(step.stage), usize::from(step.part));
                let (nrecv, nsend) = (usize::from(step.nrecv), usize::from(step.nsend));
                let peers = &packed.peers[usize::from(step.peers)..][..nrecv + nsend];
                let (from, to) = peers.split_at(nrecv);
                from.iter()
                    .for_each(|&peer| recvs[rank(peer)].push(message));
                to.iter().for_each(|&peer| sends[rank(peer)].push(message));
            }
        }
        for messages in sends.iter_mut().chain(&mut recvs) {
            // The stable sort keeps the steps of one stage in order.
            messages.sort_by_key(|&(stage, _)| std::cmp::Reverse(stage));
        }
        Ok(MessageSizes {
            stages: plan.schedule.stages,
            plan,
            sends,
            recvs,
        })
    }
}

/// Cache that makes [`MessageSizes`] from signatures.
#[derive(Debug)]
pub(super) struct MessageSizesCache {
    planner: Planner,
    /// Message sizes by signature; the key leaves out the sequence number.
    known: HashMap<[u64; SIGNATURE_WORDS - 1], Arc<MessageSizes>>,
}

impl MessageSizesCache {
    /// Makes an empty cache. `planner` yields the engine's plans.
    pub fn new(planner: Planner) -> MessageSizesCache {
        MessageSizesCache {
            planner,
            known: HashMap::new(),
        }
    }

    /// Returns the message sizes of the call with this signature.
    ///
    /// # Errors
    /// Internal if the words are no signature; see [`Planner::plan`] for calls that this rank cannot plan.
    pub fn get(&mut self, signature: &[u64; SIGNATURE_WORDS]) -> Result<Arc<MessageSizes>> {
        let [call, ranks, count, _, codec] = *signature;
        let key = [call, ranks, count, codec];
        if let Some(known) = self.known.get(&key) {
            return Ok(known.clone());
        }
        let sizes = Arc::new(self.make(signature)?);
        if self.known.len() >= KEPT_CALLS {
            self.known.clear();
        }
        self.known.insert(key, sizes.clone());
        Ok(sizes)
    }

    fn make(&mut self, signature: &[u64; SIGNATURE_WORDS]) -> Result<MessageSizes> {
        let nranks = self.planner.limits().nranks;
        let call = CallSignature::from_words(signature)
            .filter(|call| (call.root.max(call.peer) as usize) < nranks)
            .ok_or_else(|| Error::internal("no signature"))?;
        // A plan does not depend on the call's operator, tensor and sequence number, so any values
        // do here.
        let plan = self.planner.plan(&Request {
            collective: call.collective,
            dtype: call.dtype,
            op: ReduceOp::Sum,
            count: usize::try_from(call.count).unwrap_or(usize::MAX),
            root: call.root as usize,
            peer: call.peer as usize,
            codec: CodecSetting {
                intra: call.intra,
                inter: call.codec,
                auto: false,
            },
            algorithm: Some(call.algorithm),
            tuning: call.tuning,
            tensor: None,
            feedback: None,
            fused: Fused::ALONE,
        })?;
        MessageSizes::new(plan)
    }
}

/// Direction in which the proxy moves messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MessageDirection {
    /// From kernels of this rank to the peer.
    ToPeer,
    /// From the peer to kernels of this rank.
    FromPeer,
}

/// Position of one direction of one channel in its current call.
#[derive(Debug)]
pub(super) struct MessageCursor {
    direction: MessageDirection,
    peer: usize,
    channel: usize,
    sizes: Option<Arc<MessageSizes>>,
    signature: [u64; SIGNATURE_WORDS],
    /// Time step of the walk: pass p runs stage s at time p + s.
    time: usize,
    /// Index of the next message of the current time step.
    at: usize,
}

impl MessageCursor {
    /// Makes a cursor without a call.
    pub fn new(direction: MessageDirection, peer: usize, channel: usize) -> MessageCursor {
        MessageCursor {
            direction,
            peer,
            channel,
            sizes: None,
            signature: [0; SIGNATURE_WORDS],
            time: 0,
            at: 0,
        }
    }

    /// Returns the bytes of the call's next message; `None` after the last message.
    pub fn next(&mut self) -> Option<usize> {
        let sizes = self.sizes.as_ref()?;
        let (plan, channels) = (&*sizes.plan, sizes.plan.channels);
        let messages = match self.direction {
            MessageDirection::ToPeer => &sizes.sends[self.peer],
            MessageDirection::FromPeer => &sizes.recvs[self.peer],
        };
        // The channel's block runs the passes channel, channel + channels, channel + 2 * channels,
        // ...
        let passes = if self.channel < channels {
            let all = plan.geometry.passes();
            all.saturating_sub(self.channel).div_ceil(channels)
        } else {
            0
        };
        let times = if passes == 0 {
            0
        } else {
            passes + sizes.stages - 1
        };
        while self.time < times {
            while let Some(&(stage, part)) = messages.get(self.at) {
                self.at += 1;
                if stage <= self.time && self.time - stage < passes {
                    let pass = self.channel + (self.time - stage) * channels;
                    let elements = plan.geometry.range(pass, part).len();
                    return Some(plan.wire_bytes(elements));
                }
            }
            self.at = 0;
            self.time += 1;
        }
        self.sizes = None;
        None
    }

    /// Begins the call with this signature; returns the bytes of its first message.
    ///
    /// # Errors
    /// If there is no such call, or it has no message on this connection: internal if this rank's kernels
    /// sent the signature, mismatch naming the peer if the peer did.
    pub fn begin(
        &mut self,
        signature: [u64; SIGNATURE_WORDS],
        message_sizes: &mut MessageSizesCache,
    ) -> Result<usize> {
        let sizes = message_sizes.get(&signature);
        let sizes = sizes.map_err(|error| self.wrong(&signature, "is of no call", Some(error)))?;
        self.sizes = Some(sizes);
        (self.signature, self.time, self.at) = (signature, 0, 0);
        self.next()
            .ok_or_else(|| self.wrong(&signature, "is not in its schedule", None))
    }

    /// Returns the bytes that the peer's next message must have, given the signature in its header.
    ///
    /// # Errors
    /// Mismatch, naming the peer, if its call has no such message.
    pub fn expect(
        &mut self,
        signature: [u64; SIGNATURE_WORDS],
        message_sizes: &mut MessageSizesCache,
    ) -> Result<usize> {
        match self.next() {
            Some(bytes) if signature == self.signature => Ok(bytes),
            Some(_) => Err(Error::new(
                ErrorKind::Mismatch,
                format!(
                    "rank {} began {} on channel {} in the middle of {}",
                    self.peer,
                    CallSignature::describe(&signature),
                    self.channel,
                    CallSignature::describe(&self.signature)
                ),
            )),
            None => self.begin(signature, message_sizes),
        }
    }

    /// Returns the signature of the current call.
    pub fn signature(&self) -> [u64; SIGNATURE_WORDS] {
        self.signature
    }

    #[cold]
    fn wrong(&self, signature: &[u64; SIGNATURE_WORDS], what: &str, why: Option<Error>) -> Error {
        let (kind, sent) = match self.direction {
            MessageDirection::ToPeer => (
                ErrorKind::Internal,
                format!("a kernel has sent rank {}", self.peer),
            ),
            MessageDirection::FromPeer => (ErrorKind::Mismatch, format!("rank {} sent", self.peer)),
        };
        let call = CallSignature::describe(signature);
        let why = why.map_or(String::new(), |error| format!(": {error}"));
        let channel = self.channel;
        Error::new(
            kind,
            format!("{sent} a message on channel {channel} that {what} ({call}){why}"),
        )
    }
}

#[cfg(test)]
mod tests;
