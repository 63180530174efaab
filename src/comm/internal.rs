//! Methods of [`Communicator`] for the tool, the drop-in, the C library and tests. Users of the library do
//! not see them: their arguments and results are types of private modules.

use super::{CommInfo, Communicator, DeviceState, check, gpu, grow, init, split, teardown};
use crate::bootstrap::{OutOfBandRef, UniqueId};
use crate::config::{CodecPolicy, Config};
use crate::cpu::FloatEnvironment;
use crate::error::{Error, Result};
use crate::gpu::Context;
use crate::plan::{Candidate, KernelVariant, Limits, MeasuredCosts, Site};
use crate::recorder::EndStep;
use crate::sync::Fault;
use crate::types::Call;
use std::sync::Arc;
use std::time::Instant;

impl Communicator {
    /// Joins as [`Communicator::init`] does, with a fault of the caller for the new communicator. Raising the
    /// fault ends an init that still waits.
    ///
    /// # Errors
    /// See [`Communicator::init`]; the fault's reason.
    pub fn init_watched(
        id: &UniqueId,
        rank: usize,
        nranks: usize,
        config: Config,
        fault: Arc<Fault>,
    ) -> Result<Communicator> {
        grow::join(id, rank, nranks, config, fault)
    }

    /// Makes a communicator of ranks that have joined a control plane.
    ///
    /// # Errors
    /// See [`Communicator::init`].
    pub fn over(exchange: OutOfBandRef, fault: Arc<Fault>, config: Config) -> Result<Communicator> {
        init::connect(exchange, fault, config, Instant::now())
    }

    /// Returns transports, channels and slots.
    pub fn info(&self) -> CommInfo {
        self.info.clone()
    }

    /// Makes calls leave the flight recorder and the counters alone, or count again. Benchmarks compare both,
    /// between calls: a call that runs meanwhile stays open in the recorder.
    pub fn mute_recorder(&self, is_muted: bool) {
        self.recorder.mute(is_muted);
    }

    /// Returns the codec of calls that name none, and the setting that decided it.
    pub fn codec_policy(&self) -> &CodecPolicy {
        &self.policy
    }

    /// Splits as [`Communicator::split`], with the settings and the fault of the new communicator. The
    /// fault is a child of this communicator's fault ([`Communicator::fault`]).
    ///
    /// # Errors
    /// See [`Communicator::split`].
    pub fn split_watched(
        &self,
        color: Option<u32>,
        key: i64,
        config: Config,
        fault: Arc<Fault>,
    ) -> Result<Option<Communicator>> {
        self.split_under(color, key, config, fault)
    }

    /// Makes a communicator as [`Communicator::shrink`], with the fault of the new communicator.
    ///
    /// # Errors
    /// See [`Communicator::shrink`].
    pub fn shrink_watched(
        &self,
        exclude: &[usize],
        config: Config,
        fault: Arc<Fault>,
    ) -> Result<Communicator> {
        split::shrink(self, exclude, config, fault)
    }

    /// Makes a communicator as [`Communicator::grow`], with the fault of the new communicator, which is a child of
    /// this communicator's fault. A rank may pass the id that one rank made; else its own is used, if it made one.
    ///
    /// # Errors
    /// See [`Communicator::grow`]; invalid argument for an id of another communicator.
    pub fn grow_watched(
        &self,
        nranks: usize,
        id: Option<&UniqueId>,
        config: Config,
        fault: Arc<Fault>,
    ) -> Result<Communicator> {
        grow::grow(self, nranks, id, config, fault)
    }

    /// Checks the arguments of [`Communicator::grow_watched`].
    ///
    /// # Errors
    /// Invalid argument for an impossible number of ranks, or an id of another communicator.
    pub fn check_grow(&self, nranks: usize, id: Option<&UniqueId>) -> Result<()> {
        grow::check(self, nranks, id)
    }

    /// Checks that `rank` of `nranks` can be a new rank by an id of [`Communicator::grow_id`].
    ///
    /// # Errors
    /// Invalid argument for an id of an init, and for ranks that are not new or not there.
    pub fn check_new_rank(id: &UniqueId, rank: usize, nranks: usize) -> Result<()> {
        grow::check_new_rank(id, rank, nranks)
    }

    /// Splits a communicator that its ranks have aborted, as [`Communicator::split_watched`] does. The new
    /// communicator gets `fault`, which is no child of the old fault.
    ///
    /// # Errors
    /// Invalid usage without [`Communicator::prepare_to_shrink`]; else see [`Communicator::init`].
    pub fn split_again(
        &self,
        color: Option<u32>,
        key: i64,
        config: Config,
        fault: Arc<Fault>,
    ) -> Result<Option<Communicator>> {
        split::split_again(self, color, key, config, fault)
    }

    /// Returns the fault, which ends every wait of this communicator when it is raised.
    pub fn fault(&self) -> &Arc<Fault> {
        &self.fault
    }

    /// Checks that this process made the communicator.
    ///
    /// # Errors
    /// Invalid usage in a child that was forked after the communicator was made.
    pub fn check_process(&self) -> Result<()> {
        self.owner.check()
    }

    /// Cuts messages of host memory from now on by the limits of another communicator of as many ranks.
    /// Tests compare the bits of two engines with the same cut.
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

    /// Selects algorithms by these costs from now on, on host memory. All ranks must set the same costs
    /// between the same two calls.
    ///
    /// # Errors
    /// Invalid usage if the communicator is on a GPU, whose costs are constants.
    pub fn set_costs(&self, costs: MeasuredCosts) -> Result<()> {
        self.engine()?.set_costs(costs);
        Ok(())
    }

    /// Returns the limits by which this communicator selects algorithms and cuts messages.
    ///
    /// # Errors
    /// Internal if an earlier call panicked.
    pub fn limits(&self) -> Result<Limits> {
        match &self.state {
            DeviceState::Host(_) => Ok(self.engine()?.limits().clone()),
            DeviceState::Gpu(gpu) => Ok(gpu.engine()?.limits().clone()),
        }
    }

    /// Returns the GPU of the communicator's buffers; `None` if they are in host memory.
    pub fn gpu(&self) -> Option<&Arc<Context>> {
        self.gpu_context()
    }

    /// Returns the GPUs of this communicator as tuning tables name them; `None` on host memory.
    pub fn site(&self) -> Option<Site> {
        let gpu = self.gpu_context()?;
        Some(gpu::site(gpu, &self.info, self.nranks()))
    }

    /// Returns the kernel variants of `call` that are worth a measurement, equal on all ranks.
    ///
    /// # Errors
    /// Invalid usage on a communicator of host memory; invalid argument if the call is impossible.
    pub fn variants(&self, call: &Call) -> Result<Vec<KernelVariant>> {
        check::shape(self, call)?;
        let request = call.resolve(self.choose(call)?.codec);
        self.gpu_state()?.engine()?.variants(&request)
    }

    /// Returns whether `call` has this kernel variant.
    ///
    /// # Errors
    /// As for [`Communicator::variants`].
    pub fn supports(&self, call: &Call, variant: &KernelVariant) -> Result<bool> {
        check::shape(self, call)?;
        let request = call.resolve(self.choose(call)?.codec);
        self.gpu_state()?.engine()?.supports(&request, *variant)
    }

    /// Runs later calls by this kernel variant where they have it; `None` restores selection. All ranks
    /// must call it between the same two calls.
    ///
    /// # Errors
    /// Invalid usage on a communicator of host memory.
    pub fn force_variant(&self, variant: Option<KernelVariant>) -> Result<()> {
        self.gpu_state()?.engine()?.force_variant(variant);
        Ok(())
    }

    /// Returns the ways in which `call` may run, with their predicted times; the first of them runs. Equal on all
    /// ranks.
    ///
    /// # Errors
    /// Invalid argument if the call is impossible; unsupported if it names an algorithm that cannot run it.
    pub fn candidates(&self, call: &Call) -> Result<Vec<Candidate>> {
        let _environment = FloatEnvironment::standard();
        check::shape(self, call)?;
        let request = call.resolve(self.choose(call)?.codec);
        match &self.state {
            DeviceState::Host(_) => self.engine()?.candidates(&request),
            DeviceState::Gpu(gpu) => gpu.engine()?.candidates(&request),
        }
    }

    /// Returns a number that identifies the communicator, equal on all its ranks.
    pub fn number(&self) -> u64 {
        u64::from_be_bytes(self.recorder.label().id)
    }

    /// Shows in the flight recorder that the program has given up its handle.
    pub fn mark_destroyed(&self) {
        self.recorder.mark_end(EndStep::Destroyed);
    }

    /// Waits until the calls of this rank have ended, after the earlier work on their streams, and
    /// announces that no more will come. From then on the exit of this rank is no failure to other
    /// ranks, and their exit no failure to this rank. Waits for other ranks only as far as the
    /// calls do.
    ///
    /// # Errors
    /// The reason why the communicator has failed; the exit of other ranks is no error if it ended no
    /// call.
    pub fn close(&self) -> Result<()> {
        self.owner.check()?;
        self.recorder.mark_end(EndStep::Closing);
        if let Err(error) = self.fault.check()
            && !teardown::is_peer_exit(&error)
        {
            return self.fail_on_error(Err(error));
        }
        // `is_idle` may be false for a moment because another thread reads the engine.
        let (was_idle, ended) = match &self.state {
            DeviceState::Host(_) => (self.is_idle(), self.engine().map(drop)),
            DeviceState::Gpu(gpu) => match gpu.engine() {
                Ok(engine) => (gpu.is_over(&engine), engine.finish()),
                Err(error) => (false, Err(error)),
            },
        };
        // An exit that was reported but ended no call is no error.
        match ended.and_then(|()| self.fault.ends_waits()) {
            Err(error) if !(was_idle && teardown::is_peer_exit(&error)) => {
                return self.fail_on_error(Err(error));
            }
            _ => {}
        }
        self.unmap();
        self.exchange.close();
        Ok(())
    }

    /// Unmaps the memory of other ranks before this rank announces its close. A rank that learns
    /// that all have closed frees its memory, which no rank may map any more.
    ///
    /// The driver may wait for kernels of this GPU here, with the engine locked. Neither an abort nor the
    /// threads that serve running kernels need the engine.
    fn unmap(&self) {
        if let DeviceState::Gpu(gpu) = &self.state
            && !gpu.context().driver().has_ended()
            && let Ok(mut engine) = gpu.engine()
        {
            engine.close();
        }
    }

    /// Unmaps the memory of other ranks in this process, so that their teardown does not wait for
    /// this rank. The communicator takes no more calls. Returns whether any memory was mapped. Does
    /// nothing while calls of this rank run.
    pub fn unmap_local_peers(&self) -> bool {
        match &self.state {
            DeviceState::Host(_) => false,
            DeviceState::Gpu(gpu) => gpu.unmap_local_peers(),
        }
    }

    /// Returns whether other ranks of this process map this rank's GPU memory. If this rank ends
    /// before them, the last of them frees the memory.
    pub fn is_mapped_by_peers(&self) -> bool {
        match &self.state {
            DeviceState::Host(_) => false,
            DeviceState::Gpu(gpu) => gpu.is_mapped_by_peers(),
        }
    }

    /// Waits, after [`Communicator::close`], until the other ranks have closed or exited and use no
    /// memory of this rank any more.
    pub fn wait_closed(&self) {
        self.wait_peers_closed(teardown::PEER_MEMORY_TIMEOUT);
    }
}
