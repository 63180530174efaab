//! Copies past the caches.

/// Whether [`copy_streaming`] stores past the caches. Sanitizers do not see such stores, so they get plain ones
/// (`--cfg plain_copies`).
pub(crate) const CAN_STREAM: bool = cfg!(all(target_arch = "x86_64", not(miri), not(plain_copies)));

/// Copies `from` to `to` with stores past the caches, and makes them visible before later stores. `to` is aligned to 16
/// bytes.
///
/// A store into a line that another core has read waits until that core has given the line up. Between cores without a
/// common cache this takes longer than a round trip through memory. Without [`CAN_STREAM`] the copy is a plain one.
///
/// # Panics
/// If the lengths differ, or `to` is not aligned.
pub(crate) fn copy_streaming(to: &mut [u8], from: &[u8]) {
    assert!(to.len() == from.len(), "a copy of another length");
    assert!(
        to.as_ptr().addr().is_multiple_of(16),
        "unaligned stores past the caches"
    );
    #[cfg(all(target_arch = "x86_64", not(miri), not(plain_copies)))]
    {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
        const LINE: usize = 64;
        let lines = from.len() / LINE * LINE;
        for at in (0..lines).step_by(LINE) {
            // SAFETY: `at + LINE` does not exceed the equal lengths, and `to` is aligned to 16 bytes. SSE2 is part of
            // x86-64.
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
        to[lines..].copy_from_slice(&from[lines..]);
        // SAFETY: SSE is part of x86-64.
        unsafe { _mm_sfence() };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri), not(plain_copies))))]
    to.copy_from_slice(from);
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
            for (skip, begin) in [(0, 0), (1, 16), (7, 0), (16, 64)] {
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

    #[test]
    #[should_panic(expected = "unaligned")]
    fn unaligned_place_panics() {
        let mut place = [0_u128; 4];
        // SAFETY: the bytes of the numbers, for which any bytes are a value.
        let bytes = unsafe { std::slice::from_raw_parts_mut(place.as_mut_ptr().cast::<u8>(), 64) };
        copy_streaming(&mut bytes[1..33], &[0; 32]);
    }
}
