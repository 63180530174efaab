//! Aligned scratch memory that can be viewed as numbers of any element type.

use crate::types::Element;

/// Bytes of a cache line, which is also the size of the widest vector.
const LINE: usize = 64;

/// Unit of allocation, which aligns the tile.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; LINE]);

/// Scratch memory for elements of up to 8 bytes, 64-byte aligned, allocated once and reused.
///
/// A view shows the first elements of the tile as numbers of one type. Views of different types share bytes,
/// so a step that converts in place must read an element before it overwrites the element's bytes.
pub struct Tile {
    lines: Vec<Line>,
}

impl Tile {
    /// Creates a tile with room for `elements` elements of any type, all zero.
    pub fn new(elements: usize) -> Tile {
        Tile {
            lines: vec![Line([0; LINE]); (elements * size_of::<u64>()).div_ceil(LINE)],
        }
    }

    /// Returns the size in bytes: at least 8 per requested element.
    pub fn capacity(&self) -> usize {
        self.lines.len() * LINE
    }

    /// Returns the first `n` elements.
    ///
    /// # Panics
    /// If `n` exceeds the tile.
    #[inline]
    pub fn view<T: Element>(&self, n: usize) -> &[T] {
        self.check(n, size_of::<T>());
        // SAFETY: `check` keeps the view inside the lines, which are initialised and aligned for
        // every `Element`. An `Element` is a primitive number, so every byte pattern is valid.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), n) }
    }

    /// Returns the first `n` elements, writable.
    ///
    /// # Panics
    /// If `n` exceeds the tile.
    #[inline]
    pub fn view_mut<T: Element>(&mut self, n: usize) -> &mut [T] {
        self.check(n, size_of::<T>());
        // SAFETY: `check` keeps the view inside the lines, which are initialised and aligned for
        // every `Element`; every byte pattern is an `Element`. `&mut self` excludes other views.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), n) }
    }

    /// Returns the first `n` elements as fp32, on which codecs work.
    ///
    /// # Panics
    /// If `n` exceeds the tile.
    #[inline]
    pub fn f32(&self, n: usize) -> &[f32] {
        self.view(n)
    }

    /// Returns the first `n` elements as fp32, writable.
    ///
    /// # Panics
    /// If `n` exceeds the tile.
    #[inline]
    pub fn f32_mut(&mut self, n: usize) -> &mut [f32] {
        self.view_mut(n)
    }

    /// Returns the first `n` bytes.
    ///
    /// # Panics
    /// If `n` exceeds the tile.
    #[inline]
    pub fn bytes(&self, n: usize) -> &[u8] {
        self.view(n)
    }

    /// Returns the first `n` bytes, writable. If the accumulator is the element type itself
    /// ([`crate::types::DType::accumulator`]), copying elements here equals loading them.
    ///
    /// # Panics
    /// If `n` exceeds the tile.
    #[inline]
    pub fn bytes_mut(&mut self, n: usize) -> &mut [u8] {
        self.view_mut(n)
    }

    #[inline]
    fn check(&self, n: usize, size: usize) {
        assert!(
            n <= self.capacity() / size,
            "{n} elements of {size} bytes exceed a tile of {} bytes",
            self.capacity()
        );
    }
}

impl std::fmt::Debug for Tile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tile({} bytes)", self.capacity())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_are_aligned_and_share_bytes() {
        let mut tile = Tile::new(3);
        assert_eq!(tile.capacity(), 64);
        assert_eq!(tile.view::<u64>(3).as_ptr() as usize % 64, 0);
        tile.view_mut::<u64>(3)
            .copy_from_slice(&[0x0807060504030201, 0, u64::MAX]);
        assert_eq!(tile.bytes(9), [1, 2, 3, 4, 5, 6, 7, 8, 0]);
        tile.f32_mut(2)[1] = 1.0;
        assert_eq!(tile.view::<u64>(1), [0x3f80000004030201]);
        assert_eq!(Tile::new(0).bytes(0).len(), 0);
    }

    #[test]
    #[should_panic(expected = "9 elements of 8 bytes exceed a tile of 64 bytes")]
    fn view_beyond_the_tile_panics() {
        Tile::new(8).view::<f64>(9);
    }
}
