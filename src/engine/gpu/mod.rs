//! Runs plans on a GPU: packs them for the kernels, and launches those on the caller's stream.
//!
//! A call is one launch. Sends and receives between two collectives of a group share launches: the k-th
//! message of each pair and direction goes with others that are k-th too, with so many peers at once that
//! all their blocks fit, and both ends arrive at the same launch. No host thread waits in a call for anything but locks; what a kernel
//! waits for too long, and what it finds wrong, the [`Watchdog`] turns into the communicator's
//! fault. What goes to ranks of other hosts a thread of this rank carries: the proxy.

pub mod abi;
mod connections;
pub mod device;
pub mod host_copy;
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
pub mod stand_alone;
mod stream_capture;
mod teardown;
mod watchdog;
mod work_buffer;

pub use connections::Connections;
pub use sample_window::{SampleWindows, Sampled};
pub use watchdog::Watchdog;

use super::Report;
use super::numbers::CallNumbers;
use crate::bootstrap::OutOfBandRef;
use crate::config::Config;
use crate::cpu::Isa;
use crate::error::{Error, Result};
use crate::gpu::{Context, DeviceMemory, Launch, Stream};
use crate::gpu_links::Network;
use crate::mem::{DeviceBuffers, abi as shared};
use crate::plan::{
    GpuLimits, KernelVariant, Limits, Machine, Plan, Planner, Request, Resident, Tuning,
};
use crate::schedule::Hosts;
use crate::sync::Fault;
use crate::types::{CallSignature, Collective, SIGNATURE_WORDS, TransportKind};
use kernels::{Kernels, Shape};
use launch::{Prepared, copy};
use launch_order::LaunchOrder;
use pack::{Addresses, WorkBuffer};
use proxy::Proxy;
use residuals::DeviceResiduals;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use work_buffer::{Placed, WorkBufferPool};

/// One call with its buffers on this rank's GPU.
#[derive(Clone, Copy, Debug)]
pub struct GpuCall<'a> {
    /// The call.
    pub request: Request,
    /// Its buffers, and the stream on which it runs.
    pub buffers: DeviceBuffers<'a>,
}

impl GpuCall<'_> {
    fn at(&self) -> Addresses {
        Addresses {
            input: self.buffers.input().0,
            output: self.buffers.output().0,
        }
    }
}

/// What calls take that may run together.
#[derive(Debug)]
pub struct Admitted {
    /// Of each call.
    prepared: Vec<Arc<Prepared>>,
    /// That all belong to.
    capture: Option<u64>,
}

/// Runs the calls of one communicator on one GPU.
#[derive(Debug)]
pub struct GpuEngine {
    // Dropped from first to last: the watchdog looks at memory of the wiring.
    _watchdog: Watchdog,
    /// Where there are other hosts.
    proxy: Option<Proxy>,
    context: Arc<Context>,
    kernels: Arc<Kernels>,
    wiring: Arc<dyn Connections>,
    exchange: OutOfBandRef,
    fault: Arc<Fault>,
    planner: Planner,
    /// What the planner goes by where nothing is being measured.
    tuning: Tuning,
    numbers: CallNumbers,
    order: LaunchOrder,
    work_buffers: WorkBufferPool,
    residuals: DeviceResiduals,
    /// What plans need to be launched, by the plan's address; each holds its plan.
    prepared: HashMap<usize, Arc<Prepared>>,
    timeout: Duration,
    /// Of its kernels.
    begin: Launch,
    rank: usize,
    nranks: usize,
    /// Whether it takes no more calls.
    closed: bool,
    ended: bool,
    /// Whether a kernel still ran when this was ended.
    outlived: bool,
}

/// Plans whose packing is kept.
const PREPARED: usize = 1024;

/// What an engine is made of.
#[derive(Debug)]
pub struct Parts {
    /// Of the GPU.
    pub context: Arc<Context>,
    /// Loaded there.
    pub kernels: Arc<Kernels>,
    /// The connections.
    pub wiring: Arc<dyn Connections>,
    /// The out-of-band side.
    pub exchange: OutOfBandRef,
    /// Raised when something goes wrong.
    pub fault: Arc<Fault>,
    /// Blocks that a rank may have resident at once.
    pub resident: Resident,
    /// The connections with ranks of other hosts, if there are any.
    pub network: Option<Network>,
}

impl GpuEngine {
    /// The engine of one rank.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new(parts: Parts, config: &Config, isa: Isa) -> Result<GpuEngine> {
        let Parts {
            context,
            kernels,
            wiring,
            exchange,
            fault,
            resident,
            network,
        } = parts;
        let (rank, nranks) = (exchange.rank(), exchange.peers().len());
        let hosts = Hosts::new(exchange.peers().iter().map(|peer| peer.host_id));
        let between = network.as_ref().map(Network::transport);
        let gpu = GpuLimits {
            ll128: wiring.lines_arrive_whole(),
            protocol: config.protocol,
            kernel: config.kernel,
            ..GpuLimits::new(
                wiring.shape(),
                resident,
                config.gpu_channels_for(hosts.count()),
            )
        };
        let limits = Limits {
            nranks,
            slot_bytes: gpu.fifos[0].0,
            slots: wiring.shape().fifo(shared::Protocol::Simple).depth as usize,
            channels: gpu.fifos[0].1,
            algorithm: config.algorithm,
            machine: Machine {
                transport: between.unwrap_or(TransportKind::Cuda),
                inside: TransportKind::Cuda,
                oversubscribed: false,
                measured: None,
            },
            hosts,
            gpu: Some(gpu),
        };
        let planner = Planner::new(limits.clone(), rank, isa);
        let order = LaunchOrder::new(&context, config.graph_mixing)?;
        let carrying = |network| {
            Proxy::start(proxy::Parts {
                network,
                planner: Planner::new(limits.clone(), rank, isa),
                launched: order.launched().clone(),
                fault: fault.clone(),
                exchange: exchange.clone(),
            })
        };
        Ok(GpuEngine {
            proxy: network.map(carrying).transpose()?,
            _watchdog: Watchdog::start(&wiring, &fault, &exchange, config.timeout)?,
            tuning: planner.tuning().clone(),
            planner,
            numbers: CallNumbers::new(rank, nranks),
            order,
            work_buffers: WorkBufferPool::new(&context)?,
            residuals: DeviceResiduals::new(&context)?,
            prepared: HashMap::new(),
            timeout: config.timeout,
            begin: match config.early_launch {
                true => Launch::Programmatic,
                false => Launch::Serialized,
            },
            context,
            kernels,
            wiring,
            exchange,
            fault,
            rank,
            nranks,
            closed: false,
            ended: false,
            outlived: false,
        })
    }

    /// The GPU's context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// What selection goes by.
    pub fn limits(&self) -> &Limits {
        self.planner.limits()
    }

    /// Goes by this tuning from now on; all ranks do so at the same point.
    pub fn tune(&mut self, tuning: Tuning) {
        self.tuning = tuning.clone();
        self.planner.tune(tuning);
    }

    /// Runs what can go this way so; with `None`, as [`GpuEngine::tune`] said.
    pub fn force_variant(&mut self, way: Option<KernelVariant>) {
        let tuning = way.map_or_else(|| self.tuning.clone(), Tuning::Always);
        self.planner.tune(tuning);
    }

    /// Whether `request` can be run this way.
    ///
    /// # Errors
    /// As for [`kernels::check`] and [`Planner::plan`].
    pub fn supports(&self, request: &Request, way: KernelVariant) -> Result<bool> {
        kernels::check(request)?;
        self.planner.supports(request, way)
    }

    /// The ways to run `request` that are worth a measurement.
    ///
    /// # Errors
    /// As for [`kernels::check`] and [`Planner::plan`].
    pub fn variants(&self, request: &Request) -> Result<Vec<KernelVariant>> {
        kernels::check(request)?;
        self.planner.variants(request)
    }

    /// The candidates for `request`, as text.
    ///
    /// # Errors
    /// As for [`kernels::check`] and [`Planner::plan`].
    pub fn explain(&self, request: &Request) -> Result<String> {
        kernels::check(request)?;
        self.planner.explain(request)
    }

    /// Seconds that `request` is predicted to take.
    ///
    /// # Errors
    /// As for [`Planner::plan`] and [`kernels::check`].
    pub fn predict(&self, request: &Request) -> Result<f64> {
        kernels::check(request)?;
        self.planner.predict(request)
    }

    /// Queues calls, in order; returns before they have run. Reports come in their order. Calls on
    /// several streams begin when all of these have come so far, and hold all of them until they end.
    ///
    /// # Errors
    /// As for [`GpuEngine::admit`], before anything is launched. What a launch fails with after that
    /// fails the communicator.
    pub fn run(&mut self, calls: &[GpuCall<'_>]) -> Result<Vec<Report>> {
        let admitted = self.admit(calls)?;
        self.start(calls, &admitted)
    }

    /// Refuses what cannot run, before anything is launched. Calls are admitted where those that
    /// were admitted before have not begun yet, too.
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
        for call in calls {
            prepared.push(self.prepare(&call.request)?);
        }
        let capture = self.capture(calls)?;
        let runs = calls.iter().zip(&prepared);
        let fed = runs.filter_map(|(call, run)| {
            let tensor = run.feeds(&call.request)?;
            Some((tensor, &call.request, &*run.plan))
        });
        self.residuals.check(fed, capture.is_some())?;
        Ok(Admitted { prepared, capture })
    }

    /// Queues calls that were admitted, as [`GpuEngine::run`] does.
    ///
    /// # Errors
    /// What a launch fails with; the communicator cannot go on then.
    pub fn start(&mut self, calls: &[GpuCall<'_>], admitted: &Admitted) -> Result<Vec<Report>> {
        self.start_some(calls, &admitted.prepared, admitted.capture)
    }

    /// Queues some of the calls that were admitted together.
    fn start_some(
        &mut self,
        calls: &[GpuCall<'_>],
        prepared: &[Arc<Prepared>],
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
        for (index, call) in calls.iter().enumerate() {
            let run = &prepared[index];
            let signature = self.begin(call, &run.plan, capture);
            reports.push(self.report(call, run));
            if call.request.collective == Collective::SendRecv {
                messages.push((index, signature));
            } else if call.request.count > 0 {
                self.messages(calls, prepared, &messages, &stream, capture)?;
                messages.clear();
                self.collective(call, run, signature, &stream, capture)?;
            }
        }
        self.messages(calls, prepared, &messages, &stream, capture)?;
        for other in streams {
            self.order.enter(&other, capture)?;
        }
        Ok(reports)
    }

    /// Whether anything that this communicator launched may still run: outside captures, and replays
    /// unless graphs are not mixed with other calls.
    ///
    /// # Errors
    /// Timeout if it still does after `deadline`; those of the driver.
    pub fn wait(&self, deadline: Duration) -> Result<()> {
        self.order.wait(deadline)
    }

    /// What launching the plan of `request` takes.
    fn prepare(&mut self, request: &Request) -> Result<Arc<Prepared>> {
        kernels::check(request)?;
        let plan = self.planner.plan(request)?;
        let key = Arc::as_ptr(&plan).addr();
        if let Some(known) = self.prepared.get(&key) {
            return Ok(known.clone());
        }
        let made = Arc::new(Prepared::new(plan, &self.kernels)?);
        if self.prepared.len() >= PREPARED {
            self.prepared.clear();
        }
        self.prepared.insert(key, made.clone());
        Ok(made)
    }

    /// Takes the call's place in the order of calls. What a graph replays has none, and is not told to the
    /// control side: it would be compared with what other ranks do at another time.
    fn begin(
        &mut self,
        call: &GpuCall<'_>,
        plan: &Plan,
        capture: Option<u64>,
    ) -> [u64; SIGNATURE_WORDS] {
        let sequence = match capture {
            None => self.numbers.next(&call.request),
            Some(_) => CallSignature::CAPTURED,
        };
        let request = plan.decided(&call.request);
        let signature = request
            .signature(plan.algorithm, plan.intra_spec, sequence)
            .words();
        if capture.is_none() {
            self.exchange.log_call(signature);
        }
        signature
    }

    fn collective(
        &mut self,
        call: &GpuCall<'_>,
        run: &Prepared,
        signature: [u64; SIGNATURE_WORDS],
        stream: &Stream,
        capture: Option<u64>,
    ) -> Result<()> {
        if run.only_copies(call.request.op) {
            return self.queue(stream, capture, |engine| {
                copy(stream, call.at(), run.plan.count * run.plan.dtype.size())?;
                engine.keep(stream, capture, None, None)
            });
        }
        let residuals = match run.feeds(&call.request) {
            None => None,
            Some(tensor) => {
                let place = self.residuals.place(
                    tensor,
                    (&call.request, &run.plan),
                    &mut self.order,
                    stream,
                )?;
                Some(place)
            }
        };
        if let Some(fused) = run.fused(call, signature, residuals.as_ref())? {
            let memory = residuals.map(|place| place.memory);
            return self.queue(stream, capture, |engine| {
                fused.launch(run, &*engine.wiring, engine.timeout, stream, engine.begin)?;
                engine.keep(stream, capture, None, memory)
            });
        }
        let mut work_buffer = WorkBuffer::default();
        run.add_to(
            &mut work_buffer,
            call,
            signature,
            residuals.as_ref(),
            capture.is_some(),
            self.begin,
        )?;
        let memory = residuals.map(|place| place.memory);
        self.launch(run, &work_buffer, memory, stream, capture)
    }

    fn launch(
        &mut self,
        run: &Prepared,
        work_buffer: &WorkBuffer,
        residuals: Option<Arc<DeviceMemory>>,
        stream: &Stream,
        capture: Option<u64>,
    ) -> Result<()> {
        self.queue(stream, capture, |engine| {
            let view = engine.wiring.view(run.fifo(), engine.timeout);
            let mut args = launch::args(view, work_buffer);
            let mut placed = None;
            if work_buffer.len() > abi::BLOB_BYTES {
                let (far, place) = engine.work_buffers.place(work_buffer, capture.is_some())?;
                (args.far, placed) = (far, Some(place));
            } else {
                work_buffer.write(&mut args.work_buffer);
            }
            let blocks = work_buffer.channels() as u32;
            let Shape { threads, shared } = run.shape;
            // SAFETY: the interpreter takes `cinch_args`, and waits before it touches memory; the
            // addresses are of the wiring, which lives until no kernel uses it (see `end` and
            // `keep`), of the work_buffer, and of the caller's buffers, which he vouches for.
            unsafe {
                let function = &run.function;
                function.launch_with(engine.begin, blocks, threads, shared, stream, &args)?;
            }
            match placed {
                Some(Placed::Pooled(index)) => engine.work_buffers.launched(index, stream),
                Some(Placed::Own(work_buffer)) => {
                    engine.keep(stream, capture, Some(work_buffer), residuals)
                }
                None => engine.keep(stream, capture, None, residuals),
            }
        })
    }

    fn wake_proxy(&self) {
        if let Some(proxy) = &self.proxy {
            proxy.wake();
        }
    }

    /// The slowest transport that carries a call.
    fn carrier(&self, request: &Request) -> TransportKind {
        let limits = self.planner.limits();
        match request.crosses(&limits.hosts) {
            true => limits.machine.transport,
            false => TransportKind::Cuda,
        }
    }

    fn report(&self, call: &GpuCall<'_>, run: &Prepared) -> Report {
        let moves = call.request.count > 0
            && self.nranks > 1
            && (call.request.collective != Collective::SendRecv
                || call.request.root != call.request.peer);
        Report {
            codec: run.plan.spec,
            intra: run.plan.intra_spec,
            algorithm: run.plan.algorithm,
            transport: moves.then(|| self.carrier(&call.request)),
            channels: run.plan.channels,
            wire_bytes: run.wire_bytes,
            raw_bytes: run.plan.raw_bytes,
            input: None,
            fused: 1,
        }
    }
}

#[cfg(test)]
#[path = "fake_kernel_tests.rs"]
mod fake_kernel;
#[cfg(test)]
#[path = "interpreter_tests.rs"]
mod interpreter;
#[cfg(test)]
#[path = "engine_tests.rs"]
pub(crate) mod tests;
