//! Compares an output with the exact result of [`cinch::testing`], within error bounds of arithmetic and
//! codec.
//!
//! The bounds are computed independently of [`cinch::testing::RawBound`], which the library's tests use. A
//! mistake in either thus does not hide in the other.

use super::contributions::{STRETCH, are_hidden, is_one_lost};
use super::data::InputSource;
use super::row::{Row, call_of};
use cinch::codec::{self, ErrorLaw};
use cinch::cpu::Isa;
use cinch::testing::{
    Expected, Inputs, Problem, Segment, integer, largest, smallest, unit_roundoff, value,
};
use cinch::types::{CodecSetting, Scalar, ScaleRule};
use cinch::{Algorithm, CodecSpec, Collective, DType, ReduceOp};
use std::hash::Hasher;
use std::ops::Range;

/// Result of comparing one rank's output.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CheckOutcome {
    /// Elements that differ (integers, copies, max, min) or lie outside the bound of the
    /// arithmetic and the codec.
    pub wrong: u64,
    /// Largest difference among finite elements.
    pub max_abs_err: f64,
    /// Sum of the squared differences.
    pub error_squares: f64,
    /// Sum of the squared exact results.
    pub exact_squares: f64,
    /// Hash of the output's bytes.
    pub hash: u64,
}

/// An output to compare, with the call that produced it.
#[derive(Clone, Copy)]
pub struct Check<'a> {
    /// Inputs of all ranks.
    pub source: &'a InputSource,
    /// The row whose call was made.
    pub row: &'a Row,
    /// Rank whose output is compared.
    pub rank: usize,
    /// Number of ranks.
    pub nranks: usize,
    /// Number of the buffer set.
    pub set: usize,
    /// Index in each rank's data at which the call's input begins.
    pub shift: usize,
    /// Codecs that the call used.
    pub codec: BothCodecs,
    /// Algorithm that the call used.
    pub algorithm: Algorithm,
}

/// Byte with which outputs are filled before the compared call. It gives -1 in integers, and NaN or
/// the largest negative number in floating types. An ordinary number could pass as right where a
/// codec's error bound exceeds the result.
pub const POISON: u8 = 0xff;

/// Smallest number of elements in which a codec must leave at least one element other than zero,
/// unless its error bound allows more loss. In fewer elements the terms of a sum may cancel by
/// chance.
const TELLING: usize = 64;

/// Number of elements compared at a time, a multiple of the largest codec block.
const TILE: usize = 1 << 15;

impl Check<'_> {
    /// Compares this rank's output.
    pub fn run(&self, output: &[u8]) -> CheckOutcome {
        let mut hasher = std::hash::DefaultHasher::new();
        hasher.write(output);
        let mut outcome = CheckOutcome {
            hash: hasher.finish(),
            ..CheckOutcome::default()
        };
        self.piece(0, output, &mut outcome);
        outcome
    }

    /// Compares a piece of this rank's output, whose elements are `held` and whose first element
    /// has index `start`.
    pub fn piece(&self, start: usize, held: &[u8], outcome: &mut CheckOutcome) {
        let problem = self.problem();
        let (dtype, computes) = (self.row.dtype, self.row.collective.reduces());
        let inexact = dtype.is_float() && (computes || self.codec.spec.is_lossy());
        let (mut at, mut rest) = (start, held);
        while !rest.is_empty() {
            let segment = problem.segment(self.rank, at);
            let run = (self.row.count - segment.at) * dtype.size();
            let (now, later) = rest.split_at(run.min(rest.len()));
            match inexact {
                true => self.compare_floats(&problem, (at, &segment), now, outcome),
                false => self.compare_exactly(&problem, at, now, outcome),
            }
            (at, rest) = (at + now.len() / dtype.size(), later);
        }
    }

    /// Describes the call to the reference implementation.
    fn problem(&self) -> Problem {
        let (row, n) = (self.row, self.nranks);
        let factor = |rank| match call_of(row, rank, n).op {
            ReduceOp::PreMulSum(factor) => Some(factor),
            _ => None,
        };
        Problem {
            op: row.op,
            factors: (0..n).filter_map(factor).collect(),
            root: match row.collective {
                Collective::SendRecv => (self.rank + n - 1) % n,
                _ => row.root,
            },
            peer: self.rank,
            ..Problem::new(row.collective, row.dtype, n, row.count)
        }
    }

    fn inputs(&self, rank: usize, start: usize, bytes: &mut [u8]) {
        self.source
            .stream(self.row.dtype, self.row.reduction(), rank, self.set)
            .fill(self.shift + start, bytes);
    }

    /// Compares integers and unreduced data bit by bit; `at` is the output index of the first
    /// element.
    fn compare_exactly(
        &self,
        problem: &Problem,
        at: usize,
        held: &[u8],
        outcome: &mut CheckOutcome,
    ) {
        let dtype = self.row.dtype;
        let size = dtype.size();
        for (tile, held) in held.chunks(TILE * size).enumerate() {
            let exact = problem.part(self, self.rank, at + tile * TILE, held.len() / size);
            if exact.bytes == held {
                continue;
            }
            let bytes = exact.bytes.chunks_exact(size).zip(held.chunks_exact(size));
            for ((exact, held), &expected) in bytes.zip(&exact.values) {
                outcome.wrong += u64::from(exact != held);
                outcome.note(
                    expected,
                    match dtype.is_float() {
                        true => value(dtype, held),
                        false => integer(dtype, held) as f64,
                    },
                );
            }
        }
    }

    /// Compares floats of one segment of the output with error bounds. `first` is the output index
    /// of the first element.
    fn compare_floats(
        &self,
        problem: &Problem,
        (first, segment): (usize, &Segment),
        held: &[u8],
        outcome: &mut CheckOutcome,
    ) {
        let (dtype, count, at) = (self.row.dtype, self.row.count, segment.at);
        let size = dtype.size();
        let end = at + held.len() / size;
        let error = self.codec.law;
        let block = match self.codec.spec.scale {
            ScaleRule::Block(block) if self.codec.spec.kind.has_scale() => block as usize,
            _ => 0,
        };
        let whole = if self.codec.spec.kind.has_scale() && block == 0 {
            self.whole_scale(segment)
        } else {
            (0.0, false)
        };
        let contributions = segment.sources.len();
        let hidden = self.hides_contributions(contributions);
        let together = if hidden { STRETCH } else { TILE };
        let mut scratch = vec![0; (TILE + 2 * block) * size];
        for lo in (at..end).step_by(together) {
            let hi = end.min(lo + together);
            let (from, to) = (lo.saturating_sub(block), count.min(hi + block));
            let exact = problem.part(self, self.rank, first + lo - at, hi - lo);
            let mut tile = ExactTile::new(exact, self.row, block);
            for &(rank, start) in segment.sources.iter().filter(|_| block > 0 || hidden) {
                let bytes = &mut scratch[..(to - from) * size];
                self.inputs(rank, start + from, bytes);
                let factor = match problem.factors.get(rank) {
                    Some(&Scalar::Float(factor)) => factor,
                    _ => 1.0,
                };
                let values: Vec<f64> = bytes
                    .chunks_exact(size)
                    .map(|x| factor * value(dtype, x))
                    .collect();
                if block > 0 {
                    tile.add_scales(&values, block, lo - from);
                }
                if hidden {
                    tile.contributions.push(values);
                }
            }
            let held = &held[(lo - at) * size..(hi - at) * size];
            let held: Vec<f64> = held.chunks_exact(size).map(|x| value(dtype, x)).collect();
            let blank = self.can_judge_zeros(lo..hi)
                && held.iter().all(|x| *x == 0.0)
                && tile.is_to_show(&error, self.divisor(contributions), contributions, dtype);
            let before = outcome.wrong;
            for (i, &held) in held.iter().enumerate() {
                let near = i.checked_div(block);
                let (scale, poisoned) = near.map_or(whole, |k| (tile.scales[k], tile.poisoned[k]));
                self.judge(
                    (tile.exact[i], tile.magnitude[i], scale, poisoned),
                    held,
                    &error,
                    contributions,
                    outcome,
                );
            }
            if blank || hidden && self.lacks_one(&tile, &held) {
                outcome.wrong = before + (hi - lo) as u64;
            }
        }
    }

    /// Returns whether rounding errors may exceed one rank's contribution to a sum. Returns false
    /// for data files, which may be equal on all ranks: rounding errors would then correlate with
    /// them.
    fn hides_contributions(&self, contributions: usize) -> bool {
        let sums = matches!(
            self.row.reduction(),
            Some(ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_))
        );
        let share = self.rounding(contributions);
        let hidden = are_hidden(share, self.row.dtype, contributions);
        sums && hidden && !self.codec.spec.is_lossy() && self.source.native().is_none()
    }

    /// Returns whether the output equals the sum without one of the tile's contributions.
    fn lacks_one(&self, tile: &ExactTile, held: &[f64]) -> bool {
        let divisor = self.divisor(tile.contributions.len());
        let both = held.iter().zip(&tile.exact);
        let differences: Vec<f64> = both.map(|(held, exact)| divisor * (held - exact)).collect();
        differences.len() >= TELLING && is_one_lost(&differences, &tile.contributions)
    }

    /// Returns the largest rounding error, as a share of the sum of the contributions' magnitudes.
    /// A partial sum is rounded to the element type when it leaves a rank; until then an
    /// accumulator holds it.
    fn rounding(&self, contributions: usize) -> f64 {
        let unit = unit_roundoff(self.row.dtype);
        let accumulator = unit.min(unit_roundoff(DType::F32));
        let times = match self.codec.spec.is_lossy() {
            // Types with codecs have so many bits that rounding is negligible beside the codec's
            // bound, so a rough count of roundings suffices.
            true => contributions as f64 + 2.0,
            false => roundings(self.algorithm, contributions),
        };
        (1.0 + unit).powf(times) - 1.0 + (contributions as f64 + 2.0) * accumulator
    }

    /// Returns the number by which the sum is divided: the contributions for an average, otherwise
    /// 1.
    fn divisor(&self, contributions: usize) -> f64 {
        match self.row.reduction() {
            Some(ReduceOp::Avg) => contributions as f64,
            _ => 1.0,
        }
    }

    /// Returns whether a range in which every element is zero would prove an error. A single zero proves
    /// nothing if the error bound exceeds the exact result. The largest element of a codec block survives
    /// encoding, so the range must contain a whole block.
    fn can_judge_zeros(&self, elements: Range<usize>) -> bool {
        let whole = elements.len() == self.row.count;
        let blocks = match self.codec.spec.scale {
            _ if !self.codec.spec.kind.has_scale() => true,
            ScaleRule::Block(block) => elements.len() >= 2 * block as usize,
            _ => false,
        };
        elements.len() >= TELLING && (whole || blocks)
    }

    fn judge(
        &self,
        (exact, magnitude, scale, poisoned): (f64, f64, f64, bool),
        held: f64,
        error: &ErrorLaw,
        contributions: usize,
        outcome: &mut CheckOutcome,
    ) {
        let dtype = self.row.dtype;
        let n = contributions as f64;
        let divisor = self.divisor(contributions);
        let exchange_only = matches!(self.row.reduction(), Some(ReduceOp::Max | ReduceOp::Min));
        let (unit, tiny) = (unit_roundoff(dtype), smallest(dtype));
        let rounding = self.rounding(contributions);
        let mut bound = (rounding * magnitude + (n + 2.0) * tiny) / divisor + unit * exact.abs();
        if exchange_only
            || contributions == 1 && !self.codec.spec.is_lossy() && self.row.reduction().is_none()
        {
            bound = 0.0;
        }
        if self.codec.spec.is_lossy() {
            let steps = encodes(self.row.collective, self.algorithm, contributions);
            let each = error.of_scale * scale + error.of_value * magnitude + error.floor;
            let growth = 1.0 + steps * (error.of_scale + error.of_value);
            let saturated = (magnitude - error.largest).max(0.0);
            bound += (steps * each * growth + saturated) / divisor;
        }
        let overflows = exact.abs() + bound > largest(dtype) * (1.0 - unit);
        let right = if !exact.is_finite() || !held.is_finite() {
            !held.is_finite() && (!exact.is_finite() || poisoned || overflows)
        } else {
            (held - exact).abs() <= bound || overflows
        };
        outcome.wrong += u64::from(!right);
        outcome.note(exact, held);
    }

    /// Returns the sum over all ranks of the rank's largest magnitude in the segment, and whether
    /// any element is not finite.
    fn whole_scale(&self, segment: &Segment) -> (f64, bool) {
        let size = self.row.dtype.size();
        let mut scratch = vec![0; TILE * size];
        let (mut sum, mut poisoned) = (0.0, false);
        for &(rank, start) in &segment.sources {
            let mut top = 0f64;
            for lo in (0..self.row.count).step_by(TILE) {
                let bytes = &mut scratch[..TILE.min(self.row.count - lo) * size];
                self.inputs(rank, start + lo, bytes);
                for x in bytes.chunks_exact(size) {
                    let magnitude = value(self.row.dtype, x).abs();
                    match magnitude.is_finite() {
                        true => top = top.max(magnitude),
                        false => poisoned = true,
                    }
                }
            }
            sum += top;
        }
        (sum, poisoned)
    }
}

impl Inputs for Check<'_> {
    fn bytes(&self, _: usize) -> usize {
        usize::MAX
    }

    fn read(&self, rank: usize, at: usize, bytes: &mut [u8]) {
        self.inputs(rank, at / self.row.dtype.size(), bytes);
    }
}

impl CheckOutcome {
    fn note(&mut self, exact: f64, held: f64) {
        let difference = (held - exact).abs();
        if difference.is_finite() {
            self.max_abs_err = self.max_abs_err.max(difference);
            self.error_squares += difference * difference;
            self.exact_squares += exact * exact;
        }
    }

    /// Merges the result of another comparison into this one.
    pub fn merge(&mut self, other: &CheckOutcome) {
        self.wrong += other.wrong;
        self.max_abs_err = self.max_abs_err.max(other.max_abs_err);
        self.error_squares += other.error_squares;
        self.exact_squares += other.exact_squares;
        self.hash = self.hash.rotate_left(1) ^ other.hash;
    }
}

/// Exact results and error scales of a range of elements.
struct ExactTile {
    exact: Vec<f64>,
    /// Sum of the contributions' magnitudes.
    magnitude: Vec<f64>,
    /// For each block, the sum over contributions of the largest magnitude in the block and its neighbours.
    /// The sum bounds the scale of every partial sum, wherever chunks and codec blocks begin on the wire.
    scales: Vec<f64>,
    /// Whether each block, or a neighbour of it, has a contribution that is not finite.
    poisoned: Vec<bool>,
    /// Each rank's contribution; filled only when the sum is searched for lost contributions.
    contributions: Vec<Vec<f64>>,
}

impl ExactTile {
    fn new(part: Expected, row: &Row, block: usize) -> ExactTile {
        let blocks = part
            .values
            .len()
            .checked_div(block)
            .map_or(0, |_| part.values.len().div_ceil(block));
        let magnitude = match row.reduction() {
            // The magnitudes of the reference belong to a product's factors. The error is relative
            // to the product itself, so the magnitude of the result is used.
            None | Some(ReduceOp::Prod) => part.values.iter().map(|x| x.abs()).collect(),
            _ => part.magnitudes,
        };
        ExactTile {
            exact: part.values,
            magnitude,
            scales: vec![0.0; blocks],
            poisoned: vec![false; blocks],
            contributions: Vec::new(),
        }
    }

    /// Returns whether the exact result of some element exceeds the loss that codec and rounding may cause.
    /// Such an element cannot become zero.
    fn is_to_show(
        &self,
        error: &ErrorLaw,
        divisor: f64,
        contributions: usize,
        dtype: DType,
    ) -> bool {
        let floor = contributions as f64 * (error.floor + smallest(dtype));
        let mut elements = self.exact.iter().zip(&self.magnitude);
        elements.any(|(exact, &magnitude)| {
            let share = error.of_value.max(unit_roundoff(dtype));
            magnitude <= error.largest && divisor * exact.abs() > share * magnitude + floor
        })
    }

    /// Adds a contribution's block scales. `values` begins `before` elements (at most one block)
    /// before the tile.
    fn add_scales(&mut self, values: &[f64], block: usize, before: usize) {
        let (ahead, rest) = values.split_at(before);
        let before = usize::from(before > 0);
        let tops: Vec<(f64, bool)> = ahead
            .chunks(block)
            .chain(rest.chunks(block))
            .map(|block| {
                let finite = block.iter().filter(|x| x.is_finite());
                let top = finite.fold(0f64, |top, x| top.max(x.abs()));
                (top, block.iter().any(|x| !x.is_finite()))
            })
            .collect();
        for k in 0..self.scales.len() {
            let from = (k + before).saturating_sub(1);
            let near = &tops[from..tops.len().min(k + before + 2)];
            self.scales[k] += near.iter().fold(0f64, |top, x| top.max(x.0));
            self.poisoned[k] |= near.iter().any(|x| x.1);
        }
    }
}

/// Returns the error bound of one encode and decode with a codec.
fn error_law(spec: CodecSpec) -> ErrorLaw {
    match codec::build(spec, Isa::Scalar) {
        Ok(Some(codec)) => codec.description().errors,
        // Raw has no codec; impossible codec specifications were refused before the measurement.
        _ => ErrorLaw::EXACT,
    }
}

/// The codecs of a call's messages inside and between groups, as one for the comparison.
#[derive(Clone, Copy)]
pub struct BothCodecs {
    /// The codec with the longer blocks.
    spec: CodecSpec,
    /// Each part of the bound is that of the codec that loses more.
    law: ErrorLaw,
}

impl From<CodecSetting> for BothCodecs {
    fn from(codecs: CodecSetting) -> BothCodecs {
        let block = |spec: CodecSpec| match spec.scale {
            _ if !spec.kind.has_scale() => 0,
            ScaleRule::Block(block) => block,
            _ => u32::MAX,
        };
        let order = |spec: CodecSpec| (block(spec), spec.is_lossy());
        let [intra, inter] = [codecs.intra, codecs.inter].map(error_law);
        BothCodecs {
            spec: match order(codecs.inter) >= order(codecs.intra) {
                true => codecs.inter,
                false => codecs.intra,
            },
            law: ErrorLaw {
                of_scale: intra.of_scale.max(inter.of_scale),
                of_value: intra.of_value.max(inter.of_value),
                floor: intra.floor.max(inter.floor),
                largest: intra.largest.min(inter.largest),
            },
        }
    }
}

/// Returns the number of encodes on a contribution's longest path into the result.
fn encodes(collective: Collective, algorithm: Algorithm, contributions: usize) -> f64 {
    let n = contributions as f64;
    match (collective.reduces(), algorithm) {
        (false, _) => 1.0,
        (true, Algorithm::Tree) => 2.0 * n.log2().ceil() + 2.0,
        (true, Algorithm::OneShot | Algorithm::Direct | Algorithm::FlatTree) => 2.0,
        // A chain through all ranks, such as a ring, has the longest path. A hierarchical schedule encodes
        // once inside a host and then once for each host.
        (true, _) => n,
    }
}

/// Returns the number of roundings to the element type on an uncompressed contribution's longest
/// path into the result. It includes the multiplication by a rank's factor.
fn roundings(algorithm: Algorithm, contributions: usize) -> f64 {
    let n = contributions as f64;
    match algorithm {
        Algorithm::OneShot | Algorithm::Direct | Algorithm::FlatTree => 2.0,
        // Each level of the tree rounds once.
        Algorithm::Tree => n.log2().ceil() + 2.0,
        Algorithm::Ring => n + 1.0,
        // A hierarchical schedule rounds inside a host, then between hosts as often as a ring at most.
        // No other schedule rounds more often than a ring.
        _ => n + 2.0,
    }
}

/// Returns whether every rank must hold the same output after this collective.
pub fn same_on_all_ranks(collective: Collective) -> bool {
    collective.replicates_output()
}

#[cfg(test)]
#[path = "verify_tests.rs"]
mod tests;
