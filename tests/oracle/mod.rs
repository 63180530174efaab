//! What every rank must end with, computed one element at a time in f64 and i128, from the
//! definitions of the collectives and nothing of the library's arithmetic.

use crate::common::Rng;
use cinch::codec::build;
use cinch::comm::Call;
use cinch::cpu::Isa;
use cinch::types::{CodecKind, Extent, Scalar};
use cinch::{Algorithm, CodecSpec, Collective, DType, ReduceOp, Report};

/// What inputs look like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Data {
    /// Floats close to normal (small integers where an average must not wrap, any otherwise).
    Normal,
    /// Any bytes.
    Bits,
    /// -1, 0 and 1.
    Units,
}

/// One call of all ranks.
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
        // What is only moved may be anything; what is added or rounded must be numbers.
        let moved = !call.collective.reduces() && call.codec.is_none_or(|codec| !codec.is_lossy());
        Case {
            call,
            in_place: false,
            align: [0, 0],
            data: if moved { Data::Bits } else { Data::Normal },
            seed,
        }
    }

    /// The call as `rank` makes it: the factor of a pre-multiplied sum is its own.
    pub fn call_of(&self, rank: usize) -> Call {
        let mut call = self.call;
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

    /// The input of `rank`.
    pub fn input(&self, rank: usize, nranks: usize) -> Vec<u8> {
        let mut rng = Rng(self.seed ^ (rank as u64 + 1) << 48);
        let size = self.call.dtype.size();
        let mut bytes = vec![0; self.input_bytes(rank, nranks)];
        for element in bytes.chunks_exact_mut(size) {
            match self.data {
                Data::Bits => element.copy_from_slice(&rng.next().to_le_bytes()[..size]),
                Data::Units => write_float(self.call.dtype, rng.below(3) as f64 - 1.0, element),
                Data::Normal => number(self.call.dtype, self.call.op, &mut rng, element),
            }
        }
        bytes
    }
}

/// A random number that `op` can combine over 8 ranks without overflow (integers wrap, except in
/// averages, whose division shows whether the sum did).
fn number(dtype: DType, op: ReduceOp, rng: &mut Rng, out: &mut [u8]) {
    match dtype {
        DType::F8E4M3 | DType::F8E5M2 => {
            let (exponents, mantissa_bits, bias) = match (dtype, op) {
                (DType::F8E4M3, ReduceOp::Prod) => (2, 3, 6),
                (DType::F8E4M3, _) => (5, 3, 4),
                (_, ReduceOp::Prod) => (2, 2, 14),
                _ => (5, 2, 12),
            };
            let exponent = bias + rng.below(exponents);
            let mantissa = rng.below(1 << mantissa_bits);
            out[0] = ((rng.below(2) << 7) | (exponent << mantissa_bits) | mantissa) as u8;
        }
        _ if dtype.is_float() => {
            let value = match op {
                ReduceOp::Prod => (0.5 + rng.unit()) * if rng.below(2) == 0 { 1.0 } else { -1.0 },
                _ => rng.normal(),
            };
            write_float(dtype, value, out);
        }
        _ if op == ReduceOp::Avg => {
            let signed = matches!(dtype, DType::I8 | DType::I32 | DType::I64);
            let value = rng.below(16) as i64 * if signed && rng.below(2) == 0 { -1 } else { 1 };
            out.copy_from_slice(&value.to_le_bytes()[..out.len()]);
        }
        _ => out.copy_from_slice(&rng.next().to_le_bytes()[..out.len()]),
    }
}

/// Factor of `rank` in a pre-multiplied sum: exact in every type.
pub fn factor(dtype: DType, rank: usize) -> Scalar {
    if dtype.is_float() {
        Scalar::Float(0.5 + 0.25 * rank as f64)
    } else {
        let signed = matches!(dtype, DType::I8 | DType::I32 | DType::I64);
        let factor = rank as i128 + 2;
        Scalar::Int(if signed && rank % 2 == 1 {
            -factor
        } else {
            factor
        })
    }
}

fn write_float(dtype: DType, value: f64, out: &mut [u8]) {
    match dtype {
        DType::F16 => out.copy_from_slice(&half::f16::from_f64(value).to_le_bytes()),
        DType::BF16 => out.copy_from_slice(&half::bf16::from_f64(value).to_le_bytes()),
        DType::F32 => out.copy_from_slice(&(value as f32).to_le_bytes()),
        DType::F64 => out.copy_from_slice(&value.to_le_bytes()),
        _ => unreachable!("{dtype} is not written from f64"),
    }
}

/// An element as f64, which holds every value of every floating type.
pub fn float(dtype: DType, bytes: &[u8]) -> f64 {
    match dtype {
        DType::F16 => half::f16::from_le_bytes(bytes.try_into().unwrap()).to_f64(),
        DType::BF16 => half::bf16::from_le_bytes(bytes.try_into().unwrap()).to_f64(),
        DType::F32 => f32::from_le_bytes(bytes.try_into().unwrap()).into(),
        DType::F64 => f64::from_le_bytes(bytes.try_into().unwrap()),
        DType::F8E4M3 => float8(bytes[0], 3, 7, false),
        DType::F8E5M2 => float8(bytes[0], 2, 15, true),
        _ => unreachable!("{dtype} is no float"),
    }
}

/// OCP 8-bit floats, by their definition.
fn float8(code: u8, mantissa_bits: u32, bias: i32, infinity: bool) -> f64 {
    let mantissa = i32::from(code) & ((1 << mantissa_bits) - 1);
    let exponent = i32::from(code & 0x7f) >> mantissa_bits;
    let last = exponent == 0x7f >> mantissa_bits;
    let magnitude = match (last, infinity) {
        (true, true) if mantissa == 0 => f64::INFINITY,
        (true, true) => f64::NAN,
        (true, false) if mantissa == (1 << mantissa_bits) - 1 => f64::NAN,
        _ if exponent == 0 => f64::from(mantissa) * 2f64.powi(1 - bias - mantissa_bits as i32),
        _ => {
            f64::from(mantissa + (1 << mantissa_bits))
                * 2f64.powi(exponent - bias - mantissa_bits as i32)
        }
    };
    if code & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

fn int(dtype: DType, bytes: &[u8]) -> i128 {
    let mut wide = [0; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    wrap(dtype, u64::from_le_bytes(wide).into())
}

fn wrap(dtype: DType, value: i128) -> i128 {
    match dtype {
        DType::I8 => (value as i8).into(),
        DType::U8 => (value as u8).into(),
        DType::I32 => (value as i32).into(),
        DType::U32 => (value as u32).into(),
        DType::I64 => (value as i64).into(),
        DType::U64 => (value as u64).into(),
        _ => unreachable!("{dtype} is no integer"),
    }
}

/// Unit roundoff and smallest positive value.
fn precision(dtype: DType) -> (f64, f64) {
    let (bits, least) = match dtype {
        DType::F8E4M3 => (4, -9),
        DType::F8E5M2 => (3, -16),
        DType::BF16 => (8, -133),
        DType::F16 => (11, -24),
        DType::F32 => (24, -149),
        DType::F64 => (53, -1074),
        _ => unreachable!("{dtype} is no float"),
    };
    (2f64.powi(-bits), 2f64.powi(least))
}

/// Largest error of an encode relative to the largest magnitude, stated independently of the laws that
/// the codecs declare. A codec without an entry is held to its own law.
const RELATIVE_BOUNDS: [(CodecKind, f64); 19] = [
    (CodecKind::Raw, 0.0),
    (CodecKind::Linear8, 1.0 / 254.0),
    // Half of the widest gap, 0.4..0.45 and 0.45..1 in steps of 0.55/32.
    (CodecKind::Dynamic8, 0.0086),
    // Relative error at the foot of a decade, where the sixteen nodes lie widest apart.
    (CodecKind::Static8, 0.22),
    // 1.5 lies halfway between 1 and 2, where the next finer exponent ends.
    (CodecKind::Mantissa8, 1.0 / 3.0),
    (CodecKind::CastBf16, 1.0 / 256.0),
    (CodecKind::Cast16, 1.0 / 2048.0),
    // Half a step, where the block reaches from -abs_max to abs_max.
    (CodecKind::MinMax1, 1.0),
    (CodecKind::MinMax2, 1.0 / 3.0),
    (CodecKind::MinMax4, 1.0 / 15.0),
    (CodecKind::MinMax8, 1.0 / 255.0),
    // Half of the last mantissa bit.
    (CodecKind::Fp8E4M3, 1.0 / 16.0),
    (CodecKind::Fp8E5M2, 1.0 / 8.0),
    // An element may move from one value of a code to the other end of its range.
    (CodecKind::TernGrad, 1.0),
    (CodecKind::OneBit, 1.0),
    (CodecKind::Threshold2, 1.0),
    // Truncation, by the mantissa bits that are kept; one byte keeps none.
    (CodecKind::Trunc8, 0.75),
    (CodecKind::Trunc16, 1.0 / 128.0),
    (CodecKind::Trunc24, 1.0 / 32_768.0),
];

/// Returns the largest error of an encode of a value among values of magnitude up to `abs_max`.
fn half_step(codec: CodecSpec, abs_max: f64) -> f64 {
    // A draw may round to the further neighbour; ternary numbers are always drawn.
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

/// Where an output element comes from.
enum Source {
    /// All ranks' element with this index, combined.
    Combined(usize),
    /// One rank's element with this index.
    Copied(usize, usize),
}

fn source(call: &Call, rank: usize, at: usize) -> Source {
    let count = call.count;
    match call.collective {
        Collective::AllReduce | Collective::Reduce => Source::Combined(at),
        Collective::ReduceScatter => Source::Combined(rank * count + at),
        Collective::Broadcast | Collective::SendRecv => Source::Copied(call.root, at),
        Collective::AllGather | Collective::Gather => Source::Copied(at / count, at % count),
        Collective::Scatter => Source::Copied(call.root, rank * count + at),
        Collective::AllToAll => Source::Copied(at / count, rank * count + at % count),
    }
}

/// Compares the output of `rank` with the definition.
pub fn check(
    case: &Case,
    rank: usize,
    inputs: &[Vec<u8>],
    output: &[u8],
    report: &Report,
) -> Result<(), String> {
    let (call, size) = (&case.call, case.call.dtype.size());
    let maxima: Vec<f64> = match call.dtype.is_float() && case.data != Data::Bits {
        true => inputs
            .iter()
            .map(|input| abs_max(call.dtype, input))
            .collect(),
        false => Vec::new(),
    };
    // No partial sum of any elements exceeds this.
    let sum_of_maxima = maxima
        .iter()
        .enumerate()
        .map(|(rank, max)| max * float_factor(case, rank))
        .sum();
    let (mut errors, mut exacts) = (0.0, 0.0);
    for (at, got) in output.chunks_exact(size).enumerate() {
        let element = |rank: usize, index: usize| &inputs[rank][index * size..][..size];
        let wrong = |expected: String, tolerance: f64| {
            let shown = if call.dtype.is_float() {
                format!("{:e}", float(call.dtype, got))
            } else {
                int(call.dtype, got).to_string()
            };
            Err(format!(
                "rank {rank}, element {at}: {shown} instead of {expected} +- {tolerance:e}"
            ))
        };
        match source(call, rank, at) {
            Source::Copied(from, index) if !report.codec.is_lossy() => {
                if got != element(from, index) {
                    return wrong(format!("the bytes {:x?}", element(from, index)), 0.0);
                }
            }
            Source::Copied(from, index) => {
                let exact = float(call.dtype, element(from, index));
                let (unit, least) = precision(call.dtype);
                let step = half_step(report.codec.inter, maxima[from]);
                let tolerance = 1.001 * step + 1.01 * unit * (exact.abs() + step) + least;
                if !within(float(call.dtype, got), exact, tolerance) {
                    return wrong(format!("{exact:e}"), tolerance);
                }
            }
            Source::Combined(index) if call.dtype.is_float() => {
                let values = (0..inputs.len())
                    .map(|rank| float(call.dtype, element(rank, index)) * float_factor(case, rank));
                let (exact, tolerance) =
                    combine_floats(case, values, inputs.len(), report, sum_of_maxima);
                if !within(float(call.dtype, got), exact, tolerance) {
                    return wrong(format!("{exact:e}"), tolerance);
                }
                errors += (float(call.dtype, got) - exact).powi(2);
                exacts += exact * exact;
            }
            Source::Combined(index) => {
                let exact = combine_ints(case, inputs.len(), |rank| {
                    int(call.dtype, element(rank, index))
                });
                if int(call.dtype, got) != exact {
                    return wrong(exact.to_string(), 0.0);
                }
            }
        }
    }
    let (off, most) = (
        (errors / exacts).sqrt(),
        most_off(case, inputs.len(), report),
    );
    // Of few elements the mean says nothing.
    if output.len() / size >= 256 && off > most {
        return Err(format!(
            "rank {rank}: all elements together are off by {off:e} of their size, not {most:e}"
        ));
    }
    Ok(())
}

/// What a whole raw result in 8 bits may be off by, relative to its size: tolerances of elements exceed
/// the elements themselves there. Errors of roundings do not all point one way: simulated, rings and trees
/// of 8 ranks are off by 0.08 in e4m3 and 0.16 in e5m2, and from there on by the root of the ranks. Zeros
/// are off by 1, a sum without one rank by 1/sqrt(ranks).
fn most_off(case: &Case, nranks: usize, report: &Report) -> f64 {
    let unit = match case.call.dtype {
        DType::F8E4M3 => 1.0 / 16.0,
        DType::F8E5M2 => 1.0 / 8.0,
        _ => return f64::INFINITY,
    };
    if report.codec.is_lossy() || case.data == Data::Bits {
        return f64::INFINITY;
    }
    match case.call.op {
        // A few elements are nearly all of it.
        ReduceOp::Prod => 0.75,
        _ => 2.0 * unit * (nranks as f64 / 8.0).max(1.0).sqrt(),
    }
}

fn within(got: f64, exact: f64, tolerance: f64) -> bool {
    (got - exact).abs() <= tolerance // false for NaN
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
        .map(|element| float(dtype, element).abs())
        .fold(0.0, f64::max)
}

/// The exact value, and how far from it the library may end.
fn combine_floats(
    case: &Case,
    values: impl Iterator<Item = f64>,
    nranks: usize,
    report: &Report,
    sum_of_maxima: f64,
) -> (f64, f64) {
    let dtype = case.call.dtype;
    let (unit, least) = precision(dtype);
    let values: Vec<f64> = values.collect();
    // The reference itself rounds like f64 does.
    let unit = if dtype == DType::F64 {
        2.0 * unit
    } else {
        unit
    };
    let magnitude: f64 = values.iter().map(|value| value.abs()).sum();
    let additions = (nranks - 1) as f64;
    let (exact, roundings, magnitude) = match case.call.op {
        ReduceOp::Sum => (values.iter().sum(), additions, magnitude),
        ReduceOp::PreMulSum(_) => (values.iter().sum(), additions + 1.0, magnitude),
        ReduceOp::Avg => {
            let n = nranks as f64;
            (
                values.iter().sum::<f64>() / n,
                additions + 2.0,
                magnitude / n,
            )
        }
        ReduceOp::Prod => {
            let product: f64 = values.iter().product();
            (product, additions, product.abs())
        }
        ReduceOp::Max => (values.iter().copied().fold(f64::MIN, f64::max), 0.0, 0.0),
        ReduceOp::Min => (values.iter().copied().fold(f64::MAX, f64::min), 0.0, 0.0),
    };
    // Raw partial sums travel in the data type, so each addition may round once more than to
    // fp32; 2 % cover the second-order terms of at most nine roundings to 3 bits or more.
    let mut tolerance = if roundings == 0.0 {
        0.0
    } else {
        let second_order = (1.0 + unit).powi(roundings as i32) * 1.02;
        roundings * (unit + 2f64.powi(-24).min(unit)) * magnitude * second_order + roundings * least
    };
    if report.codec.is_lossy() {
        // How many encodes an element's contributions pass, weighted by what each can hold:
        // one-shot encodes each contribution, direct contributions and the sum, the others
        // every partial sum.
        let encodes = match report.algorithm {
            Algorithm::OneShot => 1.0,
            Algorithm::Direct => 2.0,
            Algorithm::Ring | Algorithm::Tree | Algorithm::Hierarchical => nranks as f64,
        };
        let step = half_step(report.codec.inter, sum_of_maxima);
        let n = if case.call.op == ReduceOp::Avg {
            nranks as f64
        } else {
            1.0
        };
        // Errors of earlier encodes enlarge what later ones hold.
        let growth = (1.0 + half_step(report.codec.inter, 1.0)).powi(encodes as i32 - 1);
        tolerance += encodes * step * growth * 1.01 / n;
        tolerance += (nranks + 2) as f64 * unit * (sum_of_maxima + encodes * step) / n;
        if report.codec.inter.kind == CodecKind::Mantissa8 && case.data == Data::Units {
            tolerance = 0.0; // integers up to 15 are among its values
        }
    }
    (exact, tolerance)
}

fn combine_ints(case: &Case, nranks: usize, value: impl Fn(usize) -> i128) -> i128 {
    let dtype = case.call.dtype;
    let values = (0..nranks).map(&value);
    match case.call.op {
        ReduceOp::Sum => values.fold(0, |a, b| wrap(dtype, a + b)),
        ReduceOp::Avg => values.sum::<i128>() / nranks as i128,
        ReduceOp::Prod => values.fold(1, |a, b| wrap(dtype, a.wrapping_mul(b))),
        ReduceOp::Max => values.max().unwrap(),
        ReduceOp::Min => values.min().unwrap(),
        ReduceOp::PreMulSum(_) => (0..nranks).fold(0, |sum, rank| {
            let Scalar::Int(factor) = factor(dtype, rank) else {
                unreachable!()
            };
            wrap(dtype, sum + wrap(dtype, value(rank).wrapping_mul(factor)))
        }),
    }
}
