//! Runs plans on a GPU: packs them for the kernels, and launches those on the caller's stream.

pub mod abi;
pub mod pack;
