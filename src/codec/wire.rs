//! Where codes and scales of a chunk lie.

use super::Span;
use super::pack::code_bytes;

/// Codes start the chunk and scales follow at a multiple of this, so that both may be read with
/// aligned vectors on any device.
const ALIGN: usize = 16;

/// Bytes of a scale.
const SCALE: usize = 4;

/// The layout of one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// Bytes of codes.
    codes: usize,
    /// The same with padding: where the scales start.
    padded: usize,
    /// Number of scales.
    scales: usize,
}

impl Layout {
    /// `n` elements of `bits` code bits each and `scales` scales.
    pub fn new(n: usize, bits: usize, scales: usize) -> Layout {
        let codes = code_bytes(n, bits);
        Layout {
            codes,
            padded: codes.next_multiple_of(ALIGN),
            scales,
        }
    }

    /// Bytes in all.
    pub fn bytes(self) -> usize {
        self.padded + SCALE * self.scales
    }

    /// Codes and scale bytes of a chunk.
    ///
    /// # Panics
    /// If `wire` is too short for the chunk: geometry is computed from checked sizes.
    #[inline]
    pub fn split(self, wire: &[u8]) -> (&[u8], &[u8]) {
        assert!(wire.len() >= self.bytes(), "chunk beyond its wire bytes");
        let (codes, scales) = wire.split_at(self.padded);
        (&codes[..self.codes], scales)
    }

    /// The same for writing; zeroes the padding if the span ends the chunk.
    ///
    /// # Panics
    /// As [`Layout::split`].
    #[inline]
    pub fn split_mut(self, wire: &mut [u8], ends_chunk: bool) -> (&mut [u8], &mut [u8]) {
        assert!(wire.len() >= self.bytes(), "chunk beyond its wire bytes");
        let (codes, scales) = wire.split_at_mut(self.padded);
        let (codes, padding) = codes.split_at_mut(self.codes);
        if ends_chunk {
            padding.fill(0);
        }
        (codes, scales)
    }
}

/// Scale number `index`.
#[inline(always)]
pub(super) fn read_scale(scales: &[u8], index: usize) -> f32 {
    let at = SCALE * index;
    let bytes: [u8; SCALE] = scales[at..at + SCALE].try_into().unwrap();
    f32::from_le_bytes(bytes)
}

/// Sets scale number `index`.
#[inline(always)]
pub(super) fn write_scale(scales: &mut [u8], index: usize, scale: f32) {
    let at = SCALE * index;
    scales[at..at + SCALE].copy_from_slice(&scale.to_le_bytes());
}

/// Checks the contract of [`Span`] for `len` elements; true if they end the chunk.
///
/// # Panics
/// If the span leaves the chunk or breaks up a granule.
#[inline]
pub(super) fn ends_chunk(span: Span, len: usize, granule: usize) -> bool {
    assert!(
        span.at <= span.chunk && len <= span.chunk - span.at,
        "a span of {len} elements at {} leaves its chunk of {}",
        span.at,
        span.chunk
    );
    let ends = len == span.chunk - span.at;
    assert!(
        span.at.is_multiple_of(granule) && (ends || len.is_multiple_of(granule)),
        "a span of {len} elements at {} breaks a block of {granule}",
        span.at
    );
    ends
}
