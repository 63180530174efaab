//! The codec of a call or communicator as users write it: `dynamic8`, `auto:dynamic8`,
//! `intra=raw,inter=dynamic8`.

use super::{CodecSpec, Level, ScaleRule};
use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// Prefix of a codec that the cost model may skip if it predicts no gain.
const AUTO: &str = "auto:";

/// Prefixes of the codec inside a host and of the codec between hosts, in the order of [`Level::ALL`].
const LEVELS: [&str; 2] = ["intra=", "inter="];

/// The codec inside a host, the codec between hosts, and whether the cost model may skip both.
///
/// Settings, calls, plans and reports all hold this type. A plan and a report hold the codecs that run, so
/// `auto` is false in them. Both codecs are equal if the schedule treats all ranks alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CodecSetting {
    /// Codec of contributions inside a host, before they leave it.
    pub intra: CodecSpec,
    /// Codec of all messages between hosts, and of their last hop inside a host. A schedule that
    /// treats all ranks alike uses only this codec.
    pub inter: CodecSpec,
    /// Whether a call runs without a codec if the cost model predicts that this is faster.
    pub auto: bool,
}

impl CodecSetting {
    /// The setting of calls without a codec: messages carry the elements unchanged.
    pub const RAW: CodecSetting = CodecSetting::of(CodecSpec::RAW);

    /// Creates a setting with the same codec inside and between hosts, which the cost model may not skip.
    pub const fn of(codec: CodecSpec) -> CodecSetting {
        CodecSetting {
            intra: codec,
            inter: codec,
            auto: false,
        }
    }

    /// Returns the codec of `level`.
    pub const fn at(self, level: Level) -> CodecSpec {
        match level {
            Level::Intra => self.intra,
            Level::Inter => self.inter,
        }
    }

    /// Returns whether the codecs inside and between hosts differ.
    pub fn is_by_level(self) -> bool {
        self.intra != self.inter
    }

    /// Returns the setting that applies on this many groups: hosts, or groups inside a host. In one group no message goes
    /// between groups, so `intra` replaces `inter`.
    pub const fn on(self, groups: usize) -> CodecSetting {
        match groups {
            0 | 1 => CodecSetting {
                inter: self.intra,
                ..self
            },
            _ => self,
        }
    }

    /// Returns whether either codec may change data.
    pub const fn is_lossy(self) -> bool {
        self.intra.is_lossy() || self.inter.is_lossy()
    }

    /// Returns whether either codec keeps scales from call to call of one tensor.
    pub fn needs_tensor(self) -> bool {
        let keeps = |spec: CodecSpec| {
            spec.kind.has_scale() && matches!(spec.scale, ScaleRule::Tensor { .. })
        };
        keeps(self.intra) || keeps(self.inter)
    }

    /// Parses `intra=CODEC,inter=CODEC` in either order; `None` if `text` begins with neither prefix.
    fn parse_levels(text: &str) -> Option<Result<CodecSetting>> {
        let names_levels = LEVELS.iter().any(|level| text.trim().starts_with(level));
        names_levels.then(|| {
            let bad = |why: &str| Error::invalid_argument(format!("codec \"{text}\": {why}"));
            let mut found = [None, None];
            for part in text.split(',') {
                let (index, name) = LEVELS
                    .iter()
                    .enumerate()
                    .find_map(|(at, level)| Some((at, part.trim().strip_prefix(level)?)))
                    .ok_or_else(|| bad("a codec by level is written intra=CODEC,inter=CODEC"))?;
                if found[index].replace(name.parse::<CodecSpec>()?).is_some() {
                    return Err(bad("a level is named twice"));
                }
            }
            let [Some(intra), Some(inter)] = found else {
                return Err(bad(
                    "a codec by level is written intra=CODEC,inter=CODEC, with both levels",
                ));
            };
            if intra != inter && matches!(intra.scale, ScaleRule::Tensor { .. }) {
                return Err(bad(
                    "only the codec between hosts may keep scales of whole tensors (tensor=K)",
                ));
            }
            Ok(CodecSetting {
                intra,
                inter,
                auto: false,
            })
        })
    }
}

impl From<CodecSpec> for CodecSetting {
    fn from(codec: CodecSpec) -> CodecSetting {
        CodecSetting::of(codec)
    }
}

impl fmt::Display for CodecSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_by_level() {
            return write!(f, "intra={},inter={}", self.intra, self.inter);
        }
        let before = if self.auto { AUTO } else { "" };
        write!(f, "{before}{}", self.inter)
    }
}

impl FromStr for CodecSetting {
    type Err = Error;

    /// Parses a codec, `auto:` and a codec, or `intra=CODEC,inter=CODEC`.
    fn from_str(text: &str) -> Result<CodecSetting> {
        if let Some(by_level) = CodecSetting::parse_levels(text) {
            return by_level;
        }
        if text == AUTO.trim_end_matches(':') {
            return Err(Error::invalid_argument(
                "codec \"auto\": name the codec that may run, as in auto:dynamic8",
            ));
        }
        let (auto, name) = match text.strip_prefix(AUTO) {
            Some(name) => (true, name),
            None => (false, text),
        };
        Ok(CodecSetting {
            auto,
            ..CodecSetting::of(name.parse()?)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn optional_codec_survives_text() {
        for (text, auto) in [
            ("raw", false),
            ("auto:raw", true),
            ("auto:minmax4:block=64:seed=7", true),
        ] {
            let setting: CodecSetting = text.parse().unwrap();
            assert_eq!((setting.auto, setting.to_string().as_str()), (auto, text));
            assert_eq!((setting.on(1), setting.is_by_level()), (setting, false));
        }
        for text in ["auto", "auto:", "auto:auto:raw", "auto:int8", "Auto:raw"] {
            assert!(text.parse::<CodecSetting>().is_err(), "{text}");
        }
    }

    #[test]
    fn codecs_by_level_survive_text() {
        for (text, shown) in [
            ("raw", "raw"),
            ("intra=raw,inter=raw", "raw"),
            (
                "intra=raw,inter=dynamic8",
                "intra=raw,inter=dynamic8:block=256",
            ),
            (
                "inter=linear8:block=64, intra=cast_bf16",
                "intra=cast_bf16,inter=linear8:block=64",
            ),
        ] {
            let setting: CodecSetting = text.parse().unwrap();
            assert_eq!(setting.to_string(), shown);
            assert_eq!(shown.parse::<CodecSetting>().unwrap(), setting);
        }
        let setting: CodecSetting = "intra=raw,inter=dynamic8".parse().unwrap();
        assert_eq!(setting.on(4), setting);
        assert_eq!(setting.on(1), CodecSetting::RAW);
        assert!(setting.is_lossy() && !setting.on(1).is_lossy());
    }

    #[test]
    fn bad_levels_are_named() {
        for text in [
            "intra=raw",
            "inter=raw",
            "intra=raw,dynamic8",
            "intra=raw,inter=raw,intra=raw",
            "intra=raw,inter=int8",
            "intra=,inter=raw",
            "intra=linear8:tensor=4,inter=dynamic8",
            "intra=auto:raw,inter=raw",
            "raw,inter=raw",
        ] {
            assert!(text.parse::<CodecSetting>().is_err(), "{text}");
        }
    }
}
