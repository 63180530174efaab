//! Plain vocabulary: data types, reduction operators, collectives, codec and algorithm names.
//!
//! Each list of names stands here once; the C header, the tool and the log derive from it.

mod algorithm;
mod codec_choice;
mod codec_spec;
mod collective;
mod device;
mod dtype;
mod level_codecs;
mod reduce_op;
mod signature;
mod subsystem;

pub use algorithm::{Algorithm, Kernel, KernelProtocol, Level, Protocol, TransportKind};
pub use codec_choice::CodecChoice;
pub(crate) use codec_spec::is_threshold;
pub use codec_spec::{CodecKind, CodecSpec, DEFAULT_BLOCK, Parameters, ScaleRule};
pub use collective::{Collective, Extent};
pub use device::DeviceChoice;
pub use dtype::{DType, Element};
pub use level_codecs::LevelCodecs;
pub use reduce_op::{ReduceOp, Scalar};
pub use signature::{CallSignature, FORMAT_VERSION, Fused, SIGNATURE_WORDS};
pub use subsystem::{Subsystem, Subsystems};
