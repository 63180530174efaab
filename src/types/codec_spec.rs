//! Codec names and their parameters, as users write them: `linear8:block=128`.

use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// Default number of elements that share one scale.
pub const DEFAULT_BLOCK: u32 = 256;

/// A set of parameters that may follow a codec's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameters(u8);

impl Parameters {
    /// `block=B`: elements that share a scale.
    pub const BLOCK: Parameters = Parameters(1);
    /// `tensor=K`: one scale for each chunk, computed anew every K calls.
    pub const TENSOR: Parameters = Parameters(2);
    /// `offset=E`: power of ten by which the range of values is moved.
    pub const OFFSET: Parameters = Parameters(4);
    /// `seed=S`: seed of stochastic rounding.
    pub const SEED: Parameters = Parameters(8);
    /// `tau=T`: a threshold, which must be given.
    pub const TAU: Parameters = Parameters(16);

    const fn of(all: &[Parameters]) -> Parameters {
        let (mut bits, mut at) = (0, 0);
        while at < all.len() {
            bits |= all[at].0;
            at += 1;
        }
        Parameters(bits)
    }

    /// Returns whether the sets have a parameter in common.
    pub const fn has(self, other: Parameters) -> bool {
        self.0 & other.0 != 0
    }
}

impl fmt::Display for Parameters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts = [
            (Parameters::BLOCK, "block=32..4096 (256)"),
            (Parameters::TENSOR, "or tensor=K calls between scales"),
            (Parameters::OFFSET, "offset=-30..30 (0), a power of ten"),
            (Parameters::SEED, "seed=1..255 to round at random"),
            (Parameters::TAU, "tau=T, a number above 0, is needed"),
        ];
        let texts: Vec<_> = texts
            .into_iter()
            .filter(|&(one, _)| self.has(one))
            .map(|(_, text)| text)
            .collect();
        match texts[..] {
            [] => f.write_str("none"),
            _ => f.write_str(&texts.join(", ")),
        }
    }
}

/// Declares the table of codecs. To add a codec, add a line here, a line in `codec::build`, and a
/// folder with its code.
macro_rules! codecs {
    ($($(#[$doc:meta])* $kind:ident = $number:literal, $name:literal, [$($parameter:ident),*];)*) => {
        /// An encoding. Numbers are part of the wire format and are never reused.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum CodecKind {
            $($(#[$doc])* $kind = $number,)*
        }

        impl CodecKind {
            /// Every codec, in numeric order.
            pub const ALL: [CodecKind; [$($number),*].len()] = [$(CodecKind::$kind),*];

            /// Returns the name as users write it.
            pub const fn name(self) -> &'static str {
                match self {
                    $(CodecKind::$kind => $name,)*
                }
            }

            /// Returns the parameters that may follow the name.
            pub const fn parameters(self) -> Parameters {
                match self {
                    $(CodecKind::$kind => Parameters::of(&[$(Parameters::$parameter),*]),)*
                }
            }
        }
    };
}

codecs! {
    /// Sends the elements unchanged.
    Raw = 0, "raw", [];
    /// Sign and 7-bit integer, times absmax/127 (absmax: absolute maximum of the block).
    Linear8 = 1, "linear8", [BLOCK, TENSOR, SEED];
    /// 8-bit dynamic tree format, times the absolute maximum of the block (absmax).
    Dynamic8 = 2, "dynamic8", [BLOCK, TENSOR, SEED];
    /// 8-bit static tree format with a fixed range.
    Static8 = 3, "static8", [OFFSET];
    /// Sign, 3-bit decimal exponent and 4-bit integer, with a fixed range.
    Mantissa8 = 4, "mantissa8", [OFFSET];
    /// bfloat16, rounded to nearest even.
    CastBf16 = 5, "cast_bf16", [];
    /// IEEE binary16, rounded to nearest even.
    Cast16 = 6, "cast16", [];
    /// The minimum or the maximum of the block.
    MinMax1 = 7, "minmax1", [BLOCK, SEED];
    /// 2-bit integer between minimum and maximum of the block.
    MinMax2 = 8, "minmax2", [BLOCK, SEED];
    /// 4-bit integer between minimum and maximum of the block.
    MinMax4 = 9, "minmax4", [BLOCK, SEED];
    /// 8-bit integer between minimum and maximum of the block.
    MinMax8 = 10, "minmax8", [BLOCK, SEED];
    /// The upper byte of an fp32 number.
    Trunc8 = 11, "trunc8", [];
    /// The upper two bytes of an fp32 number.
    Trunc16 = 12, "trunc16", [];
    /// The upper three bytes of an fp32 number.
    Trunc24 = 13, "trunc24", [];
    /// 8-bit float with 4 exponent and 3 mantissa bits, times absmax/448.
    Fp8E4M3 = 14, "fp8_e4m3", [BLOCK, TENSOR];
    /// 8-bit float with 5 exponent and 2 mantissa bits, times absmax/57,344.
    Fp8E5M2 = 15, "fp8_e5m2", [BLOCK, TENSOR];
    /// -s, 0 or s at random, unbiased, for a scale s of the block.
    TernGrad = 16, "terngrad", [BLOCK, SEED];
    /// The mean of all elements of the block with the same sign.
    OneBit = 17, "onebit", [BLOCK];
    /// -tau, 0 or tau, by comparison with the threshold tau.
    Threshold2 = 18, "threshold2", [TAU];
}

impl CodecKind {
    /// Returns whether elements are sent unchanged, without a codec.
    pub const fn is_raw(self) -> bool {
        matches!(self, CodecKind::Raw)
    }

    /// Returns whether the elements of a block share numbers that are computed from them, such as a
    /// scale.
    pub const fn has_scale(self) -> bool {
        self.parameters().has(Parameters::BLOCK)
    }

    /// Returns whether the codec can use one scale for a chunk instead of one for each block.
    pub const fn has_tensor_scale(self) -> bool {
        self.parameters().has(Parameters::TENSOR)
    }

    /// Returns whether elements are compared with a given number.
    pub const fn has_threshold(self) -> bool {
        self.parameters().has(Parameters::TAU)
    }

    /// Returns whether the codec can round stochastically.
    pub const fn has_seed(self) -> bool {
        self.parameters().has(Parameters::SEED)
    }

    /// Returns whether an f16 may decode to more than f16 holds, so that the codec limits such elements. All
    /// other codecs have a value between every f16 and 65,520, where f16 overflows.
    pub const fn has_limit(self) -> bool {
        matches!(self, CodecKind::CastBf16 | CodecKind::Mantissa8)
    }

    /// Returns whether a fixed power of ten moves the range of values.
    pub const fn has_offset(self) -> bool {
        self.parameters().has(Parameters::OFFSET)
    }
}

/// Which elements share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleRule {
    /// This many consecutive elements, a power of two from 32 to 4,096.
    Block(u32),
    /// All elements of a chunk. The scale comes from the absolute maximum, which is computed anew
    /// every `refresh` calls on one tensor. Calls in between keep the old maximum, and larger
    /// values saturate.
    Tensor {
        /// Number of calls from one computation of the maximum to the next; 1 computes it in every
        /// call.
        refresh: u32,
    },
    /// No elements share a scale: each is compared with this threshold above 0, given as fp32 bits.
    Threshold(u32),
}

/// A codec with its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CodecSpec {
    /// Encoding of the elements; the fields below are its parameters.
    pub kind: CodecKind,
    /// Elements that share a scale if [`CodecKind::has_scale`], the threshold if
    /// [`CodecKind::has_threshold`], else ignored.
    pub scale: ScaleRule,
    /// Power of ten by which the range of values is moved, -30 to 30; ignored unless
    /// [`CodecKind::has_offset`].
    pub offset: i8,
    /// Seed of stochastic rounding; 0 rounds deterministically. Ignored unless
    /// [`CodecKind::has_seed`].
    pub seed: u8,
}

impl CodecSpec {
    /// The codec that sends elements unchanged.
    pub const RAW: CodecSpec = CodecSpec::of(CodecKind::Raw);

    /// Creates a codec with default parameters. The threshold, which has no default in text, is 1.
    pub const fn of(kind: CodecKind) -> CodecSpec {
        CodecSpec {
            kind,
            scale: match kind.has_threshold() {
                true => ScaleRule::Threshold(1f32.to_bits()),
                false => ScaleRule::Block(DEFAULT_BLOCK),
            },
            offset: 0,
            seed: 0,
        }
    }

    /// Returns every lossy codec with each of its parameters, defaults first, for tests and tools.
    pub fn samples() -> Vec<CodecSpec> {
        let mut samples = Vec::new();
        for kind in &CodecKind::ALL[1..] {
            let plain = CodecSpec::of(*kind);
            samples.push(plain);
            if kind.has_scale() {
                let blocks = [32, 4096].map(ScaleRule::Block);
                samples.extend(blocks.map(|scale| CodecSpec { scale, ..plain }));
            }
            if kind.has_tensor_scale() {
                let scale = ScaleRule::Tensor { refresh: 50 };
                samples.push(CodecSpec { scale, ..plain });
            }
            if kind.has_offset() {
                samples.push(CodecSpec {
                    offset: -2,
                    ..plain
                });
            }
            if kind.has_seed() {
                samples.push(CodecSpec { seed: 7, ..plain });
            }
        }
        samples
    }

    /// Returns whether data may change on the wire.
    pub const fn is_lossy(self) -> bool {
        !matches!(self.kind, CodecKind::Raw)
    }

    /// Returns whether encoding rounds stochastically, so that messages depend on random numbers.
    pub(crate) const fn is_stochastic(self) -> bool {
        self.kind.has_seed() && (self.seed != 0 || matches!(self.kind, CodecKind::TernGrad))
    }

    /// Encodes the spec as one word of a call signature: equal words mean equal wire formats.
    pub(crate) fn word(self) -> u64 {
        let (rule, value) = match self.scale {
            ScaleRule::Block(block) => (0u64, block),
            ScaleRule::Tensor { refresh } => (1, refresh),
            ScaleRule::Threshold(bits) => (2, bits),
        };
        (self.kind as u64)
            | rule << 8
            | (self.offset as u8 as u64) << 16
            | (self.seed as u64) << 24
            | (value as u64) << 32
    }

    /// Decodes a word of a call signature.
    pub(crate) fn from_word(word: u64) -> Option<CodecSpec> {
        let kind = *CodecKind::ALL.get((word & 0xff) as usize)?;
        let value = (word >> 32) as u32;
        let scale = match (word >> 8) & 0xff {
            0 => ScaleRule::Block(value),
            1 => ScaleRule::Tensor { refresh: value },
            2 => ScaleRule::Threshold(value),
            _ => return None,
        };
        Some(CodecSpec {
            kind,
            scale,
            offset: (word >> 16) as u8 as i8,
            seed: (word >> 24) as u8,
        })
    }
}

impl fmt::Display for CodecSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.name())?;
        match self.scale {
            ScaleRule::Block(block) if self.kind.has_scale() => write!(f, ":block={block}")?,
            ScaleRule::Tensor { refresh } if self.kind.has_scale() => {
                write!(f, ":tensor={refresh}")?
            }
            ScaleRule::Threshold(bits) if self.kind.has_threshold() => {
                write!(f, ":tau={}", f32::from_bits(bits))?
            }
            _ => {}
        }
        if self.kind.has_offset() && self.offset != 0 {
            write!(f, ":offset={}", self.offset)?;
        }
        if self.kind.has_seed() && self.seed != 0 {
            write!(f, ":seed={}", self.seed)?;
        }
        Ok(())
    }
}

impl FromStr for CodecSpec {
    type Err = Error;

    /// Parses `NAME[:block=B][:tensor=K][:offset=E][:seed=S][:tau=T]`.
    fn from_str(text: &str) -> Result<CodecSpec> {
        let bad = |why: String| Error::invalid_argument(format!("codec \"{text}\": {why}"));
        let mut parts = text.split(':');
        let name = parts.next().unwrap_or_default();
        let kind = CodecKind::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| {
                let names: Vec<_> = CodecKind::ALL.iter().map(|kind| kind.name()).collect();
                bad(format!(
                    "no codec has this name; there are {}",
                    names.join(", ")
                ))
            })?;
        let mut spec = CodecSpec::of(kind);
        let mut given = !kind.has_threshold();
        for part in parts {
            let (key, value) = part
                .split_once('=')
                .ok_or_else(|| bad(format!("\"{part}\" is not of the form key=value")))?;
            let number = |low: i64, high: i64| match value.parse::<i64>() {
                Ok(number) if (low..=high).contains(&number) => Ok(number),
                _ => Err(bad(format!(
                    "{key}={value} is not a number from {low} to {high}"
                ))),
            };
            match key {
                "block" if kind.has_scale() => {
                    let block = number(32, 4096)? as u32;
                    if !block.is_power_of_two() {
                        return Err(bad(format!("block={block} is not a power of two")));
                    }
                    spec.scale = ScaleRule::Block(block);
                }
                "tensor" if kind.has_tensor_scale() => {
                    spec.scale = ScaleRule::Tensor {
                        refresh: number(1, 1 << 20)? as u32,
                    };
                }
                "tau" if kind.has_threshold() => {
                    let tau = value.parse::<f32>().unwrap_or(f32::NAN);
                    if !is_threshold(tau) {
                        return Err(bad(format!("tau={value} is not a number above 0")));
                    }
                    (spec.scale, given) = (ScaleRule::Threshold(tau.to_bits()), true);
                }
                "seed" if kind.has_seed() => spec.seed = number(1, 255)? as u8,
                "offset" if kind.has_offset() => spec.offset = number(-30, 30)? as i8,
                _ => return Err(bad(format!("{name} has no parameter \"{key}\""))),
            }
        }
        if !given {
            return Err(bad(format!("{name} needs a threshold; write {name}:tau=T")));
        }
        Ok(spec)
    }
}

/// Returns whether a codec can compare elements with `tau`.
pub(crate) fn is_threshold(tau: f32) -> bool {
    tau.is_finite() && tau > 0.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spec_survives_text_and_word() {
        for text in [
            "raw",
            "linear8:block=32",
            "dynamic8:tensor=50",
            "linear8:tensor=50:seed=7",
            "static8:offset=-3",
            "mantissa8",
            "cast16",
            "minmax4:block=64:seed=255",
            "threshold2:tau=0.001",
        ] {
            let spec: CodecSpec = text.parse().unwrap();
            assert_eq!(spec.to_string().parse::<CodecSpec>().unwrap(), spec);
            assert_eq!(CodecSpec::from_word(spec.word()), Some(spec));
        }
    }

    #[test]
    fn codec_number_is_its_place_in_the_table() {
        for (number, kind) in CodecKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, number, "{}", kind.name());
        }
    }

    #[test]
    fn bad_spec_is_refused_by_name() {
        for text in [
            "",
            "Linear8",
            "int8",
            "linear8:block=48",
            "linear8:block=16",
            "linear8:block=8192",
            "raw:block=64",
            "linear8:offset=1",
            "static8:offset=99",
            "linear8:block",
            "dynamic8:tensor=0",
            "dynamic8:block=-1",
            "fp8_e4m3:seed=1",
            "linear8:seed=0",
            "minmax4:seed=0",
            "minmax4:seed=256",
            "minmax4:tensor=5",
            "threshold2",
            "threshold2:tau=0",
            "threshold2:tau=inf",
            "linear8:tau=1",
        ] {
            let error = text.parse::<CodecSpec>().unwrap_err();
            assert!(error.message().contains(&format!("\"{text}\"")), "{error}");
        }
    }
}
