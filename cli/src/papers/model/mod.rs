//! Prediction: what a codec would bring a training step before anything runs.
//!
//! [`source`] and [`published`] are the model of the paper that the 8-bit codecs come from, with
//! its constants, beside the figures that it prints and what they are once its slips are mended.
//! [`network`] and [`machine`] are the same question for another network and this machine: a list
//! of layers, measured costs, and the schedules that the library would really run.

pub mod machine;
pub mod network;
pub mod published;
pub mod source;

pub use machine::{CodecCost, Costs, LinkCost, Prediction, predict};
pub use network::Layer;
