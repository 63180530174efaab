//! The verbs of rdma-core, opened at run time: the library loads and everything else works where
//! there is no libibverbs, and its absence is an error value.
//!
//! [`Api`] has the exported functions, [`Loaded`] gets them from the system's library, and in tests
//! `fake` stands in for them. What C programs call as inline functions (posting, polling) goes
//! through the operations of the device's context, for the fake as for a real provider.

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

/// The oldest rdma-core whose libibverbs has all that is needed.
pub const OLDEST_LIBRARY: &str = "32";
