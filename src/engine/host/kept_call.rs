//! [`KeptCall`]: a call that has run, kept for calls that repeat it.

use super::super::Report;
use super::state::{Arithmetic, Chain, Chunk};
use crate::mem::UserBuffers;
use crate::plan::{Plan, Request};
use crate::types::{Call, InPlace, RawReason, SIGNATURE_WORDS};
use std::sync::Arc;

/// A call that has run, with all that an equal call needs.
#[derive(Debug)]
pub(super) struct KeptCall {
    pub call: Call,
    pub raw_reason: RawReason,
    pub request: Request,
    pub plan: Arc<Plan>,
    pub arithmetic: Arc<Arithmetic>,
    /// Signature with the sequence number 0.
    pub signature: [u64; SIGNATURE_WORDS],
    pub extents: BufferExtents,
    /// Index and chunk of each step, in the order in which they run.
    pub order: Box<[(usize, Chunk)]>,
    /// Accumulators of chains, which later calls reuse. Between calls no sum is open.
    pub chain: Chain,
    pub report: Report,
}

/// Bytes that a call needs in its buffers, and where they may overlap.
#[derive(Clone, Copy, Debug)]
pub(super) struct BufferExtents {
    input: usize,
    output: usize,
    /// Address of the input less that of the output in an in-place call; `None` if they must be disjoint.
    in_place: Option<isize>,
}

impl BufferExtents {
    pub fn of(call: &Call, rank: usize, nranks: usize) -> Option<BufferExtents> {
        let is_root = call.root == rank;
        let size = call.dtype.size();
        let block = (call.count * size * rank) as isize;
        let collective = call.collective;
        Some(BufferExtents {
            input: collective
                .input_extent(is_root)
                .elements(call.count, nranks)?
                * size,
            output: collective
                .output_extent(is_root)
                .elements(call.count, nranks)?
                * size,
            in_place: match collective.in_place() {
                InPlace::Same => Some(0),
                InPlace::InputInOutput => Some(block),
                InPlace::OutputInInput => Some(-block),
                InPlace::Never => None,
            },
        })
    }

    /// Returns whether the buffers are large enough, and disjoint or in place. The checks of a call give the reason
    /// if they are not.
    pub fn admit(&self, buffers: &UserBuffers<'_>) -> bool {
        if buffers.input_bytes() < self.input || buffers.output_bytes() < self.output {
            return false;
        }
        let (input, output) = (buffers.input_address(), buffers.output_address());
        self.input == 0
            || self.output == 0
            || input + self.input <= output
            || output + self.output <= input
            || self.in_place == Some(input.wrapping_sub(output) as isize)
    }
}
