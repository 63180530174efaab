//! The machine whose links shared memory emulates. `cinch bench --emulate` sets it; no variable does.

use crate::types::short_digest;
use std::fmt;

/// A machine whose links shared memory emulates, so that schedules can be measured without the hardware.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmulatedMachine {
    /// Name of the topology file, for messages and records.
    pub file: String,
    /// Text of the file, in NCCL's XML format.
    pub xml: String,
    /// Divisor of all bandwidths, at least 1.
    pub scale: u32,
}

impl fmt::Display for EmulatedMachine {
    /// Names file, divisor and the beginning of the text's hash, by which ranks compare their machines.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digest = short_digest(&self.xml);
        write!(f, "{} / {} ({})", self.file, self.scale, &digest[..8])
    }
}
