//! Whole arrays without a communicator: published layouts, encoding and decoding on a GPU, and packed copies
//! between host and GPU.

mod device_codec;
mod format;
mod gpu_codecs;
mod host_copy;

pub use crate::cpu::Isa;
pub use device_codec::Elements;
#[cfg(feature = "internal")]
pub use device_codec::{CodecKernels, DeviceCodec};
pub use format::{Layout, StandAlone};
pub use gpu_codecs::GpuCodecs;
#[cfg(feature = "internal")]
pub use host_copy::HostCopier;
