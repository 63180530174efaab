//! Residuals of error feedback, which a communicator owns.

use super::{Communicator, DeviceState};
use crate::codec::feedback::Feedback;
use crate::cpu::FloatEnvironment;
use crate::error::Result;

impl Communicator {
    /// This rank's residuals of error feedback, to be stored with a checkpoint. See
    /// [`super::Call::feedback`].
    ///
    /// # Errors
    /// Internal if an earlier call panicked. A communicator that failed still has the residuals of
    /// its calls that succeeded, but for the tensor of the call that failed. On a GPU, here and
    /// below: timeout if calls that were launched do not end; those of the driver.
    pub fn export_residuals(&self) -> Result<Vec<u8>> {
        let (rank, nranks) = (self.rank(), self.nranks());
        Ok(match &self.state {
            DeviceState::Host(_) => self.engine()?.feedback().export(rank, nranks),
            DeviceState::Gpu(gpu) => gpu.engine()?.export_residuals()?.export(rank, nranks),
        })
    }

    /// Puts residuals that [`Communicator::export_residuals`] gave in the place of all present
    /// ones. They must be of this rank of as many. Those that the first call of their tensor has no
    /// use for, as it has another count, cut, operator or type, are dropped then; the log says so.
    ///
    /// # Errors
    /// Invalid argument if they are not, or are damaged; nothing changes.
    pub fn import_residuals(&self, bytes: &[u8]) -> Result<()> {
        let feedback = Feedback::import(bytes, self.rank(), self.nranks())?;
        match &self.state {
            DeviceState::Host(_) => {
                feedback.check_chunks()?;
                *self.engine()?.feedback() = feedback;
                Ok(())
            }
            DeviceState::Gpu(gpu) => gpu.engine()?.import_residuals(&feedback),
        }
    }

    /// Multiplies this rank's residuals by `factor`: new over old scale of the loss, where scaled
    /// gradients are summed ([`crate::training::Verdict::rescale`]). Those on a GPU go by way of the
    /// host.
    ///
    /// # Errors
    /// Invalid argument if the factor is negative or not finite.
    pub fn rescale_residuals(&self, factor: f32) -> Result<()> {
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

    /// Forgets this rank's residuals of one tensor, or all of them.
    ///
    /// # Errors
    /// Internal if an earlier call panicked.
    pub fn forget_residuals(&self, tensor: Option<u64>) -> Result<()> {
        match &self.state {
            DeviceState::Host(_) => {
                self.engine()?.feedback().forget(tensor);
                Ok(())
            }
            DeviceState::Gpu(gpu) => gpu.engine()?.forget_residuals(tensor),
        }
    }
}
