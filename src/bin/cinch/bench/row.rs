//! What one row of a bench runs, and the memory that it takes.

use super::metrics::size_of;
use cinch::comm::Call;
use cinch::types::{CodecSetting, Extent, Scalar, ScaleRule};
use cinch::{Algorithm, Collective, DType, Error, ReduceOp, Result};

/// From this size on, buffers rotate so that the caches do not hold them.
pub const COLD_FROM: usize = 1 << 20;

/// Bytes of all ranks' buffers that a rotation goes through.
pub const COLD_BYTES: usize = 128 << 20;

/// What a row runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Row {
    /// Call.
    pub collective: Collective,
    /// Element type.
    pub dtype: DType,
    /// Reduction; of a pre-multiplied sum, with any factor.
    pub op: ReduceOp,
    /// Root.
    pub root: usize,
    /// Elements, as in [`Call::count`].
    pub count: usize,
    /// Codec, if one is asked for.
    pub codec: Option<CodecSetting>,
    /// Algorithm, if one is asked for.
    pub algorithm: Option<Algorithm>,
}

/// Factor of a rank in a pre-multiplied sum, of floats and of integers. Exact in every type.
pub fn factor(rank: usize) -> (f64, i128) {
    (0.5 + 0.125 * (rank % 4) as f64, (rank % 3) as i128 + 1)
}

/// What `rank` calls; of a send and a receive the send, to the next rank.
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
        ..Call::new(row.collective, row.dtype, row.count)
    }
}

/// Bytes of the input and the output of a rank that is the root, or is not.
///
/// # Errors
/// Invalid argument if they overflow.
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

/// Bytes that all ranks of a row hold together.
pub fn memory(row: &Row, nranks: usize) -> usize {
    let size = size_of(row.collective, row.dtype, nranks, row.count);
    size.saturating_mul(2 * set_count(row, nranks))
        .saturating_mul(nranks)
}

/// Buffers in rotation, the same number on all ranks.
pub fn set_count(row: &Row, nranks: usize) -> usize {
    let size = size_of(row.collective, row.dtype, nranks, row.count);
    // Kept scales belong to one set of data.
    if size < COLD_FROM || keeps_scales(row) {
        return 1;
    }
    COLD_BYTES.div_ceil(2 * nranks * size).min(64)
}

/// Whether scales live from call to call.
pub fn keeps_scales(row: &Row) -> bool {
    row.codec.map(|codec| codec.inter).is_some_and(|codec| {
        codec.kind.has_scale() && matches!(codec.scale, ScaleRule::Tensor { .. })
    })
}

/// Whether `rank` is the root of the call.
pub fn is_root(row: &Row, rank: usize) -> bool {
    row.collective.has_root() && rank == row.root
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_rows_rotate() {
        let mut row = Row {
            collective: Collective::AllReduce,
            dtype: DType::F32,
            op: ReduceOp::Sum,
            root: 0,
            count: 1000,
            codec: None,
            algorithm: None,
        };
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
