//! Codec names and their parameters, as users write them: `linear8:block=128`.

use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// Elements that share one scale unless a spec says otherwise.
pub const DEFAULT_BLOCK: u32 = 256;

/// An encoding. Numbers are part of the wire format and are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum CodecKind {
    /// The elements as they are.
    Raw = 0,
    /// Sign and 7-bit integer, times absmax/127.
    Linear8 = 1,
    /// Dynamic tree, times absmax.
    Dynamic8 = 2,
    /// Static tree, fixed range.
    Static8 = 3,
    /// 3-bit decimal exponent and 4-bit integer, fixed range.
    Mantissa8 = 4,
    /// bfloat16, rounded to nearest even.
    CastBf16 = 5,
    /// IEEE binary16, rounded to nearest even.
    Cast16 = 6,
}

impl CodecKind {
    /// Every codec, in numeric order.
    pub const ALL: [CodecKind; 7] = [
        CodecKind::Raw,
        CodecKind::Linear8,
        CodecKind::Dynamic8,
        CodecKind::Static8,
        CodecKind::Mantissa8,
        CodecKind::CastBf16,
        CodecKind::Cast16,
    ];

    /// Name as users write it.
    pub const fn name(self) -> &'static str {
        match self {
            CodecKind::Raw => "raw",
            CodecKind::Linear8 => "linear8",
            CodecKind::Dynamic8 => "dynamic8",
            CodecKind::Static8 => "static8",
            CodecKind::Mantissa8 => "mantissa8",
            CodecKind::CastBf16 => "cast_bf16",
            CodecKind::Cast16 => "cast16",
        }
    }

    /// Whether values are scaled by the absolute maximum of their block.
    pub const fn has_scale(self) -> bool {
        matches!(self, CodecKind::Linear8 | CodecKind::Dynamic8)
    }

    /// Whether values are placed by a fixed power of ten.
    pub const fn has_offset(self) -> bool {
        matches!(self, CodecKind::Static8 | CodecKind::Mantissa8)
    }
}

/// Which elements share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleRule {
    /// This many consecutive elements, a power of two from 32 to 4,096.
    Block(u32),
    /// A whole chunk; the absolute maximum is taken anew every `refresh` calls of the same
    /// tensor and kept in between, values beyond it saturating.
    Tensor {
        /// Calls between two looks at the data; 1 looks every time.
        refresh: u32,
    },
}

/// A codec with its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CodecSpec {
    /// Which codec.
    pub kind: CodecKind,
    /// Scale sharing; meaningful where [`CodecKind::has_scale`].
    pub scale: ScaleRule,
    /// Power of ten by which the value range is moved; meaningful where
    /// [`CodecKind::has_offset`]. -30 to 30.
    pub offset: i8,
}

impl CodecSpec {
    /// The elements as they are.
    pub const RAW: CodecSpec = CodecSpec::of(CodecKind::Raw);

    /// A codec with default parameters.
    pub const fn of(kind: CodecKind) -> CodecSpec {
        CodecSpec {
            kind,
            scale: ScaleRule::Block(DEFAULT_BLOCK),
            offset: 0,
        }
    }

    /// Whether data may change on the wire.
    pub const fn is_lossy(self) -> bool {
        !matches!(self.kind, CodecKind::Raw)
    }

    /// The parameters as one word of a call signature: equal words, equal wire format.
    pub fn word(self) -> u64 {
        let (rule, value) = match self.scale {
            ScaleRule::Block(block) => (0u64, block),
            ScaleRule::Tensor { refresh } => (1, refresh),
        };
        (self.kind as u64) | rule << 8 | (self.offset as u8 as u64) << 16 | (value as u64) << 32
    }

    /// The spec behind a signature word, if it is one.
    pub fn from_word(word: u64) -> Option<CodecSpec> {
        let kind = *CodecKind::ALL.get((word & 0xff) as usize)?;
        let value = (word >> 32) as u32;
        let scale = match (word >> 8) & 0xff {
            0 => ScaleRule::Block(value),
            1 => ScaleRule::Tensor { refresh: value },
            _ => return None,
        };
        Some(CodecSpec {
            kind,
            scale,
            offset: (word >> 16) as u8 as i8,
        })
    }
}

impl fmt::Display for CodecSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.name())?;
        if self.kind.has_scale() {
            match self.scale {
                ScaleRule::Block(block) => write!(f, ":block={block}")?,
                ScaleRule::Tensor { refresh } => write!(f, ":tensor={refresh}")?,
            }
        }
        if self.kind.has_offset() && self.offset != 0 {
            write!(f, ":offset={}", self.offset)?;
        }
        Ok(())
    }
}

impl FromStr for CodecSpec {
    type Err = Error;

    /// Parses `NAME[:block=B][:tensor=K][:offset=E]`.
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
                "tensor" if kind.has_scale() => {
                    spec.scale = ScaleRule::Tensor {
                        refresh: number(1, 1 << 20)? as u32,
                    };
                }
                "offset" if kind.has_offset() => spec.offset = number(-30, 30)? as i8,
                _ => return Err(bad(format!("{name} has no parameter \"{key}\""))),
            }
        }
        Ok(spec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specs_survive_text_and_word() {
        for text in [
            "raw",
            "linear8:block=32",
            "dynamic8:tensor=50",
            "static8:offset=-3",
            "mantissa8",
            "cast16",
        ] {
            let spec: CodecSpec = text.parse().unwrap();
            assert_eq!(spec.to_string().parse::<CodecSpec>().unwrap(), spec);
            assert_eq!(CodecSpec::from_word(spec.word()), Some(spec));
        }
    }

    #[test]
    fn bad_specs_are_named() {
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
        ] {
            let error = text.parse::<CodecSpec>().unwrap_err();
            assert!(error.message().contains(&format!("\"{text}\"")), "{error}");
        }
    }
}
