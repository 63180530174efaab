//! Copies past the caches.

use std::marker::PhantomData;

/// Whether copies here store past the caches. Sanitizers do not see such stores, so they get plain ones
/// (`--cfg plain_copies`).
pub(crate) const CAN_STREAM: bool = cfg!(all(target_arch = "x86_64", not(miri), not(plain_copies)));

/// Copies `from` to `to` with stores past the caches, and makes them visible before later stores.
///
/// A store into a line that another core has read waits until that core has given the line up. Between cores without a
/// common cache this takes longer than a round trip through memory. Without [`CAN_STREAM`] the copy is a plain one.
///
/// # Panics
/// If the lengths differ.
pub(crate) fn copy_streaming(to: &mut [u8], from: &[u8]) {
    StreamFence::new().copy(to, from);
}

/// Copies of one thread past the caches. Other threads may see its later stores first until the value is dropped.
#[derive(Debug)]
pub(crate) struct StreamFence {
    /// A fence orders the stores of its own thread.
    stays: PhantomData<*const ()>,
}

impl StreamFence {
    pub fn new() -> StreamFence {
        StreamFence { stays: PhantomData }
    }

    /// Copies `from` to `to` with stores past the caches. The caller hands `to` to no other thread before it drops this
    /// value.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy(&self, to: &mut [u8], from: &[u8]) {
        assert!(to.len() == from.len(), "a copy of another length");
        #[cfg(all(target_arch = "x86_64", not(miri), not(plain_copies)))]
        {
            use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
            const LINE: usize = 64;
            // Lines are stored whole, so that each is one write of the memory.
            let begin = to.as_ptr().align_offset(LINE).min(to.len());
            let lines = (to.len() - begin) / LINE * LINE;
            to[..begin].copy_from_slice(&from[..begin]);
            for at in (begin..begin + lines).step_by(LINE) {
                // SAFETY: `at + LINE` does not exceed the equal lengths, and `to` is aligned to 16 bytes there. SSE2 is part
                // of x86-64. The drop of `self` fences, before any other thread can access `to`; this
                // thread's own accesses see its stores in the order of the program.
                unsafe {
                    let source = from.as_ptr().add(at).cast::<__m128i>();
                    let target = to.as_mut_ptr().add(at).cast::<__m128i>();
                    let (first, second) = (_mm_loadu_si128(source), _mm_loadu_si128(source.add(1)));
                    let third = _mm_loadu_si128(source.add(2));
                    let fourth = _mm_loadu_si128(source.add(3));
                    _mm_stream_si128(target, first);
                    _mm_stream_si128(target.add(1), second);
                    _mm_stream_si128(target.add(2), third);
                    _mm_stream_si128(target.add(3), fourth);
                }
            }
            to[begin + lines..].copy_from_slice(&from[begin + lines..]);
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri), not(plain_copies))))]
        to.copy_from_slice(from);
    }
}

impl Drop for StreamFence {
    fn drop(&mut self) {
        #[cfg(all(target_arch = "x86_64", not(miri), not(plain_copies)))]
        // SAFETY: SSE is part of x86-64.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_copied_and_no_other() {
        #[repr(align(64))]
        struct Lines([u8; 512]);
        let source: Vec<u8> = (0..600_u32).map(|at| (at % 251) as u8).collect();
        for bytes in [0, 1, 15, 16, 63, 64, 65, 127, 128, 200, 384, 511] {
            for (skip, begin) in [(0, 0), (1, 16), (7, 3), (16, 64), (0, 61)] {
                let bytes = bytes.min(512 - begin);
                let mut place = Lines([0xee; 512]);
                copy_streaming(
                    &mut place.0[begin..begin + bytes],
                    &source[skip..skip + bytes],
                );
                assert_eq!(place.0[begin..begin + bytes], source[skip..skip + bytes]);
                let outside = place.0[..begin].iter().chain(&place.0[begin + bytes..]);
                assert!(outside.into_iter().all(|&byte| byte == 0xee));
            }
        }
    }
}
