//! The CUDA driver API, opened at run time. A missing driver is an error value: the library loads, and its
//! host path works, on a machine without GPUs.
//!
//! [`Api`] has the functions, [`Loaded`] finds them in the driver's library, and the tests' `mock` simulates
//! them on host memory. Types, constants and signatures are those of the crate `cudarc`. Its loader and its
//! safe layer stay unused: they panic where the library or a symbol is missing.

mod api;
mod load;
#[cfg(test)]
pub mod mock;
mod types;

pub use api::{Api, available_since};
pub use load::Loaded;
pub use types::*;

/// The oldest CUDA version whose drivers have every required function.
pub const OLDEST_DRIVER: &str = "12.0";
