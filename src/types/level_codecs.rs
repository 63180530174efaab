//! Codecs by level, as users write them: `intra=raw,inter=dynamic8`.

use super::{CodecSpec, ScaleRule};
use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// How each level begins in text.
const LEVELS: [&str; 2] = ["intra=", "inter="];

/// What contributions travel in inside a host, and everything else between hosts. One codec for
/// both where a call runs on one host or treats all ranks alike: see [`LevelCodecs::on`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LevelCodecs {
    /// Of contributions on their way inside a host.
    pub intra: CodecSpec,
    /// Of everything that goes between hosts, and of its last way inside one.
    pub inter: CodecSpec,
}

impl LevelCodecs {
    /// The same for both.
    pub const fn of(codec: CodecSpec) -> LevelCodecs {
        LevelCodecs {
            intra: codec,
            inter: codec,
        }
    }

    /// Whether text names levels, and so is no codec alone.
    pub fn names_levels(text: &str) -> bool {
        LEVELS.iter().any(|level| text.trim().starts_with(level))
    }

    /// What is left of them on this many hosts: on one, nothing goes between hosts.
    pub const fn on(self, hosts: usize) -> LevelCodecs {
        match hosts {
            0 | 1 => LevelCodecs::of(self.intra),
            _ => self,
        }
    }

    /// Whether data may change on the wire.
    pub const fn is_lossy(self) -> bool {
        self.intra.is_lossy() || self.inter.is_lossy()
    }
}

impl fmt::Display for LevelCodecs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.intra == self.inter {
            true => self.inter.fmt(f),
            false => write!(f, "intra={},inter={}", self.intra, self.inter),
        }
    }
}

impl FromStr for LevelCodecs {
    type Err = Error;

    /// Parses a codec for both levels, or `intra=CODEC,inter=CODEC` in either order.
    fn from_str(text: &str) -> Result<LevelCodecs> {
        let bad = |why: &str| Error::invalid_argument(format!("codec \"{text}\": {why}"));
        if !LevelCodecs::names_levels(text) {
            return text.trim().parse().map(LevelCodecs::of);
        }
        let mut found = [None, None];
        for part in text.split(',') {
            let (index, name) = LEVELS
                .iter()
                .enumerate()
                .find_map(|(at, level)| Some((at, part.trim().strip_prefix(level)?)))
                .ok_or_else(|| bad("with levels it is intra=CODEC,inter=CODEC"))?;
            if found[index].replace(name.parse::<CodecSpec>()?).is_some() {
                return Err(bad("a level is named twice"));
            }
        }
        let [Some(intra), Some(inter)] = found else {
            return Err(bad(
                "with levels it is intra=CODEC,inter=CODEC, both of them",
            ));
        };
        if intra != inter && matches!(intra.scale, ScaleRule::Tensor { .. }) {
            return Err(bad(
                "scales of whole tensors are kept for one codec, that between hosts",
            ));
        }
        Ok(LevelCodecs { intra, inter })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_survive_text() {
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
            let codecs: LevelCodecs = text.parse().unwrap();
            assert_eq!(codecs.to_string(), shown);
            assert_eq!(shown.parse::<LevelCodecs>().unwrap(), codecs);
        }
        let codecs: LevelCodecs = "intra=raw,inter=dynamic8".parse().unwrap();
        assert_eq!(codecs.on(4), codecs);
        assert_eq!(codecs.on(1), LevelCodecs::of(CodecSpec::RAW));
        assert!(codecs.is_lossy() && !codecs.on(1).is_lossy());
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
            "raw,inter=raw",
        ] {
            assert!(text.parse::<LevelCodecs>().is_err(), "{text}");
        }
    }
}
