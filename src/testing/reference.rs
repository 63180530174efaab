//! The exact result of a collective, computed from all ranks' inputs: floats in f64, integers in 128
//! bits.
//!
//! Results are computed and judged block by block, so that a rank checks 64 MiB without holding any
//! rank's input.

use super::bound::RawBound;
use super::compare::Comparison;
use super::numbers;
use crate::error::{Error, Result};
use crate::types::{Collective, DType, Extent, ReduceOp, Scalar};

/// Elements worked on at a time.
const BLOCK: usize = 4096;

/// All ranks' inputs.
pub trait Inputs {
    /// Returns the bytes of the input of `rank`.
    fn bytes(&self, rank: usize) -> usize;

    /// Copies the input of `rank` from byte `at`, the start of an element, on.
    fn read(&self, rank: usize, at: usize, bytes: &mut [u8]);
}

impl<T: AsRef<[Vec<u8>]>> Inputs for T {
    fn bytes(&self, rank: usize) -> usize {
        self.as_ref().get(rank).map_or(0, Vec::len)
    }

    fn read(&self, rank: usize, at: usize, bytes: &mut [u8]) {
        bytes.copy_from_slice(&self.as_ref()[rank][at..at + bytes.len()]);
    }
}

/// A collective over all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    /// Collective.
    pub collective: Collective,
    /// Element type.
    pub dtype: DType,
    /// Reduction.
    pub op: ReduceOp,
    /// Each rank's own factor of a pre-multiplied sum; empty = that of `op` on every rank.
    pub factors: Vec<Scalar>,
    /// Ranks.
    pub nranks: usize,
    /// The call's count: see `Collective`.
    pub count: usize,
    /// Root; of a send/recv, the sender.
    pub root: usize,
    /// Receiver of a send/recv.
    pub peer: usize,
}

/// The result of one rank, or a part of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Expected {
    /// Values, before they are rounded to elements; 64-bit integers to the nearest f64.
    pub values: Vec<f64>,
    /// For computed floats the magnitude that an error is relative to: see [`RawBound::of`]. Else 0.
    pub magnitudes: Vec<f64>,
    /// The values as elements. Exact for integers and where nothing is computed; of a sum,
    /// product or average of floats rounded once, which a real reduction need not reach.
    pub bytes: Vec<u8>,
}

/// A run of `count` elements of a result, and its contributions.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// Rank and first input element of each contribution.
    pub sources: Vec<(usize, usize)>,
    /// Index, within the segment, of the element that was asked for.
    pub at: usize,
}

impl Problem {
    /// Makes a problem with op sum, root 0, and 0 sending to the last rank.
    pub fn new(collective: Collective, dtype: DType, nranks: usize, count: usize) -> Problem {
        Problem {
            collective,
            dtype,
            op: ReduceOp::Sum,
            factors: Vec::new(),
            nranks,
            count,
            root: 0,
            peer: nranks.saturating_sub(1),
        }
    }

    /// Returns the elements of a rank's input.
    pub fn input_elements(&self, rank: usize) -> usize {
        self.elements(self.collective.input_extent(rank == self.root))
    }

    /// Returns the elements of a rank's output.
    pub fn output_elements(&self, rank: usize) -> usize {
        if self.collective.is_message() && rank != self.peer {
            return 0;
        }
        self.elements(self.collective.output_extent(rank == self.root))
    }

    fn elements(&self, extent: Extent) -> usize {
        extent
            .elements(self.count, self.nranks)
            .unwrap_or(usize::MAX)
    }

    /// Returns the whole result of `rank`, for small problems.
    ///
    /// # Errors
    /// Invalid argument if the problem is impossible or an input too short.
    pub fn expected(&self, inputs: &dyn Inputs, rank: usize) -> Result<Expected> {
        self.validate(inputs, rank)?;
        Ok(self.part(inputs, rank, 0, self.output_elements(rank)))
    }

    /// Returns `n` elements of the result of `rank` from element `first` on.
    pub fn part(&self, inputs: &dyn Inputs, rank: usize, first: usize, n: usize) -> Expected {
        let mut part = Expected::default();
        let mut work = BlockScratch::new(self);
        for first_of_block in (first..first + n).step_by(BLOCK) {
            let n = BLOCK.min(first + n - first_of_block);
            work.run(self, inputs, rank, first_of_block, n);
            part.values.extend_from_slice(&work.values[..n]);
            part.magnitudes.extend_from_slice(&work.magnitudes[..n]);
            part.bytes
                .extend_from_slice(&work.bytes[..n * self.dtype.size()]);
        }
        part
    }

    /// Returns the segment that holds an element of the result of `rank`.
    pub fn segment(&self, rank: usize, element: usize) -> Segment {
        let own = rank * self.count;
        let (block, at) = (element / self.count, element % self.count);
        let from = if self.collective.splits_input() {
            own
        } else {
            0
        };
        let ranks = self
            .collective
            .contributors(rank, block, self.root, self.nranks);
        let sources = ranks.map(|rank| (rank, from)).collect();
        Segment { sources, at }
    }

    /// Judges the `output` of `rank`.
    ///
    /// Moved data and integers must have the exact bytes; sums, products and averages
    /// of floats lie within [`RawBound`]. Where the exact result is not finite, so is the output;
    /// where a partial result may overflow, it may be. `extra` is what a lossy codec may add to
    /// any element's error, 0 for none, infinity to count without judging.
    ///
    /// # Errors
    /// Invalid argument if the problem is impossible, an input too short, or the output not of
    /// the right length.
    pub fn check(
        &self,
        inputs: &dyn Inputs,
        rank: usize,
        output: &[u8],
        extra: f64,
    ) -> Result<Comparison> {
        self.validate(inputs, rank)?;
        let size = self.dtype.size();
        if output.len() != self.output_elements(rank) * size {
            return Err(Error::invalid_argument(format!(
                "the output of rank {rank} has {} bytes, but {} of {} {} gives it {}",
                output.len(),
                self.collective,
                self.count,
                self.dtype,
                self.output_elements(rank) * size
            )));
        }
        let mut whole = Comparison::default();
        let mut work = BlockScratch::new(self);
        let mut actual = vec![0.0; BLOCK];
        for (first, n) in self.blocks(rank) {
            work.run(self, inputs, rank, first, n);
            let bytes = &output[first * size..(first + n) * size];
            numbers::values(self.dtype, bytes, &mut actual[..n]);
            whole.merge(&self.judge(&work, bytes, &actual[..n], extra));
        }
        Ok(whole)
    }

    fn judge(&self, work: &BlockScratch, bytes: &[u8], actual: &[f64], extra: f64) -> Comparison {
        let mut found = Comparison::default();
        let size = self.dtype.size();
        let computed = self.collective.reduces() && self.dtype.is_float();
        for (i, (&actual, &expected)) in actual.iter().zip(&work.values).enumerate() {
            let right = if extra == f64::INFINITY {
                true
            } else if !computed && extra == 0.0 {
                bytes[i * size..][..size] == work.bytes[i * size..][..size]
            } else if !expected.is_finite() {
                // Which of the two infinities or NaN depends on the order of the sum.
                let same = actual == expected || actual.is_nan() && expected.is_nan();
                let any = extra > 0.0 || work.magnitudes[i].is_infinite();
                same || any && !actual.is_finite()
            } else if actual.is_finite() {
                let bound = work.bound.of(expected, work.magnitudes[i]);
                let bound = if computed { bound + extra } else { extra };
                (actual - expected).abs() <= bound
            } else {
                computed && work.bound.may_overflow(work.magnitudes[i])
            };
            found.add(expected, actual, right);
        }
        found
    }

    fn blocks(&self, rank: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let elements = self.output_elements(rank);
        (0..elements)
            .step_by(BLOCK)
            .map(move |first| (first, BLOCK.min(elements - first)))
    }

    fn factor(&self, rank: usize) -> Option<Scalar> {
        match self.op {
            ReduceOp::PreMulSum(own) => Some(self.factors.get(rank).copied().unwrap_or(own)),
            _ => None,
        }
    }

    fn validate(&self, inputs: &dyn Inputs, rank: usize) -> Result<()> {
        let refuse = |why: String| Err(Error::invalid_argument(format!("reference: {why}")));
        let nranks = self.nranks;
        for (what, rank) in [("rank", rank), ("root", self.root), ("peer", self.peer)] {
            if rank >= nranks {
                return refuse(format!("{what} {rank} of {nranks} ranks"));
            }
        }
        if !self.factors.is_empty() && self.factors.len() != nranks {
            return refuse(format!("{} factors for {nranks} ranks", self.factors.len()));
        }
        for rank in 0..nranks {
            let needed = self.input_elements(rank).saturating_mul(self.dtype.size());
            if inputs.bytes(rank) < needed {
                return refuse(format!(
                    "the input of rank {rank} has {} bytes, not {needed}",
                    inputs.bytes(rank)
                ));
            }
            if let Some(factor) = self.factor(rank)
                && matches!(factor, Scalar::Float(_)) != self.dtype.is_float()
            {
                return refuse(format!(
                    "factor {factor:?} for {} of rank {rank}",
                    self.dtype
                ));
            }
        }
        Ok(())
    }
}

/// A block of a result, in memory that is reused.
struct BlockScratch {
    values: Vec<f64>,
    /// Magnitude that a float's error is relative to: see [`RawBound::of`].
    magnitudes: Vec<f64>,
    bytes: Vec<u8>,
    input: Vec<u8>,
    numbers: Vec<f64>,
    integers: Vec<i128>,
    bound: RawBound,
}

impl BlockScratch {
    fn new(problem: &Problem) -> BlockScratch {
        let bytes = BLOCK * problem.dtype.size();
        BlockScratch {
            values: vec![0.0; BLOCK],
            magnitudes: vec![0.0; BLOCK],
            bytes: vec![0; bytes],
            input: vec![0; bytes],
            numbers: vec![0.0; BLOCK],
            integers: vec![0; BLOCK],
            bound: RawBound::new(problem.dtype, problem.op, problem.nranks),
        }
    }

    /// Computes `n` elements of the result of `rank` from element `first` on.
    fn run(&mut self, problem: &Problem, inputs: &dyn Inputs, rank: usize, first: usize, n: usize) {
        let bytes = n * problem.dtype.size();
        if !problem.collective.reduces() {
            gather(problem, inputs, rank, first, &mut self.bytes[..bytes]);
            numbers::values(problem.dtype, &self.bytes[..bytes], &mut self.values[..n]);
            self.magnitudes[..n].fill(0.0);
            return;
        }
        let own = rank * problem.count;
        let splits = problem.collective.splits_input();
        let first = first + if splits { own } else { 0 };
        // A reduction contributes the same ranks to each block.
        let ranks = problem
            .collective
            .contributors(rank, 0, problem.root, problem.nranks);
        for from in ranks {
            let at = first * problem.dtype.size();
            inputs.read(from, at, &mut self.input[..bytes]);
            if problem.dtype.is_float() {
                self.add_floats(problem, from, n);
            } else {
                self.add_integers(problem, from, n);
            }
        }
        if problem.dtype.is_float() {
            if problem.op == ReduceOp::Avg {
                let nranks = problem.nranks as f64;
                self.values[..n].iter_mut().for_each(|x| *x /= nranks);
            }
            numbers::round(problem.dtype, &self.values[..n], &mut self.bytes[..bytes]);
        } else {
            self.finish_integers(problem, n);
        }
    }

    fn add_floats(&mut self, problem: &Problem, from: usize, n: usize) {
        let numbers = &mut self.numbers[..n];
        numbers::values(problem.dtype, &self.input, numbers);
        if let Some(Scalar::Float(factor)) = problem.factor(from) {
            // The factor is defined in the accumulator type.
            let narrow = problem.dtype.accumulator() == DType::F32;
            let factor = if narrow {
                f64::from(factor as f32)
            } else {
                factor
            };
            numbers.iter_mut().for_each(|x| *x *= factor);
        }
        let (values, magnitudes) = (&mut self.values[..n], &mut self.magnitudes[..n]);
        if from == 0 {
            // The neutral elements; of a maximum and minimum there is none, but any first will do.
            match problem.op {
                ReduceOp::Prod => (values.fill(1.0), magnitudes.fill(1.0)),
                ReduceOp::Max | ReduceOp::Min => {
                    (values.copy_from_slice(numbers), magnitudes.fill(0.0))
                }
                _ => (values.fill(0.0), magnitudes.fill(0.0)),
            };
        }
        for ((value, magnitude), &x) in values.iter_mut().zip(magnitudes).zip(&*numbers) {
            match problem.op {
                ReduceOp::Prod => {
                    *value *= x;
                    *magnitude *= x.abs().max(1.0);
                }
                ReduceOp::Max if x > *value || x.is_nan() => *value = x,
                ReduceOp::Min if x < *value || x.is_nan() => *value = x,
                ReduceOp::Max | ReduceOp::Min => {}
                _ => {
                    *value += x;
                    *magnitude += x.abs();
                }
            }
        }
    }

    fn add_integers(&mut self, problem: &Problem, from: usize, n: usize) {
        let dtype = problem.dtype;
        let factor = match problem.factor(from) {
            Some(Scalar::Int(factor)) => factor,
            _ => 1,
        };
        let elements = self.input.chunks_exact(dtype.size());
        for (sum, element) in self.integers[..n].iter_mut().zip(elements) {
            let x = numbers::integer(dtype, element).wrapping_mul(factor);
            *sum = match problem.op {
                _ if from == 0 => x,
                ReduceOp::Prod => sum.wrapping_mul(x),
                ReduceOp::Max => x.max(*sum),
                ReduceOp::Min => x.min(*sum),
                _ => sum.wrapping_add(x),
            };
        }
    }

    fn finish_integers(&mut self, problem: &Problem, n: usize) {
        let size = problem.dtype.size();
        let elements = self.bytes.chunks_exact_mut(size);
        for ((sum, element), value) in self.integers[..n]
            .iter()
            .zip(elements)
            .zip(&mut self.values)
        {
            let mut x = numbers::wrap(problem.dtype, *sum);
            if problem.op == ReduceOp::Avg {
                x /= problem.nranks as i128;
            }
            element.copy_from_slice(&x.to_le_bytes()[..size]);
            *value = x as f64;
        }
        self.magnitudes[..n].fill(0.0);
    }
}

/// Collects elements of a result that is only moved, from element `first` on.
fn gather(problem: &Problem, inputs: &dyn Inputs, rank: usize, first: usize, bytes: &mut [u8]) {
    let size = problem.dtype.size();
    let mut done = 0;
    while done < bytes.len() {
        let Segment { sources, at } = problem.segment(rank, first + done / size);
        let (from, begin) = sources[0];
        let n = bytes.len().min(done + (problem.count - at) * size) - done;
        inputs.read(from, (begin + at) * size, &mut bytes[done..done + n]);
        done += n;
    }
}

#[cfg(test)]
mod tests;
