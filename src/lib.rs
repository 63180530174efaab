//! cinch: collective communication that compresses inside every pipeline chunk.
//!
//! Programs use [`Communicator`], [`Config`], [`UniqueId`], [`types`], [`mem`] for buffers, [`codec`]
//! for encoding without a communicator, and the training helpers of [`training`]. Modules that these
//! pages leave out are public for the tool, the drop-in for NCCL, tests and benches.
//!
//! The crate is layered; a module imports only modules of a lower layer (see [`manual`], and
//! `tests/meta/layers.rs`, which enforces it). `unsafe` is allowed module by module, below.

// Layer 0
pub mod error;
pub mod types;
// Layer 1
pub mod config;
#[doc(hidden)]
#[allow(unsafe_code)]
pub mod cpu;
#[doc(hidden)]
pub mod schedule;
#[doc(hidden)]
#[allow(unsafe_code)]
pub mod sync;
#[doc(hidden)]
#[allow(unsafe_code)]
pub mod sys;
mod wire;
// Layer 2
#[doc(hidden)]
pub mod bootstrap;
pub mod codec;
#[doc(hidden)]
#[allow(unsafe_code)]
pub mod gpu;
#[doc(hidden)]
pub mod reduce;
// Layer 3
#[allow(unsafe_code)]
pub mod mem;
pub mod training;
// Layer 4
#[doc(hidden)]
#[allow(unsafe_code)]
pub mod transport;
// Layer 5
#[doc(hidden)]
#[allow(unsafe_code)]
pub mod gpu_links;
// Layer 6
#[doc(hidden)]
pub mod plan;
// Layer 7
#[allow(unsafe_code)]
pub mod arrays;
#[doc(hidden)]
pub mod engine;
// Layer 8
pub mod comm;
// Layer 9
#[doc(hidden)]
#[allow(unsafe_code)]
pub mod capi;
#[doc(hidden)]
pub mod testing;

pub mod manual;

pub use bootstrap::UniqueId;
pub use comm::{Communicator, Report};
pub use config::Config;
pub use error::{Error, ErrorKind, Result};
pub use types::{Algorithm, CodecSetting, CodecSpec, Collective, DType, ReduceOp};

/// The library's version, `major.minor.patch`.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
