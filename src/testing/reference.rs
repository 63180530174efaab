//! Computes the exact result of a collective from all ranks' inputs: floats in f64, integers in 128 bits.
//!
//! The computation goes block by block, so that a rank can check a result of 64 MiB without storing any
//! input.

use super::bound::RawBound;
use super::compare::Comparison;
use super::numbers;
use crate::error::{Error, Result};
use crate::types::{Collective, DType, Extent, ReduceOp, Scalar};

/// Number of elements that are computed at a time.
const BLOCK: usize = 4096;

/// The inputs of all ranks.
pub trait Inputs {
    /// Returns the size of the input of `rank` in bytes.
    fn bytes(&self, rank: usize) -> usize;

    /// Copies the input of `rank`, from byte `at` on, into `bytes`; an element begins at `at`.
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

/// A collective to compute.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    /// Collective whose result is computed.
    pub collective: Collective,
    /// Type of the elements in inputs and outputs.
    pub dtype: DType,
    /// Reduction of the contributions; ignored by collectives that reduce nothing.
    pub op: ReduceOp,
    /// Factor of each rank in a pre-multiplied sum; if empty, every rank has the factor of `op`.
    pub factors: Vec<Scalar>,
    /// Number of ranks.
    pub nranks: usize,
    /// Count of the call; [`Collective`] defines its meaning.
    pub count: usize,
    /// Root; for a send/recv, the sender.
    pub root: usize,
    /// Receiver of a send/recv.
    pub peer: usize,
}

/// The result of one rank, or a part of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Expected {
    /// Values before rounding to elements; 64-bit integers become the nearest f64.
    pub values: Vec<f64>,
    /// Magnitudes to which errors of computed floats are relative, see [`RawBound::of`]; 0 for other results.
    pub magnitudes: Vec<f64>,
    /// Values as elements: exact for integers and copies; computed floats are rounded once, so a
    /// real reduction may differ.
    pub bytes: Vec<u8>,
}

/// A run of `count` elements of a result, with its contributions.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// Rank and first input element of each contribution.
    pub sources: Vec<(usize, usize)>,
    /// Index of the requested element within the segment.
    pub at: usize,
}

impl Problem {
    /// Creates a problem with sum, root 0, and for a send/recv rank 0 sending to the last rank.
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

    /// Compares the `output` of `rank` with the exact result.
    ///
    /// Copies and integers must be equal bytes; sums, products and averages of floats must lie
    /// within [`RawBound`]. Where the exact result is not finite, the output must not be finite;
    /// where a partial result may overflow, it need not be. `extra` is the additional error that a
    /// lossy codec may cause: 0 for none, infinity to count errors without judging them.
    ///
    /// # Errors
    /// Invalid argument if the problem is impossible, an input is too short, or the output has
    /// another length.
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
                // The order of the additions decides between infinity and NaN, so any non-finite
                // output is right.
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

/// Scratch memory for one block of a result.
struct BlockScratch {
    values: Vec<f64>,
    /// Magnitude to which an error is relative: see [`RawBound::of`].
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
        // All blocks of a reduction have the same contributing ranks.
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
            // The factor is defined in the accumulator type. If that type is f32, the f64 product
            // is rounded to f32.
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
            // A sum or product starts at its neutral element; maximum and minimum start at the
            // first contribution.
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

/// Copies elements of a result without arithmetic, from element `first` on.
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
