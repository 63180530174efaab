//! Helpers for training loops. Nothing inside the library uses them.
//!
//! - [`Awp`] chooses how many bits of the weights to keep, from their L2 norm.
//! - [`LossScaler`] scales the loss so that 16-bit gradients neither vanish nor overflow.
//!
//! Both are deterministic and hold no clock, no thread and no random number: ranks that pass in the
//! same numbers decide alike. Ranks that pass in different numbers choose different codecs, and the
//! library reports the mismatch.
//!
//! Related features live elsewhere: [`Call::feedback`](crate::Call::feedback) carries encoding errors from call to
//! call, and [`ScaleRule::Tensor`](crate::ScaleRule::Tensor) (`linear8:tensor=50`) keeps a scale for many calls.

mod awp;
mod loss_scaler;

pub use awp::{Awp, AwpConfig, AwpState};
pub use loss_scaler::{LossScaler, LossScalerConfig, LossScalerState, Verdict, count_non_finite};
