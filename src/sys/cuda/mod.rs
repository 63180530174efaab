//! The CUDA driver API, opened at run time: the library loads and the host path works where there
//! is no driver, and its absence is an error value.
//!
//! [`Api`] has the functions, [`Loaded`] gets them from the driver's library, and in tests `mock`
//! simulates them on heap memory.

mod api;
mod load;
#[cfg(test)]
pub mod mock;
mod types;

pub use api::{Api, available_since};
pub use load::Loaded;
pub use types::*;

/// The oldest CUDA version whose drivers have all that is needed.
pub const OLDEST_DRIVER: &str = "12.0";
