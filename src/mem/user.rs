//! The user's input and output in host memory. They may be the same memory (in place), so the engine holds a
//! slice of either for one step at most. It copies tiles through the first-level cache, or lends a chunk to
//! a transport that copies it itself.

use crate::error::{Error, Result};
use crate::types::Element;
use std::marker::PhantomData;
use std::ops::Range;

/// Returns the memory of `elements` as bytes.
pub fn bytes_of<T: Element>(elements: &[T]) -> &[u8] {
    // SAFETY: `Element` is implemented for numbers only, which have no padding: primitive ones, and `half`'s, which are
    // transparent over `u16`.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

/// Returns the memory of `elements` as bytes for writing: every bit pattern is a number.
pub fn bytes_of_mut<T: Element>(elements: &mut [T]) -> &mut [u8] {
    // SAFETY: `Element` is implemented for numbers only, which have no padding and for which any bytes are a
    // value. The types of `half` are transparent over `u16`.
    unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), size_of_val(elements)) }
}

/// Input and output of one call, in host memory.
#[derive(Debug)]
pub struct UserBuffers<'a> {
    input: *const u8,
    input_bytes: usize,
    output: *mut u8,
    output_bytes: usize,
    borrow: PhantomData<&'a mut [u8]>,
}

// SAFETY: the pointers come from borrows, or from `from_raw` under its contract. Like `&[u8]` and `&mut [u8]`
// they may move between threads.
unsafe impl Send for UserBuffers<'_> {}

impl<'a> UserBuffers<'a> {
    /// Makes buffers whose input and output are separate memory.
    pub fn new(input: &'a [u8], output: &'a mut [u8]) -> UserBuffers<'a> {
        UserBuffers {
            input: input.as_ptr(),
            input_bytes: input.len(),
            output: output.as_mut_ptr(),
            output_bytes: output.len(),
            borrow: PhantomData,
        }
    }

    /// Makes in-place buffers: the input begins `input_at` bytes into the output. An empty input is allowed.
    ///
    /// # Errors
    /// Invalid argument if the input does not lie within the output.
    pub fn in_place(
        output: &'a mut [u8],
        input_at: usize,
        input_bytes: usize,
    ) -> Result<UserBuffers<'a>> {
        if input_at
            .checked_add(input_bytes)
            .is_none_or(|end| end > output.len())
        {
            return Err(Error::invalid_argument(format!(
                "the in-place input, {input_bytes} bytes at {input_at}, exceeds the buffer of {}",
                output.len()
            )));
        }
        let start = output.as_mut_ptr();
        Ok(UserBuffers {
            input: start.wrapping_add(input_at),
            input_bytes,
            output: start,
            output_bytes: output.len(),
            borrow: PhantomData,
        })
    }

    /// Makes buffers anywhere in one piece of memory. An in-place reduce_scatter has its output within its input.
    ///
    /// # Errors
    /// Invalid argument if a range does not lie within the buffer.
    pub fn overlapping(
        buffer: &'a mut [u8],
        input: Range<usize>,
        output: Range<usize>,
    ) -> Result<UserBuffers<'a>> {
        for (name, range) in [("input", &input), ("output", &output)] {
            if range.start > range.end || range.end > buffer.len() {
                return Err(Error::invalid_argument(format!(
                    "the in-place {name}, bytes {} to {}, exceeds the buffer of {}",
                    range.start,
                    range.end,
                    buffer.len()
                )));
            }
        }
        let start = buffer.as_mut_ptr();
        Ok(UserBuffers {
            input: start.wrapping_add(input.start),
            input_bytes: input.len(),
            output: start.wrapping_add(output.start),
            output_bytes: output.len(),
            borrow: PhantomData,
        })
    }

    /// Makes the buffers of a C caller.
    ///
    /// # Safety
    /// `input` is readable for `input_bytes` and `output` writable for `output_bytes` until the value is
    /// dropped, and no other code writes either. They may overlap.
    pub unsafe fn from_raw(
        input: *const u8,
        input_bytes: usize,
        output: *mut u8,
        output_bytes: usize,
    ) -> UserBuffers<'a> {
        UserBuffers {
            input,
            input_bytes,
            output,
            output_bytes,
            borrow: PhantomData,
        }
    }

    /// Combines the input of one call with the output of another, for a rank's message to itself.
    pub(crate) fn joined(input: UserBuffers<'a>, output: UserBuffers<'a>) -> UserBuffers<'a> {
        UserBuffers {
            input: input.input,
            input_bytes: input.input_bytes,
            output: output.output,
            output_bytes: output.output_bytes,
            borrow: PhantomData,
        }
    }

    /// Returns the bytes of the input.
    pub fn input_bytes(&self) -> usize {
        self.input_bytes
    }

    /// Returns the bytes of the output.
    pub fn output_bytes(&self) -> usize {
        self.output_bytes
    }

    /// Returns whether no byte belongs to both input and output.
    pub(crate) fn are_apart(&self) -> bool {
        let (input, output) = (self.input as usize, self.output as usize);
        self.input_bytes == 0
            || self.output_bytes == 0
            || input + self.input_bytes <= output
            || output + self.output_bytes <= input
    }

    /// Returns the address of the input, for overlap checks.
    pub(crate) fn input_address(&self) -> usize {
        self.input as usize
    }

    /// Returns the address of the output, for overlap checks.
    pub(crate) fn output_address(&self) -> usize {
        self.output as usize
    }

    /// Copies input from byte `at` into `tile`.
    ///
    /// # Panics
    /// If the range exceeds the input; the geometry was computed for checked buffer sizes.
    #[inline]
    pub fn read_input(&self, at: usize, tile: &mut [u8]) {
        assert!(
            at <= self.input_bytes && tile.len() <= self.input_bytes - at,
            "input overrun"
        );
        // SAFETY: the assertion checks bounds; `tile` is the engine's own memory, which cannot overlap the
        // user's memory.
        unsafe {
            std::ptr::copy_nonoverlapping(self.input.add(at), tile.as_mut_ptr(), tile.len());
        }
    }

    /// Copies output from byte `at` into `tile`.
    ///
    /// # Panics
    /// If the range exceeds the output.
    #[inline]
    pub(crate) fn read_output(&self, at: usize, tile: &mut [u8]) {
        assert!(
            at <= self.output_bytes && tile.len() <= self.output_bytes - at,
            "output overrun"
        );
        // SAFETY: the assertion checks bounds; `tile` is the engine's own memory, which cannot overlap the
        // user's memory.
        unsafe {
            std::ptr::copy_nonoverlapping(self.output.add(at), tile.as_mut_ptr(), tile.len());
        }
    }

    /// Copies `tile` to the output at byte `at`.
    ///
    /// # Panics
    /// If the range exceeds the output.
    #[inline]
    pub fn write_output(&mut self, at: usize, tile: &[u8]) {
        assert!(
            at <= self.output_bytes && tile.len() <= self.output_bytes - at,
            "output overrun"
        );
        // SAFETY: the assertion checks bounds; `tile` is the engine's own memory or a slot.
        unsafe {
            std::ptr::copy_nonoverlapping(tile.as_ptr(), self.output.add(at), tile.len());
        }
    }

    /// Returns `bytes` bytes of the input from byte `at`.
    ///
    /// # Panics
    /// If the range exceeds the input.
    pub(crate) fn input(&self, at: usize, bytes: usize) -> &[u8] {
        assert_within(at, bytes, self.input_bytes, "input");
        if bytes == 0 {
            // A C caller's empty buffer may be NULL, which no slice may be.
            return &[];
        }
        // SAFETY: the assertion checks bounds. Writing the user's memory takes `&mut self`, which is excluded
        // while the slice is borrowed.
        unsafe { std::slice::from_raw_parts(self.input.add(at), bytes) }
    }

    /// Returns `bytes` bytes of the output from byte `at`.
    ///
    /// # Panics
    /// If the range exceeds the output.
    pub(crate) fn output(&self, at: usize, bytes: usize) -> &[u8] {
        assert_within(at, bytes, self.output_bytes, "output");
        if bytes == 0 {
            return &[];
        }
        // SAFETY: the assertion checks bounds. Writing the user's memory takes `&mut self`, which is excluded
        // while the slice is borrowed.
        unsafe { std::slice::from_raw_parts(self.output.add(at), bytes) }
    }

    /// Returns `bytes` bytes of the output from byte `at`, for writing.
    ///
    /// # Panics
    /// If the range exceeds the output.
    pub(crate) fn output_mut(&mut self, at: usize, bytes: usize) -> &mut [u8] {
        assert_within(at, bytes, self.output_bytes, "output");
        if bytes == 0 {
            return &mut [];
        }
        // SAFETY: the assertion checks bounds. The slice borrows `self` mutably, which excludes any other slice
        // of the user's memory.
        unsafe { std::slice::from_raw_parts_mut(self.output.add(at), bytes) }
    }

    /// Lends `bytes` bytes of the input from byte `at` to `work`.
    ///
    /// # Panics
    /// If the range exceeds the input.
    #[inline]
    pub(crate) fn lend_input(&self, at: usize, bytes: usize, work: impl FnOnce(&[u8])) {
        let input = self.input(at, bytes);
        if !input.is_empty() {
            work(input);
        }
    }

    /// Lends `bytes` bytes of the input from byte `from`, and of the output from byte `to`, to `work`. If
    /// both ranges are the same memory, `work` gets only the output, which holds the input.
    ///
    /// # Panics
    /// If either range exceeds its buffer, or if they overlap in part, which `comm::check` excludes.
    #[inline]
    pub(crate) fn lend(
        &mut self,
        from: usize,
        to: usize,
        bytes: usize,
        work: impl FnOnce(Option<&[u8]>, &mut [u8]),
    ) {
        assert!(
            from <= self.input_bytes && bytes <= self.input_bytes - from,
            "input overrun"
        );
        assert!(
            to <= self.output_bytes && bytes <= self.output_bytes - to,
            "output overrun"
        );
        if bytes == 0 {
            return;
        }
        let (input, output) = (self.input.wrapping_add(from), self.output.wrapping_add(to));
        let apart = self.assert_apart_or_same(from, to, bytes);
        // SAFETY: the assertions check bounds. The slices are disjoint, or only the output's slice is made.
        unsafe {
            let output = std::slice::from_raw_parts_mut(output, bytes);
            let input = (apart != 0).then(|| std::slice::from_raw_parts(input, bytes));
            work(input, output);
        }
    }

    /// Returns by how many bytes `bytes` bytes of the input from byte `from` are apart from those of the output at byte
    /// `to`; 0 if they are the same memory.
    ///
    /// # Panics
    /// If they overlap in part.
    #[inline]
    pub(crate) fn assert_apart_or_same(&self, from: usize, to: usize, bytes: usize) -> usize {
        let input = self.input.wrapping_add(from) as usize;
        let apart = input.abs_diff(self.output.wrapping_add(to) as usize);
        assert!(
            apart == 0 || apart >= bytes,
            "input and output overlap in part"
        );
        apart
    }

    /// Copies `bytes` bytes of the input from byte `from` to the output at byte `to`, unless both
    /// are the same memory.
    ///
    /// # Panics
    /// If either range exceeds its buffer.
    pub(crate) fn copy(&mut self, from: usize, to: usize, bytes: usize) {
        assert!(
            from <= self.input_bytes && bytes <= self.input_bytes - from,
            "input overrun"
        );
        assert!(
            to <= self.output_bytes && bytes <= self.output_bytes - to,
            "output overrun"
        );
        // SAFETY: the assertions check bounds; `copy` allows overlap.
        unsafe {
            let (from, to) = (self.input.add(from), self.output.add(to));
            if !std::ptr::eq(from, to) {
                std::ptr::copy(from, to, bytes);
            }
        }
    }
}

/// Panics unless `bytes` bytes from byte `at` lie within a buffer of `all` bytes.
#[inline]
fn assert_within(at: usize, bytes: usize, all: usize, buffer: &str) {
    assert!(at <= all && bytes <= all - at, "{buffer} overrun");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_buffers_share_memory_and_stay_inside() {
        let mut bytes = *b"abcdef";
        let mut buffers = UserBuffers::overlapping(&mut bytes, 0..6, 4..6).unwrap();
        assert_eq!((buffers.input_bytes(), buffers.output_bytes()), (6, 2));
        buffers.copy(1, 0, 2);
        let mut tile = [0; 6];
        buffers.read_input(0, &mut tile);
        assert_eq!(&tile, b"abcdbc");
        for (input, output) in [(0..7, 0..6), (0..6, 5..7), (7..7, 0..0)] {
            assert!(UserBuffers::overlapping(&mut bytes, input, output).is_err());
        }
    }

    /// AddressSanitizer must find the byte behind the program's buffer.
    #[test]
    #[ignore = "a planted defect, which scripts/sanitize --self-test runs"]
    fn planted_overflow_is_found() {
        let (input, mut output) = (vec![1_u8; 64], vec![0_u8; 64]);
        // SAFETY: none, the input ends one byte earlier.
        let buffers = unsafe { UserBuffers::from_raw(input.as_ptr(), 65, output.as_mut_ptr(), 64) };
        let mut tile = [0; 65];
        buffers.read_input(0, &mut tile);
        assert_eq!(std::hint::black_box(tile)[0], 1);
    }

    /// LeakSanitizer must find the memory, whose only pointer is lost.
    #[test]
    #[ignore = "a planted defect, which scripts/sanitize --self-test runs"]
    fn planted_leak_is_found() {
        for size in 1000..1010 {
            std::mem::forget(std::hint::black_box(vec![1_u8; size]));
        }
    }
}
