//! Fuses small all_reduces of a group into one call. Short messages cost the same whatever their
//! size, so fused tensors pay that cost once.
//!
//! All ranks make the same choice. The choice depends on collective, type, operator, codec, algorithm, tuning
//! and count, in the order of the calls. Pre-multiplied sums are not fused, because each rank has its own factor.
//! Calls that keep scales or residuals for their tensor are not fused either.
//!
//! A fused call reads the inputs of its members when it starts, and writes their outputs when it ends. So
//! members must not depend on each other. Members may depend on calls before the fused call, and calls after
//! it may depend on members.
//!
//! Each tensor begins at a multiple of the granules of the codecs inside and between hosts. Copies of the
//! last element fill the space before the next tensor. So no block has elements of two tensors, and no block
//! gets another minimum or maximum. If a codec depends on more than minimum and maximum, only tensors of
//! whole blocks are fused.
//!
//! The sum is formed as for any call of the total length. Exact arithmetic gives the bits of
//! separate calls. Other arithmetic may differ in the last bits. The owner of an element, which
//! adds its own part first, may be another rank, and a codec may draw other random numbers.

use super::{Call, Communicator, Report};
use crate::codec::{self, EncodeStats};
use crate::cpu::Isa;
use crate::error::{Error, Result};
use crate::mem::UserBuffers;
use crate::plan;
use crate::reduce::{Reducer, Tile};
use crate::types::{CodecSetting, Collective, DType, Fused, ReduceOp, ResolvedCall};
use std::ops::Range;

/// Largest number of bytes of a fused call. Larger calls gain nothing, because their bytes cost
/// more than their messages.
const MAX_FUSED_BYTES: usize = 1 << 20;

/// Largest number of buffers of fused calls that a communicator keeps for its next group.
const MAX_SPARE_BUFFERS: usize = 2;

/// Small calls that run as one.
#[derive(Debug)]
pub(super) struct FusedCall {
    /// Indices of the members in the group, in order.
    pub members: Vec<usize>,
    /// Elements of each member in the fused call.
    ranges: Vec<Range<usize>>,
    dtype: DType,
    codec: CodecSetting,
    rules: FusionRules,
    /// Statistics of each member's input, as its own encode pass would have taken them; empty until
    /// the inputs are gathered, and where nothing is encoded.
    inputs: Vec<EncodeStats>,
}

/// Rules for fused tensors, which follow from the codecs inside and between hosts.
#[derive(Clone, Copy, Debug)]
struct FusionRules {
    /// Tensors begin at multiples of this many elements.
    granule: usize,
    /// The element count of each tensor must be a multiple of this number.
    whole: usize,
    /// Whether a codec has blocks, so that the padding of the last block matters.
    has_blocks: bool,
    /// Largest magnitude that saturates in no codec; `None` where nothing is encoded.
    largest: Option<f64>,
}

impl FusionRules {
    fn of(dtype: DType, codec: CodecSetting) -> Result<FusionRules> {
        let mut rules = FusionRules {
            granule: plan::granule(dtype, None),
            whole: 1,
            has_blocks: false,
            largest: None,
        };
        // Planning selects the algorithm by the padded length, so the codec inside hosts or between hosts may
        // run.
        for spec in [codec.inter, codec.intra] {
            let Some(codec) = codec::build(spec, Isa::Scalar)? else {
                continue;
            };
            let described = codec.description();
            rules.granule = rules.granule.max(plan::granule(dtype, Some(&*codec)));
            if !described.fits_extremes {
                rules.whole = rules.whole.max(codec.granule());
            }
            rules.has_blocks |= described.block_numbers > 0;
            let largest = rules.largest.unwrap_or(f64::INFINITY);
            rules.largest = Some(largest.min(described.errors.largest));
        }
        Ok(rules)
    }
}

/// Returns whether two calls may be fused.
fn can_fuse(a: (&Call, CodecSetting), b: (&Call, CodecSetting)) -> bool {
    let key = |(call, codec): (&Call, CodecSetting)| {
        (call.dtype, call.op, codec, call.algorithm, call.tuning)
    };
    key(a) == key(b)
}

/// Returns whether a call is of a kind that can be fused and has at most `bytes` bytes.
fn is_small(call: &Call, bytes: usize) -> bool {
    call.collective == Collective::AllReduce
        && !matches!(call.op, ReduceOp::PreMulSum(_))
        && (call.tensor, call.feedback) == (None, None)
        && call.count > 0
        && call.count <= bytes / call.dtype.size()
}

/// Finds the calls of `comm` that are fused. `calls` are all its calls of a group in order, each with
/// its index in the group.
///
/// # Errors
/// Invalid argument if a codec has impossible parameters.
pub(super) fn fused_calls(
    comm: &Communicator,
    calls: &[(usize, &Call, CodecSetting)],
) -> Result<Vec<FusedCall>> {
    let bytes = comm.config.fuse_bytes;
    let mut calls_fused: Vec<FusedCall> = Vec::new();
    // The previous call, if the last fused call may take the next call as well.
    let mut open: Option<(&Call, CodecSetting)> = None;
    for &(index, call, codec) in calls {
        if bytes == 0 || !is_small(call, bytes) {
            open = None;
            continue;
        }
        let follows = open.is_some_and(|before| can_fuse(before, (call, codec)));
        if !(follows
            && calls_fused
                .last_mut()
                .is_some_and(|last| last.try_add(index, call)))
        {
            let mut fused = FusedCall::new(call.dtype, codec)?;
            if !fused.try_add(index, call) {
                open = None;
                continue;
            }
            calls_fused.push(fused);
        }
        open = Some((call, codec));
    }
    calls_fused.retain(|fused| fused.members.len() > 1);
    Ok(calls_fused)
}

impl FusedCall {
    fn new(dtype: DType, codec: CodecSetting) -> Result<FusedCall> {
        Ok(FusedCall {
            members: Vec::new(),
            ranges: Vec::new(),
            dtype,
            codec,
            rules: FusionRules::of(dtype, codec)?,
            inputs: Vec::new(),
        })
    }

    /// Returns the number of elements of the fused call, padding included.
    fn count(&self) -> usize {
        let end = self.ranges.last().map_or(0, |range| range.end);
        end.next_multiple_of(self.rules.granule)
    }

    /// Adds a call, unless it no longer fits or its last block must not be padded.
    fn try_add(&mut self, index: usize, call: &Call) -> bool {
        if !call.count.is_multiple_of(self.rules.whole) {
            return false;
        }
        let start = self.count();
        let end = start + call.count.next_multiple_of(self.rules.granule);
        if !self.members.is_empty() && end * self.dtype.size() > MAX_FUSED_BYTES {
            return false;
        }
        self.members.push(index);
        self.ranges.push(start..start + call.count);
        true
    }

    /// Resolves the call that runs for all members: it equals the member `one`, but has their total
    /// length.
    pub(super) fn resolve(&self, one: &Call) -> ResolvedCall {
        ResolvedCall {
            count: self.count(),
            fused: Fused::of(self.ranges.iter().map(Range::len)),
            ..one.resolve(self.codec)
        }
    }

    /// Returns the index of the first member, in whose place the fused call runs.
    pub(super) fn first(&self) -> usize {
        self.members.first().copied().unwrap_or(usize::MAX)
    }

    /// Returns the bytes of the fused call.
    pub(super) fn bytes(&self) -> usize {
        self.count() * self.dtype.size()
    }

    /// Copies the inputs of the members, in order, into `memory`, and takes their statistics.
    pub(super) fn gather<'b>(
        &mut self,
        inputs: impl Iterator<Item = &'b UserBuffers<'b>>,
        memory: &mut [u8],
    ) -> Result<()> {
        let size = self.dtype.size();
        for (range, input) in self.ranges.iter().zip(inputs) {
            let (from, to) = (range.start * size, range.end * size);
            input.read_input(0, &mut memory[from..to]);
            let filled = range.end.next_multiple_of(self.rules.granule) * size;
            if !self.rules.has_blocks {
                // Zeros do not saturate, so the statistics do not count them.
                memory[to..filled].fill(0);
                continue;
            }
            for at in (to..filled).step_by(size) {
                memory.copy_within(to - size..to, at);
            }
        }
        self.inputs = self.input_stats(memory)?;
        Ok(())
    }

    /// Copies a member's part of the result `all` to the member's output.
    pub(super) fn scatter(
        &self,
        member: usize,
        all: &UserBuffers<'_>,
        output: &mut UserBuffers<'_>,
    ) {
        let size = self.dtype.size();
        let range = &self.ranges[member];
        output.write_output(0, all.output(range.start * size, range.len() * size));
    }

    /// Takes the statistics of each member's input.
    fn input_stats(&self, memory: &[u8]) -> Result<Vec<EncodeStats>> {
        let Some(largest) = self.rules.largest else {
            return Ok(Vec::new());
        };
        let isa = Isa::detect();
        let reducer = Reducer::new(self.dtype, ReduceOp::Sum, isa)?;
        let longest = self.ranges.iter().map(Range::len).max().unwrap_or(0);
        let mut tile = Tile::new(longest);
        let size = self.dtype.size();
        let looks = self.ranges.iter().map(|range| {
            reducer.load(&memory[range.start * size..range.end * size], &mut tile);
            codec::look(isa, tile.f32(range.len()), largest)
        });
        Ok(looks.collect())
    }

    /// Divides the report of the fused call among its members. The first member has the bytes that do
    /// not divide evenly.
    pub(super) fn reports(&self, all: &Report) -> Vec<Report> {
        let count = self.count().max(1) as u64;
        let share = |bytes: u64, range: &Range<usize>| {
            let filled = range.len().next_multiple_of(self.rules.granule) as u64;
            bytes * filled / count
        };
        let of = |bytes: u64, member: usize| {
            let shared = || {
                self.ranges
                    .iter()
                    .map(|range| share(bytes, range))
                    .sum::<u64>()
            };
            share(bytes, &self.ranges[member]) + if member == 0 { bytes - shared() } else { 0 }
        };
        let inputs = all.input.map(|all| self.saturated_as(&all));
        let reports = (0..self.ranges.len()).map(|member| Report {
            wire_bytes: of(all.wire_bytes, member),
            raw_bytes: of(all.raw_bytes, member),
            input: inputs
                .as_ref()
                .and_then(|inputs| inputs.get(member).copied()),
            fused: self.members.len(),
            ..*all
        });
        reports.collect()
    }

    /// Returns the statistics of each member's input, with as many saturated elements as `all` counts.
    /// Saturated sums cannot be assigned to a member; the member with the largest elements has them.
    fn saturated_as(&self, all: &EncodeStats) -> Vec<EncodeStats> {
        let mut inputs = self.inputs.clone();
        let mut left = all.saturated;
        for input in &mut inputs {
            // Inputs that this rank added to a sum instead of encoding them did not saturate.
            input.saturated = input.saturated.min(left);
            left -= input.saturated;
        }
        let largest = inputs
            .iter_mut()
            .max_by(|a, b| a.abs_max.total_cmp(&b.abs_max));
        if let Some(largest) = largest {
            largest.saturated += left;
        }
        inputs
    }
}

/// Refuses a fused call in which a member writes memory that another member uses, because all
/// inputs are read before any output is written. Each member has its index in the group, and the
/// addresses of its input and output.
///
/// # Errors
/// Invalid argument, naming both calls by their indices in the group.
pub(super) fn check_apart(members: impl Iterator<Item = (usize, [Range<usize>; 2])>) -> Result<()> {
    // Start, end, index of the call, and whether the call writes the range.
    let mut ranges: Vec<(usize, usize, usize, bool)> = Vec::new();
    for (index, [input, output]) in members {
        ranges.push((input.start, input.end, index, false));
        ranges.push((output.start, output.end, index, true));
    }
    ranges.sort_unstable();
    for (at, a) in ranges.iter().enumerate() {
        let mut touched = ranges[at + 1..].iter().take_while(|b| b.0 < a.1);
        if let Some(b) = touched.find(|b| b.2 != a.2 && (a.3 || b.3)) {
            return Err(Error::invalid_argument(format!(
                "small calls {} and {} of a group are fused into one, but one call writes memory \
                 that the other uses, at {:#x}; group calls that do not depend on each other, or set \
                 CINCH_FUSE_BYTES=0 on all ranks",
                a.2.min(b.2),
                a.2.max(b.2),
                b.0
            )));
        }
    }
    Ok(())
}

impl Communicator {
    /// Returns memory for a fused call.
    pub(super) fn take_fuse_buffer(&self, bytes: usize) -> Vec<u8> {
        let spare = self
            .spare_buffers
            .lock()
            .ok()
            .and_then(|mut spare| spare.pop());
        let mut memory = spare.unwrap_or_default();
        memory.resize(bytes, 0);
        memory
    }

    /// Keeps the memory of a fused call for the next group.
    pub(super) fn keep_fuse_buffer(&self, memory: Vec<u8>) {
        if let Ok(mut spare) = self.spare_buffers.lock()
            && spare.len() < MAX_SPARE_BUFFERS
        {
            spare.push(memory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_reduce(count: usize) -> Call {
        Call::new(Collective::AllReduce, DType::F32, count)
    }

    #[test]
    fn small_sum_without_state_is_fused() {
        let small = all_reduce(1024);
        assert!(is_small(&small, 4096));
        assert!(!is_small(&all_reduce(1025), 4096));
        assert!(!is_small(&all_reduce(0), 4096));
        for alone in [
            Call::new(Collective::AllGather, DType::F32, 8),
            Call {
                op: ReduceOp::PreMulSum(crate::types::Scalar::Float(2.0)),
                ..small
            },
            Call {
                tensor: Some(1),
                ..small
            },
            Call {
                feedback: Some(1),
                ..small
            },
        ] {
            assert!(!is_small(&alone, 1 << 20), "{alone:?}");
        }
    }

    #[test]
    fn fused_tensor_begins_at_a_whole_block() {
        let codec: CodecSetting = "linear8:block=64".parse().unwrap();
        let mut fused = FusedCall::new(DType::F32, codec).unwrap();
        for (index, count) in [100, 64, 1].into_iter().enumerate() {
            assert!(fused.try_add(index, &all_reduce(count)));
        }
        assert_eq!(fused.ranges, [0..100, 128..192, 192..193]);
        assert_eq!(
            (fused.count(), fused.resolve(&all_reduce(1)).count),
            (256, 256)
        );
        let mut taken = 0;
        while fused.try_add(3, &all_reduce(16 << 10)) {
            taken += 1;
        }
        // A fused call of 1 MiB has room for 15 more calls of 64 KiB.
        assert_eq!(taken, 15);
    }

    #[test]
    fn reports_of_members_add_up_to_the_fused_report() {
        let mut fused = FusedCall::new(DType::F32, "raw".parse().unwrap()).unwrap();
        for count in [1, 16, 1000] {
            fused.try_add(0, &all_reduce(count));
        }
        let all = Report {
            codec: CodecSetting::RAW,
            algorithm: crate::types::Algorithm::Direct,
            transport: None,
            channels: 1,
            wire_bytes: 10_007,
            raw_bytes: 40_009,
            input: None,
            residual_norm: None,
            fused: 1,
        };
        let reports = fused.reports(&all);
        let sum = |bytes: fn(&Report) -> u64| reports.iter().map(bytes).sum::<u64>();
        assert_eq!(
            (sum(|one| one.wire_bytes), sum(|one| one.raw_bytes)),
            (10_007, 40_009)
        );
        assert!(
            reports
                .iter()
                .all(|one| one.fused == 3 && one.wire_bytes > 0)
        );
    }

    #[test]
    fn member_that_writes_what_another_uses_is_refused() {
        // Pairs are the addresses of input and output, each of 8 bytes.
        let check = |calls: &[(usize, usize)]| {
            let ranges = calls.iter().map(|&(a, b)| [a..a + 8, b..b + 8]);
            check_apart(ranges.enumerate())
        };
        for fine in [
            &[(0, 0), (8, 8), (16, 16)][..],
            &[(0, 8), (0, 16), (0, 24)],
            &[(0, 8), (16, 24), (32, 32), (16, 40)],
        ] {
            assert!(check(fine).is_ok(), "{fine:?}");
        }
        for (bad, calls) in [
            (&[(0, 8), (8, 16)][..], "0 and 1"),
            (&[(0, 0), (32, 32), (7, 16)], "0 and 2"),
            (&[(0, 8), (16, 8)], "0 and 1"),
            (&[(0, 0), (0, 16)], "0 and 1"),
            (&[(8, 8), (32, 40), (24, 24), (44, 56)], "1 and 3"),
        ] {
            let error = check(bad).unwrap_err();
            let named = format!("calls {calls} ");
            assert!(error.message().contains(&named), "{bad:?}: {error}");
        }
    }
}
