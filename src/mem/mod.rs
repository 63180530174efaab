//! Memory: the user's buffers, shared and private regions, and the slot layout in them.

mod user;

pub use user::{UserBuffers, bytes_of, bytes_of_mut};
