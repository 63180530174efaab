//! Whole arrays without a communicator: published layouts, encode and decode on a GPU, and packed copies
//! between host and GPU.

mod device_codec;
pub mod format;
mod host_copy;

pub use device_codec::{CodecKernels, DeviceCodec, Elements};
pub use format::{Layout, StandAlone};
pub use host_copy::HostCopier;
