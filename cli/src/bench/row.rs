//! A row of a benchmark: the call that it measures, and the memory that it needs.

use super::metrics::size_of;
use cinch::comm::Call;
use cinch::types::{CodecSetting, Extent, Scalar, ScaleRule};
use cinch::{Algorithm, Collective, DType, Error, ReduceOp, Result};

/// Size in bytes from which calls rotate through several buffers, so that caches do not hold the
/// data.
pub const COLD_FROM: usize = 1 << 20;

/// Total bytes of the buffers through which calls rotate, over all ranks.
pub const COLD_BYTES: usize = 128 << 20;

/// The call that a row measures.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Row {
    /// Collective that the row measures.
    pub collective: Collective,
    /// Type of the elements in the measured call.
    pub dtype: DType,
    /// Reduction; each rank replaces the factor of a pre-multiplied sum by its own.
    pub op: ReduceOp,
    /// Root of the collective; ignored by collectives without a root.
    pub root: usize,
    /// Element count, as in [`Call::count`].
    pub count: usize,
    /// The codec; `None` leaves the choice to the settings.
    pub codec: Option<CodecSetting>,
    /// The algorithm; `None` leaves the choice to the planner.
    pub algorithm: Option<Algorithm>,
    /// Whether replays of a CUDA graph are timed instead of calls on a stream.
    pub graph: bool,
}

impl Row {
    /// Makes a row with a sum, root 0, and codec and algorithm left to the library.
    pub fn new(collective: Collective, dtype: DType, count: usize) -> Row {
        Row {
            collective,
            dtype,
            op: ReduceOp::Sum,
            root: 0,
            count,
            codec: None,
            algorithm: None,
            graph: false,
        }
    }

    /// Returns the bytes of the larger buffer, counting the blocks of all ranks: the `size` column.
    pub fn size(&self, nranks: usize) -> usize {
        size_of(self.collective, self.dtype, nranks, self.count)
    }

    /// Returns the reduction, if the collective reduces.
    pub fn reduction(&self) -> Option<ReduceOp> {
        Some(self.op).filter(|_| self.collective.reduces())
    }
}

/// Returns a rank's factor in a pre-multiplied sum: one value for floats and one for integers.
/// Every element type represents the factor exactly.
pub fn factor(rank: usize) -> (f64, i128) {
    (0.5 + 0.125 * (rank % 4) as f64, (rank % 3) as i128 + 1)
}

/// Returns the call that `rank` makes; for a send_recv row, the send to the next rank.
pub fn call_of(row: &Row, rank: usize, nranks: usize) -> Call {
    let factor = factor(rank);
    let op = match row.op {
        ReduceOp::PreMulSum(_) if row.dtype.is_float() => {
            ReduceOp::PreMulSum(Scalar::Float(factor.0))
        }
        ReduceOp::PreMulSum(_) => ReduceOp::PreMulSum(Scalar::Int(factor.1)),
        op => op,
    };
    let (root, peer) = match row.collective {
        Collective::SendRecv => (rank, (rank + 1) % nranks),
        _ => (row.root, 0),
    };
    Call {
        op,
        root,
        peer,
        codec: row.codec,
        algorithm: row.algorithm,
        wrapping_average: true,
        ..Call::new(row.collective, row.dtype, row.count)
    }
}

/// Returns the bytes of the input and of the output, on the root or on another rank.
///
/// # Errors
/// Returns an invalid-argument error if the sizes overflow.
pub fn buffer_bytes(row: &Row, is_root: bool, nranks: usize) -> Result<(usize, usize)> {
    let bytes = |extent: Extent| {
        extent
            .elements(row.count, nranks)
            .and_then(|n| n.checked_mul(row.dtype.size()))
            .ok_or_else(|| Error::invalid_argument("the size overflows"))
    };
    if row.collective == Collective::SendRecv {
        let bytes = bytes(Extent::Count)?;
        return Ok((bytes, bytes));
    }
    Ok((
        bytes(row.collective.input_extent(is_root))?,
        bytes(row.collective.output_extent(is_root))?,
    ))
}

/// Returns the total bytes of all ranks' buffers.
pub fn memory(row: &Row, nranks: usize) -> usize {
    let size = row.size(nranks);
    size.saturating_mul(2 * set_count(row, nranks))
        .saturating_mul(nranks)
}

/// Returns the number of buffer sets in rotation, the same on all ranks.
pub fn set_count(row: &Row, nranks: usize) -> usize {
    let size = row.size(nranks);
    // A scale that is kept between calls fits the data of one buffer only, so such calls do not
    // rotate.
    if size < COLD_FROM || keeps_scales(row) {
        return 1;
    }
    COLD_BYTES.div_ceil(2 * nranks * size).min(64)
}

/// Returns whether the codec keeps its scale between calls.
pub fn keeps_scales(row: &Row) -> bool {
    row.codec.map(|codec| codec.inter).is_some_and(|codec| {
        codec.kind.has_scale() && matches!(codec.scale, ScaleRule::Tensor { .. })
    })
}

/// Returns whether `rank` is the root of the row's call.
pub fn is_root(row: &Row, rank: usize) -> bool {
    row.collective.has_root() && rank == row.root
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_count_of_large_rows_rotates_buffers() {
        let mut row = Row::new(Collective::AllReduce, DType::F32, 1000);
        assert_eq!(set_count(&row, 4), 1);
        row.count = 1 << 18;
        assert_eq!(set_count(&row, 4), 16);
        assert_eq!(memory(&row, 4), 128 << 20);
        row.codec = Some("linear8:tensor=50".parse().unwrap());
        assert_eq!(set_count(&row, 4), 1);
        row.codec = None;
        row.count = 64 << 20;
        assert_eq!(set_count(&row, 4), 1);
    }
}
