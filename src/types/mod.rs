//! Element types, operators, collectives, algorithms, codecs and calls, which all layers use.
//!
//! Each list is one table with the properties of its members. Other modules read these properties
//! instead of matching on members, so that a new member is one line here.

mod algorithm;
mod call;
mod call_statistics;
mod codec_setting;
mod codec_spec;
mod collective;
mod device;
mod dtype;
mod kernel_intra;
mod named_enum;
mod raw_reason;
mod reduce_op;
mod short_digest;
mod signature;
mod subsystem;

pub use algorithm::{Algorithm, Kernel, KernelProtocol, Level, Protocol, TransportKind};
pub use call::{Call, CallTuning, ResolvedCall};
pub use call_statistics::CallStatistics;
pub use codec_setting::CodecSetting;
pub(crate) use codec_spec::is_threshold;
pub use codec_spec::{CodecKind, CodecSpec, DEFAULT_BLOCK, Parameters, ScaleRule};
pub use collective::{Collective, Extent, InPlace};
pub use device::DeviceChoice;
pub use dtype::{DType, Element};
pub use kernel_intra::KernelIntra;
pub use raw_reason::RawReason;
pub use reduce_op::{ReduceOp, Scalar};
pub(crate) use short_digest::short_digest;
pub(crate) use signature::SEQUENCE_WORD;
pub use signature::{CallSignature, FORMAT_VERSION, Fused, SIGNATURE_WORDS};
pub use subsystem::{Subsystem, Subsystems};
