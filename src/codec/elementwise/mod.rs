//! Implements codecs that encode each element by itself, without blocks and scales.
//!
//! An [`ElementFormat`] defines what a code means; [`Elementwise`] does all else. [`Table8`] is the format of
//! one-byte codecs with a table of magnitudes.

mod table8;
mod vector;

use super::pack::code_bytes;
use super::simd::{Available, launch};
use super::wire::{ChunkLayout, ends_chunk};
use super::{Codec, Description, EncodeStats, ErrorLaw, Reencode, Span, Zero};
use crate::types::{CodecSpec, DType};
use std::fmt::Debug;
use std::sync::Arc;
pub(super) use table8::{Table8, decimal, kernel_words};
pub(super) use vector::VectorElementFormat;
use vector::{DecodeElements, EncodeElements};

/// Defines what a code means.
pub(super) trait ElementFormat: Debug + Send + Sync + 'static {
    /// Bits of one code: 2, 8, 16 or 24.
    const BITS: usize;

    /// How a zero decodes: with its sign, as +0, or with an error.
    const ZERO: Zero;

    /// Returns the codec's name and parameters.
    fn spec(&self) -> CodecSpec;

    /// Returns the code of an element, which may be non-finite.
    fn encode(&self, x: f32) -> u32;

    /// Returns the value of a code, which may be one that the encoder never writes.
    fn decode(&self, code: u32) -> f32;

    /// Returns the largest finite value; finite elements beyond it saturate.
    fn largest(&self) -> f32;

    /// Returns a bound of the error at a finite x up to the largest value.
    fn error_bound(&self, x: f32) -> f32;

    /// Returns the bound of the error as a law; its `largest` is [`ElementFormat::largest`].
    fn errors(&self) -> ErrorLaw;
}

/// Codec of an [`ElementFormat`].
#[derive(Debug)]
pub(super) struct Elementwise<F> {
    format: Arc<F>,
    isa: Available,
    limit: Option<Limit>,
}

/// Magnitudes above `limit` and below `overflow` are encoded as `limit`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Limit {
    /// The largest magnitude whose code decodes to a number below `overflow`.
    limit: f32,
    /// The smallest magnitude that becomes infinite when it is rounded to the element type.
    overflow: f32,
}

impl<F: VectorElementFormat> Elementwise<F> {
    pub fn new(format: F, isa: Available) -> Elementwise<F> {
        Elementwise {
            format: Arc::new(format),
            isa,
            limit: None,
        }
    }

    /// Returns the limit for elements that become infinite from `overflow` on; `None` if no smaller magnitude
    /// decodes to `overflow` or more. Codes ascend with magnitudes, so the limit is found by bisection.
    fn limit(&self, overflow: f32) -> Option<Limit> {
        let fits = |bits: u32| {
            let code = self.format.encode(f32::from_bits(bits));
            self.format.decode(code) < overflow
        };
        let (mut low, mut high) = (0, overflow.to_bits() - 1);
        if fits(high) {
            return None;
        }
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if fits(middle) {
                low = middle;
            } else {
                high = middle;
            }
        }
        let limit = f32::from_bits(low);
        Some(Limit { limit, overflow })
    }

    fn layout(&self, n: usize) -> ChunkLayout {
        ChunkLayout::new(n, F::BITS, 0)
    }

    fn decode_span<const REDUCE: bool>(&self, span: Span, wire: &[u8], dst: &mut [f32]) {
        ends_chunk(span, dst.len(), self.granule());
        let (codes, _) = self.layout(span.chunk).split(wire);
        let decode = DecodeElements::<F, REDUCE> {
            format: &*self.format,
            codes: &codes[code_bytes(span.at, F::BITS)..code_bytes(span.at + dst.len(), F::BITS)],
            dst,
        };
        launch(self.isa, decode);
    }
}

impl<F: VectorElementFormat> Codec for Elementwise<F> {
    fn spec(&self) -> CodecSpec {
        self.format.spec()
    }

    /// Returns how many elements fill whole bytes of codes; spans start at multiples of it.
    fn granule(&self) -> usize {
        if F::BITS < 8 { 8 / F::BITS } else { 1 }
    }

    fn wire_bytes(&self, n: usize) -> usize {
        self.layout(n).bytes()
    }

    fn description(&self) -> Description {
        Description {
            code_bits: F::BITS,
            block_numbers: 0,
            fits_extremes: true,
            poisons_block: false,
            zero: F::ZERO,
            errors: self.format.errors(),
        }
    }

    fn reencode(&self) -> Reencode {
        Reencode::Lossy
    }

    fn error_bound(&self, x: f32, _: f32) -> f32 {
        match self.limit {
            Some(Limit { limit, overflow }) if x.abs() > limit && x.abs() < overflow => {
                (x.abs() - self.format.decode(self.format.encode(limit))).next_up()
            }
            _ => self.format.error_bound(x),
        }
    }

    fn for_elements(&self, dtype: DType) -> Option<Arc<dyn Codec>> {
        let overflow = match dtype {
            DType::F16 => 65_520.0,
            DType::BF16 => f32::from_bits(0x7f7f_8000),
            _ => return None,
        };
        Some(Arc::new(Elementwise {
            format: self.format.clone(),
            isa: self.isa,
            limit: Some(self.limit(overflow)?),
        }))
    }

    fn element_limit(&self) -> Option<f32> {
        self.limit.map(|limit| limit.limit)
    }

    fn encode(
        &self,
        span: Span,
        src: &[f32],
        scale: Option<f32>,
        wire: &mut [u8],
        stats: Option<&mut EncodeStats>,
    ) {
        assert_eq!(scale, None, "this format has no scale");
        let ends = ends_chunk(span, src.len(), self.granule());
        let (codes, _) = self.layout(span.chunk).split_mut(wire, ends);
        let bytes = code_bytes(span.at, F::BITS)..code_bytes(span.at + src.len(), F::BITS);
        let encode = EncodeElements {
            format: &*self.format,
            limit: self.limit,
            src,
            codes: &mut codes[bytes],
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
