//! Communicators whose buffers are on GPUs: joining, checks, calls on a stream.

use super::call_times::{self, SavedTimes};
use super::check::{self, BufferRanges};
use super::resident::resident;
use super::sample::Admission;
use super::{Call, CommInfo, Communicator, DeviceState, PanicGuard, Report};
use super::{stats, topology};
use crate::bootstrap::OutOfBandRef;
use crate::config::{CodecPolicy, Config, FileChoice, cache_directory};
use crate::cpu::{FloatEnvironment, Isa};
use crate::engine::gpu::kernels::{self, Kernels};
use crate::engine::gpu::{
    Admitted, CallTimer, Connections, EngineParts, GpuCall, GpuEngine, SampleWindows, Sampled,
    is_capturing,
};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::Context;
use crate::gpu::abi::Protocol;
use crate::gpu::select;
use crate::gpu_links::{self, GpuLinks, PeerPath};
use crate::mem::DeviceBuffers;
use crate::plan::{Resident, Site, TIMED_BYTES, TIMED_DTYPES, Tuning, TuningTable, links};
use crate::schedule::Groups;
use crate::sync::Fault;
use crate::sys::fork_safe::ForkSafeOnce;
use crate::sys::log::{self, Level};
use crate::sys::numa;
use crate::topology::RankTopology;
use crate::transport::ConnectContext;
use crate::types::{CodecSetting, Collective, DType, KernelIntra, ReduceOp, Scalar};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// The part of a communicator that is on a GPU.
#[derive(Debug)]
pub(super) struct GpuState {
    context: Arc<Context>,
    engine: Mutex<GpuEngine>,
    /// Windows of coded sums, if samples are taken. Declared after the engine, so that they are
    /// dropped after the kernels that use them have ended.
    windows: Option<SampleWindows>,
}

/// Admitted calls that are queued one after the other.
#[derive(Debug)]
pub(super) enum AdmittedPart<'b> {
    Plain(Vec<GpuCall<'b>>, Admitted),
    /// A coded sum and the exact sum of its window.
    Sampled(Sampled<'b>),
}

impl Drop for GpuState {
    /// Keeps the windows allocated with the engine's memory if a kernel does not end.
    fn drop(&mut self) {
        let engine = self.engine.get_mut();
        let engine = engine.unwrap_or_else(PoisonError::into_inner);
        if !engine.end() {
            engine.leave(self.windows.take());
        }
    }
}

impl GpuState {
    pub(super) fn engine(&self) -> Result<MutexGuard<'_, GpuEngine>> {
        self.engine.lock().map_err(|_| {
            Error::internal(
                "an earlier call on this communicator panicked: make a new communicator",
            )
        })
    }

    /// Locks the engine, even after a call has panicked; `None` while a call holds the engine.
    fn engine_between_calls(&self) -> Option<MutexGuard<'_, GpuEngine>> {
        match self.engine.try_lock() {
            Ok(engine) => Some(engine),
            Err(TryLockError::Poisoned(engine)) => Some(engine.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.engine_between_calls()
            .is_some_and(|engine| self.is_over(&engine))
    }

    /// Returns whether all queued calls have ended, which is true after a failure of the context or
    /// the end of the driver.
    pub(super) fn is_over(&self, engine: &GpuEngine) -> bool {
        let waited = engine.wait(Duration::ZERO);
        let runs = waited.is_err_and(|error| error.kind() == ErrorKind::Timeout);
        !runs || self.context.driver().has_ended()
    }

    /// Implements [`Communicator::unmap_local_peers`] for buffers on a GPU.
    pub(super) fn unmap_local_peers(&self) -> bool {
        self.engine_between_calls()
            .is_some_and(|mut engine| self.is_over(&engine) && engine.unmap_local_peers())
    }

    pub(super) fn is_mapped_by_peers(&self) -> bool {
        // A rank in a call counts as mapped, because its peers take part in the call.
        self.engine_between_calls()
            .is_none_or(|engine| engine.is_mapped_by_peers())
    }

    pub(super) fn windows(&self) -> Result<&SampleWindows> {
        let none = || Error::internal("a call is sampled on a communicator without sample windows");
        self.windows.as_ref().ok_or_else(none)
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

/// Connects this rank's GPU with the GPUs of all other ranks. All ranks call it together, with the policy and the text of
/// the settings on which they agreed.
pub(super) fn connect(
    exchange: &OutOfBandRef,
    fault: &Arc<Fault>,
    (config, deadline): (&Config, Instant),
    agreed: (&CodecPolicy, &str),
    isa: Isa,
    table: Option<Arc<TuningTable>>,
) -> Result<(CommInfo, GpuState)> {
    // An error is announced, so that the other ranks do not wait for a rank that cannot connect.
    try_connect(exchange, fault, (config, deadline), agreed, isa, table)
        .inspect_err(|error| exchange.announce(error))
}

fn try_connect(
    exchange: &OutOfBandRef,
    fault: &Arc<Fault>,
    (config, deadline): (&Config, Instant),
    (policy, settings): (&CodecPolicy, &str),
    isa: Isa,
    table: Option<Arc<TuningTable>>,
) -> Result<(CommInfo, GpuState)> {
    if !policy.is_by_level() {
        check_codec(policy)?;
    }
    if let Some(why) = without_effect(config) {
        static WARNED: ForkSafeOnce<()> = ForkSafeOnce::new();
        if WARNED.try_set(()) {
            log::line(Level::Warn, format_args!("{why}"));
        }
    }
    let hosts = Groups::of_hosts(exchange.peers().iter().map(|peer| peer.host_id));
    let context = select::open(config.device)?;
    let kernels = Kernels::of(&context)?;
    let whole = kernels.resident()?;
    let connecting = ConnectContext {
        exchange: &**exchange,
        config,
        fault,
        deadline,
        place: topology::place_of_gpu(config, context.device()),
        sys: Path::new(numa::SYS),
        verbs: None,
    };
    let links = gpu_links::connect(&connecting, &context)?;
    if config.shm_disable {
        refuse_pinned(exchange, &links)?;
    }
    let asked = config
        .gpu_channels
        .map(|_| config.gpu_channels_for(hosts.count()));
    let resident = resident(exchange, &context, whole, asked)?;
    let topology = topology::on_gpus(&**exchange, config, context.device(), &links.paths)?;
    // All ranks have agreed on the policy and on the topology, so all of them refuse a codec by level together.
    let groups = match &topology {
        Some(topology) if hosts.count() == 1 => topology.groups(),
        _ => &hosts,
    };
    refuse_codec_by_level(groups, policy)?;
    let policy = policy.clone().on_groups(groups.count());
    check_codec(&policy)?;
    let info = info(&links, hosts);
    let known = known_of_calls(exchange, &info, topology.as_deref(), &resident, settings);
    let network = links.take_network();
    let own = site(&context, &info, exchange.peers().len());
    let tuning = tuning(exchange, config, own, table)?;
    log::line(Level::Info, format_args!("kernels are chosen by {tuning}"));
    let parts = EngineParts {
        context: context.clone(),
        kernels,
        connections: Arc::new(links),
        exchange: exchange.clone(),
        fault: fault.clone(),
        resident,
        network,
    };
    let mut engine = GpuEngine::new(parts, config, isa)?;
    engine.tune(tuning);
    if let Some(topology) = topology {
        log::line(
            Level::Info,
            format_args!("rings and groups are chosen by a topology: {topology}"),
        );
        engine.set_topology(topology);
    }
    let state = start(exchange, config, &policy, &known, context, engine)?;
    Ok((info, state))
}

/// Returns what this rank knows of links, topology, blocks, processes and settings, as far as the times of calls depend on
/// it.
fn known_of_calls(
    exchange: &OutOfBandRef,
    info: &CommInfo,
    topology: Option<&RankTopology>,
    resident: &Resident,
    settings: &str,
) -> String {
    let peers = exchange.peers();
    let own = peers[exchange.rank()].process_id;
    let same = peers.iter().filter(|peer| peer.process_id == own).count();
    let links = info.classes.join(" ");
    let topology = topology.map(RankTopology::fingerprint);
    format!("{links}\n{topology:?}\n{resident:?}\n{same} ranks in this process\n{settings}")
}

/// Allocates memory beside that of `engine`, and takes or measures the times of calls for `auto:` codecs. All ranks call it
/// together; `known` is what their times depend on, see [`call_times::facts`].
fn start(
    exchange: &OutOfBandRef,
    config: &Config,
    policy: &CodecPolicy,
    known: &str,
    context: Arc<Context>,
    mut engine: GpuEngine,
) -> Result<GpuState> {
    let windows = match policy.sample {
        0 => None,
        _ => Some(SampleWindows::new(&context, config.init_timeout)?),
    };
    let codecs = match engine.has_queues() {
        true => call_times::timed_codecs(policy),
        false => Vec::new(),
    };
    let mut saved = None;
    let mut times = None;
    if !codecs.is_empty() {
        let own = call_times::facts(&context, config, known);
        let file = SavedTimes::new(exchange, &codecs, &own, cache_directory())?;
        times = file.load(!config.saved_times)?;
        saved = Some(file);
    }
    let timer = match (&saved, &times) {
        (Some(_), None) => Some(CallTimer::new(
            &context,
            LARGEST_TIMED,
            config.init_timeout,
        )?),
        _ => None,
    };
    // No rank launches kernels before all ranks have allocated. Otherwise an allocation could wait for
    // another rank's kernel on the GPU, and that kernel for this rank.
    exchange.barrier()?;
    if let (Some(saved), Some(timer)) = (saved, timer) {
        let deadline = config.init_timeout;
        let calls = (&codecs[..], &TIMED_DTYPES[..]);
        let timed = call_times::measure(exchange, calls, &mut engine, &timer, deadline)?;
        saved.save(&timed);
        times = Some(timed);
    }
    if let Some(times) = times {
        engine.set_call_times(&times)?;
    }
    Ok(GpuState {
        context,
        engine: Mutex::new(engine),
        windows,
    })
}

/// Returns a warning about settings without effect on GPUs.
fn without_effect(config: &Config) -> Option<String> {
    let names = ["CINCH_SLOT_BYTES", "CINCH_SLOTS"];
    let set: Vec<&str> = names
        .into_iter()
        .filter(|name| config.is_set(name))
        .collect();
    (!set.is_empty()).then(|| {
        format!(
            "without effect on buffers on GPUs, whose slots are as large as CINCH_BUFFER_BYTES lets \
             them be: {}",
            set.join(", ")
        )
    })
}

/// Bytes of the largest timed call.
const LARGEST_TIMED: usize = TIMED_BYTES[TIMED_BYTES.len() - 1];

/// Refuses a default codec without kernels.
fn check_codec(policy: &CodecPolicy) -> Result<()> {
    let default = Call::new(Collective::AllReduce, DType::F32, 1);
    for one in &policy.codecs {
        kernels::check(&default.resolve(one.codec))
            .map_err(|error| error.context(format!("the codec of this communicator ({policy})")))?;
    }
    Ok(())
}

/// Refuses different codecs inside and between groups (hosts, or groups inside a host) if there are several groups, and no
/// kernel has both.
fn refuse_codec_by_level(groups: &Groups, policy: &CodecPolicy) -> Result<()> {
    let mut codecs = policy.codecs.iter().map(|one| one.codec);
    let refused = codecs.find(|&codec| KernelIntra::of(codec).is_none());
    let Some(CodecSetting { intra, inter, .. }) = refused.filter(|_| groups.count() > 1) else {
        return Ok(());
    };
    let advice = match inter.is_lossy() {
        true => format!(
            "set CINCH_CODEC={inter}, or intra=raw, cast16, cast_bf16 or linear8 (blocks of up to 512, no seed) with \
             inter={inter}"
        ),
        false => {
            format!("between groups they are raw here; set CINCH_CODEC={intra} for all messages")
        }
    };
    Err(Error::new(
        ErrorKind::Unsupported,
        format!(
            "codec intra={intra},inter={inter} on {groups} with GPUs: a kernel has one codec for all of a call, beside \
             which contributions inside a group may be raw, cast to 16 bits, or in linear8; {advice}"
        ),
    ))
}

/// Returns this rank's GPU and its links as tuning tables name them.
pub(super) fn site(context: &Context, info: &CommInfo, ranks: usize) -> Site {
    Site {
        gpu: context.device().name.clone(),
        ranks,
        links: links(info.classes.iter().map(String::as_str)),
    }
}

/// Chooses the tuning table or the cost model from the GPUs and links of all ranks. All ranks make
/// the same choice.
fn tuning(
    exchange: &OutOfBandRef,
    config: &Config,
    own: Site,
    table: Option<Arc<TuningTable>>,
) -> Result<Tuning> {
    let ranks = own.ranks;
    let bounded =
        config.gpu_channels.is_some() || config.gpu_channels_for(1) < Config::GPU_CHANNELS;
    let channels = if bounded { "1" } else { "" };
    let part = [own.gpu.as_str(), &own.links, channels].join("\0");
    let mut sites = Vec::with_capacity(ranks);
    let mut asked = false;
    for (part, peer) in exchange
        .all_gather(part.as_bytes())?
        .iter()
        .zip(exchange.peers())
    {
        let words: Vec<&str> = std::str::from_utf8(part)
            .map(|text| text.split('\0').collect())
            .unwrap_or_default();
        let [gpu, links, channels] = words[..] else {
            return Err(Error::new(
                ErrorKind::Mismatch,
                format!("{peer} described its GPU in another format: use one version"),
            ));
        };
        asked |= !channels.is_empty();
        sites.push(Site {
            gpu: gpu.into(),
            ranks,
            links: links.into(),
        });
    }
    match (table, &config.tuning) {
        (_, FileChoice::Off) => Ok(Tuning::Model("CINCH_TUNING=off".into())),
        (Some(table), _) => Ok(Tuning::of_file(table, &sites)),
        (None, _) => Tuning::of_library(&sites),
    }
    .map(|tuning| match asked {
        true => Tuning::Model("CINCH_GPU_CHANNELS or a bound of NCCL's is set".into()),
        false => tuning,
    })
}

/// Refuses pinned host memory between GPUs under `CINCH_SHM_DISABLE=1`; GPUs without peer access have
/// no other path.
fn refuse_pinned(exchange: &OutOfBandRef, links: &GpuLinks) -> Result<()> {
    for (path, peer) in links.paths.iter().zip(exchange.peers()) {
        if let Some(PeerPath::PinnedHost { reason }) = path {
            let me = &exchange.peers()[exchange.rank()];
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "CINCH_SHM_DISABLE=1 leaves no path between {me} and {peer}, whose GPUs cannot \
                     use each other's memory ({reason}): unset the variable"
                ),
            ));
        }
    }
    Ok(())
}

fn info(links: &GpuLinks, hosts: Groups) -> CommInfo {
    let fifo = links.shape().fifo(Protocol::Simple);
    let served = links.paths.iter();
    let classes = served.clone().flatten();
    CommInfo {
        classes: classes.map(PeerPath::name).collect(),
        transports: served
            .map(|path| path.as_ref().map(PeerPath::transport))
            .collect(),
        channels: fifo.channels as usize,
        slot_bytes: fifo.slot_bytes as usize,
        slots: fifo.depth as usize,
        buffer_bytes: links.buffer_bytes(),
        hosts,
    }
}

impl Communicator {
    /// Returns the GPU of the communicator's buffers; `None` if they are in host memory.
    pub(super) fn gpu_context(&self) -> Option<&Arc<Context>> {
        match &self.state {
            DeviceState::Host(_) => None,
            DeviceState::Gpu(gpu) => Some(gpu.context()),
        }
    }

    /// Queues one call on the buffers' stream and returns before it has run. Later work of the stream
    /// runs after it. Later failures are the communicator's [`Communicator::async_error`].
    ///
    /// Calls of one communicator run in the order in which they are made, whatever their streams; all
    /// ranks must make them in one order. A stream that is being captured records the call, and its
    /// graph may be launched any number of times while the communicator exists. A launch takes its
    /// place among the communicator's calls, unless `CINCH_GRAPH_MIXING=0` leaves their order to the
    /// caller's streams.
    ///
    /// Ranks of one process that share a GPU wait for each other's kernels there. Their streams must
    /// not queue behind each other (`CUDA_DEVICE_MAX_CONNECTIONS=32`). Each stream must have run a
    /// kernel before, because the first kernel of a stream may wait for all kernels of the GPU.
    ///
    /// # Errors
    /// Before anything is queued: invalid usage on a communicator of host memory, or for a stream
    /// of another context. Invalid argument if the call or its buffers are impossible, misaligned,
    /// or not on this GPU. Unsupported if a GPU cannot run the call. Otherwise the reason why the
    /// communicator has failed.
    pub fn call_on(&self, call: &Call, buffers: DeviceBuffers<'_>) -> Result<Report> {
        let _environment = FloatEnvironment::standard();
        self.check_fault()?;
        let gpu = self.gpu_state()?;
        let _bound = gpu.context().bind()?;
        self.check_on(call, &buffers)?;
        check::own_message_is_grouped(self, call)?;
        let admission = self.admit_on(call, &buffers)?;
        let bytes = stats::call_bytes(call, self.nranks());
        let _range = self.profiler_range(call, admission.decision.codec, bytes);
        let mut engine = gpu.engine()?;
        let _guard = PanicGuard(self);
        let queued = GpuCall {
            request: call.resolve(admission.decision.codec),
            buffers,
        };
        let parts = self
            .prepare_on(gpu, &mut engine, &[(queued, admission)])
            .inspect_err(|_| self.rollback(&admission))?;
        let mut reports = self.launch_on(gpu, &mut engine, &parts)?;
        let none = || Error::internal("a call has no report");
        let report = reports.pop().ok_or_else(none)?;
        self.count_call(call, &admission.decision, &report, None);
        Ok(report)
    }

    /// Decides how a call on this GPU runs. Calls are admitted in their order.
    pub(super) fn admit_on(&self, call: &Call, buffers: &DeviceBuffers<'_>) -> Result<Admission> {
        // The result of a captured call does not exist before its graph is launched.
        let sampled =
            self.policy.sample > 0 && !is_capturing(self.gpu_state()?.context(), buffers)?;
        self.admit(call, sampled)
    }

    /// Checks a call on this GPU and its buffers.
    pub(super) fn check_on(&self, call: &Call, buffers: &DeviceBuffers<'_>) -> Result<()> {
        let gpu = self.gpu_state()?;
        check::call(self, call, &BufferRanges::from(buffers))?;
        let size = call.dtype.size();
        for (what, (address, bytes)) in [("input", buffers.input()), ("output", buffers.output())] {
            if bytes == 0 {
                continue;
            }
            let what = || format!("{}: the {what} buffer", call.collective);
            if !address.is_multiple_of(size as u64) {
                return Err(Error::invalid_argument(format!(
                    "{} at {address:#x} is not aligned to the {size} bytes of a {} element",
                    what(),
                    call.dtype
                )));
            }
            select::check_address(gpu.context(), what, address)?;
        }
        self.check_statistics(call, buffers)?;
        if call.collective.reduces()
            && let ReduceOp::PreMulSum(Scalar::Device(address)) = call.op
        {
            let what = || format!("{}: the factor of the premulsum", call.collective);
            if !address.is_multiple_of(size as u64) {
                return Err(Error::invalid_argument(format!(
                    "{} at {address:#x} is not aligned to the {size} bytes of a {} element",
                    what(),
                    call.dtype
                )));
            }
            select::check_factor(gpu.context(), what, address)?;
        }
        Ok(())
    }

    /// Plans checked calls, and refuses calls that cannot be queued. Queues nothing.
    pub(super) fn prepare_on<'b>(
        &self,
        gpu: &GpuState,
        engine: &mut GpuEngine,
        calls: &[(GpuCall<'b>, Admission)],
    ) -> Result<Vec<AdmittedPart<'b>>> {
        let _bound = gpu.context().bind()?;
        // A call with a sample window is queued as a part of its own, followed by the exact sum of
        // the window. Otherwise the position of the exact sum would depend on the rest of the
        // group.
        let parts = calls.chunk_by(|one, next| one.1.window.is_none() && next.1.window.is_none());
        let admitted = parts.map(|part| match part {
            [
                (
                    call,
                    Admission {
                        window: Some(window),
                        ..
                    },
                ),
            ] => {
                let sampled = gpu.windows()?.admit(engine, call, window)?;
                Ok(AdmittedPart::Sampled(sampled))
            }
            part => {
                let calls: Vec<GpuCall<'_>> = part.iter().map(|(call, _)| *call).collect();
                let admitted = engine.admit(&calls)?;
                Ok(AdmittedPart::Plain(calls, admitted))
            }
        });
        admitted.collect()
    }

    /// Queues calls that [`GpuEngine::admit`] has accepted, and returns their reports before they have run.
    pub(super) fn launch_on(
        &self,
        gpu: &GpuState,
        engine: &mut GpuEngine,
        parts: &[AdmittedPart<'_>],
    ) -> Result<Vec<Report>> {
        let mut queue = || {
            let _bound = gpu.context().bind()?;
            let mut reports = Vec::new();
            for part in parts {
                match part {
                    AdmittedPart::Plain(calls, admitted) => {
                        reports.extend(engine.start(calls, admitted)?);
                    }
                    AdmittedPart::Sampled(sampled) => {
                        reports.push(self.sample_on(gpu.windows()?, engine, sampled)?);
                    }
                }
            }
            Ok(reports)
        };
        self.fail_on_error(queue())
    }

    pub(super) fn gpu_state(&self) -> Result<&GpuState> {
        match &self.state {
            DeviceState::Gpu(gpu) => Ok(gpu),
            DeviceState::Host(_) => Err(Error::invalid_usage(
                "device buffers or a stream on a communicator of host memory: pass NULL for the \
                 stream, or join with CINCH_DEVICE=cuda",
            )),
        }
    }
}

#[cfg(test)]
#[path = "gpu_tests.rs"]
mod tests;
