//! Computes sizes, counts and rates as nccl-tests does.

use cinch::codec;
use cinch::cpu::Isa;
use cinch::{CodecSpec, Collective, DType};

/// Returns the element count of a call (`Call::count`) whose larger buffer holds about `bytes`,
/// rounded down. A buffer with a block per rank gets blocks of a multiple of 16 bytes, as in
/// nccl-tests.
pub fn count_of(collective: Collective, dtype: DType, nranks: usize, bytes: usize) -> usize {
    let elements = bytes / dtype.size();
    if !collective.has_blocks() {
        return elements;
    }
    let granule = 16 / dtype.size();
    elements / nranks / granule * granule
}

/// Returns the bytes of a call's larger buffer, counting the blocks of all ranks: the `size`
/// column.
pub fn size_of(collective: Collective, dtype: DType, nranks: usize, count: usize) -> usize {
    let blocks = if collective.has_blocks() { nranks } else { 1 };
    blocks * count * dtype.size()
}

/// Returns nccl-tests' bus bandwidth factor: the share of `size` that crosses the busiest link in
/// the best algorithm.
pub fn bus_factor(collective: Collective, nranks: usize) -> f64 {
    let n = nranks as f64;
    match collective {
        Collective::AllReduce => 2.0 * (n - 1.0) / n,
        _ if collective.has_blocks() => (n - 1.0) / n,
        _ => 1.0,
    }
}

/// The rates of a row, in GB/s (1e9 bytes a second).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Algorithm bandwidth: uncompressed bytes over time.
    pub alg: f64,
    /// Bus bandwidth of the bytes that cross the links: `effective` divided by the codec's
    /// compression ratio.
    pub bus: f64,
    /// The bus bandwidth that an uncompressed run would need to take equally long. It equals
    /// nccl-tests' busbw, and equals `bus` for codec raw.
    pub effective: f64,
}

/// Computes the rates of a call that took `seconds`.
pub fn rates(
    collective: Collective,
    nranks: usize,
    size: usize,
    seconds: f64,
    ratio: Option<f64>,
) -> Rates {
    let alg = if seconds > 0.0 {
        size as f64 / seconds / 1e9
    } else {
        0.0
    };
    let effective = alg * bus_factor(collective, nranks);
    Rates {
        alg,
        bus: effective / ratio.unwrap_or(1.0),
        effective,
    }
}

/// Returns the wire bytes per element of a long message, including scales.
pub fn bytes_per_element(codec: CodecSpec, dtype: DType) -> f64 {
    // Number of elements: a multiple of every block size and alignment, and large enough that a
    // single scale is negligible.
    const LONG: usize = 1 << 24;
    match codec::build(codec, Isa::Scalar) {
        Ok(Some(codec)) => (codec.wire_bytes(LONG) as f64 / LONG as f64 * 1e6).round() / 1e6,
        _ => dtype.size() as f64,
    }
}

/// Returns the `q` quantile of samples that are already sorted (nearest rank).
pub fn quantile(sorted: &[f64], q: f64) -> f64 {
    match sorted.len() {
        0 => 0.0,
        n => sorted[((q * n as f64).ceil() as usize).clamp(1, n) - 1],
    }
}

/// Returns the median of samples that are already sorted.
pub fn median(sorted: &[f64]) -> f64 {
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected values are nccl-tests' formulas for each collective.
    #[test]
    fn bus_factors_are_those_of_nccl_tests() {
        for (collective, two, eight) in [
            (Collective::AllReduce, 1.0, 1.75),
            (Collective::AllGather, 0.5, 0.875),
            (Collective::ReduceScatter, 0.5, 0.875),
            (Collective::AllToAll, 0.5, 0.875),
            (Collective::Gather, 0.5, 0.875),
            (Collective::Scatter, 0.5, 0.875),
            (Collective::Broadcast, 1.0, 1.0),
            (Collective::Reduce, 1.0, 1.0),
            (Collective::SendRecv, 1.0, 1.0),
        ] {
            assert_eq!(bus_factor(collective, 2), two, "{collective}");
            assert_eq!(bus_factor(collective, 8), eight, "{collective}");
        }
    }

    #[test]
    fn counts_round_as_nccl_tests() {
        use Collective::*;
        assert_eq!(count_of(AllReduce, DType::F32, 4, 1027), 256);
        assert_eq!(count_of(AllGather, DType::F32, 4, 1024), 64);
        assert_eq!(count_of(AllGather, DType::F32, 4, 1000), 60);
        assert_eq!(count_of(ReduceScatter, DType::I8, 3, 100), 32);
        for blocks in [AllToAll, Gather, Scatter] {
            assert_eq!(count_of(blocks, DType::F32, 4, 1000), 60);
        }
        assert_eq!(count_of(AllGather, DType::F64, 8, 64), 0);
        for collective in Collective::ALL {
            let count = count_of(collective, DType::F16, 4, 1 << 20);
            assert_eq!(size_of(collective, DType::F16, 4, count), 1 << 20);
        }
    }

    #[test]
    fn rates_count_wire_and_exact_bytes() {
        let exact = rates(Collective::AllReduce, 4, 1_000_000_000, 0.5, Some(1.0));
        assert_eq!((exact.alg, exact.bus, exact.effective), (2.0, 3.0, 3.0));
        let lossy = rates(Collective::AllReduce, 4, 1_000_000_000, 0.5, Some(4.0));
        assert_eq!((lossy.alg, lossy.bus, lossy.effective), (2.0, 0.75, 3.0));
        let alone = rates(Collective::AllReduce, 1, 1 << 20, 1.0, None);
        assert_eq!((alone.bus, alone.effective), (0.0, 0.0));
    }

    #[test]
    fn samples_have_quantiles() {
        let samples: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(quantile(&samples, 0.99), 99.0);
        assert_eq!(quantile(&samples, 0.0), 1.0);
        assert_eq!(median(&samples), 50.5);
        assert_eq!(median(&[1.0, 5.0, 7.0]), 5.0);
        assert_eq!(median(&[]), 0.0);
    }

    #[test]
    fn bytes_per_element_follow_the_layout() {
        let cost = |text: &str| bytes_per_element(text.parse().unwrap(), DType::F32);
        assert_eq!(cost("raw"), 4.0);
        assert_eq!(cost("linear8"), 1.0 + 4.0 / 256.0);
        assert_eq!(cost("dynamic8:block=32"), 1.125);
        assert_eq!(cost("dynamic8:tensor=5"), 1.0);
        assert_eq!(cost("mantissa8"), 1.0);
        assert_eq!(cost("cast16"), 2.0);
    }
}
