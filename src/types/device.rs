//! The memory of a communicator's buffers.

use std::fmt;
use std::str::FromStr;

/// The memory that a communicator works on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DeviceChoice {
    /// Host memory.
    #[default]
    Host,
    /// The GPU of the calling thread's current context; GPU 0 if it has none.
    Current,
    /// The GPU with this number, counted by the CUDA driver among the GPUs that the process may see.
    Cuda(u32),
}

impl fmt::Display for DeviceChoice {
    /// Formats the choice as a value of `CINCH_DEVICE`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceChoice::Host => f.write_str("host"),
            DeviceChoice::Current => f.write_str("cuda"),
            DeviceChoice::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = String;

    /// Reads `host`, `cuda` or `cuda:N`.
    fn from_str(text: &str) -> Result<DeviceChoice, String> {
        match text.trim() {
            "host" => Ok(DeviceChoice::Host),
            "cuda" => Ok(DeviceChoice::Current),
            text => text
                .strip_prefix("cuda:")
                .filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))
                .and_then(|digits| digits.parse().ok())
                .map(DeviceChoice::Cuda)
                .ok_or_else(|| "no such device".to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_survives_text_and_other_text_is_refused() {
        for choice in [
            DeviceChoice::Host,
            DeviceChoice::Current,
            DeviceChoice::Cuda(0),
            DeviceChoice::Cuda(15),
        ] {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        for text in [
            "",
            "gpu",
            "cuda:",
            "cuda:-1",
            "cuda:+1",
            "cuda:99999999999",
            "Host",
        ] {
            assert!(text.parse::<DeviceChoice>().is_err(), "{text}");
        }
    }
}
