//! Properties of the CPU: instruction sets ([`Isa`]), the floating-point environment of a thread
//! ([`FloatEnvironment`]) and aligned scratch memory ([`Tile`]).
//!
//! The instruction set is chosen once, when a codec or reducer is built, and never per call.

#[cfg(target_arch = "x86_64")]
mod emulator;
mod environment;
mod prefetch;
mod stream;
mod tile;

pub use environment::FloatEnvironment;
#[cfg(test)]
pub(crate) use environment::{STRANGE, is_standard, under};
pub(crate) use prefetch::{prefetch, prefetch_to_write};
pub(crate) use stream::{CAN_STREAM, StreamFence, copy_streaming};
pub use tile::Tile;

use crate::error::{Error, Result};

/// An instruction set for vector code, ordered by vector width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Portable Rust, whose results specify the results of the other sets.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
}

impl Isa {
    /// Returns the widest instruction set that this machine has. A processor that QEMU emulates has none but
    /// `Scalar`, because its AVX2 may be wrong.
    pub fn detect() -> Isa {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            match (avx2 && !emulator::is_tcg(), avx512) {
                (true, true) => return Isa::Avx512,
                (true, false) => return Isa::Avx2,
                _ => {}
            }
        }
        Isa::Scalar
    }

    /// Returns every instruction set that this machine has, scalar first. Tests compare all of
    /// them.
    pub fn available() -> Vec<Isa> {
        [Isa::Scalar, Isa::Avx2, Isa::Avx512]
            .into_iter()
            .filter(|&isa| isa <= Isa::detect())
            .collect()
    }

    /// Returns the instruction set that a `CINCH_SIMD` value names, or the widest one for any other
    /// value.
    ///
    /// # Errors
    /// Unsupported if the machine lacks the named set.
    pub fn from_setting(setting: &str) -> Result<Isa> {
        let wanted = match setting {
            "scalar" => Isa::Scalar,
            "avx2" => Isa::Avx2,
            "avx512" => Isa::Avx512,
            _ => return Ok(Isa::detect()),
        };
        if wanted > Isa::detect() {
            return Err(Error::new(
                crate::error::ErrorKind::Unsupported,
                format!(
                    "CINCH_SIMD={setting}, but the widest set of this machine is {}",
                    Isa::detect().name()
                ),
            ));
        }
        Ok(wanted)
    }

    /// Returns the lower-case name of the instruction set.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        }
    }
}
