//! Encodings of a chunk on the wire.
//!
//! A codec works on fp32 values: elements of other types are widened before and rounded after
//! (`reduce`). It works on spans of a chunk, so that a step runs tile by tile in the first-level
//! cache. No codec holds state: what lives from call to call is the caller's ([`TensorScales`]).
//!
//! Wire layout of a chunk of n elements: the codes of all blocks, contiguous, padded with zeros
//! to a multiple of 16 bytes; then one little-endian fp32 scale a block. Tensor scale: one scale.
//! Formats without scales end after the padding.
//!
//! A code of one byte has the sign in bit 7 and a magnitude in the others. Zero is 0x00, whatever
//! its sign was. `linear8` and `dynamic8` never emit 0x80: a block with a non-finite element has
//! the scale NaN and codes 0 (under a tensor scale: its own codes, 0 for the element), and decodes
//! to NaN throughout. `static8` and `mantissa8` emit 0x80 for a non-finite element, which decodes
//! to NaN. Casts have two bytes a code and what their formats have for such elements; they
//! saturate finite ones.
//!
//! The scalar functions are the specification; vector forms equal them bit for bit. Only
//! [`EncodeStats::sum_squares`] may differ in its last bits, by the order of its additions. Any
//! bytes decode to some numbers: what a peer writes is never trusted to be an encoding.

mod blocked;
mod cast16;
mod cast_bf16;
mod dynamic8;
mod elementwise;
mod fp8;
mod kernel_params;
mod linear8;
mod mantissa8;
mod minmax;
mod onebit;
mod pack;
mod random;
mod scaled;
#[allow(unsafe_code)]
mod simd;
mod stand_alone;
mod static8;
mod stats;
mod table;
mod tensor_scales;
mod terngrad;
mod threshold2;
mod trunc;
mod wire;

pub use kernel_params::{FUSED_CODECS, KERNEL_CODECS, array_family, kernel_family, kernel_params};
pub use random::Random;
pub use stand_alone::{Layout, StandAlone};
pub use stats::{abs_max, look};
pub use tensor_scales::TensorScales;

use crate::cpu::Isa;
use crate::error::{Error, Result};
use crate::types::{CodecKind, CodecSpec, ScaleRule, is_threshold};
use simd::Available;
use std::sync::Arc;

/// Whether encoding a decoded chunk again, after adding to it, loses anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reencode {
    /// Sums travel as exactly as contributions do.
    Exact,
    /// Each encode of a partial sum adds its own rounding error.
    Lossy,
}

/// What an encode pass learns about its input on the way.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EncodeStats {
    /// Finite elements beyond the largest representable value, which saturated.
    pub saturated: u64,
    /// NaN and infinite elements.
    pub non_finite: u64,
    /// Largest magnitude among the finite elements.
    pub abs_max: f32,
    /// Sum of squares of the finite elements.
    pub sum_squares: f64,
}

impl EncodeStats {
    /// Adds what another pass learnt.
    pub fn merge(&mut self, other: &EncodeStats) {
        self.saturated += other.saturated;
        self.non_finite += other.non_finite;
        self.abs_max = self.abs_max.max(other.abs_max);
        self.sum_squares += other.sum_squares;
    }
}

/// Bound of |decode(encode(x)) - x| as plain terms, for whoever predicts the error of a sum:
/// `of_scale` times the largest magnitude of the block, plus `of_value` times |x|, plus `floor`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ErrorLaw {
    /// Times the largest magnitude of the block.
    pub of_scale: f64,
    /// Times the value.
    pub of_value: f64,
    /// Regardless of the value.
    pub floor: f64,
    /// Magnitudes beyond it saturate; infinite where none do.
    pub largest: f64,
}

impl ErrorLaw {
    /// Nothing is lost and nothing saturates.
    pub const EXACT: ErrorLaw = ErrorLaw {
        of_scale: 0.0,
        of_value: 0.0,
        floor: 0.0,
        largest: f64::INFINITY,
    };
}

/// What a zero of either sign comes back as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zero {
    /// Itself, with its sign.
    Signed,
    /// +0.
    Positive,
    /// +0 in a block of zeros; among other numbers an element like any other.
    Inexact,
}

/// What is fixed about a codec: tests, tools and other devices read it instead of knowing names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Description {
    /// Bits of a code.
    pub code_bits: usize,
    /// fp32 numbers on the wire for each block; 0 for formats without blocks.
    pub block_numbers: usize,
    /// Whether the numbers of a block follow from its smallest and its largest element, so that more
    /// elements between those change nothing for the others; true of formats without blocks.
    pub fits_extremes: bool,
    /// Whether a non-finite element takes its block along; else it alone comes back non-finite.
    pub poisons_block: bool,
    /// What a zero comes back as.
    pub zero: Zero,
    /// How far off a decoded element is.
    pub errors: ErrorLaw,
}

/// A part of a chunk: `len` elements from `at`. `at` is a multiple of the codec's granule, and so
/// is `len` unless the span ends the chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Elements of the whole chunk.
    pub chunk: usize,
    /// First element of the span.
    pub at: usize,
    /// What the chunk draws, where encoding rounds at random; decoding does not look at it.
    pub random: Random,
}

impl Span {
    /// From element `at` of a chunk that draws the numbers of no operation in particular.
    pub fn new(chunk: usize, at: usize) -> Span {
        Span {
            chunk,
            at,
            random: Random::default(),
        }
    }

    /// A chunk of `n` elements in one span.
    pub fn whole(n: usize) -> Span {
        Span::new(n, 0)
    }

    /// The same span, drawing these numbers.
    pub fn drawing(self, random: Random) -> Span {
        Span { random, ..self }
    }
}

/// An encoding. Implementations are pure; one value serves all threads.
///
/// The methods that take a span panic if it breaks the contract of [`Span`], if `wire` is shorter
/// than [`Codec::wire_bytes`] of its chunk, or if a scale is given or missing against the rule:
/// these follow from geometry that was checked before. Bytes of `wire` never make them panic.
pub trait Codec: Send + Sync + std::fmt::Debug {
    /// Name and parameters.
    fn spec(&self) -> CodecSpec;

    /// Elements that must stay together: spans start at multiples of it.
    fn granule(&self) -> usize;

    /// Wire bytes of a chunk of `n` elements.
    fn wire_bytes(&self, n: usize) -> usize;

    /// What is fixed about the format.
    fn description(&self) -> Description;

    /// What re-encoding a partial sum costs.
    fn reencode(&self) -> Reencode;

    /// Bound of |decode(encode(x)) - x| for a finite x in a block whose largest finite magnitude
    /// is `abs_max`, for values that do not saturate.
    fn error_bound(&self, x: f32, abs_max: f32) -> f32;

    /// Encodes `src`, the elements of `span`, into the chunk `wire`.
    ///
    /// `scale` is the absolute maximum to use instead of the block's own: `Some` exactly with
    /// [`crate::types::ScaleRule::Tensor`]. A block with a non-finite element decodes to NaN
    /// throughout (formats without scales: just that element).
    /// Under a tensor scale the spans of a chunk are encoded in order from the first: one that
    /// is poisoned poisons the chunk. A given scale that is negative or not finite does so, too.
    /// The span that ends the chunk zeroes the padding.
    /// `stats` is brought up to date with `src` if it is there.
    fn encode(
        &self,
        span: Span,
        src: &[f32],
        scale: Option<f32>,
        wire: &mut [u8],
        stats: Option<&mut EncodeStats>,
    );

    /// Decodes the elements of `span` into `dst`.
    fn decode(&self, span: Span, wire: &[u8], dst: &mut [f32]);

    /// Adds the decoded elements of `span` to `acc`, each with one fused multiply-add where the
    /// format has a scale, so that the sum is rounded once.
    fn decode_reduce(&self, span: Span, wire: &[u8], acc: &mut [f32]);
}

/// The codec of a spec, running on `isa`. Raw bytes are no codec: the engine moves them itself,
/// and [`CodecKind::Raw`] gives `None`.
///
/// # Errors
/// Invalid argument if a parameter is outside its range (a spec may come from a peer's signature
/// word); unsupported if the machine lacks `isa`.
pub fn build(spec: CodecSpec, isa: Isa) -> Result<Option<Arc<dyn Codec>>> {
    check(spec)?;
    let isa = Available::new(isa)?;
    Ok(Some(match spec.kind {
        CodecKind::Raw => return Ok(None),
        CodecKind::Linear8 => Arc::new(linear8::Linear8::new(linear8::Linear, spec.scale, isa)),
        CodecKind::Dynamic8 => Arc::new(dynamic8::Dynamic8::new(
            dynamic8::Dynamic::new(),
            spec.scale,
            isa,
        )),
        CodecKind::Static8 => Arc::new(static8::Static8::new(static8::format(spec.offset), isa)),
        CodecKind::Mantissa8 => Arc::new(mantissa8::Mantissa8::new(
            mantissa8::format(spec.offset),
            isa,
        )),
        CodecKind::CastBf16 => Arc::new(cast_bf16::CastBf16::new(cast_bf16::Bf16, isa)),
        CodecKind::Cast16 => Arc::new(cast16::Cast16::new(cast16::F16, isa)),
        CodecKind::MinMax1 => Arc::new(minmax::MinMax::<1>::new(spec, isa)),
        CodecKind::MinMax2 => Arc::new(minmax::MinMax::<2>::new(spec, isa)),
        CodecKind::MinMax4 => Arc::new(minmax::MinMax::<4>::new(spec, isa)),
        CodecKind::MinMax8 => Arc::new(minmax::MinMax::<8>::new(spec, isa)),
        CodecKind::Trunc8 => Arc::new(trunc::Trunc::new(trunc::Upper::<8>, isa)),
        CodecKind::Trunc16 => Arc::new(trunc::Trunc::new(trunc::Upper::<16>, isa)),
        CodecKind::Trunc24 => Arc::new(trunc::Trunc::new(trunc::Upper::<24>, isa)),
        CodecKind::Fp8E4M3 => Arc::new(fp8::Fp8::new(fp8::Small::<3>, spec.scale, isa)),
        CodecKind::Fp8E5M2 => Arc::new(fp8::Fp8::new(fp8::Small::<2>, spec.scale, isa)),
        CodecKind::TernGrad => Arc::new(terngrad::TernGrad::new(spec, isa)),
        CodecKind::OneBit => Arc::new(onebit::OneBit::new(spec, isa)),
        CodecKind::Threshold2 => {
            Arc::new(threshold2::Threshold2::new(threshold2::format(spec), isa))
        }
    }))
}

/// Parameters that text cannot have, but a struct or a signature word can.
fn check(spec: CodecSpec) -> Result<()> {
    let good_scale = match spec.scale {
        ScaleRule::Block(block) => (32..=4096).contains(&block) && block.is_power_of_two(),
        ScaleRule::Tensor { refresh } => refresh > 0,
        ScaleRule::Threshold(_) => false,
    };
    let good_threshold = match spec.scale {
        ScaleRule::Threshold(bits) => is_threshold(f32::from_bits(bits)),
        _ => false,
    };
    if spec.kind.has_threshold() && !good_threshold {
        return Err(Error::invalid_argument(format!(
            "codec \"{spec}\": a threshold is a number above 0"
        )));
    }
    if spec.kind.has_scale() && !good_scale {
        return Err(Error::invalid_argument(format!(
            "codec \"{spec}\": a block is a power of two from 32 to 4096, a refresh at least 1"
        )));
    }
    let tensor = matches!(spec.scale, ScaleRule::Tensor { .. });
    if spec.kind.has_scale() && tensor && !spec.kind.has_tensor_scale() {
        return Err(Error::invalid_argument(format!(
            "codec \"{spec}\": {} has no tensor scale; take block=B",
            spec.kind.name()
        )));
    }
    if spec.kind.has_offset() && !(-30..=30).contains(&spec.offset) {
        return Err(Error::invalid_argument(format!(
            "codec \"{spec}\": an offset is a number from -30 to 30"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod conformance;
