//! Compares an output with the exact result, computed in fp64 (integers: exactly).

use super::contributions::{STRETCH, are_hidden, is_one_lost};
use super::data::Source;
use super::number::{decode, decode_integer, largest, smallest, unit_roundoff, wrap_integer};
use super::row::{Row, factor};
use cinch::codec::{self, ErrorLaw};
use cinch::cpu::Isa;
use cinch::types::{CodecSetting, ScaleRule};
use cinch::{Algorithm, CodecSpec, Collective, DType, ReduceOp};
use std::hash::Hasher;
use std::ops::Range;

/// What a comparison found on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Elements that differ (integers, copies, max, min) or lie outside the bound of the
    /// arithmetic and the codec.
    pub wrong: u64,
    /// Largest difference among finite elements.
    pub max_abs_err: f64,
    /// Sum of squared differences.
    pub error_squares: f64,
    /// Sum of squares of the exact result.
    pub exact_squares: f64,
    /// Hash of the output's bytes.
    pub hash: u64,
}

/// One run of elements of the output and where they come from.
#[derive(Debug, PartialEq)]
struct Segment {
    /// First element in the output.
    at: usize,
    /// Rank and first element in that rank's input, for each contribution.
    sources: Vec<(usize, usize)>,
}

/// Which output to compare.
#[derive(Clone, Copy)]
pub struct Check<'a> {
    /// Inputs.
    pub source: &'a Source,
    /// The call.
    pub row: &'a Row,
    /// This rank.
    pub rank: usize,
    /// All ranks.
    pub nranks: usize,
    /// Set of inputs.
    pub set: usize,
    /// Element of each rank's data with which its input begins.
    pub shift: usize,
    /// What ran.
    pub codec: CodecSpec,
    /// What ran.
    pub algorithm: Algorithm,
}

/// What outputs are filled with before the call that is compared: NaN in every floating type, -1 in
/// integers. A number would be right wherever a codec may be off by more than the result.
pub const POISON: u8 = 0xff;

/// Elements of which a codec leaves one other than zero, if its law does not say otherwise. Of fewer,
/// the terms of a sum may cancel by chance.
const TELLING: usize = 64;

/// Elements compared at a time: a multiple of the largest block.
const TILE: usize = 1 << 15;

impl Check<'_> {
    /// Compares this rank's output.
    pub fn run(&self, output: &[u8]) -> Outcome {
        let mut hasher = std::hash::DefaultHasher::new();
        hasher.write(output);
        let mut outcome = Outcome {
            hash: hasher.finish(),
            ..Outcome::default()
        };
        let size = self.row.dtype.size();
        for segment in self.segments() {
            let held = &output[segment.at * size..][..self.row.count * size];
            self.compare(&segment, 0, held, &mut outcome);
        }
        outcome
    }

    /// Compares a piece of this rank's output, which begins at element `start`.
    pub fn piece(&self, start: usize, held: &[u8], outcome: &mut Outcome) {
        let size = self.row.dtype.size();
        let end = start + held.len() / size;
        for segment in self.segments() {
            let from = start.max(segment.at);
            let to = end.min(segment.at + self.row.count);
            if from < to {
                let held = &held[(from - start) * size..(to - start) * size];
                self.compare(&segment, from - segment.at, held, outcome);
            }
        }
    }

    /// Compares elements of a segment from its element `at` on.
    fn compare(&self, segment: &Segment, at: usize, held: &[u8], outcome: &mut Outcome) {
        if !self.codec.is_lossy() && segment.sources.len() == 1 && !self.row.collective.reduces() {
            self.compare_copy(segment, at, held, outcome);
        } else if self.row.dtype.is_float() {
            self.compare_floats(segment, at, held, outcome);
        } else {
            self.compare_integers(segment, at, held, outcome);
        }
    }

    fn segments(&self) -> Vec<Segment> {
        let (me, n, count) = (self.rank, self.nranks, self.row.count);
        let root = self.row.root;
        let one = |sources| vec![Segment { at: 0, sources }];
        let each = |from: &dyn Fn(usize) -> usize| {
            (0..n)
                .map(|r| Segment {
                    at: r * count,
                    sources: vec![(r, from(r))],
                })
                .collect()
        };
        match self.row.collective {
            Collective::AllReduce => one((0..n).map(|r| (r, 0)).collect()),
            Collective::Reduce if me == root => one((0..n).map(|r| (r, 0)).collect()),
            Collective::ReduceScatter => one((0..n).map(|r| (r, me * count)).collect()),
            Collective::AllGather => each(&|_| 0),
            Collective::Gather if me == root => each(&|_| 0),
            Collective::AllToAll => each(&|_| me * count),
            Collective::Broadcast => one(vec![(root, 0)]),
            Collective::Scatter => one(vec![(root, me * count)]),
            Collective::SendRecv => one(vec![((me + n - 1) % n, 0)]),
            Collective::Reduce | Collective::Gather => Vec::new(),
        }
    }

    fn op(&self) -> Option<ReduceOp> {
        Some(self.row.op).filter(|_| self.row.collective.reduces())
    }

    fn inputs(&self, rank: usize, start: usize, bytes: &mut [u8]) {
        self.source
            .stream(self.row.dtype, self.op(), rank, self.set)
            .fill(self.shift + start, bytes);
    }

    fn compare_copy(&self, segment: &Segment, at: usize, held: &[u8], outcome: &mut Outcome) {
        let dtype = self.row.dtype;
        let size = dtype.size();
        let (rank, start) = segment.sources[0];
        let mut exact = vec![0; TILE * size];
        for (tile, held) in held.chunks(TILE * size).enumerate() {
            let exact = &mut exact[..held.len()];
            self.inputs(rank, start + at + tile * TILE, exact);
            if exact == held {
                continue;
            }
            let pairs = exact.chunks_exact(size).zip(held.chunks_exact(size));
            for (exact, held) in pairs.filter(|(exact, held)| exact != held) {
                outcome.wrong += 1;
                if dtype.is_float() {
                    outcome.note(decode(dtype, exact), decode(dtype, held));
                } else {
                    let (exact, held) = (decode_integer(dtype, exact), decode_integer(dtype, held));
                    outcome.note(exact as f64, held as f64);
                }
            }
        }
    }

    fn compare_integers(&self, segment: &Segment, at: usize, held: &[u8], outcome: &mut Outcome) {
        let dtype = self.row.dtype;
        let size = dtype.size();
        let mut input = vec![0; TILE * size];
        for (tile, held) in held.chunks(TILE * size).enumerate() {
            let mut exact: Vec<i128> = Vec::new();
            for &(rank, start) in &segment.sources {
                let input = &mut input[..held.len()];
                self.inputs(rank, start + at + tile * TILE, input);
                let values = input.chunks_exact(size).map(|x| decode_integer(dtype, x));
                let values = values.map(|x| match self.row.op {
                    ReduceOp::PreMulSum(_) => x * factor(rank).1,
                    _ => x,
                });
                if exact.is_empty() {
                    exact = values.collect();
                    continue;
                }
                for (sum, x) in exact.iter_mut().zip(values) {
                    *sum = match self.row.op {
                        ReduceOp::Prod => wrap_integer(dtype, *sum).wrapping_mul(x),
                        ReduceOp::Max => (*sum).max(x),
                        ReduceOp::Min => (*sum).min(x),
                        _ => *sum + x,
                    };
                }
            }
            for (exact, held) in exact.into_iter().zip(held.chunks_exact(size)) {
                let mut exact = wrap_integer(dtype, exact);
                if matches!(self.row.op, ReduceOp::Avg) {
                    exact /= self.nranks as i128;
                }
                let held = decode_integer(dtype, held);
                outcome.wrong += u64::from(exact != held);
                outcome.note(exact as f64, held as f64);
            }
        }
    }

    fn compare_floats(&self, segment: &Segment, at: usize, held: &[u8], outcome: &mut Outcome) {
        let (dtype, count) = (self.row.dtype, self.row.count);
        let size = dtype.size();
        let end = at + held.len() / size;
        let error = error_law(self.codec);
        let block = match self.codec.scale {
            ScaleRule::Block(block) if self.codec.kind.has_scale() => block as usize,
            _ => 0,
        };
        let whole = if self.codec.kind.has_scale() && block == 0 {
            self.whole_scale(segment)
        } else {
            (0.0, false)
        };
        let hidden = self.hides_contributions(segment.sources.len());
        let together = if hidden { STRETCH } else { TILE };
        let mut scratch = vec![0; (TILE + 2 * block) * size];
        let mut tile = Tile::default();
        for lo in (at..end).step_by(together) {
            let hi = end.min(lo + together);
            let (from, to) = (lo.saturating_sub(block), count.min(hi + block));
            tile.reset(hi - lo, block);
            for (nth, &(rank, start)) in segment.sources.iter().enumerate() {
                let bytes = &mut scratch[..(to - from) * size];
                self.inputs(rank, start + from, bytes);
                let factor = match self.op() {
                    Some(ReduceOp::PreMulSum(_)) => factor(rank).0,
                    _ => 1.0,
                };
                let values: Vec<f64> = bytes
                    .chunks_exact(size)
                    .map(|x| factor * decode(dtype, x))
                    .collect();
                tile.add(nth == 0, self.op(), &values[lo - from..hi - from]);
                if block > 0 {
                    tile.add_scales(&values, block, lo - from);
                }
                if hidden {
                    tile.contributions.push(values);
                }
            }
            let elements = held[(lo - at) * size..(hi - at) * size].chunks_exact(size);
            let blank = self.tells(lo..hi)
                && elements.clone().all(|x| decode(dtype, x) == 0.0)
                && tile.is_to_show(&error, segment.sources.len(), dtype);
            let before = outcome.wrong;
            for (i, element) in elements.enumerate() {
                let near = i.checked_div(block);
                let (scale, poisoned) = near.map_or(whole, |k| (tile.scales[k], tile.poisoned[k]));
                self.judge(
                    (tile.exact[i], tile.magnitude[i], scale, poisoned),
                    decode(dtype, element),
                    &error,
                    segment.sources.len(),
                    outcome,
                );
            }
            let held = &held[(lo - at) * size..(hi - at) * size];
            if blank || hidden && self.lacks_one(&tile, held) {
                outcome.wrong = before + (hi - lo) as u64;
            }
        }
    }

    /// Whether an element of a sum may be off by more than what one rank has given. Arrays from files may
    /// be alike on all ranks, and then each of them is like what is missing of the sum by roundings.
    fn hides_contributions(&self, contributions: usize) -> bool {
        let sums = matches!(
            self.op(),
            Some(ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_))
        );
        let share = self.rounding(contributions);
        let hidden = are_hidden(share, self.row.dtype, contributions);
        sums && hidden && !self.codec.is_lossy() && self.source.native().is_none()
    }

    /// Whether what is held is a sum without one of the tile's contributions.
    fn lacks_one(&self, tile: &Tile, held: &[u8]) -> bool {
        let (dtype, divisor) = (self.row.dtype, self.divisor(tile.contributions.len()));
        let elements = held.chunks_exact(dtype.size());
        let differences: Vec<f64> = elements
            .zip(&tile.exact)
            .map(|(element, exact)| divisor * decode(dtype, element) - exact)
            .collect();
        differences.len() >= TELLING && is_one_lost(&differences, &tile.contributions)
    }

    /// What roundings may change at most, as a share of the sum of the contributions' magnitudes. A
    /// partial sum is rounded where it leaves a rank; between, an accumulator holds it.
    fn rounding(&self, contributions: usize) -> f64 {
        let unit = unit_roundoff(self.row.dtype);
        let accumulator = unit.min(unit_roundoff(DType::F32));
        let times = match self.codec.is_lossy() {
            // Of types with so many bits that an exact count is of no use beside the codec's bound.
            true => contributions as f64 + 2.0,
            false => roundings(self.algorithm, contributions),
        };
        (1.0 + unit).powf(times) - 1.0 + (contributions as f64 + 2.0) * accumulator
    }

    /// What a sum is divided by.
    fn divisor(&self, contributions: usize) -> f64 {
        match self.op() {
            Some(ReduceOp::Avg) => contributions as f64,
            _ => 1.0,
        }
    }

    /// Whether nothing but zeros in these elements of a segment cannot be what roundings or a lossy codec
    /// made of other numbers. The bound of a single element does not tell, where it exceeds the result. Scales
    /// are of a block, of which the largest element stays: one has to be there as a whole.
    fn tells(&self, elements: Range<usize>) -> bool {
        let whole = elements.len() == self.row.count;
        let blocks = match self.codec.scale {
            _ if !self.codec.kind.has_scale() => true,
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
        outcome: &mut Outcome,
    ) {
        let dtype = self.row.dtype;
        let n = contributions as f64;
        let divisor = self.divisor(contributions);
        let exact = exact / divisor;
        let exchange_only = matches!(self.op(), Some(ReduceOp::Max | ReduceOp::Min));
        let (unit, tiny) = (unit_roundoff(dtype), smallest(dtype));
        let rounding = self.rounding(contributions);
        let mut bound = (rounding * magnitude + (n + 2.0) * tiny) / divisor + unit * exact.abs();
        if exchange_only || contributions == 1 && !self.codec.is_lossy() && self.op().is_none() {
            bound = 0.0;
        }
        if self.codec.is_lossy() {
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

    /// Sum over ranks of the largest magnitude of the whole segment, and whether anything in it is
    /// not finite.
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
                    let magnitude = decode(self.row.dtype, x).abs();
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

impl Outcome {
    fn note(&mut self, exact: f64, held: f64) {
        let difference = (held - exact).abs();
        if difference.is_finite() {
            self.max_abs_err = self.max_abs_err.max(difference);
            self.error_squares += difference * difference;
            self.exact_squares += exact * exact;
        }
    }

    /// This and another comparison together.
    pub fn merge(&mut self, other: &Outcome) {
        self.wrong += other.wrong;
        self.max_abs_err = self.max_abs_err.max(other.max_abs_err);
        self.error_squares += other.error_squares;
        self.exact_squares += other.exact_squares;
        self.hash = self.hash.rotate_left(1) ^ other.hash;
    }
}

/// Exact results and error scales of some elements.
#[derive(Default)]
struct Tile {
    exact: Vec<f64>,
    /// Sum of the contributions' magnitudes.
    magnitude: Vec<f64>,
    /// For each block, the sum over contributions of the largest magnitude in it and its
    /// neighbours: an upper bound of the scale of every partial sum, wherever the chunks, and
    /// with them the blocks of the wire, begin.
    scales: Vec<f64>,
    /// Blocks with a non-finite contribution in them or a neighbour.
    poisoned: Vec<bool>,
    /// What each rank has given, where it is looked for in the sum.
    contributions: Vec<Vec<f64>>,
}

impl Tile {
    fn reset(&mut self, elements: usize, block: usize) {
        self.exact.clear();
        self.magnitude.clear();
        self.magnitude.resize(elements, 0.0);
        let blocks = if block > 0 {
            elements.div_ceil(block)
        } else {
            0
        };
        self.scales.clear();
        self.scales.resize(blocks, 0.0);
        self.poisoned.clear();
        self.poisoned.resize(blocks, false);
        self.contributions.clear();
    }

    fn add(&mut self, first: bool, op: Option<ReduceOp>, values: &[f64]) {
        if first {
            self.exact.extend_from_slice(values);
        } else {
            for (sum, &x) in self.exact.iter_mut().zip(values) {
                *sum = match op {
                    Some(ReduceOp::Prod) => *sum * x,
                    Some(ReduceOp::Max) if !(*sum >= x || sum.is_nan()) => x,
                    Some(ReduceOp::Min) if !(*sum <= x || sum.is_nan()) => x,
                    Some(ReduceOp::Max | ReduceOp::Min) => *sum,
                    _ => *sum + x,
                };
            }
        }
        if matches!(op, Some(ReduceOp::Prod)) {
            self.magnitude.clear();
            self.magnitude.extend(self.exact.iter().map(|x| x.abs()));
        } else {
            for (sum, x) in self.magnitude.iter_mut().zip(values) {
                *sum += x.abs();
            }
        }
    }

    /// Whether some element is larger than all that a codec, or one rounding, may drop of its contributions.
    fn is_to_show(&self, error: &ErrorLaw, contributions: usize, dtype: DType) -> bool {
        let floor = contributions as f64 * (error.floor + smallest(dtype));
        let mut elements = self.exact.iter().zip(&self.magnitude);
        elements.any(|(exact, &magnitude)| {
            let share = error.of_value.max(unit_roundoff(dtype));
            magnitude <= error.largest && exact.abs() > share * magnitude + floor
        })
    }

    /// `values` begins `before` elements before the tile, a block at most.
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

/// Bounds of one encode and decode.
fn error_law(spec: CodecSpec) -> ErrorLaw {
    match codec::build(spec, Isa::Scalar) {
        Ok(Some(codec)) => codec.description().errors,
        // Raw; a spec that is none was refused before anything was measured.
        _ => ErrorLaw::EXACT,
    }
}

/// The codec whose bound holds for both levels: the one that loses more, in the longer blocks.
pub fn coarser(codecs: CodecSetting) -> CodecSpec {
    let both = [codecs.intra, codecs.inter];
    let loss = |spec: CodecSpec| {
        let law = error_law(spec);
        law.of_scale + law.of_value + law.floor
    };
    let worse = both[usize::from(loss(codecs.inter) >= loss(codecs.intra))];
    let block = |spec: &CodecSpec| match spec.scale {
        ScaleRule::Block(block) if spec.kind.has_scale() => block,
        _ => 0,
    };
    match (worse.scale, both.iter().map(block).max()) {
        (ScaleRule::Block(own), Some(longest)) if worse.kind.has_scale() => CodecSpec {
            scale: ScaleRule::Block(own.max(longest)),
            ..worse
        },
        _ => worse,
    }
}

/// Encodes on the longest way of a contribution into the result.
fn encodes(collective: Collective, algorithm: Algorithm, contributions: usize) -> f64 {
    let n = contributions as f64;
    match (collective.reduces(), algorithm) {
        (false, _) => 1.0,
        // Of two levels: a ring between hosts has the longest way, one encode inside and one a host.
        (true, Algorithm::Ring | Algorithm::Hierarchical) => n,
        (true, Algorithm::Tree) => 2.0 * n.log2().ceil() + 2.0,
        (true, Algorithm::OneShot | Algorithm::Direct) => 2.0,
    }
}

/// Roundings to the element type on the longest way of a raw contribution into the result, that of a
/// product with a rank's own factor among them.
fn roundings(algorithm: Algorithm, contributions: usize) -> f64 {
    let n = contributions as f64;
    match algorithm {
        Algorithm::OneShot | Algorithm::Direct => 2.0,
        // One a level.
        Algorithm::Tree => n.log2().ceil() + 2.0,
        Algorithm::Ring => n + 1.0,
        // Inside, between, and at most as a ring there.
        Algorithm::Hierarchical => n + 2.0,
    }
}

/// Whether every rank must hold the same output.
pub fn same_on_all_ranks(collective: Collective) -> bool {
    matches!(
        collective,
        Collective::AllReduce | Collective::AllGather | Collective::Broadcast
    )
}

#[cfg(test)]
#[path = "verify_tests.rs"]
mod tests;
