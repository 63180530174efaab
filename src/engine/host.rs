//! The engine of one communicator, for host memory.

use super::Report;
use super::numbers::CallNumbers;
use super::run::{ChannelRun, Run};
use super::state::{Arithmetic, Scratch};
use crate::adapt::Feedback;
use crate::bootstrap::OutOfBandRef;
use crate::codec::TensorScales;
use crate::config::Config;
use crate::cpu::Isa;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::UserBuffers;
use crate::plan::{Limits, Machine, MeasuredCosts, Planner, Request};
use crate::schedule::{Hosts, Step};
use crate::sync::{CAUSE_TIMEOUT, Fault};
use crate::transport::Links;
use crate::types::{CallSignature, Collective, SIGNATURE_WORDS, TransportKind};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Runs the calls of one communicator on host memory, on the caller's thread.
#[derive(Debug)]
pub struct HostEngine {
    pub(super) links: Links,
    pub(super) exchange: OutOfBandRef,
    pub(super) fault: Arc<Fault>,
    pub(super) planner: Planner,
    pub(super) isa: Isa,
    pub(super) scratch: Scratch,
    /// Those of the latest calls, newest first: programs repeat types and operators.
    arithmetics: VecDeque<Arc<Arithmetic>>,
    /// Lanes of calls that are done, for the next one.
    pub(super) spare_channels: Vec<ChannelRun>,
    /// Whether any connection sends from, and receives into, the memory of the caller.
    pub(super) zero_copy: bool,
    /// The transport of all peers, if they have one in common.
    pub(super) common_transport: Option<TransportKind>,
    /// Scales of `tensor=K` codecs of calls that are not running.
    scales: HashMap<ScaleKey, TensorScales>,
    /// Residuals of error feedback of calls that are not running.
    pub(super) feedback: Feedback,
    timeout: Duration,
    numbers: CallNumbers,
    /// Signatures of the latest collectives, by sequence number modulo their number: to tell a
    /// peer that lags behind what this rank ran in its place.
    recent: [[u64; SIGNATURE_WORDS]; RECENT],
}

/// Combinations of type and operator whose functions are kept at hand.
const REMEMBERED: usize = 4;

/// Tensors whose scales are kept.
const KEPT_TENSORS: usize = 4096;

/// Whose scales they are: the caller's tensor in one kind of call. Another collective, operator
/// or factor has sums of another size.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct ScaleKey {
    pub tensor: u64,
    pub refresh: u32,
    /// The call's signature without its number.
    pub call: [u64; SIGNATURE_WORDS],
    /// This rank's factor of a pre-multiplied sum.
    pub factor: i128,
}

/// Collectives whose signatures are remembered.
const RECENT: usize = 16;

/// Longest sleep of one wait while there is nothing else to do.
pub(super) const SLEEP: Duration = Duration::from_millis(5);

/// Scans between two looks at the clock while waits are short.
const SCANS_PER_CLOCK: u32 = 64;

/// From this many fruitless scans on a wait may have slept, and the clock is looked at every time.
const SPINS: u32 = 2048;

impl HostEngine {
    /// The engine over `links`.
    pub fn new(
        mut links: Links,
        exchange: OutOfBandRef,
        fault: Arc<Fault>,
        config: &Config,
        isa: Isa,
        (machine, hosts): (Machine, Hosts),
    ) -> HostEngine {
        let limits = Limits {
            nranks: links.nranks,
            slot_bytes: links.slot_bytes,
            slots: links.slots,
            channels: links.channels,
            algorithm: config.algorithm,
            machine,
            hosts,
            gpu: None,
        };
        HostEngine {
            planner: Planner::new(limits, links.rank, isa),
            numbers: CallNumbers::new(links.rank, links.nranks),
            arithmetics: VecDeque::new(),
            spare_channels: Vec::new(),
            common_transport: common(&links.kinds),
            zero_copy: lends(&mut links),
            links,
            exchange,
            fault,
            isa,
            scratch: Scratch::new(),
            scales: HashMap::new(),
            feedback: Feedback::new(),
            timeout: config.timeout,
            recent: [[0; SIGNATURE_WORDS]; RECENT],
        }
    }

    /// Binds one request to a plan. Nothing moves yet.
    ///
    /// # Errors
    /// As for [`Planner::plan`] and [`Feedback::admit`].
    pub fn prepare<'a>(&mut self, request: Request, buffers: UserBuffers<'a>) -> Result<Run<'a>> {
        let plan = self.planner.plan(&request)?;
        let run = Run::new(self, 0, &request, plan, buffers)?;
        self.feedback.admit(run.feeds())?;
        Ok(run)
    }

    /// The arithmetic of `request`.
    pub(super) fn arithmetic(&mut self, request: &Request) -> Result<Arc<Arithmetic>> {
        if let Some(known) = self.arithmetics.iter().find(|known| known.serves(request)) {
            return Ok(known.clone());
        }
        let made = Arc::new(Arithmetic::new(request, self.isa)?);
        self.arithmetics.truncate(REMEMBERED - 1);
        self.arithmetics.push_front(made.clone());
        Ok(made)
    }

    /// Runs one request to its end.
    ///
    /// # Errors
    /// What stopped it; the communicator cannot go on after that.
    pub fn run(&mut self, mut run: Run<'_>) -> Result<Report> {
        self.drive(&mut run)
    }

    /// As [`HostEngine::run`], for whoever looks at the buffers afterwards.
    ///
    /// # Errors
    /// As there.
    pub fn drive(&mut self, run: &mut Run<'_>) -> Result<Report> {
        run.start(self);
        let mut clock = WaitClock::default();
        let mut scans = 0;
        loop {
            let (moved, complete) = run.poll(self)?;
            if complete {
                return Ok(run.report(self));
            }
            if moved {
                scans = 0;
                clock = WaitClock::default();
            } else {
                self.wait(scans, SLEEP, &mut clock, |links| run.waits_for(links))?;
                scans += 1;
            }
        }
    }

    /// What selection goes by.
    pub fn limits(&self) -> &Limits {
        self.planner.limits()
    }

    /// Cuts messages from now on as another communicator of as many ranks does: see
    /// [`Planner::copy_limits`].
    pub fn copy_limits(&mut self, limits: Limits) {
        self.planner.copy_limits(limits);
    }

    /// Selects by these costs from now on: see [`Planner::set_costs`].
    pub fn set_costs(&mut self, costs: MeasuredCosts) {
        self.planner.set_costs(costs);
    }

    /// Residuals of error feedback.
    pub fn feedback(&mut self) -> &mut Feedback {
        &mut self.feedback
    }

    /// The candidates for `request`, as text.
    ///
    /// # Errors
    /// As for [`Planner::plan`].
    pub fn explain(&self, request: &Request) -> Result<String> {
        self.planner.explain(request)
    }

    /// Seconds that `request` is predicted to take.
    ///
    /// # Errors
    /// As for [`Planner::plan`].
    pub fn predict(&self, request: &Request) -> Result<f64> {
        self.planner.predict(request)
    }

    /// Number of this call among those that must come in the same order on its ranks.
    pub(super) fn next_sequence(&mut self, request: &Request) -> u64 {
        self.numbers.next(request)
    }

    /// Takes the scales that a call keeps, if it keeps any; a new call starts without.
    pub(super) fn take_scales(&mut self, key: &ScaleKey) -> TensorScales {
        self.scales
            .remove(key)
            .unwrap_or_else(|| TensorScales::new(key.refresh))
    }

    /// Keeps the scales of a call that is over. A program that names its tensors anew each time
    /// does not fill memory with them: beyond a bound all are forgotten.
    pub(super) fn keep_scales(&mut self, key: ScaleKey, scales: TensorScales) {
        if self.scales.len() >= KEPT_TENSORS {
            self.scales.clear();
        }
        self.scales.insert(key, scales);
    }

    /// Remembers the signature of a call that starts, and tells the control side.
    pub(super) fn log_call(&mut self, signature: [u64; SIGNATURE_WORDS]) {
        self.exchange.log_call(signature);
        if is_collective(&signature) {
            self.recent[signature[3] as usize % RECENT] = signature;
        }
    }

    /// Why a message of `theirs` came from rank `from` where this rank runs `mine`.
    pub(super) fn disagreement(
        &self,
        from: usize,
        theirs: &[u64; SIGNATURE_WORDS],
        mine: &[u64; SIGNATURE_WORDS],
    ) -> Error {
        let peers = self.exchange.peers();
        // Messages between two ranks have numbers of their own.
        let comparable = is_collective(theirs) && is_collective(mine);
        let recent = &self.recent[theirs[3] as usize % RECENT];
        // A peer that lags is compared with what this rank ran then. What a peer that is ahead
        // ran at this rank's place is known to the control side, which compares all ranks.
        let lags = comparable && theirs[3] < mine[3] && recent[3] == theirs[3];
        let then = if lags { recent } else { mine };
        let error = Error::new(
            ErrorKind::Mismatch,
            format!(
                "ranks disagree: {} runs {}, {} runs {}",
                peers[from],
                CallSignature::describe(theirs),
                peers[self.links.rank],
                CallSignature::describe(then)
            ),
        );
        if comparable && theirs[3] > mine[3] {
            self.await_cause(error)
        } else {
            error
        }
    }

    /// One wait of a batch that found nothing to do `scans` times in a row. `waiting` tells for
    /// whom and what, and is asked only when that matters.
    pub(super) fn wait(
        &mut self,
        scans: u32,
        limit: Duration,
        clock: &mut WaitClock,
        waiting: impl FnOnce(&mut Links) -> Vec<(usize, String)>,
    ) -> Result<()> {
        if self.fault.is_raised()
            && let Err(reason) = self.fault.ends_waits()
        {
            // Data before faults: some may have come between the last scan and the end.
            return match std::mem::replace(&mut clock.looked_again, true) {
                false => Ok(()),
                true => Err(reason),
            };
        }
        self.links.waiter.idle(scans, limit)?;
        if scans < SPINS && !scans.is_multiple_of(SCANS_PER_CLOCK) {
            return Ok(());
        }
        let waited = clock.waited(Instant::now());
        let expired = waited >= self.timeout;
        if !expired && waited < CAUSE_TIMEOUT {
            return Ok(());
        }
        let missing = waiting(&mut self.links);
        // A rank that left in good order published all it had before it said so. In memory that is
        // to be seen by now; what a network still carries comes before the connection ends. The
        // scan that found nothing of it may have been before it left: only what the next one lacks
        // will never come.
        if let Some((rank, what)) = missing.iter().find(|(rank, _)| clock.gone.contains(rank)) {
            return Err(Error::new(ErrorKind::Remote, self.left(*rank, what)));
        }
        let gone = missing
            .iter()
            .map(|(rank, _)| *rank)
            .filter(|&rank| self.exchange.has_left(rank) && (expired || self.shares_memory(rank)));
        clock.gone = gone.collect();
        // Where nothing is missing, all has come since the last scan.
        match expired && clock.gone.is_empty() && !missing.is_empty() {
            true => Err(self.timed_out(&missing)),
            false => Ok(()),
        }
    }

    fn timed_out(&self, missing: &[(usize, String)]) -> Error {
        let peers = self.exchange.peers();
        let whom: Vec<String> = missing
            .iter()
            .map(|(rank, what)| format!("{}: {what}", peers[*rank]))
            .collect();
        Error::new(
            ErrorKind::Timeout,
            format!(
                "rank {} has waited {:.1} s (CINCH_TIMEOUT) for {}",
                self.links.rank,
                self.timeout.as_secs_f64(),
                whom.join("; ")
            ),
        )
    }

    /// Whether what `rank` has published can be seen at once.
    fn shares_memory(&self, rank: usize) -> bool {
        let kind = self.links.kinds[rank];
        matches!(kind, Some(TransportKind::Loopback | TransportKind::Shm))
    }

    fn left(&self, rank: usize, what: impl std::fmt::Display) -> String {
        format!(
            "{} left the communicator, and rank {} still waits for it: {what}",
            self.exchange.peers()[rank],
            self.links.rank
        )
    }

    /// A connection broke in `step`: gives the control side a moment to name the cause.
    pub(super) fn explain_break(&self, error: Error, step: &Step) -> Error {
        if error.kind() != ErrorKind::Remote {
            return error;
        }
        let error = self.await_cause(error);
        let mut peers = step.recv_from.iter().chain(step.send_to.iter());
        let gone = peers.find(|&&rank| self.exchange.has_left(rank as usize));
        match gone {
            Some(&rank) if !self.fault.is_raised() => {
                Error::new(ErrorKind::Remote, self.left(rank as usize, error.message()))
            }
            _ => error,
        }
    }

    /// The control side's account of what went wrong, or `error` if there is none in time.
    fn await_cause(&self, error: Error) -> Error {
        self.fault.reason_within(CAUSE_TIMEOUT).unwrap_or(error)
    }
}

/// Whether a call is numbered among those of all ranks.
fn is_collective(signature: &[u64; SIGNATURE_WORDS]) -> bool {
    signature[0] >> 8 & 0xff != Collective::SendRecv as u64
}

/// Whether any connection has ends that need no slot.
fn lends(links: &mut Links) -> bool {
    let mut sends = links.sends.iter_mut().flatten();
    sends.any(|end| end.zero_copy().is_some())
}

/// The transport that all peers have in common, if there is one.
fn common(kinds: &[Option<TransportKind>]) -> Option<TransportKind> {
    let mut peers = kinds.iter().flatten();
    let first = *peers.next()?;
    peers.all(|&kind| kind == first).then_some(first)
}

/// How long a batch has waited; reset by progress.
#[derive(Debug, Default)]
pub(super) struct WaitClock {
    waited: Duration,
    looked: Option<Instant>,
    /// Ranks that had left by the last look, and of which something was missing.
    gone: Vec<usize>,
    /// A fault ends the wait, unless the scan that follows finds something.
    looked_again: bool,
}

impl WaitClock {
    /// Looks at the clock. Of the time between two looks [`CAUSE_TIMEOUT`] counts at most: a thread that
    /// did not run for longer, because its process was stopped, waited for nobody meanwhile, and
    /// what has come it has yet to read.
    fn waited(&mut self, now: Instant) -> Duration {
        let last = self.looked.replace(now).unwrap_or(now);
        self.waited += now.duration_since(last).min(CAUSE_TIMEOUT);
        self.waited
    }
}
