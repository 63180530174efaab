//! The verbs of rdma-core, opened at run time. If libibverbs is missing, opening returns an error
//! and the library uses its other transports.
//!
//! [`Api`] is the trait of the exported functions. [`Loaded`] takes them from the system's library;
//! `fake` simulates them in tests. Inline functions of C (posting, polling) call the operations of
//! the device's context, simulated or real.

mod api;
#[cfg(test)]
pub mod fake;
mod inline;
#[cfg(test)]
mod layout_tests;
mod load;
mod types;

pub use api::Api;
pub use inline::{poll_cq, post_recv, post_send, req_notify_cq};
pub use load::Loaded;
pub use types::*;

/// The oldest rdma-core whose libibverbs has all required functions.
pub const OLDEST_LIBRARY: &str = "32";
