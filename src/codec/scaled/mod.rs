//! Codecs whose codes are multiples of a scale: what [`super::linear8`] and [`super::dynamic8`]
//! share, which is all but the meaning of a code.
//!
//! The scale on the wire is the absolute maximum s of its elements; NaN marks a poisoned block.
//! A scale below 2^-100 would lose bits in its reciprocal or in its unit, or overflow them; there
//! both sides work with 2^64 times the numbers, which is exact, in plain scalar code.

mod blocks;
mod vector;

use super::simd::{Available, launch};
use super::stats::scan_slowly;
use super::wire::{Layout, ends_chunk};
use super::{Codec, Description, EncodeStats, ErrorLaw, Reencode, Span, Zero};
use crate::types::{CodecKind, CodecSpec, ScaleRule};
use blocks::{Decode, Encode};
use std::fmt::Debug;
pub(super) use vector::VectorFormat;

/// Scales below this are raised, and what they scale with them.
const TINY: f32 = f32::from_bits((127 - 100) << 23);
/// 2^64.
const RAISE: f32 = f32::from_bits((127 + 64) << 23);
/// 2^-64.
const LOWER: f32 = f32::from_bits((127 - 64) << 23);

/// The meaning of a code.
pub(super) trait ScaledFormat: Debug + Send + Sync + 'static {
    const KIND: CodecKind;

    /// The error in plain terms.
    const ERRORS: ErrorLaw;

    /// What magnitudes are multiplied with before [`ScaledFormat::magnitude`], from their scale.
    fn factor(scale: f32) -> f32;

    /// What values are multiplied with, from their scale.
    fn unit(scale: f32) -> f32;

    /// The code, 0 to 127, of a magnitude in a block with this factor.
    fn magnitude(&self, x: f32, factor: f32) -> u8;

    /// Signed value of a code, in units.
    fn value(&self, code: u8) -> f32;

    /// Bound of the error at |x| <= scale, in exact arithmetic.
    fn half_step(&self, x: f64, scale: f64) -> f64;
}

/// A codec of one such format.
#[derive(Debug)]
pub(super) struct Scaled<F> {
    format: F,
    rule: ScaleRule,
    isa: Available,
}

impl<F: VectorFormat> Scaled<F> {
    pub fn new(format: F, rule: ScaleRule, isa: Available) -> Scaled<F> {
        Scaled { format, rule, isa }
    }

    /// Elements that share a scale; `None`: all.
    fn block(&self) -> Option<usize> {
        match self.rule {
            ScaleRule::Block(block) => Some(block as usize),
            _ => None,
        }
    }

    fn layout(&self, n: usize) -> Layout {
        let scales = match self.block() {
            Some(block) => n.div_ceil(block),
            None => usize::from(n > 0),
        };
        Layout::new(n, 8, scales)
    }

    fn decode_span<const REDUCE: bool>(&self, span: Span, wire: &[u8], dst: &mut [f32]) {
        ends_chunk(span, dst.len(), self.granule());
        let (codes, scales) = self.layout(span.chunk).split(wire);
        let decode = Decode::<F, REDUCE> {
            format: &self.format,
            block: self.block(),
            first_block: self.block().map_or(0, |block| span.at / block),
            codes: &codes[span.at..span.at + dst.len()],
            scales,
            dst,
        };
        launch(self.isa, decode);
    }
}

impl<F: VectorFormat> Codec for Scaled<F> {
    fn spec(&self) -> CodecSpec {
        CodecSpec {
            scale: self.rule,
            ..CodecSpec::of(F::KIND)
        }
    }

    fn granule(&self) -> usize {
        self.block().unwrap_or(1)
    }

    fn wire_bytes(&self, n: usize) -> usize {
        self.layout(n).bytes()
    }

    fn description(&self) -> Description {
        Description {
            code_bits: 8,
            block_numbers: 1,
            fits_extremes: true,
            poisons_block: true,
            zero: Zero::Positive,
            errors: F::ERRORS,
        }
    }

    fn reencode(&self) -> Reencode {
        Reencode::Lossy
    }

    /// Half a step of the format plus 2^-22 of the scale for the roundings of the factor, the
    /// unit and the product, plus the smallest subnormal.
    fn error_bound(&self, x: f32, abs_max: f32) -> f32 {
        let scale = f64::from(abs_max);
        let bound = self.format.half_step(f64::from(x.abs()), scale) + scale * 2f64.powi(-22);
        (bound as f32).next_up() + f32::from_bits(1)
    }

    fn encode(
        &self,
        span: Span,
        src: &[f32],
        scale: Option<f32>,
        wire: &mut [u8],
        stats: Option<&mut EncodeStats>,
    ) {
        assert_eq!(
            scale.is_none(),
            self.block().is_some(),
            "a scale is given exactly with the tensor rule"
        );
        let ends = ends_chunk(span, src.len(), self.granule());
        let (codes, scales) = self.layout(span.chunk).split_mut(wire, ends);
        let encode = Encode {
            format: &self.format,
            block: self.block(),
            given: scale,
            starts_chunk: span.at == 0,
            first_block: self.block().map_or(0, |block| span.at / block),
            src,
            codes: &mut codes[span.at..span.at + src.len()],
            scales,
            stats,
        };
        launch(self.isa, encode);
    }

    fn decode(&self, span: Span, wire: &[u8], dst: &mut [f32]) {
        self.decode_span::<false>(span, wire, dst);
    }

    fn decode_reduce(&self, span: Span, wire: &[u8], acc: &mut [f32]) {
        self.decode_span::<true>(span, wire, acc);
    }
}

/// The code of an element: the specification. A non-finite element has code 0; its block is
/// poisoned besides.
fn encode_element<F: ScaledFormat>(format: &F, x: f32, scale: f32) -> u8 {
    let x = if scale < TINY { x * RAISE } else { x };
    let scale = if scale < TINY { scale * RAISE } else { scale };
    encode_with_factor(format, x, F::factor(scale))
}

/// The same with the factor at hand.
#[inline(always)]
fn encode_with_factor<F: ScaledFormat>(format: &F, x: f32, factor: f32) -> u8 {
    // An x raised to infinity saturates like any other; a NaN or infinity of the input is
    // sorted out before.
    let magnitude = format.magnitude(x.abs(), factor);
    let sign = ((x.to_bits() >> 24) & 0x80) as u8;
    if magnitude == 0 { 0 } else { magnitude | sign }
}

/// Adds the decoded element to `acc`: the specification. `scale` is finite.
fn decode_element<F: ScaledFormat>(format: &F, code: u8, scale: f32, acc: f32) -> f32 {
    let value = format.value(code);
    if scale.abs() < TINY && scale != 0.0 {
        (value * F::unit(scale * RAISE)).mul_add(LOWER, acc)
    } else {
        value.mul_add(F::unit(scale), acc)
    }
}
