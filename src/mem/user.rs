//! The user's input and output. They may be the same memory (in place), so the engine holds no
//! slice of either for longer than one step takes: it copies tiles in and out through the
//! first-level cache, or lends a chunk to a transport that copies it itself.

use crate::error::{Error, Result};
use crate::types::Element;
use std::marker::PhantomData;
use std::ops::Range;

/// The bytes of elements.
pub fn bytes_of<T: Element>(elements: &[T]) -> &[u8] {
    // SAFETY: `Element` is implemented for primitive numbers only, which have no padding.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

/// The bytes of elements, writable: every bit pattern is a number.
pub fn bytes_of_mut<T: Element>(elements: &mut [T]) -> &mut [u8] {
    // SAFETY: as for `bytes_of`; any bytes make valid elements.
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

// SAFETY: the pointers stand for borrows (see `new` and `from_raw`), which may move between
// threads like `&[u8]` and `&mut [u8]`.
unsafe impl Send for UserBuffers<'_> {}

impl<'a> UserBuffers<'a> {
    /// Separate buffers.
    pub fn new(input: &'a [u8], output: &'a mut [u8]) -> UserBuffers<'a> {
        UserBuffers {
            input: input.as_ptr(),
            input_bytes: input.len(),
            output: output.as_mut_ptr(),
            output_bytes: output.len(),
            borrow: PhantomData,
        }
    }

    /// Output only, or in place with the input `input_at` bytes into the output.
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

    /// Input and output anywhere in one buffer: a reduce_scatter in place, for instance, has its
    /// output within its input.
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

    /// Buffers of a C caller.
    ///
    /// # Safety
    /// `input` is readable for `input_bytes` and `output` writable for `output_bytes` until the
    /// value is dropped, and nobody else writes either. They may overlap.
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

    /// The input of one pair of buffers with the output of another: a rank's message to itself.
    pub fn joined(input: UserBuffers<'a>, output: UserBuffers<'a>) -> UserBuffers<'a> {
        UserBuffers {
            input: input.input,
            input_bytes: input.input_bytes,
            output: output.output,
            output_bytes: output.output_bytes,
            borrow: PhantomData,
        }
    }

    /// Bytes of the input.
    pub fn input_bytes(&self) -> usize {
        self.input_bytes
    }

    /// Bytes of the output.
    pub fn output_bytes(&self) -> usize {
        self.output_bytes
    }

    /// Address of the input, for overlap checks.
    pub fn input_address(&self) -> usize {
        self.input as usize
    }

    /// Address of the output, for overlap checks.
    pub fn output_address(&self) -> usize {
        self.output as usize
    }

    /// Copies input from byte `at` into `tile`.
    ///
    /// # Panics
    /// If that exceeds the input: geometry is computed against checked buffer sizes.
    #[inline]
    pub fn read_input(&self, at: usize, tile: &mut [u8]) {
        assert!(
            at <= self.input_bytes && tile.len() <= self.input_bytes - at,
            "input overrun"
        );
        // SAFETY: in bounds by the assertion; `tile` is private memory of the engine, so it does
        // not overlap the user's.
        unsafe {
            std::ptr::copy_nonoverlapping(self.input.add(at), tile.as_mut_ptr(), tile.len());
        }
    }

    /// Copies output from byte `at` into `tile`.
    ///
    /// # Panics
    /// If that exceeds the output.
    #[inline]
    pub fn read_output(&self, at: usize, tile: &mut [u8]) {
        assert!(
            at <= self.output_bytes && tile.len() <= self.output_bytes - at,
            "output overrun"
        );
        // SAFETY: as for `read_input`.
        unsafe {
            std::ptr::copy_nonoverlapping(self.output.add(at), tile.as_mut_ptr(), tile.len());
        }
    }

    /// Copies `tile` to the output at byte `at`.
    ///
    /// # Panics
    /// If that exceeds the output.
    #[inline]
    pub fn write_output(&mut self, at: usize, tile: &[u8]) {
        assert!(
            at <= self.output_bytes && tile.len() <= self.output_bytes - at,
            "output overrun"
        );
        // SAFETY: in bounds by the assertion; `tile` is private memory of the engine or a slot.
        unsafe {
            std::ptr::copy_nonoverlapping(tile.as_ptr(), self.output.add(at), tile.len());
        }
    }

    /// `bytes` of input at `at`.
    ///
    /// # Panics
    /// If that exceeds the input.
    pub fn input(&self, at: usize, bytes: usize) -> &[u8] {
        assert_within(at, bytes, self.input_bytes, "input");
        if bytes == 0 {
            // A C caller's empty buffer may be NULL, which no slice may be.
            return &[];
        }
        // SAFETY: in bounds by the assertion; nothing writes the user's memory while the slice
        // lives, since writing takes `&mut self`.
        unsafe { std::slice::from_raw_parts(self.input.add(at), bytes) }
    }

    /// `bytes` of output at `at`.
    ///
    /// # Panics
    /// If that exceeds the output.
    pub fn output(&self, at: usize, bytes: usize) -> &[u8] {
        assert_within(at, bytes, self.output_bytes, "output");
        if bytes == 0 {
            return &[];
        }
        // SAFETY: as for `input`.
        unsafe { std::slice::from_raw_parts(self.output.add(at), bytes) }
    }

    /// The same, for writing.
    ///
    /// # Panics
    /// If that exceeds the output.
    pub fn output_mut(&mut self, at: usize, bytes: usize) -> &mut [u8] {
        assert_within(at, bytes, self.output_bytes, "output");
        if bytes == 0 {
            return &mut [];
        }
        // SAFETY: in bounds by the assertion; no other slice of the user's memory, which input and
        // output may share, lives meanwhile: it would borrow `self`.
        unsafe { std::slice::from_raw_parts_mut(self.output.add(at), bytes) }
    }

    /// Lends `bytes` of input at `at` to `work`.
    ///
    /// # Panics
    /// If that exceeds the input.
    #[inline]
    pub fn lend_input(&self, at: usize, bytes: usize, work: impl FnOnce(&[u8])) {
        let input = self.input(at, bytes);
        if !input.is_empty() {
            work(input);
        }
    }

    /// Lends `bytes` of input at `from` and of output at `to` to `work`. Where both are the same
    /// memory it gets the output alone, which then holds the input.
    ///
    /// # Panics
    /// If either range exceeds its buffer, or if they overlap in part: a call in place never has
    /// that, see `comm::check`.
    #[inline]
    pub fn lend(
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
        let apart = (input as usize).abs_diff(output as usize);
        assert!(
            apart == 0 || apart >= bytes,
            "input and output overlap in part"
        );
        // SAFETY: in bounds by the assertions. The slices are disjoint, or only one is made.
        unsafe {
            let output = std::slice::from_raw_parts_mut(output, bytes);
            let input = (apart != 0).then(|| std::slice::from_raw_parts(input, bytes));
            work(input, output);
        }
    }

    /// Copies `bytes` of input at `from` to the output at `to`; nothing if they are the same.
    ///
    /// # Panics
    /// If either range exceeds its buffer.
    pub fn copy(&mut self, from: usize, to: usize, bytes: usize) {
        assert!(
            from <= self.input_bytes && bytes <= self.input_bytes - from,
            "input overrun"
        );
        assert!(
            to <= self.output_bytes && bytes <= self.output_bytes - to,
            "output overrun"
        );
        // SAFETY: in bounds by the assertions; `copy` allows overlap.
        unsafe {
            let (from, to) = (self.input.add(from), self.output.add(to));
            if !std::ptr::eq(from, to) {
                std::ptr::copy(from, to, bytes);
            }
        }
    }
}

/// Panics unless `bytes` at `at` lie within a buffer of `all`.
#[inline]
fn assert_within(at: usize, bytes: usize, all: usize, buffer: &str) {
    assert!(at <= all && bytes <= all - at, "{buffer} overrun");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_ranges_share_memory_and_stay_inside() {
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
}
