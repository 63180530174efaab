//! Tests collectives, codecs and kernels on host memory, with ranks as threads of this process.

mod auto_codec;
mod averages;
mod codec_limits;
mod codec_rules;
mod collectives;
#[path = "../cuda_host/mod.rs"]
mod cuda_host;
mod defects;
mod emulated;
mod error_growth;
mod feedback;
mod feedback_soak;
mod group_fusion;
mod mismatch;
mod multi_host;
#[path = "../support/mod.rs"]
mod support;
// Runs the unit tests of the example, whose `main` is unused here.
#[allow(dead_code)]
#[path = "../../examples/train/main.rs"]
mod train;
