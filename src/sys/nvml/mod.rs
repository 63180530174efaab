//! NVIDIA's management library (NVML), opened at run time: which GPUs there are, their PCIe links, and what is at
//! the other end of each NVLink. A missing library is an error value.
//!
//! [`Api`] has the C functions, [`Loaded`] finds them in the driver's library, and the tests' `mock` simulates
//! them. [`Nvml`] calls them and returns plain values.

mod api;
mod load;
#[cfg(test)]
pub mod mock;
mod query;
#[cfg(test)]
mod tests;
mod types;

pub use api::Api;
pub use load::Loaded;
pub use query::{Nvml, NvmlGpu, NvmlLink, NvmlPcieLink, NvmlRemote};
pub use types::*;
