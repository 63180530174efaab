//! Key of the scales that a tensor keeps from call to call.

use crate::plan::{Plan, Request};
use crate::types::{ReduceOp, SEQUENCE_WORD, SIGNATURE_WORDS, Scalar, ScaleRule};

/// Number of tensors whose scales are kept. With more, all scales are dropped, so that a program with new tensor names
/// in each call does not exhaust memory.
pub(super) const KEPT_TENSORS: usize = 4096;

/// Key of kept scales: the caller's tensor in one kind of call. Calls with a different collective, operator
/// or factor have sums of a different magnitude, so they have scales of their own.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct ScaleKey {
    tensor: u64,
    pub refresh: u32,
    /// The call's signature without its sequence number.
    call: [u64; SIGNATURE_WORDS],
    /// This rank's factor of a pre-multiplied sum.
    factor: i128,
}

impl ScaleKey {
    /// Returns the key of a call's kept scales; `None` if its codec keeps no scales.
    pub(super) fn new(
        request: &Request,
        plan: &Plan,
        signature: [u64; SIGNATURE_WORDS],
    ) -> Option<ScaleKey> {
        let ScaleRule::Tensor { refresh } = plan.specs.inter.scale else {
            return None;
        };
        let tensor = request
            .tensor
            .filter(|_| plan.specs.inter.kind.has_scale())?;
        let mut call = signature;
        call[SEQUENCE_WORD] = 0;
        let factor = match request.op {
            ReduceOp::PreMulSum(Scalar::Float(factor)) => i128::from(factor.to_bits()),
            ReduceOp::PreMulSum(Scalar::Int(factor)) => factor,
            _ => 0,
        };
        Some(ScaleKey {
            tensor,
            refresh,
            call,
            factor,
        })
    }
}
