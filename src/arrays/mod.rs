//! Whole arrays without a communicator: encoding and decoding on host and GPU, and encoded copies between
//! host and GPU. [`Layout`] selects the chunk layout or the layout of the system that introduced the format.

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
pub use host_copy::{CopyTarget, HostCopier};
