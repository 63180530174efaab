//! Layout of the codes and numbers of a chunk on the wire.

use super::Span;
use super::pack::code_bytes;

/// The numbers of a chunk start at a multiple of this many bytes, so that all devices can use aligned vector
/// loads.
const ALIGN: usize = 16;

/// Bytes of one number, which is fp32.
const NUMBER: usize = 4;

/// Layout of a chunk: the codes of all elements, padding, then the numbers of all blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChunkLayout {
    /// Bytes of all codes.
    codes: usize,
    /// Bytes of all codes and the padding, which is the offset of the numbers.
    padded: usize,
    /// Count of all numbers.
    numbers: usize,
}

impl ChunkLayout {
    /// Creates the layout of a chunk with `n` elements of `bits` code bits each, and `numbers`
    /// numbers.
    pub fn new(n: usize, bits: usize, numbers: usize) -> ChunkLayout {
        let codes = code_bytes(n, bits);
        ChunkLayout {
            codes,
            padded: codes.next_multiple_of(ALIGN),
            numbers,
        }
    }

    /// Returns the total bytes of the chunk.
    pub fn bytes(self) -> usize {
        self.padded + NUMBER * self.numbers
    }

    /// Splits the bytes of a chunk into codes and numbers.
    ///
    /// # Panics
    /// If `wire` is too short for the chunk. Callers compute both from checked sizes.
    #[inline]
    pub fn split(self, wire: &[u8]) -> (&[u8], &[u8]) {
        assert!(wire.len() >= self.bytes(), "chunk beyond its wire bytes");
        let (codes, numbers) = wire.split_at(self.padded);
        (&codes[..self.codes], numbers)
    }

    /// Splits the bytes of a chunk for writing, and zeroes the padding if `ends_chunk`.
    ///
    /// # Panics
    /// As [`ChunkLayout::split`].
    #[inline]
    pub fn split_mut(self, wire: &mut [u8], ends_chunk: bool) -> (&mut [u8], &mut [u8]) {
        assert!(wire.len() >= self.bytes(), "chunk beyond its wire bytes");
        let (codes, numbers) = wire.split_at_mut(self.padded);
        let (codes, padding) = codes.split_at_mut(self.codes);
        if ends_chunk {
            padding.fill(0);
        }
        (codes, numbers)
    }
}

/// Returns the bytes of a chunk with `n` elements of `bits` code bits each, and `numbers` numbers.
pub fn chunk_bytes(n: usize, bits: usize, numbers: usize) -> usize {
    ChunkLayout::new(n, bits, numbers).bytes()
}

/// Reads the number at index `index`.
#[inline(always)]
pub(super) fn read_number(numbers: &[u8], index: usize) -> f32 {
    let at = NUMBER * index;
    let bytes: [u8; NUMBER] = numbers[at..at + NUMBER].try_into().unwrap();
    f32::from_le_bytes(bytes)
}

/// Writes the number at index `index`.
#[inline(always)]
pub(super) fn write_number(numbers: &mut [u8], index: usize, number: f32) {
    let at = NUMBER * index;
    numbers[at..at + NUMBER].copy_from_slice(&number.to_le_bytes());
}

/// Checks the contract of [`Span`] for `len` elements, and returns whether the span ends the chunk.
///
/// # Panics
/// If the span leaves the chunk or divides a granule.
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
