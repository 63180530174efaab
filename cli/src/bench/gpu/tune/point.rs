//! Combinations of collective, type and codec whose message sizes are swept, and measured times.

use crate::bench::metrics::count_of;
use crate::bench::row::Row;
use cinch::plan::{KernelVariant, WireClass};
use cinch::types::CodecSetting;
use cinch::{Collective, DType};

/// A combination of collective, type and codec whose message sizes are swept. Each combination
/// becomes one part of the table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sweep {
    /// Collective whose calls are measured.
    pub collective: Collective,
    /// Type of the elements in the measured calls.
    pub dtype: DType,
    /// Codec that every measured call names; raw for calls without a codec.
    pub codec: CodecSetting,
}

impl Sweep {
    /// Returns the row of this combination whose larger buffer (input or output) has about `bytes`
    /// bytes.
    pub fn row(&self, nranks: usize, bytes: usize) -> Row {
        let count = count_of(self.collective, self.dtype, nranks, bytes);
        Row {
            codec: Some(self.codec),
            ..Row::new(self.collective, self.dtype, count)
        }
    }

    /// Returns the table's key for the messages: codec and element width.
    pub fn wire(&self) -> WireClass {
        WireClass {
            codec: self.codec.inter.kind,
            element_bytes: self.dtype.size(),
        }
    }
}

/// Measured times at one size.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// Bytes of the larger buffer.
    pub size: usize,
    /// Seconds of each variant; variants that were eliminated early are missing.
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

    /// Sets the seconds of a variant and replaces its earlier value.
    pub fn set(&mut self, variant: KernelVariant, seconds: f64) {
        match self.times.iter_mut().find(|(known, _)| *known == variant) {
            Some(known) => known.1 = seconds,
            None => self.times.push((variant, seconds)),
        }
    }
}
