//! Residuals of error feedback, which a communicator owns.

use super::Communicator;
use crate::adapt::Feedback;
use crate::engine::HostEngine;
use crate::error::{Error, ErrorKind, Result};
use std::sync::MutexGuard;

impl Communicator {
    /// This rank's residuals of error feedback, to be stored with a checkpoint. See
    /// [`super::Call::feedback`].
    ///
    /// # Errors
    /// Internal if an earlier call panicked; unsupported if the communicator's buffers are on a GPU,
    /// here and for the other methods below. A communicator that failed still has the residuals of
    /// its calls that succeeded, but for the tensor of the call that failed.
    pub fn export_residuals(&self) -> Result<Vec<u8>> {
        let mut engine = self.fed_engine()?;
        Ok(engine.feedback().export(self.rank(), self.nranks()))
    }

    /// Puts residuals that [`Communicator::export_residuals`] gave in the place of all present
    /// ones. They must be of this rank of as many.
    ///
    /// # Errors
    /// Invalid argument if they are not, or are damaged; nothing changes.
    pub fn import_residuals(&self, bytes: &[u8]) -> Result<()> {
        let mut engine = self.fed_engine()?;
        *engine.feedback() = Feedback::import(bytes, self.rank(), self.nranks())?;
        Ok(())
    }

    /// Multiplies this rank's residuals by `factor`: new over old scale of the loss, where scaled
    /// gradients are summed ([`crate::adapt::Verdict::rescale`]).
    ///
    /// # Errors
    /// Invalid argument if the factor is negative or not finite.
    pub fn rescale_residuals(&self, factor: f32) -> Result<()> {
        self.fed_engine()?.feedback().rescale(factor)
    }

    /// Forgets this rank's residuals of one tensor, or all of them.
    ///
    /// # Errors
    /// Internal if an earlier call panicked.
    pub fn forget_residuals(&self, tensor: Option<u64>) -> Result<()> {
        self.fed_engine()?.feedback().forget(tensor);
        Ok(())
    }

    fn fed_engine(&self) -> Result<MutexGuard<'_, HostEngine>> {
        if let Some(context) = self.gpu() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the communicator is one of {}, and error feedback keeps residuals for host \
                     buffers only; join with CINCH_DEVICE=host",
                    context.device()
                ),
            ));
        }
        self.engine()
    }
}
