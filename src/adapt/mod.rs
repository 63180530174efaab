//! What adapts compression while a model trains: small objects without a framework, fed with what
//! a call reports.
//!
//! - [`Awp`] chooses how many bits of the weights to keep, from their L2 norm.
//! - [`LossScaler`] scales the loss so that 16-bit gradients neither vanish nor overflow.
//! - [`Feedback`] keeps what lossy encodes dropped, and gives it to the next call. The engine
//!   drives it for calls that name a tensor for it (`Call::feedback`).
//! - The absolute maximum of a tensor that is refreshed every k-th call is a scale rule of the
//!   codecs: [`crate::types::ScaleRule::Tensor`], as in `linear8:tensor=50`.
//!
//! All are deterministic and hold no clock, no thread and no random number, so ranks that feed
//! them the same numbers decide alike. Who feeds them different numbers gets different codecs on
//! different ranks, which the library reports as a mismatch.

mod awp;
mod feedback;
mod loss_scaler;
mod residuals;

pub use awp::{Awp, AwpConfig, AwpState};
pub use feedback::Feedback;
pub use loss_scaler::{LossScaler, LossScalerConfig, LossScalerState, Verdict, count_non_finite};
pub use residuals::{BY_ELEMENT, Residuals, Role, Shape};
