//! Defines the calls that a part of a table is for, and their times at one size.

use crate::bench::metrics::count_of;
use crate::bench::row::Row;
use cinch::plan::{KernelVariant, WireClass};
use cinch::types::CodecSetting;
use cinch::{Collective, DType};

/// Calls whose sizes are swept: one part of a table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sweep {
    /// The collective.
    pub collective: Collective,
    /// Its elements.
    pub dtype: DType,
    /// Its codec.
    pub codec: CodecSetting,
}

impl Sweep {
    /// Returns the call whose larger buffer has about `bytes`.
    pub fn row(&self, nranks: usize, bytes: usize) -> Row {
        let count = count_of(self.collective, self.dtype, nranks, bytes);
        Row {
            codec: Some(self.codec),
            ..Row::new(self.collective, self.dtype, count)
        }
    }

    /// Returns the class of the messages' content.
    pub fn wire(&self) -> WireClass {
        WireClass {
            codec: self.codec.inter.kind,
            element_bytes: self.dtype.size(),
        }
    }
}

/// Times at one size.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// Bytes of the larger buffer.
    pub size: usize,
    /// Seconds of each variant that passed the first round.
    pub times: Vec<(KernelVariant, f64)>,
}

impl Point {
    /// Returns the seconds of a variant, if it was measured.
    pub fn time(&self, variant: &KernelVariant) -> Option<f64> {
        let known = self.times.iter().find(|(known, _)| known == variant);
        known.map(|(_, seconds)| *seconds)
    }

    /// Returns the fastest variant and its seconds.
    pub fn best(&self) -> (KernelVariant, f64) {
        let least = self.times.iter().min_by(|a, b| a.1.total_cmp(&b.1));
        *least.unwrap_or(&self.times[0])
    }

    /// Keeps the seconds of a variant, in place of earlier ones.
    pub fn set(&mut self, variant: KernelVariant, seconds: f64) {
        match self.times.iter_mut().find(|(known, _)| *known == variant) {
            Some(known) => known.1 = seconds,
            None => self.times.push((variant, seconds)),
        }
    }
}
