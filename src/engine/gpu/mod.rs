//! The GPU engine: packs plans for the kernels, and launches them on the caller's stream.
//!
//! ```text
//! launch         plan -> kernel arguments      launch_order    one order over streams and graphs
//! pack           schedule -> packed steps      stream_capture  captures, and memory that graphs need
//! work_buffer    arguments beyond 4 KiB        messages        sends and receives that share a launch
//! proxy          messages to other hosts       watchdog        fault <-> kernels
//! residuals      error feedback                sample_window   coded sums beside exact sums
//! statistics     of input and output       scales          kept scales (tensor=K)
//! call_timer     for `auto:` codecs        collectives     which of them share a launch
//! teardown       the end
//! ```
//! A call is one launch, but some calls of more than 32 ranks take several. Small collectives of a group share launches, see
//! `collectives`, and so do sends and receives between two collectives, see `messages`. No host thread blocks in a call
//! except on locks, and before a launch where more than 32 ranks share a GPU. The [`Watchdog`] turns timeouts and
//! mismatches of kernels into the communicator's fault. The `proxy` carries messages to other hosts.

mod call_timer;
mod collectives;
mod connections;
mod event_wait;
pub mod kernels;
mod launch;
mod launch_order;
mod message_cursor;
mod messages;
pub mod pack;
mod proxy;
mod proxy_channel;
mod residuals;
mod sample_window;
mod scales;
mod statistics;
mod stream_capture;
mod teardown;
mod watchdog;
mod work_buffer;

pub use call_timer::CallTimer;
pub use connections::Connections;
pub use launch::signature_hash;
pub use sample_window::{SampleWindows, Sampled};
pub use statistics::read_statistics;
pub use stream_capture::is_capturing;
pub use watchdog::Watchdog;

use super::Report;
use super::numbers::CallNumbers;
use crate::bootstrap::OutOfBandRef;
use crate::config::Config;
use crate::cpu::Isa;
use crate::error::{Error, Result};
use crate::gpu::abi;
use crate::gpu::{Context, DeviceMemory, Launch, Stream};
use crate::gpu_links::{self, Network};
use crate::mem::DeviceBuffers;
use crate::plan::{
    Candidate, GpuLimits, KernelVariant, LaunchPlace, Limits, MachineFacts, Planner, Request,
    Resident, Tuning,
};
use crate::recorder::{CallState, FlightRecorder};
use crate::schedule::Groups;
use crate::sync::Fault;
use crate::topology::RankTopology;
use crate::transport::HostLoad;
use crate::types::{CallSignature, Collective, SIGNATURE_WORDS, TransportKind};
use collectives::BegunCall;
use event_wait::await_event;
use kernels::{BlockShape, Kernels};
use launch::PreparedPlan;
use launch_order::LaunchOrder;
use pack::{Addresses, WorkBuffer};
use proxy::Proxy;
use residuals::DeviceResiduals;
use scales::DeviceScales;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use work_buffer::{Placed, WorkBufferPool};

/// A call with its buffers on this rank's GPU.
#[derive(Clone, Copy, Debug)]
pub struct GpuCall<'a> {
    /// Collective, count, type and codec of the call.
    pub request: Request,
    /// The call's buffers, and the stream on which it runs.
    pub buffers: DeviceBuffers<'a>,
}

impl GpuCall<'_> {
    fn addresses(&self) -> Addresses {
        Addresses {
            input: self.buffers.input().0,
            output: self.buffers.output().0,
        }
    }
}

/// Calls that [`GpuEngine::admit`] accepted together.
#[derive(Debug)]
pub struct Admitted {
    /// The plan and place of each call.
    prepared: Vec<PreparedCall>,
    /// The stream capture that all calls belong to; `None` outside captures.
    capture: Option<u64>,
}

/// The plan of a call, for the place in a launch that it has.
#[derive(Clone, Debug)]
struct PreparedCall {
    run: Arc<PreparedPlan>,
    place: LaunchPlace,
}

impl PreparedCall {
    /// Returns the call as it is planned.
    fn request(&self, call: &GpuCall<'_>) -> Request {
        self.place.request(&call.request)
    }
}

/// Runs the calls of one communicator on one GPU.
#[derive(Debug)]
pub struct GpuEngine {
    // Fields are dropped in this order. The watchdog comes first, because it reads memory of the
    // connections.
    _watchdog: Watchdog,
    /// Carries messages to other hosts; `None` if all ranks share one host.
    proxy: Option<Proxy>,
    context: Arc<Context>,
    kernels: Arc<Kernels>,
    connections: Arc<dyn Connections>,
    exchange: OutOfBandRef,
    fault: Arc<Fault>,
    planner: Planner,
    /// Tuning to which the planner returns when no variant is forced.
    tuning: Tuning,
    numbers: CallNumbers,
    order: LaunchOrder,
    work_buffers: WorkBufferPool,
    residuals: DeviceResiduals,
    scales: DeviceScales,
    /// Largest bytes of calls of a group that share a launch.
    fuse_bytes: usize,
    /// Prepared plans by the address of the plan. The address stays unique because each value keeps
    /// its plan.
    prepared: HashMap<usize, Arc<PreparedPlan>>,
    recorder: Option<Arc<FlightRecorder>>,
    timeout: Duration,
    /// How kernels are launched after earlier work of their stream.
    launch_mode: Launch,
    rank: usize,
    nranks: usize,
    /// Whether the engine has stopped accepting calls.
    closed: bool,
    ended: bool,
    /// Whether a kernel still ran when teardown ended, so that its memory must stay.
    outlived: bool,
}

/// Returns how kernels are launched after earlier work of their stream.
fn launch_mode(config: &Config) -> Launch {
    match config.early_launch {
        true => Launch::Programmatic,
        false => Launch::Serialized,
    }
}

/// Number of prepared plans that are kept.
const KEPT_PLANS: usize = 1024;

/// Parts that an engine is made from.
#[derive(Debug)]
pub struct EngineParts {
    /// CUDA context of the GPU that holds the buffers.
    pub context: Arc<Context>,
    /// Kernels that are loaded on the GPU.
    pub kernels: Arc<Kernels>,
    /// Peer buffers, cursors and control words of this rank.
    pub connections: Arc<dyn Connections>,
    /// Control plane, through which ranks exchange messages and announce failures.
    pub exchange: OutOfBandRef,
    /// The communicator's fault, raised by any failure.
    pub fault: Arc<Fault>,
    /// Number of blocks that a rank may have resident at once.
    pub resident: Resident,
    /// The connections with ranks of other hosts, if there are any.
    pub network: Option<Network>,
}

impl GpuEngine {
    /// Makes the engine of one rank.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn new(parts: EngineParts, config: &Config, isa: Isa) -> Result<GpuEngine> {
        let EngineParts {
            context,
            kernels,
            connections,
            exchange,
            fault,
            resident,
            network,
        } = parts;
        let (rank, nranks) = (exchange.rank(), exchange.peers().len());
        let hosts = Groups::of_hosts(exchange.peers().iter().map(|peer| peer.host_id));
        let between = network.as_ref().map(Network::transport);
        let gpu = GpuLimits {
            ll128: connections.lines_arrive_whole(),
            pairs: connections.pair_links(),
            protocol: config.protocol,
            kernel: config.kernel,
            ..GpuLimits::new(
                connections.shape(),
                resident,
                config.gpu_channels_for(hosts.count()),
            )
        };
        let limits = Limits {
            nranks,
            slot_bytes: gpu.fifos[0].0,
            slots: connections.shape().fifo(abi::Protocol::Simple).depth as usize,
            channels: gpu.fifos[0].1,
            algorithm: config.algorithm,
            machine: MachineFacts {
                transport: between.unwrap_or(gpu_links::KIND),
                inside: gpu_links::KIND,
                load: HostLoad::LIGHT,
                measured: None,
            },
            hosts,
            topology: None,
            gpu: Some(gpu),
        };
        let planner = Planner::new(limits.clone(), rank, isa);
        let order = LaunchOrder::new(&context, config.graph_mixing)?;
        let carrying = |network| {
            Proxy::start(proxy::ProxyParts {
                numa_node: context.device().numa_node,
                network,
                planner: Planner::new(limits.clone(), rank, isa),
                launched: order.launched().clone(),
                fault: fault.clone(),
                exchange: exchange.clone(),
            })
        };
        let residuals = DeviceResiduals::new(&context)?;
        Ok(GpuEngine {
            proxy: network.map(carrying).transpose()?,
            _watchdog: Watchdog::start(&connections, &fault, &exchange, config.timeout)?,
            tuning: planner.tuning().clone(),
            planner,
            numbers: CallNumbers::new(rank, nranks),
            order,
            work_buffers: WorkBufferPool::new(&context)?,
            scales: DeviceScales::new(residuals.stream().clone()),
            residuals,
            fuse_bytes: config.fuse_bytes,
            prepared: HashMap::new(),
            recorder: None,
            timeout: config.timeout,
            launch_mode: launch_mode(config),
            context,
            kernels,
            connections,
            exchange,
            fault,
            rank,
            nranks,
            closed: false,
            ended: false,
            outlived: false,
        })
    }

    /// Returns the GPU's context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Makes later calls appear in a flight recorder.
    pub fn set_recorder(&mut self, recorder: Arc<FlightRecorder>) {
        self.recorder = Some(recorder);
    }

    /// Makes later calls select by this topology. All ranks must do so before the same call.
    pub fn set_topology(&mut self, topology: Arc<RankTopology>) {
        self.planner.set_topology(topology);
    }

    /// Returns the limits that selection depends on.
    pub fn limits(&self) -> &Limits {
        self.planner.limits()
    }

    /// Makes later calls select their variant by this tuning. All ranks must change it at the same
    /// call.
    pub fn tune(&mut self, tuning: Tuning) {
        self.tuning = tuning.clone();
        self.planner.tune(tuning);
    }

    /// Makes later calls use this variant where they support it. `None` returns to the selection by tuning.
    pub fn force_variant(&mut self, variant: Option<KernelVariant>) {
        let tuning = variant.map_or_else(|| self.tuning.clone(), Tuning::Always);
        self.planner.tune(tuning);
    }

    /// Returns whether this variant can run `request`.
    ///
    /// # Errors
    /// See [`kernels::check`] and [`Planner::plan`].
    pub fn supports(&self, request: &Request, variant: KernelVariant) -> Result<bool> {
        kernels::check(request)?;
        self.planner.supports(request, variant)
    }

    /// Returns the variants of `request` that are worth a measurement.
    ///
    /// # Errors
    /// See [`kernels::check`] and [`Planner::plan`].
    pub fn variants(&self, request: &Request) -> Result<Vec<KernelVariant>> {
        kernels::check(request)?;
        self.planner.variants(request)
    }

    /// Returns the planner's candidates for `request`, as text.
    ///
    /// # Errors
    /// See [`kernels::check`] and [`Planner::plan`].
    pub fn explain(&self, request: &Request) -> Result<String> {
        kernels::check(request)?;
        self.planner.explain(request)
    }

    /// Returns the predicted duration of `request` in seconds.
    ///
    /// # Errors
    /// See [`kernels::check`] and [`Planner::plan`].
    pub fn predict(&self, request: &Request) -> Result<f64> {
        kernels::check(request)?;
        self.planner.predict(request)
    }

    /// Returns the planner's candidates for `request`; the first of them runs.
    ///
    /// # Errors
    /// See [`kernels::check`] and [`Planner::plan`].
    pub fn candidates(&self, request: &Request) -> Result<Vec<Candidate>> {
        kernels::check(request)?;
        self.planner.candidates(request)
    }

    /// Queues calls in order, and returns their reports before they have run. Calls on several streams begin
    /// when all these streams have reached them, and all streams continue after the last call.
    ///
    /// # Errors
    /// See [`GpuEngine::admit`], before anything is launched. An error of a launch fails the communicator.
    pub fn run(&mut self, calls: &[GpuCall<'_>]) -> Result<Vec<Report>> {
        let admitted = self.admit(calls)?;
        self.start(calls, &admitted)
    }

    /// Checks and plans calls before anything is launched. Earlier admitted calls need not have begun.
    ///
    /// # Errors
    /// Unsupported if a call cannot run on a GPU; invalid usage if the communicator was finalized, or
    /// if streams are of another context, or mix captures in a way that has no order.
    pub fn admit(&mut self, calls: &[GpuCall<'_>]) -> Result<Admitted> {
        if self.closed {
            return Err(Error::invalid_usage(format!(
                "rank {}: the communicator was finalized, and takes no more calls",
                self.rank
            )));
        }
        let mut prepared = Vec::with_capacity(calls.len());
        let places = match calls {
            [one] => vec![LaunchPlace::alone(&one.request)],
            _ => {
                let group = calls.iter().map(|call| (call.request, true));
                self.launch_places(&group.collect::<Vec<_>>())
            }
        };
        for (call, place) in calls.iter().zip(places) {
            let run = self.prepare(&place.request(&call.request))?;
            self.check_channels(&run, &place)?;
            prepared.push(PreparedCall { run, place });
        }
        let capture = self.capture(calls)?;
        let runs = calls.iter().zip(&prepared);
        let fed = runs.filter_map(|(call, PreparedCall { run, .. })| {
            let tensor = run.feedback_tensor(&call.request)?;
            Some((tensor, &call.request, &*run.plan))
        });
        self.residuals.check(fed, capture.is_some())?;
        let runs = calls.iter().zip(&prepared);
        let runs = runs.map(|(call, prepared)| (&call.request, &*prepared.run));
        self.check_scales(runs, capture.is_some())?;
        Ok(Admitted { prepared, capture })
    }

    /// Queues admitted calls, as [`GpuEngine::run`] does.
    ///
    /// # Errors
    /// An error of a launch; the communicator cannot continue after it.
    pub fn start(&mut self, calls: &[GpuCall<'_>], admitted: &Admitted) -> Result<Vec<Report>> {
        self.start_some(calls, &admitted.prepared, admitted.capture)
    }

    /// Queues a part of the calls that were admitted together.
    fn start_some(
        &mut self,
        calls: &[GpuCall<'_>],
        all: &[PreparedCall],
        capture: Option<u64>,
    ) -> Result<Vec<Report>> {
        let Some(head) = calls.first() else {
            return Ok(Vec::new());
        };
        let mut reports = Vec::with_capacity(calls.len());
        let mut messages = Vec::new();
        let mut streams = self.join(calls)?.into_iter();
        let stream = streams.next();
        let stream = stream.unwrap_or_else(|| self.stream(head.buffers.stream()));
        let mut begun: Vec<BegunCall<'_, '_>> = Vec::new();
        for (index, (call, prepared)) in calls.iter().zip(all).enumerate() {
            let is_message = call.request.collective == Collective::SendRecv;
            if prepared.place.begins || is_message {
                self.together(&std::mem::take(&mut begun), &stream, capture)?;
            }
            let signature = self.begin(call, prepared, capture);
            reports.push(self.report(call, &prepared.run));
            if is_message {
                messages.push((index, signature));
            } else if call.request.count > 0 {
                self.messages(calls, all, &messages, &stream, capture)?;
                messages.clear();
                begun.push(BegunCall {
                    call,
                    prepared,
                    signature,
                });
            } else if call.buffers.statistics().is_some() {
                self.take_output_statistics(call, (&stream, capture))?;
            }
        }
        self.together(&begun, &stream, capture)?;
        self.messages(calls, all, &messages, &stream, capture)?;
        for other in streams {
            self.order.enter(&other, capture)?;
        }
        Ok(reports)
    }

    /// Waits until all launches outside captures have ended, and all replays of graphs unless
    /// `CINCH_GRAPH_MIXING` is off.
    ///
    /// # Errors
    /// Timeout after `deadline`; the driver's errors.
    pub fn wait(&self, deadline: Duration) -> Result<()> {
        self.order.wait(deadline)
    }

    /// Returns the prepared plan of `request`.
    fn prepare(&mut self, request: &Request) -> Result<Arc<PreparedPlan>> {
        kernels::check(request)?;
        let plan = self.planner.plan(request)?;
        let key = Arc::as_ptr(&plan).addr();
        if let Some(known) = self.prepared.get(&key) {
            return Ok(known.clone());
        }
        let made = Arc::new(PreparedPlan::new(plan, &self.kernels)?);
        if self.prepared.len() >= KEPT_PLANS {
            self.prepared.clear();
        }
        self.prepared.insert(key, made.clone());
        Ok(made)
    }

    /// Gives a call its sequence number, logs it in the call log, and returns its signature. A captured call
    /// gets neither number nor log entry: the control plane would compare its replays with calls that other
    /// ranks make at other times.
    fn begin(
        &mut self,
        call: &GpuCall<'_>,
        prepared: &PreparedCall,
        capture: Option<u64>,
    ) -> [u64; SIGNATURE_WORDS] {
        let plan = &prepared.run.plan;
        let sequence = match capture {
            None => self.numbers.next(&call.request),
            Some(_) => CallSignature::CAPTURED,
        };
        let request = plan.decided(&prepared.request(call));
        let signature = request
            .signature(plan.algorithm, plan.specs.intra, sequence)
            .words();
        if capture.is_none() {
            self.exchange.log_call(signature);
        }
        if let Some(recorder) = &self.recorder {
            recorder.begin(&signature, CallState::Queued);
        }
        signature
    }

    /// Gives a barrier a sequence number, as on host memory: seeded codecs then draw equal numbers on both.
    pub fn pass_number(&mut self) {
        self.numbers.pass();
    }

    fn launch(
        &mut self,
        run: &PreparedPlan,
        work_buffer: &WorkBuffer,
        memory: Vec<Arc<DeviceMemory>>,
        stream: &Stream,
        capture: Option<u64>,
    ) -> Result<()> {
        self.wait_for_earlier_launches(stream, capture)?;
        self.queue(stream, capture, |engine| {
            let view = (engine.connections).view(work_buffer.ranks(), run.fifo(), engine.timeout);
            let mut args = launch::args(view, work_buffer);
            let mut placed = None;
            if work_buffer.len() > abi::WORK_BUFFER_BYTES {
                let (overflow, place) =
                    engine.work_buffers.place(work_buffer, capture.is_some())?;
                (args.overflow, placed) = (overflow, Some(place));
            } else {
                work_buffer.write(&mut args.work_buffer);
            }
            let blocks = work_buffer.channels() as u32;
            let BlockShape { threads, shared } = run.shape;
            // SAFETY: a schedule kernel takes `cinch_args`, and waits for its predecessor before it touches
            // memory. `end` and `keep` hold connections and work buffer until no kernel uses them; the
            // contract of `DeviceBuffers` covers the caller's buffers.
            unsafe {
                let function = &run.function;
                function.launch_with(engine.launch_mode, blocks, threads, shared, stream, &args)?;
            }
            match placed {
                Some(Placed::Pooled(index)) => engine.work_buffers.launched(index, stream),
                Some(Placed::Own(work_buffer)) => {
                    engine.keep(stream, capture, Some(work_buffer), memory)
                }
                None => engine.keep(stream, capture, None, memory),
            }
        })
    }

    fn wake_proxy(&self) {
        if let Some(proxy) = &self.proxy {
            proxy.wake();
        }
    }

    /// Returns the slowest transport that carries a call.
    fn transport(&self, request: &Request) -> TransportKind {
        let limits = self.planner.limits();
        match request.crosses(&limits.hosts) {
            true => limits.machine.transport,
            false => gpu_links::KIND,
        }
    }

    fn report(&self, call: &GpuCall<'_>, run: &PreparedPlan) -> Report {
        let moves = call.request.count > 0
            && self.nranks > 1
            && (call.request.collective != Collective::SendRecv
                || call.request.root != call.request.peer);
        Report {
            codec: run.plan.specs,
            algorithm: run.plan.algorithm,
            transport: moves.then(|| self.transport(&call.request)),
            channels: run.plan.channels,
            wire_bytes: run.wire_bytes,
            raw_bytes: run.plan.raw_bytes,
            input: None,
            residual_norm: None,
            fused: 1,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
