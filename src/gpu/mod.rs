//! GPUs: contexts, streams, events, modules and memory, as values that free their driver objects when dropped.
//!
//! All of it calls [`crate::sys::cuda`], whose functions come from the driver at run time or, in tests, from
//! a mock. A child holds an `Arc` of its parent, so values may be dropped in any order. Every method makes
//! the context current that it needs, and restores the caller's. No method waits without a deadline.

pub mod abi;
mod context;
mod device;
mod driver;
mod event;
mod graph;
mod ipc;
pub mod kernels;
mod memory;
mod module;
mod pinned;
mod pointer;
pub mod probe;
pub mod select;
mod stream;
#[cfg(test)]
mod tests;

pub use context::{Bound, Context};
pub use device::Device;
pub use driver::Driver;
pub use event::Event;
pub use graph::{CaptureMode, EndMark, Graph};
pub use ipc::{IPC_HANDLE_BYTES, IpcHandle, IpcMemory};
pub use memory::DeviceMemory;
pub use module::{Dim3, Function, Launch, MAX_ARGUMENT_BYTES, Module};
pub use pinned::PinnedMemory;
pub use pointer::{Pointer, Space};
pub use stream::Stream;
