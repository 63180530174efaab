//! Compares every rank's output with the exact result of `cinch::testing`.
//!
//! The error bounds of roundings and codecs are defined here again, independently of
//! [`cinch::testing::RawBound`] and of the codecs' own descriptions. A mistake in either definition then
//! shows as a difference.

pub mod worlds;

use super::Rng;
use cinch::codec::build;
use cinch::comm::Call;
use cinch::cpu::Isa;
use cinch::testing::{Problem, integer, set_value, smallest, unit_roundoff, value};
use cinch::types::{CodecKind, Extent, Scalar};
use cinch::{Algorithm, CodecSpec, DType, ReduceOp, Report};

/// The kind of inputs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Data {
    /// Floats that are approximately normal. Integers are small where an average must not wrap, and
    /// arbitrary elsewhere.
    Normal,
    /// Random bytes, so floats may be infinite or NaN.
    Bits,
    /// Only the values -1, 0 and 1.
    Units,
}

/// A collective call that all ranks make.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub call: Call,
    pub in_place: bool,
    /// Byte offsets of input and output from a 64-byte boundary.
    pub align: [usize; 2],
    pub data: Data,
    pub seed: u64,
}

impl Case {
    pub fn new(call: Call, seed: u64) -> Case {
        // Data that is only copied may be any bytes, while additions and roundings need finite
        // numbers.
        let moved = !call.collective.reduces() && call.codec.is_none_or(|codec| !codec.is_lossy());
        Case {
            call,
            in_place: false,
            align: [0, 0],
            data: if moved { Data::Bits } else { Data::Normal },
            seed,
        }
    }

    /// Returns the call of `rank`, with its own factor in a pre-multiplied sum.
    pub fn call_of(&self, rank: usize) -> Call {
        let mut call = self.call;
        call.wrapping_average = true;
        if let ReduceOp::PreMulSum(_) = call.op {
            call.op = ReduceOp::PreMulSum(factor(call.dtype, rank));
        }
        call
    }

    fn elements(&self, extent: Extent, nranks: usize) -> usize {
        extent
            .elements(self.call.count, nranks)
            .expect("no overflow")
    }

    pub fn input_bytes(&self, rank: usize, nranks: usize) -> usize {
        let extent = self.call.collective.input_extent(rank == self.call.root);
        self.elements(extent, nranks) * self.call.dtype.size()
    }

    pub fn output_bytes(&self, rank: usize, nranks: usize) -> usize {
        let extent = self.call.collective.output_extent(rank == self.call.root);
        self.elements(extent, nranks) * self.call.dtype.size()
    }

    /// Returns the input of `rank`.
    pub fn input(&self, rank: usize, nranks: usize) -> Vec<u8> {
        let mut rng = Rng(self.seed ^ (rank as u64 + 1) << 48);
        let size = self.call.dtype.size();
        let mut bytes = vec![0; self.input_bytes(rank, nranks)];
        for element in bytes.chunks_exact_mut(size) {
            match self.data {
                Data::Bits => element.copy_from_slice(&rng.next().to_le_bytes()[..size]),
                Data::Units => set_value(self.call.dtype, rng.below(3) as f64 - 1.0, element),
                Data::Normal => number(self.call.dtype, self.call.op, &mut rng, element),
            }
        }
        bytes
    }
}

/// Writes a random number that `op` can combine over 8 ranks without overflow. Integers may wrap except in
/// averages, whose division would reveal it.
fn number(dtype: DType, op: ReduceOp, rng: &mut Rng, out: &mut [u8]) {
    match dtype {
        _ if dtype.is_float() && dtype.size() == 1 => {
            let (exponents, least) = match op {
                ReduceOp::Prod => (2, -1),
                _ => (5, -3),
            };
            let power = 2f64.powi(least + rng.below(exponents) as i32);
            let mantissas = (0.5 / unit_roundoff(dtype)) as usize;
            let magnitude = power * (1.0 + rng.below(mantissas) as f64 / mantissas as f64);
            let is_negative = rng.below(2) == 1;
            set_value(dtype, if is_negative { -magnitude } else { magnitude }, out);
        }
        _ if dtype.is_float() => {
            let value = match op {
                ReduceOp::Prod => (0.5 + rng.unit()) * if rng.below(2) == 0 { 1.0 } else { -1.0 },
                _ => rng.normal(),
            };
            set_value(dtype, value, out);
        }
        _ if op == ReduceOp::Avg => {
            let value = rng.below(16) as i64
                * if dtype.is_signed() && rng.below(2) == 0 {
                    -1
                } else {
                    1
                };
            out.copy_from_slice(&value.to_le_bytes()[..out.len()]);
        }
        _ => out.copy_from_slice(&rng.next().to_le_bytes()[..out.len()]),
    }
}

/// Returns the factor of `rank` in a pre-multiplied sum, exact in every type.
pub fn factor(dtype: DType, rank: usize) -> Scalar {
    if dtype.is_float() {
        Scalar::Float(0.5 + 0.25 * rank as f64)
    } else {
        let factor = rank as i128 + 2;
        Scalar::Int(if dtype.is_signed() && rank % 2 == 1 {
            -factor
        } else {
            factor
        })
    }
}

/// Largest error of an encode relative to the largest magnitude, independent of the errors that the codecs
/// declare. Codecs without an entry are compared with their own declaration.
const RELATIVE_BOUNDS: [(CodecKind, f64); 19] = [
    (CodecKind::Raw, 0.0),
    (CodecKind::Linear8, 1.0 / 254.0),
    // The error is half of the widest gap: values from 0.45 to 1 have steps of 0.55/32.
    (CodecKind::Dynamic8, 0.0086),
    // The relative error is largest at the low end of a decade, where the 16 values are farthest
    // apart.
    (CodecKind::Static8, 0.22),
    // The relative error is largest for 1.5, halfway between the neighbouring values 1 and 2.
    (CodecKind::Mantissa8, 1.0 / 3.0),
    (CodecKind::CastBf16, 1.0 / 256.0),
    (CodecKind::Cast16, 1.0 / 2048.0),
    // The error is half a step, in a block that reaches from -abs_max to abs_max.
    (CodecKind::MinMax1, 1.0),
    (CodecKind::MinMax2, 1.0 / 3.0),
    (CodecKind::MinMax4, 1.0 / 15.0),
    (CodecKind::MinMax8, 1.0 / 255.0),
    // The relative error is half of the last mantissa bit.
    (CodecKind::Fp8E4M3, 1.0 / 16.0),
    (CodecKind::Fp8E5M2, 1.0 / 8.0),
    // These codecs may map an element to the far end of its code's range.
    (CodecKind::TernGrad, 1.0),
    (CodecKind::OneBit, 1.0),
    (CodecKind::Threshold2, 1.0),
    // Truncation errors depend on the number of mantissa bits that are kept; Trunc8 keeps none.
    (CodecKind::Trunc8, 0.75),
    (CodecKind::Trunc16, 1.0 / 128.0),
    (CodecKind::Trunc24, 1.0 / 32_768.0),
];

/// Returns the largest error of one encode of values with magnitudes up to `abs_max`.
fn largest_encode_error(codec: CodecSpec, abs_max: f64) -> f64 {
    // Stochastic rounding may choose the farther neighbour, which doubles the error. TernGrad
    // always rounds stochastically, so its bound already covers this.
    let is_doubled = codec.seed != 0 && codec.kind != CodecKind::TernGrad;
    let abs_max = if is_doubled { 2.0 * abs_max } else { abs_max };
    let floor = match codec.kind {
        CodecKind::Static8 | CodecKind::Mantissa8 => 1e-6,
        CodecKind::Cast16 => 2f64.powi(-25),
        _ => 0.0,
    };
    let bound = RELATIVE_BOUNDS.iter().find(|(kind, _)| *kind == codec.kind);
    if let Some((_, relative)) = bound {
        return abs_max * relative + floor;
    }
    let law = build(codec, Isa::Scalar).unwrap().unwrap();
    let law = law.description().errors;
    abs_max * (law.of_scale + law.of_value) + law.floor
}

/// Compares the output of `rank` with the exact result.
pub fn check(
    case: &Case,
    rank: usize,
    inputs: &[Vec<u8>],
    output: &[u8],
    report: &Report,
) -> Result<(), String> {
    let (call, size, nranks) = (&case.call, case.call.dtype.size(), inputs.len());
    let problem = Problem {
        op: call.op,
        factors: match call.op {
            ReduceOp::PreMulSum(_) => (0..nranks).map(|rank| factor(call.dtype, rank)).collect(),
            _ => Vec::new(),
        },
        root: call.root,
        ..Problem::new(call.collective, call.dtype, nranks, call.count)
    };
    let exact = problem.part(&inputs, rank, 0, output.len() / size);
    let (is_float, reduces) = (call.dtype.is_float(), call.collective.reduces());
    let maxima: Vec<f64> = match is_float && case.data != Data::Bits {
        true => inputs
            .iter()
            .map(|input| abs_max(call.dtype, input))
            .collect(),
        false => Vec::new(),
    };
    // No partial sum of any element exceeds this sum of maxima.
    let sum_of_maxima = maxima
        .iter()
        .enumerate()
        .map(|(rank, max)| max * float_factor(case, rank))
        .sum();
    let (mut errors, mut exacts) = (0.0, 0.0);
    for (at, got) in output.chunks_exact(size).enumerate() {
        let expected = exact.values[at];
        let held = match is_float {
            true => value(call.dtype, got),
            false => integer(call.dtype, got) as f64,
        };
        let tolerance = if is_float && reduces {
            let element = (expected, exact.magnitudes[at]);
            Some(sum_tolerance(case, element, nranks, report, sum_of_maxima))
        } else if report.codec.is_lossy() {
            let (from, _) = problem.segment(rank, at).sources[0];
            let step = largest_encode_error(report.codec.inter, maxima[from]);
            let unit = unit_roundoff(call.dtype);
            Some(1.001 * step + 1.01 * unit * (expected.abs() + step) + smallest(call.dtype))
        } else {
            None
        };
        // Comparisons with NaN are false, so a NaN is never within the tolerance.
        let right = match tolerance {
            Some(tolerance) => (held - expected).abs() <= tolerance,
            None => got == &exact.bytes[at * size..][..size],
        };
        if !right {
            return Err(format!(
                "rank {rank}, element {at}: {held:e} ({got:x?}) instead of {expected:e}, tolerance {tolerance:?}"
            ));
        }
        errors += (held - expected).powi(2);
        exacts += expected * expected;
    }
    let (off, most) = ((errors / exacts).sqrt(), rms_limit(case, nranks, report));
    // The mean error of a few elements varies too much for a check.
    if output.len() / size >= 256 && off > most {
        return Err(format!(
            "rank {rank}: all elements together are off by {off:e} of their size, not {most:e}"
        ));
    }
    Ok(())
}

/// Returns the limit of the relative RMS error of an 8-bit result without a codec, where tolerances of single
/// elements exceed the elements.
///
/// In simulations rings and trees of 8 ranks err by 0.08 in e4m3 and 0.16 in e5m2. With more ranks the error
/// grows with the square root of their number. An output of zeros errs by 1, a sum that lacks one rank by
/// 1/sqrt(ranks).
fn rms_limit(case: &Case, nranks: usize, report: &Report) -> f64 {
    let dtype = case.call.dtype;
    if !dtype.is_float() || dtype.size() != 1 {
        return f64::INFINITY;
    }
    let unit = unit_roundoff(dtype);
    if report.codec.is_lossy() || case.data == Data::Bits {
        return f64::INFINITY;
    }
    match case.call.op {
        // A few large elements dominate the RMS of products.
        ReduceOp::Prod => 0.75,
        _ => 2.0 * unit * (nranks as f64 / 8.0).max(1.0).sqrt(),
    }
}

fn float_factor(case: &Case, rank: usize) -> f64 {
    match (case.call.op, factor(case.call.dtype, rank)) {
        (ReduceOp::PreMulSum(_), Scalar::Float(factor)) => factor,
        _ => 1.0,
    }
}

fn abs_max(dtype: DType, bytes: &[u8]) -> f64 {
    bytes
        .chunks_exact(dtype.size())
        .map(|element| value(dtype, element).abs())
        .fold(0.0, f64::max)
}

/// Returns the largest error that a float result may have.
fn sum_tolerance(
    case: &Case,
    (exact, magnitude): (f64, f64),
    nranks: usize,
    report: &Report,
    sum_of_maxima: f64,
) -> f64 {
    let dtype = case.call.dtype;
    let (n, additions) = (nranks as f64, (nranks - 1) as f64);
    let (mut unit, least) = (unit_roundoff(dtype), smallest(dtype));
    // The exact result itself is rounded to f64, which adds to the error.
    if dtype == DType::F64 {
        unit *= 2.0;
    }
    let (roundings, magnitude, divisor) = match case.call.op {
        ReduceOp::Sum => (additions, magnitude, 1.0),
        ReduceOp::PreMulSum(_) => (additions + 1.0, magnitude, 1.0),
        ReduceOp::Avg => (additions + 2.0, magnitude / n, n),
        ReduceOp::Prod => (additions, exact.abs(), 1.0),
        ReduceOp::Max | ReduceOp::Min => (0.0, 0.0, 1.0),
    };
    // Partial sums without a codec are sent in the data type. An addition may therefore round twice, to fp32
    // and to the type. The factor 1.02 covers what the first-order sum of the errors leaves out, for up to
    // nine roundings to types with at least 3 mantissa bits.
    let mut tolerance = if roundings == 0.0 {
        0.0
    } else {
        let second_order = (1.0 + unit).powi(roundings as i32) * 1.02;
        roundings * (unit + 2f64.powi(-24).min(unit)) * magnitude * second_order + roundings * least
    };
    if report.codec.is_lossy() {
        // Number of encodes that affect an element. One-shot encodes each contribution, direct and flat tree the
        // contributions and the sum, other algorithms every partial sum.
        let encodes = match report.algorithm {
            Algorithm::OneShot => 1.0,
            Algorithm::Direct | Algorithm::FlatTree => 2.0,
            _ => n,
        };
        let step = largest_encode_error(report.codec.inter, sum_of_maxima);
        // Errors of earlier encodes enlarge the values that later encodes round.
        let growth = (1.0 + largest_encode_error(report.codec.inter, 1.0)).powi(encodes as i32 - 1);
        tolerance += encodes * step * growth * 1.01 / divisor;
        tolerance += (n + 2.0) * unit * (sum_of_maxima + encodes * step) / divisor;
        if report.codec.inter.kind == CodecKind::Mantissa8 && case.data == Data::Units {
            tolerance = 0.0; // integers up to 15 are among its values
        }
    }
    tolerance
}
