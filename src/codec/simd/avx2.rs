//! Vectors of eight elements: AVX2 with FMA and F16C.

use super::{Lanes, four};
use std::arch::x86_64::*;

/// Token that proves that the machine has AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    /// Creates the token.
    ///
    /// # Safety
    /// The machine must have AVX2, FMA and F16C.
    #[inline(always)]
    pub unsafe fn new() -> Avx2 {
        Avx2(())
    }
}

/// Evaluates an expression of intrinsics that touch no memory.
macro_rules! op {
    ($body:expr) => {{
        // SAFETY: the token in `self` proves the instruction set; no memory is touched.
        unsafe { $body }
    }};
}

impl Lanes for Avx2 {
    const N: usize = 8;
    type F = __m256;
    type I = __m256i;
    type M = __m256i;
    type D = (__m256d, __m256d);
    type T16<'a> = [__m256; 2];
    type T128<'a> = &'a [f32; 128];

    #[inline(always)]
    fn load(self, from: &[f32]) -> __m256 {
        let from: &[f32; 8] = from.first_chunk().unwrap();
        // SAFETY: the token `self` proves the instruction set. `from` has 8 floats; the instruction
        // accepts any alignment.
        unsafe { _mm256_loadu_ps(from.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, v: __m256, to: &mut [f32]) {
        let to: &mut [f32; 8] = to.first_chunk_mut().unwrap();
        // SAFETY: the token `self` proves the instruction set. `to` has 8 floats; the instruction
        // accepts any alignment.
        unsafe { _mm256_storeu_ps(to.as_mut_ptr(), v) }
    }

    #[inline(always)]
    fn load_u8(self, from: &[u8]) -> __m256i {
        let from: &[u8; 8] = from.first_chunk().unwrap();
        // SAFETY: the token `self` proves the instruction set. `from` has 8 bytes; the instruction
        // accepts any alignment.
        unsafe { _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.as_ptr().cast())) }
    }

    #[inline(always)]
    fn store_u8(self, v: __m256i, to: &mut [u8]) {
        let to: &mut [u8; 8] = to.first_chunk_mut().unwrap();
        // SAFETY: the token `self` proves the instruction set. `to` has 8 bytes; the instruction
        // accepts any alignment.
        unsafe {
            let low = _mm256_castsi256_si128(v);
            let words = _mm_packs_epi32(low, _mm256_extracti128_si256::<1>(v));
            _mm_storel_epi64(to.as_mut_ptr().cast(), _mm_packus_epi16(words, words));
        }
    }

    #[inline(always)]
    fn pack(self, v: [__m256i; 4]) -> __m256i {
        op!(_mm256_packus_epi16(
            _mm256_packs_epi32(v[0], v[1]),
            _mm256_packs_epi32(v[2], v[3]),
        ))
    }

    #[inline(always)]
    fn with_signs(self, bytes: __m256i, of: [__m256; 4]) -> __m256i {
        let of = four!(i => self.bits(of[i]));
        op!({
            // Signed saturation keeps the sign.
            let signs = _mm256_packs_epi16(
                _mm256_packs_epi32(of[0], of[1]),
                _mm256_packs_epi32(of[2], of[3]),
            );
            let signs = _mm256_and_si256(signs, _mm256_set1_epi8(i8::MIN));
            let zero = _mm256_cmpeq_epi8(bytes, _mm256_setzero_si256());
            _mm256_or_si256(bytes, _mm256_andnot_si256(zero, signs))
        })
    }

    #[inline(always)]
    fn in_order(self, bytes: __m256i) -> __m256i {
        op!(_mm256_permutevar8x32_epi32(
            bytes,
            _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)
        ))
    }

    #[inline(always)]
    fn lookup_bytes(self, table: &[u8; 16], at: __m256i) -> __m256i {
        // SAFETY: the token `self` proves the instruction set. `table` has 16 bytes; the instruction
        // accepts any alignment.
        unsafe {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), at)
        }
    }

    #[inline(always)]
    fn min_bytes(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_min_epu8(a, b))
    }

    #[inline(always)]
    fn store_bytes(self, v: __m256i, to: &mut [u8]) {
        let to: &mut [u8; 32] = to.first_chunk_mut().unwrap();
        // SAFETY: the token `self` proves the instruction set. `to` has 32 bytes; the instruction
        // accepts any alignment.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), v) }
    }

    #[inline(always)]
    fn store_bits<const BITS: usize>(self, v: __m256i, to: &mut [u8]) {
        match BITS {
            1 => {
                let bits = op!(_mm256_movemask_epi8(_mm256_slli_epi16::<7>(v)));
                to[..4].copy_from_slice(&bits.to_le_bytes());
            }
            2 => {
                let words = op!({
                    let pairs = _mm256_maddubs_epi16(v, _mm256_set1_epi16(0x0401));
                    _mm256_madd_epi16(pairs, _mm256_set1_epi32(0x0010_0001))
                });
                self.store_u8(words, to);
            }
            _ => {
                let to: &mut [u8; 16] = to.first_chunk_mut().unwrap();
                // SAFETY: the token `self` proves the instruction set. `to` has 16 bytes; the
                // instruction accepts any alignment.
                unsafe {
                    let pairs = _mm256_maddubs_epi16(v, _mm256_set1_epi16(0x1001));
                    let low = _mm256_castsi256_si128(pairs);
                    let bytes = _mm_packus_epi16(low, _mm256_extracti128_si256::<1>(pairs));
                    _mm_storeu_si128(to.as_mut_ptr().cast(), bytes);
                }
            }
        }
    }

    #[inline(always)]
    fn load_u16(self, from: &[u8]) -> __m256i {
        let from: &[u8; 16] = from.first_chunk().unwrap();
        // SAFETY: the token `self` proves the instruction set. `from` has 16 bytes; the instruction
        // accepts any alignment.
        unsafe { _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().cast())) }
    }

    #[inline(always)]
    fn store_u16(self, v: __m256i, to: &mut [u8]) {
        let to: &mut [u8; 16] = to.first_chunk_mut().unwrap();
        // SAFETY: the token `self` proves the instruction set. `to` has 16 bytes; the instruction
        // accepts any alignment.
        unsafe {
            let low = _mm256_castsi256_si128(v);
            let words = _mm_packus_epi32(low, _mm256_extracti128_si256::<1>(v));
            _mm_storeu_si128(to.as_mut_ptr().cast(), words);
        }
    }

    #[inline(always)]
    fn load_u24(self, from: &[u8]) -> __m256i {
        let from: &[u8; 24] = from.first_chunk().unwrap();
        // SAFETY: the token `self` proves the instruction set. The halves are bytes 0 to 15 and 8
        // to 23 of 24; the instructions accept any alignment.
        unsafe {
            let low = _mm_loadu_si128(from.as_ptr().cast());
            let high = _mm_loadu_si128(from.as_ptr().add(8).cast());
            let halves = _mm256_set_m128i(high, low);
            // Elements 0 to 3 start at byte 0 of the low half, 4 to 7 at byte 4 of the high half.
            #[rustfmt::skip]
            let order = _mm256_setr_epi8(
                0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1,
                4, 5, 6, -1, 7, 8, 9, -1, 10, 11, 12, -1, 13, 14, 15, -1,
            );
            _mm256_shuffle_epi8(halves, order)
        }
    }

    #[inline(always)]
    fn store_u24(self, v: __m256i, to: &mut [u8]) {
        let to: &mut [u8; 24] = to.first_chunk_mut().unwrap();
        // SAFETY: the token `self` proves the instruction set. The stores write bytes 0 to 15 and
        // 16 to 23 of 24; they accept any alignment.
        unsafe {
            #[rustfmt::skip]
            let order = _mm256_setr_epi8(
                0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1,
                0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1,
            );
            // Moves three bytes of each 32-bit word together, in each 128-bit half.
            let words = _mm256_shuffle_epi8(v, order);
            let dense =
                _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 1, 2, 4, 5, 6, 3, 7));
            _mm_storeu_si128(to.as_mut_ptr().cast(), _mm256_castsi256_si128(dense));
            let rest = _mm256_extracti128_si256::<1>(dense);
            _mm_storel_epi64(to.as_mut_ptr().add(16).cast(), rest);
        }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        op!(_mm256_set1_ps(x))
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        op!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_sub_ps(a, b))
    }
    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_min_ps(a, b))
    }
    #[inline(always)]
    fn ceil(self, a: __m256) -> __m256 {
        op!(_mm256_ceil_ps(a))
    }
    #[inline(always)]
    fn gt(self, a: __m256, b: __m256) -> __m256i {
        op!(_mm256_castps_si256(_mm256_cmp_ps::<_CMP_GT_OQ>(a, b)))
    }
    #[inline(always)]
    fn all_gt(self, v: [__m256; 4], limit: __m256) -> bool {
        op!({
            let least = _mm256_min_ps(_mm256_min_ps(v[0], v[1]), _mm256_min_ps(v[2], v[3]));
            _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(least, limit)) == 0xff
        })
    }
    #[inline(always)]
    fn select(self, m: __m256i, yes: __m256, no: __m256) -> __m256 {
        op!(_mm256_blendv_ps(no, yes, _mm256_castsi256_ps(m)))
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> __m256i {
        op!(_mm256_set1_epi32(x))
    }
    #[inline(always)]
    fn and(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_and_si256(a, b))
    }
    #[inline(always)]
    fn or(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_or_si256(a, b))
    }
    #[inline(always)]
    fn xor(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_xor_si256(a, b))
    }
    #[inline(always)]
    fn mul_i(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_mullo_epi32(a, b))
    }
    #[inline(always)]
    fn count(self) -> __m256i {
        op!(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
    }
    #[inline(always)]
    fn add_i(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_add_epi32(a, b))
    }
    #[inline(always)]
    fn sub_i(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_sub_epi32(a, b))
    }
    #[inline(always)]
    fn max_i(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_max_epi32(a, b))
    }
    #[inline(always)]
    fn min_i(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_min_epi32(a, b))
    }
    #[inline(always)]
    fn gt_i(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_cmpgt_epi32(a, b))
    }
    #[inline(always)]
    fn increment(self, m: __m256i, a: __m256i) -> __m256i {
        op!(_mm256_sub_epi32(a, m))
    }
    #[inline(always)]
    fn subs_u16(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_subs_epu16(a, b))
    }
    #[inline(always)]
    fn mul_halves(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_madd_epi16(a, b))
    }
    #[inline(always)]
    fn any_low_half_below(self, v: [__m256i; 4], limit: i32) -> bool {
        op!({
            let least =
                _mm256_min_epu16(_mm256_min_epu16(v[0], v[1]), _mm256_min_epu16(v[2], v[3]));
            // The high halves become the largest number.
            let least = _mm256_or_si256(least, _mm256_set1_epi32(0xffff_0000u32 as i32));
            let last = _mm256_set1_epi16(limit as i16 - 1);
            let is_below = _mm256_cmpeq_epi16(_mm256_min_epu16(least, last), least);
            _mm256_movemask_epi8(is_below) != 0
        })
    }
    #[inline(always)]
    fn any(self, m: __m256i) -> bool {
        op!(_mm256_movemask_epi8(m) != 0)
    }
    #[inline(always)]
    fn eq_i(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_cmpeq_epi32(a, b))
    }
    #[inline(always)]
    fn select_i(self, m: __m256i, yes: __m256i, no: __m256i) -> __m256i {
        op!(_mm256_blendv_epi8(no, yes, m))
    }
    #[inline(always)]
    fn shl<const S: u32>(self, a: __m256i) -> __m256i {
        op!(_mm256_sll_epi32(a, _mm_cvtsi32_si128(S as i32)))
    }
    #[inline(always)]
    fn shr<const S: u32>(self, a: __m256i) -> __m256i {
        op!(_mm256_srl_epi32(a, _mm_cvtsi32_si128(S as i32)))
    }

    #[inline(always)]
    fn bits(self, a: __m256) -> __m256i {
        op!(_mm256_castps_si256(a))
    }
    #[inline(always)]
    fn float(self, a: __m256i) -> __m256 {
        op!(_mm256_castsi256_ps(a))
    }
    #[inline(always)]
    fn truncate(self, a: __m256) -> __m256i {
        op!(_mm256_cvttps_epi32(a))
    }
    #[inline(always)]
    fn convert(self, a: __m256i) -> __m256 {
        op!(_mm256_cvtepi32_ps(a))
    }
    #[inline(always)]
    fn narrow_f16(self, a: __m256) -> __m256i {
        op!(_mm256_cvtepu16_epi32(_mm256_cvtps_ph::<
            _MM_FROUND_TO_NEAREST_INT,
        >(a)))
    }
    #[inline(always)]
    fn widen_f16(self, a: __m256i) -> __m256 {
        op!({
            let low = _mm256_castsi256_si128(a);
            _mm256_cvtph_ps(_mm_packus_epi32(low, _mm256_extracti128_si256::<1>(a)))
        })
    }

    #[inline(always)]
    fn table16(self, table: &[f32; 16]) -> [__m256; 2] {
        [self.load(table), self.load(&table[8..])]
    }
    #[inline(always)]
    fn table128(self, table: &[f32; 128]) -> &[f32; 128] {
        table
    }
    #[inline(always)]
    fn lookup16(self, table: [__m256; 2], at: __m256i) -> __m256 {
        // A permutation reads bits 0 to 2 of the index.
        op!({
            let low = _mm256_permutevar8x32_ps(table[0], at);
            let high = _mm256_permutevar8x32_ps(table[1], at);
            let is_upper = _mm256_cmpgt_epi32(at, _mm256_set1_epi32(7));
            _mm256_blendv_ps(low, high, _mm256_castsi256_ps(is_upper))
        })
    }
    #[inline(always)]
    fn lookup_upper(self, table: [__m256; 2], at: __m256i) -> __m256 {
        op!(_mm256_permutevar8x32_ps(table[1], at))
    }
    #[inline(always)]
    fn lookup128(self, table: &[f32; 128], at: __m256i) -> __m256 {
        lookup(table, at)
    }

    #[inline(always)]
    fn gather(self, table: &[i32], at: __m256i) -> __m256i {
        let last = last_index(table);
        // SAFETY: the token `self` proves the instruction set. As an unsigned number, `min_epu32`
        // limits each index to the last entry of `table`.
        unsafe {
            let at = _mm256_min_epu32(at, _mm256_set1_epi32(last));
            _mm256_i32gather_epi32::<4>(table.as_ptr(), at)
        }
    }

    #[inline(always)]
    fn reduce_max(self, a: __m256i) -> i32 {
        elements(a).into_iter().fold(i32::MIN, i32::max)
    }

    #[inline(always)]
    fn reduce_sum(self, a: __m256i) -> u64 {
        elements(a).into_iter().map(|x| x as u64).sum()
    }

    #[inline(always)]
    fn zero_sum(self) -> (__m256d, __m256d) {
        op!((_mm256_setzero_pd(), _mm256_setzero_pd()))
    }

    #[inline(always)]
    fn add_squares(self, sum: (__m256d, __m256d), a: __m256) -> (__m256d, __m256d) {
        op!({
            let low = _mm256_cvtps_pd(_mm256_castps256_ps128(a));
            let high = _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(a));
            (
                _mm256_fmadd_pd(low, low, sum.0),
                _mm256_fmadd_pd(high, high, sum.1),
            )
        })
    }

    #[inline(always)]
    fn add_by_sign(
        self,
        above: (__m256d, __m256d),
        below: (__m256d, __m256d),
        a: __m256,
    ) -> ((__m256d, __m256d), (__m256d, __m256d)) {
        // A sum starts at +0, which neither zero changes. The second operand is returned if it is NaN.
        op!({
            let zero = _mm256_setzero_pd();
            let low = _mm256_cvtps_pd(_mm256_castps256_ps128(a));
            let high = _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(a));
            (
                (
                    _mm256_add_pd(above.0, _mm256_max_pd(zero, low)),
                    _mm256_add_pd(above.1, _mm256_max_pd(zero, high)),
                ),
                (
                    _mm256_add_pd(below.0, _mm256_min_pd(zero, low)),
                    _mm256_add_pd(below.1, _mm256_min_pd(zero, high)),
                ),
            )
        })
    }

    #[inline(always)]
    fn sums(self, sum: (__m256d, __m256d), to: &mut [f64]) {
        let to: &mut [f64; 8] = to.first_chunk_mut().unwrap();
        // SAFETY: the token `self` proves the instruction set. `to` has 8 doubles; the instruction
        // accepts any alignment.
        unsafe {
            _mm256_storeu_pd(to.as_mut_ptr(), sum.0);
            _mm256_storeu_pd(to.as_mut_ptr().add(4), sum.1);
        }
    }

    #[inline(always)]
    fn total(self, sum: (__m256d, __m256d)) -> f64 {
        let mut parts = [0.0; 4];
        // SAFETY: the token `self` proves the instruction set. `parts` has 4 doubles; the
        // instruction accepts any alignment.
        unsafe { _mm256_storeu_pd(parts.as_mut_ptr(), _mm256_add_pd(sum.0, sum.1)) };
        parts.iter().sum()
    }
}

/// Returns the table entries at the low bits of the indexes `at`; the table's length is a power of
/// two.
#[inline(always)]
fn lookup<const LEN: usize>(table: &[f32; LEN], at: __m256i) -> __m256 {
    const { assert!(LEN.is_power_of_two()) };
    // SAFETY: callers hold an `Avx2` token, which proves the instruction set; the mask keeps the index
    // below LEN.
    unsafe {
        let at = _mm256_and_si256(at, _mm256_set1_epi32(LEN as i32 - 1));
        _mm256_i32gather_ps::<4>(table.as_ptr(), at)
    }
}

/// Returns the index of the table's last entry, to which `gather` limits indexes.
///
/// # Panics
/// If the table is empty or has more than 2^20 entries.
#[inline(always)]
pub(super) fn last_index(table: &[i32]) -> i32 {
    assert!(!table.is_empty() && table.len() <= 1 << 20);
    table.len() as i32 - 1
}

#[inline(always)]
fn elements(a: __m256i) -> [i32; 8] {
    let mut elements = [0; 8];
    // SAFETY: callers hold an `Avx2` token, which proves the instruction set; `elements` has 32 bytes.
    unsafe { _mm256_storeu_si256(elements.as_mut_ptr().cast(), a) };
    elements
}
