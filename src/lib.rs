//! cinch: collective communication that compresses inside every pipeline chunk.
//!
//! - [`Communicator`] joins ranks and runs collectives; [`Group`] runs several calls together.
//! - [`Call`] describes any call, with its codec and algorithm; [`UserBuffers`] and [`DeviceBuffers`] hold
//!   its memory.
//! - [`Config`] holds the settings, whose types are in [`settings`].
//! - [`arrays`] encodes and decodes arrays without a communicator.
//! - [`training`] has helpers for training loops.
//! - [`manual`] has the pages of the guide that explain failures, numerics and selection.
//!
//! # Features
//! - `half` makes `f16` and `bf16` of the crate `half` elements of typed collectives ([`Element`]).
//! - `internal` makes all modules public for the tool, the drop-in for NCCL, tests and benches. It is no part of
//!   the API: its names change from version to version.

// The tool, the drop-in and the C library call code that the library itself does not. Builds with
// `internal` find code that none of them calls.
#![cfg_attr(not(feature = "internal"), allow(dead_code, unused_imports))]

// The crate is layered; a module imports only modules of a lower layer (see docs/layers.md, and
// `tests/meta/layers.rs`, which enforces it). `unsafe` is allowed module by module. Each module has two
// declarations: a macro that chose the visibility would hide the files from rustfmt.

// Layer 0: errors, and the types of calls, codecs and elements.
#[cfg(not(feature = "internal"))]
mod error;
#[cfg(feature = "internal")]
pub mod error;
#[cfg(not(feature = "internal"))]
mod types;
#[cfg(feature = "internal")]
pub mod types;
// Layer 1: settings, schedules, synchronisation, and calls of the operating system and of drivers.
#[cfg(not(feature = "internal"))]
mod config;
#[cfg(feature = "internal")]
pub mod config;
#[cfg(not(feature = "internal"))]
#[allow(unsafe_code)]
mod cpu;
#[cfg(feature = "internal")]
#[allow(unsafe_code)]
pub mod cpu;
#[cfg(not(feature = "internal"))]
mod schedule;
#[cfg(feature = "internal")]
pub mod schedule;
#[cfg(not(feature = "internal"))]
#[allow(unsafe_code)]
mod sync;
#[cfg(feature = "internal")]
#[allow(unsafe_code)]
pub mod sync;
#[cfg(not(feature = "internal"))]
#[allow(unsafe_code)]
mod sys;
#[cfg(feature = "internal")]
#[allow(unsafe_code)]
pub mod sys;
mod wire;
// Layer 2: control plane, codecs, element arithmetic, and CUDA objects.
#[cfg(not(feature = "internal"))]
mod bootstrap;
#[cfg(feature = "internal")]
pub mod bootstrap;
#[cfg(not(feature = "internal"))]
mod codec;
#[cfg(feature = "internal")]
pub mod codec;
#[cfg(not(feature = "internal"))]
#[allow(unsafe_code)]
mod gpu;
#[cfg(feature = "internal")]
#[allow(unsafe_code)]
pub mod gpu;
#[cfg(not(feature = "internal"))]
mod recorder;
#[cfg(feature = "internal")]
pub mod recorder;
#[cfg(not(feature = "internal"))]
mod reduce;
#[cfg(feature = "internal")]
pub mod reduce;
pub mod settings;
#[cfg(not(feature = "internal"))]
mod topology;
#[cfg(feature = "internal")]
pub mod topology;
// Layer 3: memory that ranks share, and helpers of training loops.
#[cfg(not(feature = "internal"))]
#[allow(unsafe_code)]
mod mem;
#[cfg(feature = "internal")]
#[allow(unsafe_code)]
pub mod mem;
pub mod training;
// Layer 4: transports between ranks in host memory.
#[cfg(not(feature = "internal"))]
#[allow(unsafe_code)]
mod transport;
#[cfg(feature = "internal")]
#[allow(unsafe_code)]
pub mod transport;
// Layer 5: peer memory between GPU ranks.
#[cfg(not(feature = "internal"))]
#[allow(unsafe_code)]
mod gpu_links;
#[cfg(feature = "internal")]
#[allow(unsafe_code)]
pub mod gpu_links;
// Layer 6: the planner, which selects algorithm, kernel and chunk size of a call.
#[cfg(not(feature = "internal"))]
mod plan;
#[cfg(feature = "internal")]
pub mod plan;
// Layer 7: engines, which run planned calls, and codecs for whole arrays.
#[allow(unsafe_code)]
pub mod arrays;
#[cfg(not(feature = "internal"))]
mod engine;
#[cfg(feature = "internal")]
pub mod engine;
// Layer 8: communicators and groups.
#[cfg(not(feature = "internal"))]
mod comm;
#[cfg(feature = "internal")]
pub mod comm;
// Layer 9: the C ABI, and reference results for tests.
#[cfg(feature = "internal")]
#[allow(unsafe_code)]
pub mod capi;
#[cfg(feature = "internal")]
pub mod testing;

pub mod manual;

pub use bootstrap::{PeerInfo, UniqueId};
pub use codec::EncodeStats;
pub use comm::{CallRequest, CodecStats, Communicator, Group, PendingCall, RawReason, Report};
pub use comm::{StartedArrays, wait_any};
pub use config::Config;
pub use error::{Error, ErrorKind, Result};
pub use mem::{DeviceBuffers, UserBuffers, bytes_of, bytes_of_mut};
pub use types::{
    Algorithm, Call, CallStatistics, CallTuning, CodecKind, CodecSetting, CodecSpec, Collective,
    DType, Element, Extent, InPlace, Level, Parameters, ReduceOp, Scalar, ScaleRule, TransportKind,
};

/// The library's version, `major.minor.patch`.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
