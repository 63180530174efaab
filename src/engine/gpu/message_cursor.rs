//! What a rank's kernels send and take in a call, message by message.
//!
//! A slot does not say how many bytes of it are used: a peer's kernel knows, because it runs the
//! same plan. So does the proxy, and it knows what length each message has that comes from a peer. The first message of a launch on each channel and connection carries
//! the signature of its call; from that the proxy makes the plan that the engine made, and walks
//! it as the kernel does ([`crate::schedule::walk`]'s order). Hence nobody tells the proxy of calls,
//! and launches that a graph replays are no different from others.

use super::pack::PackedSchedule;
use crate::error::{Error, ErrorKind, Result};
use crate::plan::{Plan, Planner, Request};
use crate::types::{CallSignature, CodecSetting, Fused, ReduceOp, SIGNATURE_WORDS};
use std::collections::HashMap;
use std::sync::Arc;

/// MessageSizesCache that are kept; a program with more shapes than this pays for planning again.
const KEPT: usize = 1024;

/// What this rank sends and takes in a call of one shape.
#[derive(Debug)]
pub(super) struct MessageSizes {
    plan: Arc<Plan>,
    stages: usize,
    /// By receiver.
    sends: Vec<Vec<Message>>,
    /// By sender.
    recvs: Vec<Vec<Message>>,
}

/// Stage and part of a message of a pass. Those of one connection stand with the latest stage
/// first, as the oldest pass comes first; those of one stage in the order of its steps.
type Message = (usize, usize);

impl MessageSizes {
    /// That of `plan`.
    ///
    /// # Errors
    /// As for [`PackedSchedule::new`].
    pub fn new(plan: Arc<Plan>) -> Result<MessageSizes> {
        let packed = PackedSchedule::new(&plan.schedule, &plan.pattern)?;
        let [mut sends, mut recvs] = [(); 2].map(|()| vec![Vec::new(); plan.pattern.nranks]);
        for step in &packed.steps {
            let message = (usize::from(step.stage), usize::from(step.part));
            let (nrecv, nsend) = (usize::from(step.nrecv), usize::from(step.nsend));
            let peers = &packed.peers[usize::from(step.peers)..][..nrecv + nsend];
            let (from, to) = peers.split_at(nrecv);
            from.iter()
                .for_each(|&peer| recvs[usize::from(peer)].push(message));
            to.iter()
                .for_each(|&peer| sends[usize::from(peer)].push(message));
        }
        for messages in sends.iter_mut().chain(&mut recvs) {
            // Stable: steps of one stage stay in order.
            messages.sort_by_key(|&(stage, _)| std::cmp::Reverse(stage));
        }
        Ok(MessageSizes {
            stages: usize::from(packed.stages),
            plan,
            sends,
            recvs,
        })
    }
}

/// Makes message_sizes from signatures, and keeps them.
#[derive(Debug)]
pub(super) struct MessageSizesCache {
    planner: Planner,
    /// By signature, without the number of the call.
    known: HashMap<[u64; SIGNATURE_WORDS - 1], Arc<MessageSizes>>,
}

impl MessageSizesCache {
    /// From plans of `planner`, which plans as the engine does.
    pub fn new(planner: Planner) -> MessageSizesCache {
        MessageSizesCache {
            planner,
            known: HashMap::new(),
        }
    }

    /// The sizes of the call with this signature.
    ///
    /// # Errors
    /// Why it is none of a call that this rank can take part in.
    pub fn of(&mut self, signature: &[u64; SIGNATURE_WORDS]) -> Result<Arc<MessageSizes>> {
        let [call, ranks, count, _, codec] = *signature;
        let key = [call, ranks, count, codec];
        if let Some(known) = self.known.get(&key) {
            return Ok(known.clone());
        }
        let sizes = Arc::new(self.make(signature)?);
        if self.known.len() >= KEPT {
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
        // Operator, tensor and sequence do not shape a plan.
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
            tensor: None,
            feedback: None,
            fused: Fused::ALONE,
        })?;
        MessageSizes::new(plan)
    }
}

/// Which way messages go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// From kernels of this rank to the peer.
    ToPeer,
    /// From the peer to kernels of this rank.
    FromPeer,
}

/// Where one direction of one channel between this rank and a peer stands in its call.
#[derive(Debug)]
pub(super) struct MessageCursor {
    way: Direction,
    peer: usize,
    channel: usize,
    sizes: Option<Arc<MessageSizes>>,
    signature: [u64; SIGNATURE_WORDS],
    /// Of the walk; pass p is at stage s at time p + s.
    time: usize,
    /// Next message of that time.
    at: usize,
}

impl MessageCursor {
    /// At no call yet.
    pub fn new(way: Direction, peer: usize, channel: usize) -> MessageCursor {
        MessageCursor {
            way,
            peer,
            channel,
            sizes: None,
            signature: [0; SIGNATURE_WORDS],
            time: 0,
            at: 0,
        }
    }

    /// Bytes of the next message of the call; `None` if it has no more.
    pub fn next(&mut self) -> Option<usize> {
        let sizes = self.sizes.as_ref()?;
        let (plan, channels) = (&*sizes.plan, sizes.plan.channels);
        let messages = match self.way {
            Direction::ToPeer => &sizes.sends[self.peer],
            Direction::FromPeer => &sizes.recvs[self.peer],
        };
        // As a kernel's block counts them: passes channel, channel + channels, ...
        let passes = match self.channel < channels {
            true => plan
                .geometry
                .passes()
                .saturating_sub(self.channel)
                .div_ceil(channels),
            false => 0,
        };
        let times = match passes {
            0 => 0,
            passes => passes + sizes.stages - 1,
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

    /// Bytes of the first message of the call with this signature.
    ///
    /// # Errors
    /// If there is no such call, or nothing of it goes this way: internal if kernels of this rank
    /// sent it, mismatch naming the peer if that did.
    pub fn begin(
        &mut self,
        signature: [u64; SIGNATURE_WORDS],
        message_sizes: &mut MessageSizesCache,
    ) -> Result<usize> {
        let sizes = message_sizes.of(&signature);
        let sizes = sizes.map_err(|error| self.wrong(&signature, "is of no call", Some(error)))?;
        self.sizes = Some(sizes);
        (self.signature, self.time, self.at) = (signature, 0, 0);
        self.next()
            .ok_or_else(|| self.wrong(&signature, "is not in its schedule", None))
    }

    /// Bytes that a message from the peer must have which says that it belongs to the call with
    /// this signature.
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

    /// Signature of the call.
    pub fn signature(&self) -> [u64; SIGNATURE_WORDS] {
        self.signature
    }

    #[cold]
    fn wrong(&self, signature: &[u64; SIGNATURE_WORDS], what: &str, why: Option<Error>) -> Error {
        let (kind, sent) = match self.way {
            Direction::ToPeer => (
                ErrorKind::Internal,
                format!("a kernel has sent rank {}", self.peer),
            ),
            Direction::FromPeer => (ErrorKind::Mismatch, format!("rank {} sent", self.peer)),
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
#[path = "message_cursor_tests.rs"]
mod tests;
