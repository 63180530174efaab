//! Divides a message into passes and chunks. The division follows from the call alone, so that all
//! ranks divide alike, whatever their number of cores or kind of memory.

use std::ops::Range;

/// The division of `count` elements into passes of `parts` chunks each.
///
/// `count` is the number of elements of the message for collectives whose chunks are parts of the
/// message. For collectives whose chunks are parts of blocks, it is the number of elements of one
/// rank's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    count: usize,
    parts: usize,
    chunk: usize,
    passes: usize,
}

impl Geometry {
    /// Divides `count` elements into as few passes as chunks of at most `chunk_max` elements allow.
    /// All chunks but the last have equal sizes and begin at multiples of `granule`, which divides
    /// `chunk_max`.
    pub fn new(count: usize, parts: usize, granule: usize, chunk_max: usize) -> Geometry {
        debug_assert!(granule > 0 && chunk_max >= granule && chunk_max.is_multiple_of(granule));
        let least = count.div_ceil(parts * chunk_max).max(1);
        let chunk = count
            .div_ceil(least * parts)
            .max(1)
            .next_multiple_of(granule);
        let passes = count.div_ceil(parts * chunk).max(1);
        Geometry {
            count,
            parts,
            chunk,
            passes,
        }
    }

    /// Returns the number of passes, at least 1: an empty message still sends its signature.
    pub fn passes(&self) -> usize {
        self.passes
    }

    /// Returns the largest number of elements of a chunk.
    pub fn chunk(&self) -> usize {
        self.chunk
    }

    /// Returns the range of elements of part `part` of pass `pass`; empty beyond the end of the
    /// message.
    #[inline]
    pub fn range(&self, pass: usize, part: usize) -> Range<usize> {
        let start = (pass * self.parts + part) * self.chunk;
        start.min(self.count)..(start + self.chunk).min(self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_tile_the_message() {
        for count in [0, 1, 31, 32, 33, 255, 1000, 4096, 100_003] {
            for parts in [1, 2, 3, 8] {
                for (granule, chunk_max) in [(1, 1), (16, 64), (256, 1024), (256, 256)] {
                    let geometry = Geometry::new(count, parts, granule, chunk_max);
                    let mut next = 0;
                    for pass in 0..geometry.passes() {
                        for part in 0..parts {
                            let range = geometry.range(pass, part);
                            assert_eq!(range.start, next);
                            assert!(range.start.is_multiple_of(granule) || range.is_empty());
                            assert!(range.len() <= chunk_max && range.len() <= geometry.chunk());
                            next = range.end;
                        }
                    }
                    assert_eq!(next, count);
                    assert!(geometry.chunk() <= chunk_max);
                }
            }
        }
    }
}
