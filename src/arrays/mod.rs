//! Whole arrays without a communicator: encode and decode them on a GPU, and copy them packed between host
//! and GPU.

mod device_codec;
mod host_copy;

pub use device_codec::{CodecKernels, DeviceCodec, Elements};
pub use host_copy::HostCopier;
