//! Predicts how a codec would change a training step, without running it.
//!
//! [`source`] is the model, with its constants, of Dettmers, "8-Bit Approximations for Parallelism
//! in Deep Learning", which introduced the 8-bit codecs. [`published`] compares that paper's
//! printed figures with computed and corrected ones. [`network`] and [`machine`] predict any
//! network on a measured machine, from a list of layers, measured costs and the library's own
//! schedules.

pub mod machine;
pub mod network;
pub mod published;
pub mod source;

pub use machine::{CodecCost, Costs, LinkCost, Prediction, predict};
pub use network::Layer;
