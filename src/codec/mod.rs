//! Encodings of a chunk on the wire.
//!
//! A codec works on fp32 values; `reduce` widens elements of other types before and rounds after. It
//! encodes a chunk in spans, so that a step runs tile by tile in the first-level cache. No codec holds
//! state: the caller owns all that is kept from call to call ([`TensorScales`], [`feedback`]).
//!
//! Wire layout of a chunk of n elements: the codes of all blocks, contiguous, padded with zeros to a
//! multiple of 16 bytes; then the numbers of each block as little-endian fp32, such as its scale. A
//! tensor scale is one number for the chunk. Formats without numbers end after the padding.
//!
//! `blocked` has the loops for formats with numbers, `elementwise` for formats without.
//!
//! A code of one byte has the sign in bit 7 and a magnitude in the others. Zero is 0x00, whatever its
//! sign was. `linear8` and `dynamic8` never emit 0x80. A block with a non-finite element has the scale
//! NaN and codes 0, and decodes to NaN throughout; under a tensor scale only that element has code 0,
//! but the chunk decodes to NaN. `static8` and `mantissa8` emit 0x80 for a non-finite element, which
//! decodes to NaN. Casts have two bytes a code and encode non-finite elements as their formats do; they
//! saturate finite elements.
//!
//! The scalar functions are the specification, and vector forms equal them bit for bit. Only
//! [`EncodeStats::sum_squares`] may differ in its last bits, by the order of its additions. Any bytes
//! decode to some numbers, because a codec does not trust the bytes that a peer sent.

// Vector forms are instantiated for the instruction sets of x86-64 alone.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code, unused_imports))]

mod blocked;
mod cast16;
mod cast_bf16;
mod dynamic8;
mod elementwise;
pub mod feedback;
mod fp8;
mod info;
mod kernel_info;
mod kernel_params;
mod linear8;
mod lines;
mod mantissa8;
mod minmax;
mod onebit;
mod pack;
mod random;
#[allow(unsafe_code)]
mod simd;
mod static8;
mod stats;
mod table;
mod tensor_scales;
mod terngrad;
mod threshold2;
mod trunc;
mod wire;

pub use info::{CodecInfo, MessageRange, info, message_range};
pub use kernel_info::KernelInfo;
pub use kernel_params::{
    FUSED_CODECS, KERNEL_CODECS, REFRESH_WORD, array_family, kernel_family, kernel_params,
};
pub(crate) use minmax::{decode_range, encode_range};
pub use random::RoundingRandom;
pub use stats::{abs_max, look};
pub use tensor_scales::TensorScales;
pub(crate) use trunc::{pack_upper, unpack_upper};
pub(crate) use wire::chunk_bytes;

use crate::cpu::Isa;
use crate::error::{Error, Result};
use crate::types::{CodecKind, CodecSpec, DType, ScaleRule, is_threshold};
use simd::Available;
use std::sync::Arc;

/// Facts about all codecs, in the order of [`CodecKind`]. Raw is not a codec and has no entry.
const TABLE: [CodecInfo; CodecKind::ALL.len() - 1] = [
    linear8::INFO,
    dynamic8::INFO,
    static8::INFO,
    mantissa8::INFO,
    cast_bf16::INFO,
    cast16::INFO,
    minmax::info::<1>(),
    minmax::info::<2>(),
    minmax::info::<4>(),
    minmax::info::<8>(),
    trunc::info::<8>(),
    trunc::info::<16>(),
    trunc::info::<24>(),
    fp8::info::<3>(),
    fp8::info::<2>(),
    terngrad::INFO,
    onebit::INFO,
    threshold2::INFO,
];

/// Whether encoding a partial sum adds a rounding error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reencode {
    /// Partial sums are encoded as exactly as contributions.
    Exact,
    /// Each encode of a partial sum adds its own rounding error.
    Lossy,
}

/// Statistics of the input of an encode.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EncodeStats {
    /// Count of finite elements beyond the largest representable value, which saturated.
    pub saturated: u64,
    /// Count of NaN and infinite elements.
    pub non_finite: u64,
    /// Largest magnitude among the finite elements.
    pub abs_max: f32,
    /// Sum of squares of the finite elements.
    pub sum_squares: f64,
}

impl EncodeStats {
    /// Merges the statistics of other elements into these.
    pub fn merge(&mut self, other: &EncodeStats) {
        self.saturated += other.saturated;
        self.non_finite += other.non_finite;
        self.abs_max = self.abs_max.max(other.abs_max);
        self.sum_squares += other.sum_squares;
    }
}

/// Bound of |decode(encode(x)) - x|, from which the error of a sum can be predicted. It is `of_scale` times
/// the largest magnitude of the block, plus `of_value` times |x|, plus `floor`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ErrorLaw {
    /// Factor by which the block's largest magnitude is multiplied.
    pub of_scale: f64,
    /// Factor by which |x| is multiplied.
    pub of_value: f64,
    /// Constant part of the bound.
    pub floor: f64,
    /// Magnitudes beyond this saturate, and the bound does not hold; infinite if none saturate.
    pub largest: f64,
}

impl ErrorLaw {
    /// Bound of a codec that is lossless.
    pub const EXACT: ErrorLaw = ErrorLaw {
        of_scale: 0.0,
        of_value: 0.0,
        floor: 0.0,
        largest: f64::INFINITY,
    };
}

/// How a zero of either sign is decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zero {
    /// A zero decodes to itself, with its sign.
    Signed,
    /// A zero of either sign decodes to +0.
    Positive,
    /// A zero decodes to +0 if all elements of its block are zero. In other blocks it may have the
    /// error of any element.
    Inexact,
}

/// Fixed properties of a codec, which tests, tools and GPUs read instead of matching on names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Description {
    /// Bits of one code.
    pub code_bits: usize,
    /// Count of fp32 numbers on the wire for each block; 0 for formats without blocks.
    pub block_numbers: usize,
    /// Whether a block's numbers depend only on its smallest and largest element, so that adding
    /// elements between them changes no other element. Also true for formats without blocks.
    pub fits_extremes: bool,
    /// Whether a non-finite element makes its whole block decode to NaN; otherwise only that
    /// element is affected.
    pub poisons_block: bool,
    /// How zeros are decoded.
    pub zero: Zero,
    /// Bound of the error of an element.
    pub errors: ErrorLaw,
}

/// A part of a chunk, from element `at` on. `at` must be a multiple of the codec's granule. So must the
/// length be, unless the span ends the chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Number of elements of the whole chunk.
    pub chunk: usize,
    /// Index, in the chunk, of the span's first element.
    pub at: usize,
    /// Random numbers of the chunk for stochastic rounding; decoding ignores them.
    pub random: RoundingRandom,
}

impl Span {
    /// Creates a span from element `at` on, with the default random numbers.
    pub fn new(chunk: usize, at: usize) -> Span {
        Span {
            chunk,
            at,
            random: RoundingRandom::default(),
        }
    }

    /// Creates a span of a whole chunk of `n` elements.
    pub fn whole(n: usize) -> Span {
        Span::new(n, 0)
    }

    /// Returns the span with `random` as its random numbers.
    pub fn drawing(self, random: RoundingRandom) -> Span {
        Span { random, ..self }
    }
}

/// An encoding of fp32 values. Implementations hold no mutable state, so threads can share a codec.
///
/// Methods that take a span panic if it breaks the contract of [`Span`], or if `wire` is shorter than
/// [`Codec::wire_bytes`] of the span's chunk. They also panic if a scale is passed to a codec that takes
/// none, or is missing for a codec that needs one. The engine checks all this before. The bytes of `wire`
/// never cause a panic.
pub trait Codec: Send + Sync + std::fmt::Debug {
    /// Returns the codec's name and parameters.
    fn spec(&self) -> CodecSpec;

    /// Returns the number of elements that must stay together; spans start at multiples of it.
    fn granule(&self) -> usize;

    /// Returns the number of bytes on the wire of a chunk of `n` elements.
    fn wire_bytes(&self, n: usize) -> usize;

    /// Returns the fixed properties of the codec.
    fn description(&self) -> Description;

    /// Returns whether encoding a partial sum loses precision.
    fn reencode(&self) -> Reencode;

    /// Returns a bound of |decode(encode(x)) - x| for a finite x that does not saturate, in a block
    /// whose largest finite magnitude is `abs_max`.
    fn error_bound(&self, x: f32, abs_max: f32) -> f32;

    /// Returns the codec for values that were elements of `dtype`, or will be: it makes no value infinite that
    /// the type holds. `None` if this codec has this property.
    fn for_elements(&self, _dtype: DType) -> Option<Arc<dyn Codec>> {
        None
    }

    /// Returns the limit of a codec of [`Codec::for_elements`]. Magnitudes above it are encoded as the limit if
    /// the type holds them: they would decode to infinity.
    fn element_limit(&self) -> Option<f32> {
        None
    }

    /// Encodes `src`, the elements of `span`, into `wire`, the bytes of the whole chunk.
    ///
    /// `scale` replaces the largest magnitude of the block; it is `Some` if and only if the codec has a
    /// [`crate::types::ScaleRule::Tensor`]. A block with a non-finite element decodes to NaN throughout. In
    /// formats without block numbers only that element decodes to NaN.
    ///
    /// Under a tensor scale the spans of a chunk must be encoded in order from the first. A span with a
    /// non-finite element makes the chunk decode to NaN, and so does a negative or non-finite scale. The span
    /// that ends the chunk zeroes the padding. Statistics of `src` are added to `stats`.
    fn encode(
        &self,
        span: Span,
        src: &[f32],
        scale: Option<f32>,
        wire: &mut [u8],
        stats: Option<&mut EncodeStats>,
    );

    /// Multiplies the numbers of the blocks of `len` elements of `span` by `factor`, so that the elements
    /// decode to `factor` times their values. Only for codecs with numbers.
    ///
    /// Error feedback damps encodes in this way; see [`feedback::Contraction`].
    fn damp(&self, span: Span, len: usize, factor: f32, wire: &mut [u8]) {
        let _ = (span, len, factor, wire);
    }

    /// Decodes the elements of `span` from the chunk `wire` into `dst`.
    fn decode(&self, span: Span, wire: &[u8], dst: &mut [f32]);

    /// Decodes the elements of `span` and adds them to `acc`. Formats with a scale use a fused multiply-add,
    /// so that the sum is rounded only once.
    fn decode_reduce(&self, span: Span, wire: &[u8], acc: &mut [f32]);
}

/// Creates the codec of a specification, for instruction set `isa`; `None` for raw, whose bytes the engine
/// moves itself.
///
/// # Errors
/// Invalid argument if a parameter is outside its range (a specification may come from a peer's signature
/// word). Unsupported if the machine lacks `isa`.
pub fn build(spec: CodecSpec, isa: Isa) -> Result<Option<Arc<dyn Codec>>> {
    check(spec)?;
    let isa = Available::new(isa)?;
    Ok(info(spec.kind).map(|info| (info.build)(spec, isa)))
}

/// Creates the codec of a specification for elements of `dtype`; see [`build`] and [`Codec::for_elements`].
///
/// # Errors
/// See [`build`].
pub fn build_for(spec: CodecSpec, dtype: DType, isa: Isa) -> Result<Option<Arc<dyn Codec>>> {
    let codec = build(spec, isa)?;
    Ok(codec.map(|codec| codec.for_elements(dtype).unwrap_or(codec)))
}

/// Checks parameters. The parser checks textual specifications, but a struct or a peer's signature
/// word may hold any value.
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
