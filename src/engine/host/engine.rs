//! [`HostEngine`]: state that all calls of a communicator on host memory share.

use super::super::numbers::CallNumbers;
use super::call_cache::CallCache;
use super::first_look::FirstLook;
use super::output_writes::OutputChoices;
use super::state::{Arithmetic, ChannelRun, Scratch};
use crate::bootstrap::OutOfBandRef;
use crate::codec::TensorScales;
use crate::codec::feedback::Feedback;
use crate::config::Config;
use crate::cpu::{CAN_STREAM, Isa};
use crate::engine::scale_key::{KEPT_TENSORS, ScaleKey};
use crate::error::Result;
use crate::plan::{Candidate, Limits, MachineFacts, MeasuredCosts, Plan, Planner, Request};
use crate::recorder::{CallState, FlightRecorder};
use crate::schedule::Groups;
use crate::sync::Fault;
use crate::topology::RankTopology;
use crate::transport::Links;
use crate::types::{Collective, SEQUENCE_WORD, SIGNATURE_WORDS, TransportKind};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Runs the calls of one communicator on host memory, on the caller's thread.
#[derive(Debug)]
pub struct HostEngine {
    pub(super) links: Links,
    pub(super) exchange: OutOfBandRef,
    pub(super) fault: Arc<Fault>,
    pub(super) planner: Planner,
    pub(super) isa: Isa,
    pub(super) scratch: Scratch,
    pub(super) outputs: OutputChoices,
    /// Reducers of the latest calls, newest first. They are kept because programs repeat types and
    /// operators.
    arithmetics: VecDeque<Arc<Arithmetic>>,
    /// Calls without a codec that programs repeat.
    pub(super) cache: CallCache,
    /// When cached calls look for messages, by rank of the sender.
    pub(super) first_looks: Vec<FirstLook>,
    /// Channels of the last complete call, whose memory the next call reuses.
    pub(super) spare_channels: Vec<ChannelRun>,
    /// Whether any connection can send from, and receive into, the caller's memory.
    pub(super) zero_copy: bool,
    /// The transport of all peers; `None` if peers use different transports.
    pub(super) common_transport: Option<TransportKind>,
    /// Scales of `tensor=K` codecs, except those that running calls have taken.
    scales: HashMap<ScaleKey, TensorScales>,
    /// Residuals of error feedback, except those that running calls have taken.
    pub(super) feedback: Feedback,
    pub(super) timeout: Duration,
    numbers: CallNumbers,
    recorder: Option<Arc<FlightRecorder>>,
    /// Signatures of the latest collectives; the index is the sequence number modulo [`RECENT`]. A peer that
    /// is behind is compared with the call that this rank ran under the same number.
    pub(super) recent: [[u64; SIGNATURE_WORDS]; RECENT],
}

/// Number of combinations of type and operator whose reducers are kept.
const KEPT_ARITHMETICS: usize = 4;

/// Number of collectives whose signatures are kept.
pub(super) const RECENT: usize = 16;

impl HostEngine {
    /// Creates the engine that communicates over `links`.
    pub fn new(
        mut links: Links,
        exchange: OutOfBandRef,
        fault: Arc<Fault>,
        config: &Config,
        isa: Isa,
        (machine, hosts): (MachineFacts, Groups),
    ) -> HostEngine {
        let limits = Limits {
            nranks: links.nranks,
            slot_bytes: links.slot_bytes,
            slots: links.slots,
            channels: links.channels,
            algorithm: config.algorithm,
            machine,
            hosts,
            topology: None,
            gpu: None,
        };
        let scratch = Scratch::new(CAN_STREAM && has_slots_of_peers(&links));
        // The payload of a message is complete before its header only in a slot.
        let zero_copy = !links.checks_data && has_zero_copy(&mut links);
        HostEngine {
            planner: Planner::new(limits, links.rank, isa),
            numbers: CallNumbers::new(links.rank, links.nranks),
            arithmetics: VecDeque::new(),
            cache: CallCache::new(),
            first_looks: FirstLook::each(links.nranks),
            spare_channels: Vec::new(),
            common_transport: common_transport(&links.kinds),
            // Connections without slots send from the output soon after it is written.
            outputs: OutputChoices::new(CAN_STREAM && !zero_copy),
            zero_copy,
            links,
            exchange,
            fault,
            isa,
            scratch,
            scales: HashMap::new(),
            feedback: Feedback::new(),
            timeout: config.timeout,
            recorder: None,
            recent: [[0; SIGNATURE_WORDS]; RECENT],
        }
    }

    /// Makes later calls and waits appear in a flight recorder.
    pub fn set_recorder(&mut self, recorder: Arc<FlightRecorder>) {
        self.recorder = Some(recorder);
    }

    /// Returns the flight recorder.
    pub(super) fn recorder(&self) -> Option<&FlightRecorder> {
        self.recorder
            .as_deref()
            .filter(|recorder| !recorder.is_muted())
    }

    /// Returns the reducers for `request`'s type and operator, which scale an average as `plan` needs.
    pub(super) fn arithmetic(&mut self, request: &Request, plan: &Plan) -> Result<Arc<Arithmetic>> {
        let shift = plan.average_shift(request.op);
        let mut known = self.arithmetics.iter();
        if let Some(known) = known.find(|known| known.serves(request, shift)) {
            return Ok(known.clone());
        }
        let made = Arc::new(Arithmetic::new(request, shift, self.isa)?);
        self.arithmetics.truncate(KEPT_ARITHMETICS - 1);
        self.arithmetics.push_front(made.clone());
        Ok(made)
    }

    /// Returns the limits that selection depends on.
    pub fn limits(&self) -> &Limits {
        self.planner.limits()
    }

    /// Makes later calls cut messages as another communicator with as many ranks does: see
    /// [`Planner::copy_limits`].
    pub fn copy_limits(&mut self, limits: Limits) {
        self.planner.copy_limits(limits);
        self.cache.clear();
    }

    /// Makes later calls select by these costs: see [`Planner::set_costs`].
    pub fn set_costs(&mut self, costs: MeasuredCosts) {
        self.planner.set_costs(costs);
        self.cache.clear();
    }

    /// Makes later calls select by this topology. All ranks must do so before the same call.
    pub fn set_topology(&mut self, topology: Arc<RankTopology>) {
        self.planner.set_topology(topology);
        self.cache.clear();
    }

    /// Returns the residuals of error feedback.
    pub fn feedback(&mut self) -> &mut Feedback {
        &mut self.feedback
    }

    /// Returns the planner's candidates for `request`, as text.
    ///
    /// # Errors
    /// See [`Planner::plan`].
    pub fn explain(&self, request: &Request) -> Result<String> {
        self.planner.explain(request)
    }

    /// Returns the predicted duration of `request` in seconds.
    ///
    /// # Errors
    /// See [`Planner::plan`].
    pub fn predict(&self, request: &Request) -> Result<f64> {
        self.planner.predict(request)
    }

    /// Returns the planner's candidates for `request`; the first of them runs.
    ///
    /// # Errors
    /// See [`Planner::plan`].
    pub fn candidates(&self, request: &Request) -> Result<Vec<Candidate>> {
        self.planner.candidates(request)
    }

    /// Returns the call's sequence number among the calls that its ranks must make in the same order.
    pub(super) fn next_sequence(&mut self, request: &Request) -> u64 {
        self.numbers.next(request)
    }

    /// Takes the kept scales of a call out of the engine; returns empty scales for a new key.
    pub(super) fn take_scales(&mut self, key: &ScaleKey) -> TensorScales {
        self.scales
            .remove(key)
            .unwrap_or_else(|| TensorScales::new(key.refresh))
    }

    /// Puts the scales of a complete call back. Beyond [`KEPT_TENSORS`] all scales are dropped.
    pub(super) fn keep_scales(&mut self, key: ScaleKey, scales: TensorScales) {
        if self.scales.len() >= KEPT_TENSORS {
            self.scales.clear();
        }
        self.scales.insert(key, scales);
    }

    /// Remembers the signature of a call that starts, and adds it to the control plane's call log. Returns its number in
    /// the flight recorder.
    pub(super) fn record_begin(&mut self, signature: [u64; SIGNATURE_WORDS]) -> Option<u64> {
        self.exchange.log_call(signature);
        if is_collective(&signature) {
            self.recent[signature[SEQUENCE_WORD] as usize % RECENT] = signature;
        }
        let recorder = self.recorder();
        recorder.map(|recorder| recorder.begin(&signature, CallState::Running))
    }
}

/// Returns whether the sequence number in a signature counts collectives; otherwise it counts the messages of
/// a pair.
pub(super) fn is_collective(signature: &[u64; SIGNATURE_WORDS]) -> bool {
    signature[0] >> 8 & 0xff != Collective::SendRecv as u64
}

/// Returns whether any connection can send without a slot.
fn has_zero_copy(links: &mut Links) -> bool {
    let mut sends = links.sends.iter_mut().flatten();
    sends.any(|end| end.zero_copy().is_some())
}

/// Returns whether any connection writes into memory of the receiver.
fn has_slots_of_peers(links: &Links) -> bool {
    links.sends.iter().flatten().any(|end| end.is_immediate())
}

/// Returns the transport of all peers; `None` if peers use different transports.
fn common_transport(kinds: &[Option<TransportKind>]) -> Option<TransportKind> {
    let mut peers = kinds.iter().flatten();
    let first = *peers.next()?;
    peers.all(|&kind| kind == first).then_some(first)
}
