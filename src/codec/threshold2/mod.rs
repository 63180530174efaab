//! `threshold2:tau=T`: -T, 0 or T, by comparison with the threshold T.
//!
//! Source: Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing" (2015), in the
//! dense form of HiPress. The code is 2 for x >= T, 0 for x <= -T, and 1 for elements between, which
//! decode to 0; so four zeros are the byte 0x55.
//!
//! Use it with error feedback, which keeps what did not reach the threshold. A message moves an element
//! by at most T; elements beyond T count as saturated.
//!
//! Code 3, which HiPress does not use, stands for a non-finite element and decodes to NaN.

mod simd;

use super::elementwise::{ElementFormat, Elementwise};
use super::feedback::Contraction;
use super::{CodecInfo, ErrorLaw, KernelInfo, MessageRange, Zero};
use crate::types::{CodecKind, CodecSpec, ScaleRule};
use std::sync::Arc;

pub(super) const INFO: CodecInfo = CodecInfo {
    kind: CodecKind::Threshold2,
    encode_seconds: 0.15e-9,
    decode_seconds: 0.15e-9,
    // Below twice the threshold T the error is at most T. A call reduces a larger magnitude by T.
    range: MessageRange::Fixed,
    contraction: |spec| Contraction {
        floor: format(spec).tau.into(),
        ..Contraction::largest(0.0)
    },
    kernels: Some(KernelInfo::new("threshold2")),
    build: |spec, isa| Arc::new(Elementwise::new(format(spec), isa)),
};

/// The element format of `threshold2`, with a threshold above 0.
#[derive(Debug)]
pub(super) struct Threshold {
    tau: f32,
}

const BELOW: u32 = 0;
const BETWEEN: u32 = 1;
const ABOVE: u32 = 2;
const NOT_FINITE: u32 = 3;

/// Creates the format from a specification that was checked.
///
/// # Panics
/// If the specification has no threshold.
pub(super) fn format(spec: CodecSpec) -> Threshold {
    let ScaleRule::Threshold(bits) = spec.scale else {
        unreachable!("{spec} has no threshold")
    };
    Threshold {
        tau: f32::from_bits(bits),
    }
}

impl ElementFormat for Threshold {
    const BITS: usize = 2;
    const ZERO: Zero = Zero::Positive;

    fn spec(&self) -> CodecSpec {
        CodecSpec {
            scale: ScaleRule::Threshold(self.tau.to_bits()),
            ..CodecSpec::of(CodecKind::Threshold2)
        }
    }

    fn encode(&self, x: f32) -> u32 {
        if !x.is_finite() {
            NOT_FINITE
        } else if x >= self.tau {
            ABOVE
        } else if x <= -self.tau {
            BELOW
        } else {
            BETWEEN
        }
    }

    fn decode(&self, code: u32) -> f32 {
        match code {
            BELOW => -self.tau,
            BETWEEN => 0.0,
            ABOVE => self.tau,
            _ => f32::NAN,
        }
    }

    fn largest(&self) -> f32 {
        self.tau
    }

    /// An element below the threshold becomes 0, so its error is |x|.
    fn error_bound(&self, x: f32) -> f32 {
        x.abs()
    }

    fn errors(&self) -> ErrorLaw {
        ErrorLaw {
            of_value: 1.0,
            largest: self.tau.into(),
            ..ErrorLaw::EXACT
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{EncodeStats, Span, build};
    use crate::cpu::Isa;

    #[test]
    fn elements_at_and_beyond_the_threshold_have_the_published_codes() {
        for isa in Isa::available() {
            let codec = build("threshold2:tau=0.5".parse().unwrap(), isa)
                .unwrap()
                .unwrap();
            let code = |x: &[f32]| {
                let mut wire = vec![0xee; codec.wire_bytes(x.len())];
                let mut stats = EncodeStats::default();
                codec.encode(Span::whole(x.len()), x, None, &mut wire, Some(&mut stats));
                let mut y = vec![9.0; x.len()];
                codec.decode(Span::whole(x.len()), &wire, &mut y);
                (wire, y, stats.saturated)
            };
            assert_eq!(code(&[0.0; 4]).0[..2], [0x55, 0], "{isa:?}");
            let x = [0.5, 0.5f32.next_down(), -0.5, -0.49, 3.0, -0.0, -9.0];
            let (wire, y, saturated) = code(&x);
            assert_eq!(wire[..3], [0b01_00_01_10, 0b00_00_01_10, 0]);
            assert_eq!(y, [0.5, 0.0, -0.5, 0.0, 0.5, 0.0, -0.5]);
            assert_eq!(saturated, 2);
            let (wire, y, _) = code(&[f32::NAN, f32::NEG_INFINITY, 1.0]);
            assert_eq!(wire[0], 0b10_11_11);
            assert!(y[0].is_nan() && y[1].is_nan() && y[2] == 0.5);
        }
    }
}
