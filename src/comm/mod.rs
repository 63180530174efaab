//! Communicators: what a program holds.

mod agreement;
mod check;
mod choice;
mod costs;
#[cfg(test)]
mod environment_tests;
mod feedback;
mod fuse;
mod gpu;
mod group;
mod init;
mod launch_interleave;
mod sample;
mod split;
mod stats;
mod teardown;
mod typed;

pub use crate::engine::Report;
pub use crate::types::Call;
use check::BufferRanges;
pub use choice::RawReason;
pub use group::Group;
pub use stats::CodecStats;

use crate::bootstrap::{OutOfBandRef, PeerInfo, ShrinkRendezvous, UniqueId};
use crate::config::{CodecPolicy, Config};
use crate::cpu::FloatEnvironment;
use crate::engine::HostEngine;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::UserBuffers;
use crate::plan::{Limits, MeasuredCosts};
use crate::schedule::Hosts;
use crate::sync::{Fault, GRACE};
use crate::sys::fork::{ForkOwned, ProcessId};
use crate::types::TransportKind;
use gpu::GpuState;
use sample::Sampler;
use stats::CommCounters;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

/// A group of ranks that call collectives together.
///
/// Calls block until their buffers may be used again. Two threads may hold one communicator, but
/// its calls run one after the other, and all ranks must make them in the same order, small sums in
/// the same groups ([`Group::run`]).
///
/// Dropping it leaves in good order: peers that still wait for this rank's part of a call get an
/// error, peers that do not are not disturbed.
///
/// In a child that is forked later it is dead: calls fail with invalid usage, and abort and drop
/// do nothing. The parent goes on.
#[derive(Debug)]
pub struct Communicator {
    owner: ProcessId,
    exchange: OutOfBandRef,
    fault: Arc<Fault>,
    /// Whether the other ranks were told why this communicator failed. The fault may be raised by
    /// another communicator, the one that this was split from; its ranks hear of it from us.
    announced: AtomicBool,
    config: Config,
    /// What holds for calls that name no codec.
    policy: CodecPolicy,
    sampler: Sampler,
    counters: CommCounters,
    info: CommInfo,
    state: DeviceState,
    /// Memory of small calls that travelled as one, for the next ones.
    spare_buffers: Mutex<Vec<Vec<u8>>>,
    /// Where its ranks can meet again, once they have agreed on that.
    shrink_rendezvous: OnceLock<ShrinkRendezvous>,
}

/// Everything that a running call needs. `abort` must not take its lock: it frees those who wait
/// inside.
#[derive(Debug)]
enum DeviceState {
    /// Buffers are in host memory.
    Host(ForkOwned<Box<Mutex<HostEngine>>>),
    /// Buffers are on a GPU.
    Gpu(ForkOwned<Box<GpuState>>),
}

/// What a communicator is made of, for `cinch info` and logs.
#[derive(Clone, Debug)]
pub struct CommInfo {
    /// Transport to each rank; `None` for this rank itself.
    pub transports: Vec<Option<TransportKind>>,
    /// What lies between this rank's GPU and that of each other rank; empty on host memory.
    pub classes: Vec<String>,
    /// Channels.
    pub channels: usize,
    /// Payload bytes of a slot.
    pub slot_bytes: usize,
    /// Slots of a connection.
    pub slots: usize,
    /// Bytes of slot memory on this rank.
    pub buffer_bytes: usize,
    /// Which ranks share a host.
    pub hosts: Hosts,
}

impl Communicator {
    /// Joins the communicator of `id` as `rank` of `nranks`. Returns when all ranks have joined.
    ///
    /// # Errors
    /// Invalid argument for impossible ranks or a damaged id; timeout naming the missing ranks;
    /// mismatch if ranks differ in version or in settings that all must share.
    pub fn init(id: &UniqueId, rank: usize, nranks: usize, config: Config) -> Result<Communicator> {
        init::by_id(id, rank, nranks, config, Fault::new())
    }

    /// As [`Communicator::init`], with the fault that the communicator will have: raising it ends
    /// an init that still waits.
    ///
    /// # Errors
    /// As for [`Communicator::init`]; the fault's reason.
    pub fn init_watched(
        id: &UniqueId,
        rank: usize,
        nranks: usize,
        config: Config,
        fault: Arc<Fault>,
    ) -> Result<Communicator> {
        init::by_id(id, rank, nranks, config, fault)
    }

    /// Joins the communicator that the launcher describes: `cinch run`, torchrun, mpirun, srun.
    ///
    /// # Errors
    /// Invalid usage if no launcher's variables are there; else as for [`Communicator::init`].
    pub fn from_env(config: Config) -> Result<Communicator> {
        init::by_environment(config)
    }

    /// Joins over an out-of-band side that is there already.
    ///
    /// # Errors
    /// As for [`Communicator::init`].
    pub fn over(exchange: OutOfBandRef, fault: Arc<Fault>, config: Config) -> Result<Communicator> {
        init::connect(exchange, fault, config)
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.exchange.rank()
    }

    /// Number of ranks.
    pub fn nranks(&self) -> usize {
        self.exchange.peers().len()
    }

    /// All ranks, in order.
    pub fn peers(&self) -> &[PeerInfo] {
        self.exchange.peers()
    }

    /// Equal on the ranks of this communicator, and of no other communicator, also if both met by
    /// one id. Says nothing about the secret.
    pub fn identity(&self) -> [u8; 32] {
        self.exchange.key("identity")
    }

    /// What the communicator is made of.
    pub fn info(&self) -> CommInfo {
        self.info.clone()
    }

    /// What holds for calls that name no codec, and who said so.
    pub fn codec_policy(&self) -> &CodecPolicy {
        &self.policy
    }

    /// The settings in effect.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Runs one call.
    ///
    /// # Errors
    /// Invalid argument, before anything moves, if the call or its buffers are impossible;
    /// mismatch, remote, timeout or aborted otherwise, after which the communicator is only good
    /// for [`Communicator::abort`] and drop, and the output is undefined.
    pub fn call(&self, call: &Call, buffers: UserBuffers<'_>) -> Result<Report> {
        let _environment = FloatEnvironment::standard();
        self.check_fault()?;
        self.host_engine()?;
        check::call(self, call, &BufferRanges::from(&buffers))?;
        check::alone(self, call)?;
        let admission = self.admit(call, true)?;
        let request = call.resolve(admission.decision.codec);
        let mut engine = self.engine()?;
        let _guard = PanicGuard(self);
        let run = engine
            .prepare(request, buffers)
            .inspect_err(|_| self.rollback(&admission))?;
        let result = match &admission.slice {
            Some(slice) => self.sample(&mut engine, run, slice),
            None => engine.run(run),
        };
        drop(engine);
        let report = self.fail_on_error(result)?;
        self.counters.ran(&admission.decision, &report);
        Ok(report)
    }

    /// Returns when every rank has called it. On a GPU it does not wait for calls that are queued.
    ///
    /// # Errors
    /// As [`Communicator::call`].
    pub fn barrier(&self) -> Result<()> {
        if self.gpu().is_some() {
            self.check_fault()?;
            return self.fail_on_error(self.exchange.barrier());
        }
        self.all_reduce_in_place::<u8>(&mut [], crate::types::ReduceOp::Sum)
            .map(|_| ())
    }

    /// The candidates for a call, their predicted costs and the winner, as text.
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

    /// Seconds that a call is predicted to take, by the model that selects how it is run.
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
        self.split_watched(color, key, self.config.clone(), self.fault.child())
    }

    /// As [`Communicator::split`], with the settings of the new communicator, which its ranks must
    /// share as those of any, and with its fault: a child of this communicator's
    /// ([`Communicator::fault`]).
    ///
    /// # Errors
    /// As [`Communicator::split`].
    pub fn split_watched(
        &self,
        color: Option<u32>,
        key: i64,
        config: Config,
        fault: Arc<Fault>,
    ) -> Result<Option<Communicator>> {
        self.check_fault()?;
        let made = split::split(self, color, key, config, fault);
        // Who aborts this communicator ends its part in the split at once, and that may be seen here
        // before the news of the abort comes.
        if let Err(error) = &made
            && error.kind() == ErrorKind::Remote
        {
            self.fault.reason_within(GRACE);
        }
        // A rank that fails to split leaves the others waiting for it: all of them fail.
        self.fail_on_error(made)
    }

    /// Lets ranks of this communicator make another one when it has failed: see
    /// [`Communicator::shrink`]. All ranks must call it. Costs a socket for as long as the
    /// communicator lives.
    ///
    /// # Errors
    /// As [`Communicator::call`].
    pub fn prepare_to_shrink(&self) -> Result<()> {
        self.check_fault()?;
        if self.shrink_rendezvous.get().is_none() {
            let refuge = self.fail_on_error(ShrinkRendezvous::open(&*self.exchange))?;
            let _ = self.shrink_rendezvous.set(refuge);
        }
        Ok(())
    }

    /// Makes a communicator of the ranks that are not in `exclude`, in order. They all must call
    /// it with the same list; those in the list need not be alive, and this communicator may have
    /// failed. The new one's fault is `fault`.
    ///
    /// # Errors
    /// Invalid argument for a list with this rank, a rank twice or one that there is not; invalid
    /// usage without [`Communicator::prepare_to_shrink`]; else as [`Communicator::init`].
    pub fn shrink(
        &self,
        exclude: &[usize],
        config: Config,
        fault: Arc<Fault>,
    ) -> Result<Communicator> {
        split::shrink(self, exclude, config, fault)
    }

    /// As [`Communicator::split_watched`], for a communicator that has failed although all its ranks
    /// are there: one that they aborted. The new one's fault is `fault`, which is no child.
    ///
    /// # Errors
    /// Invalid usage without [`Communicator::prepare_to_shrink`]; else as [`Communicator::init`].
    pub fn split_again(
        &self,
        color: Option<u32>,
        key: i64,
        config: Config,
        fault: Arc<Fault>,
    ) -> Result<Option<Communicator>> {
        split::split_again(self, color, key, config, fault)
    }

    /// What every wait of this communicator watches.
    pub fn fault(&self) -> &Arc<Fault> {
        &self.fault
    }

    /// The reason why the communicator has failed, if it has. That another rank is gone is told
    /// here when it ends this rank's calls, since those that need nothing of it complete first, or as
    /// soon as a call was refused for it.
    pub fn async_error(&self) -> Option<Error> {
        if let Err(error) = self.owner.check() {
            return Some(error);
        }
        if self.announced.load(Ordering::Relaxed) {
            return self.fault.check().err();
        }
        let ended = self.fault.ends_waits();
        ended.inspect_err(|reason| self.tell(reason)).err()
    }

    /// # Errors
    /// Invalid usage in a child that was forked after the communicator was made.
    pub fn check_process(&self) -> Result<()> {
        self.owner.check()
    }

    /// Whether this rank is in no call: none is being made, and on a GPU none that was queued is left.
    /// What a graph replays is not known where `CINCH_GRAPH_MIXING` is 0.
    pub fn is_idle(&self) -> bool {
        match &self.state {
            DeviceState::Host(engine) => engine.try_lock().is_ok(),
            DeviceState::Gpu(gpu) => gpu.is_idle(),
        }
    }

    /// Fails the communicator, on this rank at once and on the others by message. Calls that wait
    /// return [`ErrorKind::Aborted`]. Reaches communicators split from this one whose faults are still
    /// children of its own.
    pub fn abort(&self) {
        let me = &self.peers()[self.rank()];
        self.fail(Error::new(
            ErrorKind::Aborted,
            format!("{me} aborted the communicator"),
        ));
    }

    /// Waits until the calls of this rank have ended, which do so soon once the communicator has
    /// failed; those on a GPU behind what else is on their streams, at most `patience`.
    ///
    /// # Errors
    /// Timeout if a kernel still runs; those of the driver.
    pub fn wait_stopped(&self, patience: Duration) -> Result<()> {
        self.owner.check()?;
        match &self.state {
            DeviceState::Host(engine) => {
                // Held while a call runs. One that panicked has ended, too.
                drop(engine.lock());
                Ok(())
            }
            DeviceState::Gpu(gpu) => gpu.engine()?.wait(patience),
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
            Error::internal("an earlier call on this communicator panicked; it cannot go on")
        })
    }

    /// The reason why the communicator has failed, if it has; tells the other ranks if they have
    /// not heard it from this one.
    fn check_fault(&self) -> Result<()> {
        self.owner.check()?;
        self.fault.check().inspect_err(|reason| self.tell(reason))
    }

    /// Turns a failed call into the failure of the communicator. Errors that are found before
    /// anything moves do not come here.
    fn fail_on_error<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| {
            self.fail(error.clone());
            // Whoever was first decides what all calls return from now on.
            self.fault.reason().cloned().unwrap_or(error)
        })
    }

    fn fail(&self, reason: Error) {
        if !self.owner.is_this() {
            return;
        }
        self.fault.raise(reason.clone());
        self.tell(self.fault.reason().unwrap_or(&reason));
    }

    fn tell(&self, reason: &Error) {
        if !self.announced.swap(true, Ordering::Relaxed) {
            self.exchange.announce(reason);
        }
    }
}

/// Fails a communicator whose call unwinds: its peers must not wait for a rank that will not come
/// back to it.
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

impl Communicator {
    /// Cuts messages of host memory from now on as `other` does, which has as many ranks: two
    /// engines must give the same bits for the same cut. For tests.
    ///
    /// # Errors
    /// Invalid usage if this communicator is on a GPU; invalid argument if the ranks differ.
    pub fn copy_limits(&self, limits: Limits) -> Result<()> {
        if limits.nranks != self.nranks() {
            return Err(Error::invalid_argument(format!(
                "a communicator of {} ranks cannot cut as one of {} does",
                self.nranks(),
                limits.nranks
            )));
        }
        self.engine()?.copy_limits(limits);
        Ok(())
    }

    /// Selects by these costs from now on, on host memory: measured in another way, or another
    /// machine's. All ranks give the same ones at the same point.
    ///
    /// # Errors
    /// Invalid usage if the communicator is on a GPU, whose costs are constants.
    pub fn set_costs(&self, costs: MeasuredCosts) -> Result<()> {
        self.engine()?.set_costs(costs);
        Ok(())
    }

    /// What this communicator selects and cuts by.
    ///
    /// # Errors
    /// Internal if an earlier call panicked.
    pub fn limits(&self) -> Result<Limits> {
        match &self.state {
            DeviceState::Host(_) => Ok(self.engine()?.limits().clone()),
            DeviceState::Gpu(gpu) => Ok(gpu.engine()?.limits().clone()),
        }
    }
}
