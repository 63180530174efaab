//! Communicators and groups of calls.

mod agreement;
#[cfg(test)]
mod cached_call_tests;
mod call_statistics;
mod call_times;
mod check;
mod choice;
mod costs;
#[cfg(test)]
mod environment_tests;
mod feedback;
mod fuse;
mod gpu;
mod group;
mod grow;
mod init;
#[cfg(feature = "internal")]
mod internal;
mod launch_interleave;
mod requests;
mod resident;
mod sample;
mod split;
mod stats;
mod teardown;
mod topology;
mod topology_file;
mod typed;
#[cfg(test)]
mod wire_tests;

pub use crate::engine::Report;
pub use crate::types::{Call, RawReason};
use check::BufferRanges;
pub use group::Group;
pub use requests::{CallRequest, PendingCall, StartedArrays, wait_any};
pub use stats::CodecStats;

use crate::bootstrap::{OutOfBandRef, PeerInfo, ShrinkRendezvous, UniqueId};
use crate::config::{CodecPolicy, Config};
use crate::cpu::FloatEnvironment;
use crate::engine::HostEngine;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::UserBuffers;
use crate::recorder::{self, EndStep, RecorderHandle};
use crate::schedule::Groups;
use crate::sync::{CAUSE_TIMEOUT, Fault};
use crate::sys::fork::{ForkOwned, ProcessId};
use crate::sys::log::{self, LabelGuard, LogLabel};
use crate::sys::nvtx::{self, ProfilerRange};
use crate::types::{CodecSetting, TransportKind};
use gpu::GpuState;
use requests::CallThread;
use sample::Sampler;
use stats::CommCounters;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

/// A group of ranks that call collectives together.
///
/// Calls block until their buffers may be used again. Threads may share a communicator; its calls run one
/// after the other. All ranks must make collective calls in the same order. All ranks must also group small
/// all_reduces alike, because a group fuses them ([`Group::run`]).
///
/// A drop announces that this rank leaves. Peers that wait for this rank's part of a call get an
/// error; other peers are not disturbed.
///
/// In a child that is forked later, calls fail with invalid usage, and abort and drop do nothing. The
/// parent's communicator keeps working.
#[derive(Debug)]
pub struct Communicator {
    owner: ProcessId,
    exchange: OutOfBandRef,
    fault: Arc<Fault>,
    /// Whether the failure was announced to the other ranks. If the parent communicator raised the
    /// fault, this communicator's ranks learn of the failure by this announcement only.
    announced: AtomicBool,
    config: Config,
    /// Codec of calls that name no codec.
    policy: CodecPolicy,
    sampler: Sampler,
    counters: CommCounters,
    recorder: RecorderHandle,
    info: CommInfo,
    state: DeviceState,
    /// Runs the calls that return before they have ended.
    started: ForkOwned<CallThread>,
    /// Memory of fused calls, for the next group.
    spare_buffers: Mutex<Vec<Vec<u8>>>,
    /// Rendezvous after a failure, once all ranks have prepared to shrink.
    shrink_rendezvous: OnceLock<ShrinkRendezvous>,
    /// Id that this rank made for new ranks, until a grow uses it.
    grow_id: Mutex<Option<UniqueId>>,
}

/// The engine of running calls. `abort` must not take its lock, because a call may hold the lock while
/// it waits for the abort.
#[derive(Debug)]
enum DeviceState {
    /// Buffers are in host memory.
    Host(ForkOwned<Box<Mutex<HostEngine>>>),
    /// Buffers are on a GPU.
    Gpu(ForkOwned<Box<GpuState>>),
}

/// The transports and slots of a communicator, for `cinch info` and logs.
#[derive(Clone, Debug)]
pub struct CommInfo {
    /// Transport to each rank; `None` for this rank itself.
    pub transports: Vec<Option<TransportKind>>,
    /// Link between this rank's GPU and the GPU of each other rank; empty on host memory.
    pub classes: Vec<String>,
    /// Number of channels over which a call may send in parallel.
    pub channels: usize,
    /// Payload bytes of a slot.
    pub slot_bytes: usize,
    /// Number of slots of a connection.
    pub slots: usize,
    /// Bytes of slot memory on this rank.
    pub buffer_bytes: usize,
    /// The ranks of each host.
    pub hosts: Groups,
}

impl Communicator {
    /// Joins the communicator of `id` as `rank` of `nranks`. Returns when all ranks have joined. With an id of
    /// [`Communicator::grow_id`] this is a new rank of a communicator that grows.
    ///
    /// # Errors
    /// Invalid argument for an impossible rank or a damaged id. Timeout, naming the missing ranks.
    /// Mismatch if ranks differ in version or in settings that all must share.
    pub fn init(id: &UniqueId, rank: usize, nranks: usize, config: Config) -> Result<Communicator> {
        grow::join(id, rank, nranks, config, Fault::new())
    }

    /// Joins the communicator that the launcher describes: `cinch run`, torchrun, mpirun, srun.
    ///
    /// # Errors
    /// Invalid usage if no launcher's variables are there; else as for [`Communicator::init`].
    pub fn from_env(config: Config) -> Result<Communicator> {
        init::by_environment(config)
    }

    /// Returns the number of this rank in the communicator.
    pub fn rank(&self) -> usize {
        self.exchange.rank()
    }

    /// Returns the number of ranks.
    pub fn nranks(&self) -> usize {
        self.exchange.peers().len()
    }

    /// Returns all ranks, in order.
    pub fn peers(&self) -> &[PeerInfo] {
        self.exchange.peers()
    }

    /// Returns the settings in effect.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Runs one call.
    ///
    /// # Errors
    /// Invalid argument, before anything moves, if the call or its buffers are impossible;
    /// mismatch, remote, timeout or aborted otherwise. After these the output is undefined, and the
    /// communicator takes [`Communicator::abort`] and drop only.
    pub fn call(&self, call: &Call, buffers: UserBuffers<'_>) -> Result<Report> {
        self.owner.check()?;
        self.started.wait_idle();
        self.run_call(call, buffers)
    }

    /// Runs one call, whatever calls were started before.
    fn run_call(&self, call: &Call, mut buffers: UserBuffers<'_>) -> Result<Report> {
        let _environment = FloatEnvironment::standard();
        self.check_fault()?;
        self.host_engine()?;
        if let Some(ended) = self.run_cached(call, &mut buffers) {
            return ended;
        }
        check::call(self, call, &BufferRanges::from(&buffers))?;
        check::own_message_is_grouped(self, call)?;
        let admission = self.admit(call, true)?;
        let request = call.resolve(admission.decision.codec);
        let bytes = stats::call_bytes(call, self.nranks());
        let _range = self.profiler_range(call, admission.decision.codec, bytes);
        let begun = self.start_clock(bytes);
        let mut engine = self.engine()?;
        let _guard = PanicGuard(self);
        let run = engine
            .prepare(request, buffers)
            .inspect_err(|_| self.rollback(&admission))?;
        let result = match &admission.window {
            Some(window) => self.sample(&mut engine, run, window),
            None => engine.run(run),
        };
        if let (Ok(report), Some(reason)) = (&result, admission.decision.raw_reason) {
            let counts = || self.count_repeats(call, reason, report);
            engine.cache_call(call, &request, report, counts);
        }
        drop(engine);
        let report = self.fail_on_error(result)?;
        let time = begun.map(|begun| begun.elapsed());
        self.count_call(call, &admission.decision, &report, time);
        Ok(report)
    }

    /// Runs a call that equals a cached one; `None` if none equals it, or while another thread makes a call. A cached
    /// call has passed all checks but those of its buffers.
    fn run_cached(&self, call: &Call, buffers: &mut UserBuffers<'_>) -> Option<Result<Report>> {
        // A call that waits for another thread's is checked first.
        let mut engine = self.host_engine().ok()?.try_lock().ok()?;
        let at = engine.find_cached(call, buffers)?;
        let bytes = stats::call_bytes(call, self.nranks());
        let _range = self.profiler_range(call, CodecSetting::RAW, bytes);
        let begun = self.start_clock(bytes);
        let _guard = PanicGuard(self);
        let result = engine.run_cached(at, buffers, begun);
        drop(engine);
        Some(self.fail_on_error(result))
    }

    /// Waits until every rank has called it, but not for calls that are queued on a GPU.
    ///
    /// # Errors
    /// As [`Communicator::call`].
    pub fn barrier(&self) -> Result<()> {
        if let DeviceState::Gpu(gpu) = &self.state {
            self.check_fault()?;
            gpu.engine()?.pass_number();
            return self.fail_on_error(self.exchange.barrier());
        }
        self.all_reduce_in_place::<u8>(&mut [], crate::types::ReduceOp::Sum)
            .map(|_| ())
    }

    /// Returns the name that the program gave the communicator; empty without one.
    pub fn name(&self) -> &str {
        &self.config.comm_name
    }

    /// Begins a range of the profiler for a call, if there is a profiler.
    #[inline]
    fn profiler_range(
        &self,
        call: &Call,
        codec: CodecSetting,
        bytes: usize,
    ) -> Option<ProfilerRange> {
        let name = || format!("{} {} {codec} {}", call.collective, call.dtype, self.name());
        nvtx::range(name, bytes)
    }

    /// Labels this thread's log lines with the rank until the guard is dropped.
    fn label_log(&self) -> LabelGuard {
        log::label(LogLabel {
            rank: self.rank(),
            communicator: self.name().into(),
        })
    }

    /// Shows the candidates for a call, their predicted costs and the winner as text.
    ///
    /// # Errors
    /// Invalid argument if the call is impossible.
    pub fn explain(&self, call: &Call) -> Result<String> {
        let _environment = FloatEnvironment::standard();
        check::shape(self, call)?;
        let request = call.resolve(self.choose(call)?.codec);
        match &self.state {
            DeviceState::Host(_) => self.engine()?.explain(&request),
            DeviceState::Gpu(gpu) => gpu.engine()?.explain(&request),
        }
    }

    /// Predicts the seconds of a call, by the model that selects how it runs.
    ///
    /// # Errors
    /// Invalid argument if the call is impossible.
    pub fn predict(&self, call: &Call) -> Result<f64> {
        let _environment = FloatEnvironment::standard();
        check::shape(self, call)?;
        let request = call.resolve(self.choose(call)?.codec);
        match &self.state {
            DeviceState::Host(_) => self.engine()?.predict(&request),
            DeviceState::Gpu(gpu) => gpu.engine()?.predict(&request),
        }
    }

    /// Splits into communicators of equal `color`, ranked by `key`, then by rank. A rank without
    /// a colour gets none. All ranks must call it.
    ///
    /// # Errors
    /// As [`Communicator::init`].
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Communicator>> {
        self.split_under(color, key, self.config.clone(), self.fault.child())
    }

    fn split_under(
        &self,
        color: Option<u32>,
        key: i64,
        config: Config,
        fault: Arc<Fault>,
    ) -> Result<Option<Communicator>> {
        self.check_fault()?;
        let made = split::split(self, color, key, config, fault);
        // A rank that aborts this communicator leaves the split at once. The announcement of the
        // abort may arrive a little later, and explains more than the lost rank.
        if let Err(error) = &made
            && error.kind() == ErrorKind::Remote
        {
            self.fault.reason_within(CAUSE_TIMEOUT);
        }
        // A failed split fails the communicator, because the other ranks would wait for this rank.
        self.fail_on_error(made)
    }

    /// Prepares a rendezvous by which ranks can [`Communicator::shrink`] the communicator after a
    /// failure. All ranks must call it. It keeps a socket open while the communicator exists.
    ///
    /// # Errors
    /// As [`Communicator::call`].
    pub fn prepare_to_shrink(&self) -> Result<()> {
        self.check_fault()?;
        if self.shrink_rendezvous.get().is_none() {
            // The drop-in opens it as a part of every init.
            let deadline = Instant::now() + self.config.init_timeout;
            self.exchange.limit_exchanges(Some(deadline));
            let opened = ShrinkRendezvous::open(&self.exchange);
            self.exchange.limit_exchanges(None);
            let rendezvous = self.fail_on_error(opened)?;
            let _ = self.shrink_rendezvous.set(rendezvous);
        }
        Ok(())
    }

    /// Makes a communicator of the ranks that are not in `exclude`, in order. If `exclude` is empty, it
    /// leaves out the ranks that have left or died. All ranks of the new communicator must call it
    /// with the same list. Excluded ranks may have exited, and this communicator may have failed. The
    /// new communicator has the settings `config` and can be shrunk itself.
    ///
    /// A rank that dies meanwhile is an error on all others; they can call it again without that rank.
    ///
    /// # Errors
    /// Invalid argument for a list with this rank, a rank twice or an unknown rank; invalid
    /// usage without [`Communicator::prepare_to_shrink`], or for an empty list if no rank is known to
    /// have left or died; remote, naming a rank of this communicator that died; else as
    /// [`Communicator::init`].
    pub fn shrink(&self, exclude: &[usize], config: Config) -> Result<Communicator> {
        split::shrink(self, exclude, config, Fault::new())
    }

    /// Makes the unique id by which new ranks join this communicator in its next [`Communicator::grow`]. One
    /// rank calls it, any one, and hands the id to the new ranks, which call [`Communicator::init`] with it.
    ///
    /// This process serves their rendezvous until [`Config::init_timeout`] has passed. An id serves one grow. An
    /// earlier id of this rank that was not used ends.
    ///
    /// # Errors
    /// As [`UniqueId::create`]; the reason why the communicator has failed, if it has.
    pub fn grow_id(&self) -> Result<UniqueId> {
        grow::create_id(self)
    }

    /// Makes a communicator of `nranks` ranks: the ranks of this communicator, which keep their numbers, and
    /// new ranks after them. All ranks of this communicator call it, after one of them has called
    /// [`Communicator::grow_id`]. Returns when the new ranks have joined, too.
    ///
    /// The new communicator has the settings `config` and can be shrunk. It does not fail with this
    /// communicator, which stays usable.
    ///
    /// # Errors
    /// Invalid argument if `nranks` is not above the number of ranks; invalid usage if no rank has made an id;
    /// mismatch if ranks pass different numbers or ids, or differ in settings that all must share; timeout,
    /// naming the ranks that did not come; remote, naming a rank that died. If all ranks of this communicator
    /// live, it stays usable, and they can try again with a new id.
    pub fn grow(&self, nranks: usize, config: Config) -> Result<Communicator> {
        grow::grow(self, nranks, None, config, self.fault.child())
    }

    /// Returns the reason why the communicator has failed, if it has. The exit of another rank
    /// counts once it ends or refuses a call of this rank. Calls that need no data of that rank
    /// complete first.
    pub fn async_error(&self) -> Option<Error> {
        if let Err(error) = self.owner.check() {
            return Some(error);
        }
        if self.announced.load(Ordering::Relaxed) {
            return self.fault.check().err();
        }
        let ended = self.fault.ends_waits();
        ended.inspect_err(|reason| self.announce(reason)).err()
    }

    /// Returns whether this rank is in no call: no call is being made, and on a GPU no queued call is
    /// left. With `CINCH_GRAPH_MIXING=0`, replays of graphs are not seen.
    pub fn is_idle(&self) -> bool {
        match &self.state {
            DeviceState::Host(engine) => engine.try_lock().is_ok(),
            DeviceState::Gpu(gpu) => gpu.is_idle(),
        }
    }

    /// Fails the communicator, on this rank at once and on the other ranks by message. Calls that wait
    /// return [`ErrorKind::Aborted`]. Communicators that were split from this communicator fail as well.
    pub fn abort(&self) {
        let me = &self.peers()[self.rank()];
        self.recorder.mark_end(EndStep::Aborted);
        self.fail(Error::new(
            ErrorKind::Aborted,
            format!("{me} aborted the communicator"),
        ));
    }

    /// Waits until the calls of this rank have ended, at most `timeout`. Once the communicator has
    /// failed this is short, except that calls on a GPU end after the earlier work on their
    /// streams.
    ///
    /// # Errors
    /// Timeout if a kernel still runs; errors of the driver.
    pub fn wait_stopped(&self, timeout: Duration) -> Result<()> {
        self.owner.check()?;
        match &self.state {
            DeviceState::Host(engine) => {
                // A call holds the lock while it runs, so the lock is free once the call has ended or
                // panicked.
                drop(engine.lock());
                Ok(())
            }
            DeviceState::Gpu(gpu) => gpu.engine()?.wait(timeout),
        }
    }

    fn host_engine(&self) -> Result<&Mutex<HostEngine>> {
        self.owner.check()?;
        match &self.state {
            DeviceState::Host(engine) => Ok(engine),
            DeviceState::Gpu(gpu) => Err(Error::invalid_usage(format!(
                "host buffers on a communicator of {}: pass device addresses and a stream \
                 (call_on), or join with CINCH_DEVICE=host",
                gpu.context().device()
            ))),
        }
    }

    fn engine(&self) -> Result<MutexGuard<'_, HostEngine>> {
        self.host_engine()?.lock().map_err(|_| {
            Error::internal(
                "an earlier call on this communicator panicked: make a new communicator",
            )
        })
    }

    /// Fails if the communicator has failed, and announces the reason to the other ranks if this rank
    /// has not done so.
    fn check_fault(&self) -> Result<()> {
        self.owner.check()?;
        self.fault.check().inspect_err(|reason| {
            self.announce(reason);
            self.record_failure(reason);
        })
    }

    /// Fails the communicator if `result` is an error. Errors of checks before anything moves must
    /// not be passed here.
    fn fail_on_error<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| {
            self.fail(error.clone());
            // The first failure decides the error of all later calls.
            self.fault.reason().cloned().unwrap_or(error)
        })
    }

    fn fail(&self, reason: Error) {
        if !self.owner.is_this() {
            return;
        }
        self.fault.raise(reason.clone());
        let reason = self.fault.reason().unwrap_or(&reason);
        self.announce(reason);
        self.record_failure(reason);
    }

    /// Shows the reason of the failure in the flight recorder, and writes the recorders, once.
    fn record_failure(&self, reason: &Error) {
        if self.recorder.fail(&reason.to_string()) {
            recorder::dump(&reason.to_string());
        }
    }

    /// Announces the reason of the failure to the other ranks, once.
    fn announce(&self, reason: &Error) {
        if !self.announced.swap(true, Ordering::Relaxed) {
            self.exchange.announce(reason);
        }
    }
}

/// Fails a communicator whose call panics, because its peers would wait for this rank.
struct PanicGuard<'a>(&'a Communicator);

impl Drop for PanicGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let me = &self.0.peers()[self.0.rank()];
            self.0
                .fail(Error::internal(format!("a call panicked on {me}")));
        }
    }
}
