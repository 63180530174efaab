//! What users write for a codec: the codec, or `auto:` and the codec.

use super::CodecSpec;
use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// A codec and whether it is for every call that admits it, or only for those that the model of
/// costs finds faster with it: `dynamic8`, `auto:dynamic8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodecChoice {
    /// Which codec.
    pub spec: CodecSpec,
    /// Whether a call may go without it.
    pub auto: bool,
    /// The codec of contributions inside hosts, where it is another one.
    pub intra: Option<CodecSpec>,
}

impl CodecChoice {
    /// Whether some contribution may be rounded.
    pub fn is_lossy(&self) -> bool {
        self.spec.is_lossy() || self.intra.is_some_and(|intra| intra.is_lossy())
    }
}

/// What stands before a codec that is left to the model.
const AUTO: &str = "auto:";

impl From<CodecSpec> for CodecChoice {
    /// The codec, whatever it costs.
    fn from(spec: CodecSpec) -> CodecChoice {
        CodecChoice {
            spec,
            auto: false,
            intra: None,
        }
    }
}

impl fmt::Display for CodecChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(intra) = self.intra {
            return write!(f, "intra={intra},inter={}", self.spec);
        }
        let before = if self.auto { AUTO } else { "" };
        write!(f, "{before}{}", self.spec)
    }
}

impl FromStr for CodecChoice {
    type Err = Error;

    /// Parses a codec, or `auto:` and a codec.
    fn from_str(text: &str) -> Result<CodecChoice> {
        if text == AUTO.trim_end_matches(':') {
            return Err(Error::invalid_argument(
                "codec \"auto\": say which codec may run, as in auto:dynamic8",
            ));
        }
        let (auto, name) = match text.strip_prefix(AUTO) {
            Some(name) => (true, name),
            None => (false, text),
        };
        Ok(CodecChoice {
            spec: name.parse()?,
            auto,
            intra: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_survive_text() {
        for (text, auto) in [
            ("raw", false),
            ("auto:raw", true),
            ("auto:minmax4:block=64:seed=7", true),
        ] {
            let choice: CodecChoice = text.parse().unwrap();
            assert_eq!((choice.auto, choice.to_string().as_str()), (auto, text));
        }
        for text in ["auto", "auto:", "auto:auto:raw", "auto:int8", "Auto:raw"] {
            assert!(text.parse::<CodecChoice>().is_err(), "{text}");
        }
    }
}
