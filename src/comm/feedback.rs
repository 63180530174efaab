//! Residuals of error feedback: export, import and rescaling.

use super::{Communicator, DeviceState};
use crate::codec::feedback::Feedback;
use crate::cpu::FloatEnvironment;
use crate::error::Result;

impl Communicator {
    /// Exports this rank's residuals of error feedback ([`super::Call::feedback`]), to be stored with a
    /// checkpoint.
    ///
    /// # Errors
    /// Internal if an earlier call panicked. On a GPU: timeout if queued calls do not end; errors of the
    /// driver. A failed communicator still has the residuals of its successful calls, without the tensor
    /// of the call that failed.
    pub fn export_residuals(&self) -> Result<Vec<u8>> {
        self.await_started_calls()?;
        let (rank, nranks) = (self.rank(), self.nranks());
        Ok(match &self.state {
            DeviceState::Host(_) => self.engine()?.feedback().export(rank, nranks),
            DeviceState::Gpu(gpu) => gpu.engine()?.export_residuals()?.export(rank, nranks),
        })
    }

    /// Replaces all residuals by those in `bytes`, which this rank exported from a communicator with equally
    /// many ranks ([`Communicator::export_residuals`]). The first call of a tensor logs and drops residuals
    /// whose element count, chunks, operator, type, codec or algorithm differ from its own.
    ///
    /// # Errors
    /// Invalid argument if another rank exported the residuals, or if they are damaged; nothing changes. On a
    /// GPU also the errors of [`Communicator::export_residuals`].
    pub fn import_residuals(&self, bytes: &[u8]) -> Result<()> {
        let feedback = Feedback::import(bytes, self.rank(), self.nranks())?;
        self.await_started_calls()?;
        match &self.state {
            DeviceState::Host(_) => {
                feedback.check_chunks()?;
                *self.engine()?.feedback() = feedback;
                Ok(())
            }
            DeviceState::Gpu(gpu) => gpu.engine()?.import_residuals(&feedback),
        }
    }

    /// Multiplies this rank's residuals by `factor`. If the program sums scaled gradients, `factor` is the
    /// new loss scale divided by the old ([`crate::training::Verdict::rescale`]). Residuals on a GPU are
    /// copied to the host and back.
    ///
    /// # Errors
    /// Invalid argument if the factor is negative or not finite.
    pub fn rescale_residuals(&self, factor: f32) -> Result<()> {
        self.await_started_calls()?;
        let _environment = FloatEnvironment::standard();
        match &self.state {
            DeviceState::Host(_) => self.engine()?.feedback().rescale(factor),
            DeviceState::Gpu(gpu) => {
                let mut engine = gpu.engine()?;
                let mut feedback = engine.export_residuals()?;
                feedback.rescale(factor)?;
                engine.import_residuals(&feedback)
            }
        }
    }

    /// Drops this rank's residuals of one tensor, or of all tensors.
    ///
    /// # Errors
    /// Internal if an earlier call panicked.
    pub fn forget_residuals(&self, tensor: Option<u64>) -> Result<()> {
        self.await_started_calls()?;
        match &self.state {
            DeviceState::Host(_) => {
                self.engine()?.feedback().forget(tensor);
                Ok(())
            }
            DeviceState::Gpu(gpu) => gpu.engine()?.forget_residuals(tensor),
        }
    }

    /// Waits for the calls that were started earlier, which use residuals.
    fn await_started_calls(&self) -> Result<()> {
        self.owner.check()?;
        self.started.wait_idle();
        Ok(())
    }
}
