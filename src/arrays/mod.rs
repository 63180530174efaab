//! Encode and decode of whole arrays, without a communicator.

pub mod format;

pub use format::{Layout, StandAlone};
