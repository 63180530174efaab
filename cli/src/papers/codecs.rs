//! `cinch codecs`: prints the codecs' errors beside published ones, and compares SIMD code with
//! scalar code.
//!
//! The paper (Dettmers, 8-bit approximations for parallelism in deep learning, Table 2) prints a
//! "mean absolute error" that is a mean squared error. Its relative errors come from a search that
//! omits the last comparison. The reference here is exact rounding to the nearest value of the same
//! formats; printed figures are shown for comparison only.

use cinch::CodecSpec;
use cinch::codec::{Codec, EncodeStats, Span, build};
use cinch::cpu::Isa;
use cinch::testing::Random;
use cinch::types::ScaleRule;
use std::io::{Error, Result, Write};
use std::sync::Arc;

/// A figure may differ from its reference by this number of the samples' standard errors.
pub const DEVIATIONS: f64 = 4.0;
/// Number of elements that pass through the codecs together.
const PIECE: usize = 1 << 16;

/// Prints the error table, from `samples` samples of each distribution.
///
/// # Errors
/// Returns an error if a row is beyond its tolerance, after the table is complete. Returns the
/// writer's errors.
pub fn run(samples: usize, seed: u64, out: &mut dyn Write) -> Result<()> {
    writeln!(out, "# {samples} samples a distribution, seed {seed}")?;
    writeln!(
        out,
        "# the source's \"mean absolute error\" is a mean squared error, and its search drops \
         its last comparison;\n# reference: true nearest rounding; deviation: the largest of the \
         three from the reference;\n# SE: the largest of their standard errors; a row may be off by its \
         tolerance and {DEVIATIONS} of them"
    )?;
    writeln!(
        out,
        "{:<10} {:<10} {:>9} {:>9} {:>10} {:>7} | {:>9} {:>7} | {:>9} {:>9} {:>7} | {:>6} {:>6}",
        "data",
        "codec",
        "MAE",
        "RMSE",
        "MSE",
        "rel %",
        "\"MAE\"",
        "rel %",
        "MAE",
        "RMSE",
        "rel %",
        "dev %",
        "SE %"
    )?;
    writeln!(
        out,
        "{:<60} | {:^17} | {:^27} |",
        "", "source prints", "reference"
    )?;
    let mut off = 0;
    for (index, data) in DATA.iter().enumerate() {
        let seed = seed.wrapping_add(index as u64);
        let codecs: Vec<_> = data.rows.iter().map(|row| row.codec()).collect();
        for (row, errors) in data.rows.iter().zip(data.measure(&codecs, samples, seed)) {
            let [mean_absolute, root_mean_square, relative] = errors.map(|error| error.mean);
            let good = row.agrees(&errors);
            off += usize::from(!good);
            writeln!(
                out,
                "{:<10} {:<10} {:>9.3e} {:>9.3e} {:>10.4e} {:>7.3} | {:>9} {:>7} | {:>9.3e} {:>9.3e} {:>7.3} | {:>6.3} {:>6.3} {}",
                data.name,
                row.name(),
                mean_absolute,
                root_mean_square,
                root_mean_square.powi(2),
                relative,
                row.printed.0,
                row.printed.1,
                row.reference[0],
                row.reference[1],
                row.reference[2],
                row.deviations(&errors).fold(0.0, f64::max),
                row.standard_errors(&errors).fold(0.0, f64::max),
                if good { "ok" } else { "off" },
            )?;
        }
    }
    let rows: usize = DATA.iter().map(|data| data.rows.len()).sum();
    if off > 0 {
        return Err(Error::other(format!(
            "{off} of {rows} rows differ from their reference by more than their tolerance"
        )));
    }
    writeln!(out, "all {rows} rows agree with their reference")
}

/// Compares the code of every SIMD instruction set of this machine with the scalar code, and the
/// scalar code with its error bound. Each codec gets `patterns` fp32 bit patterns, including NaN,
/// infinities, subnormals and -0.
///
/// # Errors
/// Returns an error that names the first difference. Returns the writer's errors.
pub fn check(patterns: u64, seed: u64, out: &mut dyn Write) -> Result<()> {
    let vectors: Vec<Isa> = Isa::available().into_iter().skip(1).collect();
    let names: Vec<_> = vectors.iter().map(|isa| isa.name()).collect();
    if vectors.is_empty() {
        return writeln!(out, "skipped: this machine has no vector forms to compare");
    }
    for spec in CodecSpec::samples() {
        let scalar = codec(spec, Isa::Scalar);
        let forms: Vec<_> = vectors.iter().map(|&isa| codec(spec, isa)).collect();
        let tensor = spec.kind.has_scale() && matches!(spec.scale, ScaleRule::Tensor { .. });
        let mut random = Random::new(seed);
        let mut done = 0;
        while done < patterns {
            // The length varies, so that the last SIMD vector is often incomplete.
            let n = (patterns - done).min((PIECE - random.below(100)) as u64) as usize;
            let x = random.patterns(n);
            // A random element serves as tensor scale. Some elements exceed it, and it may be NaN
            // or infinite.
            let given = tensor.then(|| x[random.below(n)].abs());
            let expected = Pass::of(&*scalar, &x, given);
            if let Some(what) = beyond_bound(&*scalar, &x, given, &expected.decoded) {
                return Err(Error::other(format!(
                    "{spec} after {done} patterns of seed {seed}: {what}"
                )));
            }
            for (isa, form) in vectors.iter().zip(&forms) {
                if let Some(what) = expected.difference(&Pass::of(&**form, &x, given)) {
                    return Err(Error::other(format!(
                        "{spec} on {} differs from the scalar code after {done} patterns of seed \
                         {seed}: {what}",
                        isa.name()
                    )));
                }
            }
            done += n as u64;
        }
        writeln!(
            out,
            "{:<26} {done} patterns within the bound, equal on scalar, {}",
            spec.to_string(),
            names.join(", ")
        )?;
    }
    Ok(())
}

fn codec(spec: CodecSpec, isa: Isa) -> Arc<dyn Codec> {
    let codec = build(spec, isa).expect("specs of this file are legal");
    codec.expect("no spec of this file is raw")
}

/// All results of a codec for one input.
struct Pass {
    wire: Vec<u8>,
    decoded: Vec<f32>,
    sum: Vec<f32>,
    stats: EncodeStats,
}

impl Pass {
    fn of(codec: &dyn Codec, x: &[f32], given: Option<f32>) -> Pass {
        let span = Span::whole(x.len());
        let mut pass = Pass {
            wire: vec![0; codec.wire_bytes(x.len())],
            decoded: vec![0.0; x.len()],
            sum: x.to_vec(),
            stats: EncodeStats::default(),
        };
        codec.encode(span, x, given, &mut pass.wire, Some(&mut pass.stats));
        codec.decode(span, &pass.wire, &mut pass.decoded);
        codec.decode_reduce(span, &pass.wire, &mut pass.sum);
        pass
    }

    fn difference(&self, other: &Pass) -> Option<String> {
        let bits = |x: f32| if x.is_nan() { u32::MAX } else { x.to_bits() };
        let floats = |a: &[f32], b: &[f32]| (0..a.len()).find(|&i| bits(a[i]) != bits(b[i]));
        if let Some(i) = (0..self.wire.len()).find(|&i| self.wire[i] != other.wire[i]) {
            return Some(format!(
                "wire byte {i}: {} and {}",
                self.wire[i], other.wire[i]
            ));
        }
        if let Some(i) = floats(&self.decoded, &other.decoded) {
            return Some(format!(
                "element {i}: {} and {}",
                self.decoded[i], other.decoded[i]
            ));
        }
        if let Some(i) = floats(&self.sum, &other.sum) {
            return Some(format!("sum {i}: {} and {}", self.sum[i], other.sum[i]));
        }
        let (a, b) = (&self.stats, &other.stats);
        let close = (a.sum_squares - b.sum_squares).abs() <= 1e-9 * a.sum_squares;
        let equal =
            (a.abs_max, a.non_finite, a.saturated) == (b.abs_max, b.non_finite, b.saturated);
        (!close || !equal).then(|| format!("statistics: {a:?} and {b:?}"))
    }
}

/// Returns a description of an element that exceeds its error bound, or that is finite where it
/// must not be; `None` if there is no such element.
fn beyond_bound(codec: &dyn Codec, x: &[f32], given: Option<f32>, y: &[f32]) -> Option<String> {
    let description = codec.description();
    let block = match (given, description.block_numbers) {
        (None, 1..) => codec.granule(),
        _ => x.len(),
    };
    for (x, y) in x.chunks(block).zip(y.chunks(block)) {
        let finite = x.iter().all(|x| x.is_finite()) && given.is_none_or(f32::is_finite);
        let scale = given.unwrap_or_else(|| x.iter().fold(0.0, |most, x| x.abs().max(most)));
        for (&x, &y) in x.iter().zip(y) {
            let poisoned = if description.poisons_block {
                !finite
            } else {
                !x.is_finite()
            };
            // For a saturated value, the bound is checked against the largest value that the codec
            // represents.
            let most = description.errors.largest.min(f32::MAX.into()) as f32;
            let most = given.unwrap_or(most);
            let right = if poisoned || y.is_nan() {
                poisoned && !y.is_finite()
            } else {
                let kept = x.clamp(-most, most);
                let error = (f64::from(kept) - f64::from(y)).abs();
                error <= f64::from(codec.error_bound(kept, scale))
            };
            if !right {
                return Some(format!("{x:e} became {y:e} in a block of up to {scale:e}"));
            }
        }
    }
    None
}

/// A distribution, with the codecs whose errors are measured on it.
struct SampledCodecs {
    name: &'static str,
    /// Standard deviation of a Gaussian; `None` for a uniform distribution on (0, 1).
    sigma: Option<f64>,
    rows: [CodecRow; 4],
}

/// A codec's row for one distribution.
struct CodecRow {
    spec: &'static str,
    /// The tensor scale, for codecs that have one.
    scale: Option<f32>,
    /// Figures that the paper prints.
    printed: (&'static str, &'static str),
    /// Expected mean absolute error, root mean square error, and mean relative error in percent.
    reference: [f64; 3],
    /// Percent of the reference that a figure may be off, in addition to the samples' standard
    /// error.
    tolerance: f64,
}

/// Mean absolute error, root mean square error, and mean relative error in percent, each with the
/// standard error of the estimate.
type Errors = [Mean; 3];

/// A mean with its standard error.
#[derive(Clone, Copy)]
pub struct Mean {
    /// The mean of the samples.
    pub mean: f64,
    /// Standard error of the mean.
    pub error: f64,
}

impl Mean {
    /// Returns the mean of `n` terms from their sum and the sum of their squares.
    pub fn of(sum: f64, squares: f64, n: f64) -> Mean {
        let mean = sum / n;
        let variance = (squares / n - mean * mean).max(0.0);
        Mean {
            mean,
            error: (variance / n).sqrt(),
        }
    }

    /// Returns the square root of the mean, with its standard error to first order.
    pub fn root(self) -> Mean {
        let mean = self.mean.sqrt();
        let error = match mean > 0.0 {
            true => self.error / (2.0 * mean),
            false => 0.0,
        };
        Mean { mean, error }
    }
}

impl CodecRow {
    fn name(&self) -> &'static str {
        self.spec.split(':').next().unwrap_or(self.spec)
    }

    fn codec(&self) -> Arc<dyn Codec> {
        let spec = self.spec.parse().expect("specs of this file are legal");
        codec(spec, Isa::detect())
    }

    /// Returns the differences between figures and references, in percent of the reference.
    fn deviations(&self, errors: &Errors) -> impl Iterator<Item = f64> {
        let both = errors.iter().zip(self.reference);
        both.map(|(found, exact)| 100.0 * (found.mean / exact - 1.0).abs())
    }

    /// Returns the standard error of each figure, in percent of the reference.
    fn standard_errors(&self, errors: &Errors) -> impl Iterator<Item = f64> {
        let both = errors.iter().zip(self.reference);
        both.map(|(found, exact)| 100.0 * found.error / exact)
    }

    /// Returns whether each figure is within the tolerance plus [`DEVIATIONS`] standard errors of
    /// its reference.
    fn agrees(&self, errors: &Errors) -> bool {
        let chances = self.standard_errors(errors);
        let mut both = self.deviations(errors).zip(chances);
        both.all(|(deviation, chance)| deviation <= self.tolerance + DEVIATIONS * chance)
    }
}

impl SampledCodecs {
    /// Returns the errors of each row's codec on the same samples.
    fn measure(&self, codecs: &[Arc<dyn Codec>], samples: usize, seed: u64) -> Vec<Errors> {
        let mut random = Random::new(seed);
        // For each figure, the sum of its terms and the sum of their squares.
        let mut sums = vec![[(0.0, 0.0); 3]; codecs.len()];
        let mut done = 0;
        while done < samples {
            let n = PIECE.min(samples - done);
            let x = match self.sigma {
                Some(sigma) => random.gaussian(n, sigma),
                None => random.uniform(n),
            };
            for ((row, codec), sum) in self.rows.iter().zip(codecs).zip(&mut sums) {
                let span = Span::whole(n);
                let mut wire = vec![0; codec.wire_bytes(n)];
                let mut y = vec![0.0; n];
                codec.encode(span, &x, row.scale, &mut wire, None);
                codec.decode(span, &wire, &mut y);
                for (&x, &y) in x.iter().zip(&y) {
                    let (x, error) = (f64::from(x), f64::from(x) - f64::from(y));
                    let terms = [error.abs(), error * error, 100.0 * (error / x).abs()];
                    for ((sum, squares), term) in sum.iter_mut().zip(terms) {
                        *sum += term;
                        *squares += term * term;
                    }
                }
            }
            done += n;
        }
        let n = samples.max(1) as f64;
        let means = sums.into_iter().map(|sums| {
            let [absolute, square, relative] = sums.map(|(sum, squares)| Mean::of(sum, squares, n));
            [absolute, square.root(), relative]
        });
        means.collect()
    }
}

/// Creates a row of the table with its reference.
const fn row(
    spec: &'static str,
    scale: f32,
    printed: (&'static str, &'static str),
    reference: [f64; 3],
    tolerance: f64,
) -> CodecRow {
    CodecRow {
        spec,
        scale: if scale > 0.0 { Some(scale) } else { None },
        printed,
        reference,
        tolerance,
    }
}

/// Distributions and rows. The tensor scale of the Gaussian rows is 5.5 sigma, about the largest of
/// 25 million samples. It is fixed so that figures do not depend on one sample.
#[rustfmt::skip]
const DATA: [SampledCodecs; 4] = [
    SampledCodecs { name: "U(0,1)", sigma: None, rows: [
        row("dynamic8:tensor=1", 1.0, ("0.00004", "1.39"), [0.003363, 0.004108, 0.935], 0.3),
        row("linear8:tensor=1", 1.0, ("0.0024", "2.16"), [0.001969, 0.002273, 1.496], 0.3),
        row("mantissa8", 0.0, ("0.0017", "7.22"), [0.02096, 0.02604, 4.968], 0.5),
        row("static8", 0.0, ("0.0007", "4.82"), [0.01344, 0.01656, 3.343], 0.5),
    ] },
    SampledCodecs { name: "N(0,1)", sigma: Some(1.0), rows: [
        row("dynamic8:tensor=1", 5.5, ("0.0005", "2.46"), [0.01033, 0.01367, 1.658], 0.5),
        row("linear8:tensor=1", 5.5, ("0.0004", "6.47"), [0.01083, 0.01250, 5.147], 0.5),
        row("mantissa8", 0.0, ("0.0104", "6.89"), [0.03964, 0.07546, 4.971], 0.5),
        row("static8", 0.0, ("0.0093", "6.3"), [0.04328, 0.07206, 4.788], 0.5),
    ] },
    SampledCodecs { name: "N(0,10^2)", sigma: Some(10.0), rows: [
        row("dynamic8:tensor=1", 55.0, ("0.049", "2.49"), [0.1033, 0.1367, 1.658], 0.5),
        row("linear8:tensor=1", 55.0, ("0.041", "6.44"), [0.1083, 0.1250, 5.147], 0.5),
        row("mantissa8", 0.0, ("1.066", "7.19"), [0.3964, 0.7546, 4.971], 0.5),
        row("static8", 0.0, ("0.926", "6.28"), [0.4328, 0.7206, 4.788], 0.5),
    ] },
    SampledCodecs { name: "N(0,0.2^2)", sigma: Some(0.2), rows: [
        row("dynamic8:tensor=1", 1.1, ("0.000018", "2.45"), [0.002066, 0.002734, 1.658], 0.5),
        row("linear8:tensor=1", 1.1, ("0.000015", "6.15"), [0.002166, 0.002500, 5.147], 0.5),
        row("mantissa8", 0.0, ("0.00055", "8.26"), [0.01077, 0.01713, 5.963], 0.5),
        row("static8", 0.0, ("0.00022", "6.58"), [0.00739, 0.01023, 4.844], 0.5),
    ] },
];
