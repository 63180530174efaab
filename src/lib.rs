//! cinch: collective communication that compresses inside every pipeline chunk.
//!
//! The crate is layered; a module imports only modules of a lower layer (see [`manual`], and
//! `tests/meta/layers.rs`, which enforces it). `unsafe` is allowed module by module, below.

// Layer 0
pub mod error;
pub mod types;
// Layer 1
pub mod adapt;
pub mod config;
#[allow(unsafe_code)]
pub mod cpu;
pub mod schedule;
#[allow(unsafe_code)]
pub mod sync;
#[allow(unsafe_code)]
pub mod sys;
// Layer 2
pub mod bootstrap;
pub mod codec;
#[allow(unsafe_code)]
pub mod gpu;
pub mod reduce;
// Layer 3
#[allow(unsafe_code)]
pub mod mem;
// Layer 4
#[allow(unsafe_code)]
pub mod transport;
// Layer 5
#[allow(unsafe_code)]
pub mod gpu_links;
// Layer 6
pub mod plan;
// Layer 7
pub mod engine;
// Layer 8
pub mod comm;
// Layer 9
#[allow(unsafe_code)]
pub mod capi;
pub mod testing;

pub mod manual;

pub use bootstrap::UniqueId;
pub use comm::{Communicator, Report};
pub use config::Config;
pub use error::{Error, ErrorKind, Result};
pub use types::{Algorithm, CodecSetting, CodecSpec, Collective, DType, ReduceOp};

/// The library's version, `major.minor.patch`.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
