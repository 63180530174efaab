//! `cinch codecs --table2`: recomputes the 32 cells of Table 2 in Dettmers, "8-Bit Approximations
//! for Parallelism in Deep Learning", each with an explanation of its value.
//!
//! No cell follows from the formats and rounding to the nearest. All cells follow from these
//! properties of the paper's program:
//! - the column "mean absolute error" holds mean squared errors;
//! - the search through a table of values halves its step six times. It compares its last value
//!   only with the lower neighbour, except in the first interval, so half of all intervals lack a
//!   comparison with the upper neighbour;
//! - the dynamic tree and linear types scale by the largest sample M, and values above 0.9907 M
//!   become M. The paper does not give its M; a single M explains both cells of a row;
//! - the linear type decodes code 126 to 0, as the table of the dynamic tree does;
//! - the mantissa and static tree types have no scale. They use the offset 10^1 on all data, and
//!   their search begins at index 64.

use super::codecs::{DEVIATIONS, Mean};
use cinch::CodecSpec;
use cinch::codec::{Span, build};
use cinch::cpu::Isa;
use cinch::testing::Random;
use std::io::{Error, Result, Write};

/// Number of samples that are searched together.
const PIECE: usize = 1 << 16;
/// Share of the largest sample beyond which a value becomes the largest sample.
const SATURATES: f64 = 0.9907;
/// Share of the largest sample below which a value becomes 0.
const VANISHES: f64 = 1.5e-6;

/// Prints the cells, from `samples` samples of each distribution.
///
/// # Errors
/// Returns an error if a cell differs from the printed one, after the table is complete. Returns
/// the writer's errors.
pub fn run(samples: usize, seed: u64, out: &mut dyn Write) -> Result<()> {
    writeln!(
        out,
        "# Table 2 of the paper by its own search, {samples} samples a distribution, seed {seed}\n\
         {:<10} {:<9} {:>9} {:>10} {:>7} {:>7}  reading",
        "data", "type", "\"MAE\"", "ours: MSE", "rel %", "ours"
    )?;
    let mut off = 0;
    for (index, (data, rows)) in CELLS.iter().enumerate() {
        let types = rows.each_ref().map(Quantiser::new);
        let found = measure(&types, data, samples, seed.wrapping_add(index as u64));
        for ((row, quantiser), [squared, relative]) in rows.iter().zip(&types).zip(found) {
            let good = [(squared, row.printed.0), (relative, row.printed.1)];
            let good = good.map(|(found, printed)| explains(found, printed));
            off += good.iter().filter(|good| !**good).count();
            writeln!(
                out,
                "{:<10} {:<9} {:>9} {:>10.4e} {:>7} {:>7.3}  {}{}",
                data.name,
                row.codec,
                row.printed.0,
                squared.mean,
                row.printed.1,
                relative.mean,
                quantiser.reading(data),
                match good {
                    [true, true] => "",
                    _ => " DIFFERS",
                }
            )?;
        }
    }
    let cells = 2 * CELLS.iter().map(|(_, rows)| rows.len()).sum::<usize>();
    if off > 0 {
        return Err(Error::other(format!(
            "{off} of {cells} cells differ from the printed ones"
        )));
    }
    writeln!(
        out,
        "all {cells} cells agree with the printed ones, to one unit of their last digit and {DEVIATIONS} standard errors"
    )
}

/// A distribution of samples.
struct SampledData {
    name: &'static str,
    /// Standard deviation of a Gaussian; `None` for a uniform distribution on (0, 1).
    sigma: Option<f64>,
}

/// A data type on one distribution, with the figures that the paper prints.
struct Table2Row {
    codec: &'static str,
    /// The largest sample; 0 for types without a scale.
    largest: f64,
    printed: (&'static str, &'static str),
}

/// Returns whether `printed` equals this mean after rounding or truncation; the paper uses both.
fn explains(found: Mean, printed: &str) -> bool {
    let digits = printed
        .split_once('.')
        .map_or(0, |(_, digits)| digits.len());
    let unit = 10f64.powi(-(digits as i32));
    let value: f64 = printed.parse().unwrap_or(f64::NAN);
    (found.mean - value).abs() < unit + DEVIATIONS * found.error
}

/// The paper's search for the nearest value of one data type.
struct Quantiser {
    /// Magnitudes in ascending order.
    values: Vec<f64>,
    /// Index at which the search begins.
    start: usize,
    /// Index of a value whose code wrongly decodes to 0.
    lost: Option<usize>,
    /// The largest sample, if values are relative to it.
    largest: Option<f64>,
}

impl Quantiser {
    fn new(row: &Table2Row) -> Quantiser {
        let mut values = magnitudes(row.codec);
        let scaled = row.largest > 0.0;
        if row.codec == "dynamic8" {
            // The paper's program has separate codes for 0 and 1, so its search does not include
            // them.
            values.retain(|&value| value > 0.0 && value < 1.0);
        }
        Quantiser {
            values,
            start: if scaled { 63 } else { 64 },
            lost: (row.codec == "linear8").then_some(126),
            largest: scaled.then_some(row.largest),
        }
    }

    /// Returns the magnitude to which the paper's program encodes and decodes `x`.
    fn through(&self, x: f64) -> f64 {
        let Some(largest) = self.largest else {
            return self.search(x);
        };
        match x / largest {
            share if share > SATURATES => largest,
            share if share < VANISHES => 0.0,
            share => largest * self.search(share),
        }
    }

    fn search(&self, x: f64) -> f64 {
        let last = self.values.len() - 1;
        let (mut pivot, mut lower, mut upper) = (self.start, 0, last);
        for step in [32, 16, 8, 4, 2, 1] {
            if self.values[pivot.min(last)] > x {
                upper = pivot;
                pivot -= step;
            } else {
                lower = pivot;
                pivot += step;
            }
        }
        let pivot = pivot.min(last);
        // If no step of the search went up, there is no lower neighbour to compare with.
        let other = if lower == pivot { upper } else { lower };
        let distance = |at: usize| (self.values[at] - x).abs();
        let code = if distance(other) < distance(pivot) {
            other
        } else {
            pivot
        };
        if self.lost == Some(code) {
            return 0.0;
        }
        self.values[code]
    }

    fn reading(&self, data: &SampledData) -> String {
        let scale = match (self.largest, data.sigma) {
            (None, _) => "no scale, offset 10^1".into(),
            (Some(_), None) => "M = 1".into(),
            (Some(largest), Some(sigma)) => format!("M = {:.2} sigma", largest / sigma),
        };
        let lost = match self.lost {
            Some(code) => format!("; code {code} is 0"),
            None => String::new(),
        };
        format!(
            "squared; search from {} without its last comparison; {scale}{lost}",
            self.start
        )
    }
}

/// Returns the 128 magnitudes of a type in ascending order: the decoded values of its positive
/// codes, relative to the scale.
fn magnitudes(name: &str) -> Vec<f64> {
    let mut spec: CodecSpec = name.parse().expect("names of this file are legal");
    if spec.kind.has_tensor_scale() {
        let text = format!("{name}:tensor=1");
        spec = text.parse().expect("these codecs have tensor scales");
    }
    let codec = build(spec, Isa::Scalar).expect("parameters of this file are legal");
    let codec = codec.expect("no codec of this file is raw");
    let mut wire = vec![0u8; codec.wire_bytes(128)];
    // Encodes 128 elements with scale 1, then replaces the codes by all positive ones.
    let scale = spec.kind.has_tensor_scale().then_some(1.0);
    codec.encode(Span::whole(128), &[1.0; 128], scale, &mut wire, None);
    for (code, byte) in wire[..128].iter_mut().enumerate() {
        *byte = code as u8;
    }
    let mut values = vec![0f32; 128];
    codec.decode(Span::whole(128), &wire, &mut values);
    let mut values: Vec<f64> = values.into_iter().map(f64::from).collect();
    values.sort_by(f64::total_cmp);
    values
}

/// Returns the mean squared error and the mean relative error (in percent) of each type, on the
/// same samples.
fn measure(
    types: &[Quantiser; 4],
    data: &SampledData,
    samples: usize,
    seed: u64,
) -> [[Mean; 2]; 4] {
    let mut random = Random::new(seed);
    let mut sums = [[[0f64; 2]; 2]; 4];
    let mut done = 0;
    while done < samples {
        let n = PIECE.min(samples - done);
        let x = match data.sigma {
            Some(sigma) => random.gaussian(n, sigma),
            None => random.uniform(n),
        };
        for (quantiser, sums) in types.iter().zip(&mut sums) {
            for &x in &x {
                let x = f64::from(x.abs());
                let error = (x - quantiser.through(x)).abs();
                for (sum, value) in sums.iter_mut().zip([error * error, 100.0 * error / x]) {
                    sum[0] += value;
                    sum[1] += value * value;
                }
            }
        }
        done += n;
    }
    let n = samples.max(1) as f64;
    sums.map(|sums| sums.map(|[sum, squares]| Mean::of(sum, squares, n)))
}

const fn row(
    codec: &'static str,
    largest: f64,
    printed: (&'static str, &'static str),
) -> Table2Row {
    Table2Row {
        codec,
        largest,
        printed,
    }
}

const fn data(name: &'static str, sigma: Option<f64>) -> SampledData {
    SampledData { name, sigma }
}

#[rustfmt::skip]
const CELLS: [(SampledData, [Table2Row; 4]); 4] = [
    (data("U(0,1)", None), [
        row("dynamic8", 1.0, ("0.00004", "1.39")),
        row("linear8", 1.0, ("0.0024", "2.16")),
        row("mantissa8", 0.0, ("0.0017", "7.22")),
        row("static8", 0.0, ("0.0007", "4.82")),
    ]),
    (data("N(0,1)", Some(1.0)), [
        row("dynamic8", 5.5, ("0.0005", "2.46")),
        row("linear8", 5.76, ("0.0004", "6.47")),
        row("mantissa8", 0.0, ("0.0104", "6.89")),
        row("static8", 0.0, ("0.0093", "6.3")),
    ]),
    (data("N(0,10^2)", Some(10.0)), [
        row("dynamic8", 57.1, ("0.049", "2.49")),
        row("linear8", 57.3, ("0.041", "6.44")),
        row("mantissa8", 0.0, ("1.066", "7.19")),
        row("static8", 0.0, ("0.926", "6.28")),
    ]),
    (data("N(0,0.2^2)", Some(0.2)), [
        row("dynamic8", 1.086, ("0.000018", "2.45")),
        row("linear8", 1.081, ("0.000015", "6.15")),
        row("mantissa8", 0.0, ("0.00055", "8.26")),
        row("static8", 0.0, ("0.00022", "6.58")),
    ]),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn search_never_compares_with_the_upper_neighbour() {
        let tree = Quantiser::new(&CELLS[0].1[0]);
        assert_eq!(tree.values.len(), 126);
        // The search rounds to the nearest between an odd index and the next. Between an even index
        // and the next it rounds down, except in the first interval.
        let middle = |at: usize| (tree.values[at] + tree.values[at + 1]) / 2.0;
        for at in 1..124 {
            let above = 0.3 * middle(at) + 0.7 * tree.values[at + 1];
            let up = tree.search(above) == tree.values[at + 1];
            assert_eq!(up, at % 2 == 1, "{at}");
        }
        let below = 0.1 * tree.values[0] + 0.9 * tree.values[1];
        assert_eq!(tree.search(below), tree.values[1]);
    }

    #[test]
    fn cells_are_rounded_or_cut_off() {
        let mean = |mean| Mean { mean, error: 0.0 };
        assert!(explains(mean(1.398), "1.39") && explains(mean(1.392), "1.39"));
        assert!(!explains(mean(1.401), "1.39") && !explains(mean(1.379), "1.39"));
        assert!(explains(mean(0.000226), "0.00022") && !explains(mean(0.00024), "0.00022"));
        let drawn = Mean {
            mean: 1.41,
            error: 0.01,
        };
        assert!(explains(drawn, "1.39"));
    }
}
