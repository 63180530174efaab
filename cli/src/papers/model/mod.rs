//! Predicts how a codec would change a training step, without running it.
//!
//! [`source`] is the model, with its constants, of the paper that introduced the 8-bit codecs.
//! [`published`] compares the paper's printed figures with computed and corrected ones. [`network`]
//! and [`machine`] predict any network on a measured machine, from a list of layers, measured costs
//! and the library's own schedules.

pub mod machine;
pub mod network;
pub mod published;
pub mod source;

pub use machine::{CodecCost, Costs, LinkCost, Prediction, predict};
pub use network::Layer;
