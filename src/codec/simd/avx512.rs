//! Vectors of sixteen elements: AVX-512 F, BW, DQ and VL.

use super::avx2::last_index;
use super::{Lanes, four};
use std::arch::x86_64::*;

/// Token that proves that the machine has AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    /// Creates the token.
    ///
    /// # Safety
    /// The machine must have AVX-512 F, BW, DQ and VL.
    #[inline(always)]
    pub unsafe fn new() -> Avx512 {
        Avx512(())
    }
}

/// Evaluates an expression of intrinsics that touch no memory.
macro_rules! op {
    ($body:expr) => {{
        // SAFETY: the token in `self` proves the instruction set; no memory is touched.
        unsafe { $body }
    }};
}

impl Lanes for Avx512 {
    const N: usize = 16;
    type F = __m512;
    type I = __m512i;
    type M = __mmask16;
    type D = (__m512d, __m512d);
    type T16<'a> = __m512;
    type T128<'a> = [__m512; 8];

    #[inline(always)]
    fn load(self, from: &[f32]) -> __m512 {
        let from: &[f32; 16] = from.first_chunk().unwrap();
        // SAFETY: the token `self` proves the instruction set. `from` has 16 floats; the
        // instruction accepts any alignment.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, v: __m512, to: &mut [f32]) {
        let to: &mut [f32; 16] = to.first_chunk_mut().unwrap();
        // SAFETY: the token `self` proves the instruction set. `to` has 16 floats; the instruction
        // accepts any alignment.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), v) }
    }

    #[inline(always)]
    fn load_u8(self, from: &[u8]) -> __m512i {
        let from: &[u8; 16] = from.first_chunk().unwrap();
        // SAFETY: the token `self` proves the instruction set. `from` has 16 bytes; the instruction
        // accepts any alignment.
        unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(from.as_ptr().cast())) }
    }

    #[inline(always)]
    fn store_u8(self, v: __m512i, to: &mut [u8]) {
        let to: &mut [u8; 16] = to.first_chunk_mut().unwrap();
        // SAFETY: the token `self` proves the instruction set. `to` has 16 bytes; the instruction
        // accepts any alignment.
        unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(v)) }
    }

    #[inline(always)]
    fn pack(self, v: [__m512i; 4]) -> __m512i {
        op!(_mm512_packus_epi16(
            _mm512_packs_epi32(v[0], v[1]),
            _mm512_packs_epi32(v[2], v[3]),
        ))
    }

    #[inline(always)]
    fn with_signs(self, bytes: __m512i, of: [__m512; 4]) -> __m512i {
        let of = four!(i => self.bits(of[i]));
        op!({
            // Signed saturation keeps the sign.
            let signs = _mm512_packs_epi16(
                _mm512_packs_epi32(of[0], of[1]),
                _mm512_packs_epi32(of[2], of[3]),
            );
            let signs = _mm512_and_si512(signs, _mm512_set1_epi8(i8::MIN));
            let is_nonzero = _mm512_test_epi8_mask(bytes, bytes);
            _mm512_or_si512(bytes, _mm512_maskz_mov_epi8(is_nonzero, signs))
        })
    }

    #[inline(always)]
    fn in_order(self, bytes: __m512i) -> __m512i {
        op!({
            #[rustfmt::skip]
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            _mm512_permutexvar_epi32(order, bytes)
        })
    }

    #[inline(always)]
    fn lookup_bytes(self, table: &[u8; 16], at: __m512i) -> __m512i {
        // SAFETY: the token `self` proves the instruction set. `table` has 16 bytes; the instruction
        // accepts any alignment.
        unsafe {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), at)
        }
    }

    #[inline(always)]
    fn min_bytes(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_min_epu8(a, b))
    }

    #[inline(always)]
    fn store_bytes(self, v: __m512i, to: &mut [u8]) {
        let to: &mut [u8; 64] = to.first_chunk_mut().unwrap();
        // SAFETY: the token `self` proves the instruction set. `to` has 64 bytes; the instruction
        // accepts any alignment.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), v) }
    }

    #[inline(always)]
    fn store_bits<const BITS: usize>(self, v: __m512i, to: &mut [u8]) {
        match BITS {
            1 => {
                let bits = op!(_mm512_test_epi8_mask(v, v));
                to[..8].copy_from_slice(&bits.to_le_bytes());
            }
            2 => {
                let words = op!({
                    let pairs = _mm512_maddubs_epi16(v, _mm512_set1_epi16(0x0401));
                    _mm512_madd_epi16(pairs, _mm512_set1_epi32(0x0010_0001))
                });
                self.store_u8(words, to);
            }
            _ => {
                let to: &mut [u8; 32] = to.first_chunk_mut().unwrap();
                // SAFETY: the token `self` proves the instruction set. `to` has 32 bytes; the
                // instruction accepts any alignment.
                unsafe {
                    let pairs = _mm512_maddubs_epi16(v, _mm512_set1_epi16(0x1001));
                    _mm256_storeu_si256(to.as_mut_ptr().cast(), _mm512_cvtepi16_epi8(pairs));
                }
            }
        }
    }

    #[inline(always)]
    fn load_u16(self, from: &[u8]) -> __m512i {
        let from: &[u8; 32] = from.first_chunk().unwrap();
        // SAFETY: the token `self` proves the instruction set. `from` has 32 bytes; the instruction
        // accepts any alignment.
        unsafe { _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast())) }
    }

    #[inline(always)]
    fn store_u16(self, v: __m512i, to: &mut [u8]) {
        let to: &mut [u8; 32] = to.first_chunk_mut().unwrap();
        // SAFETY: the token `self` proves the instruction set. `to` has 32 bytes; the instruction
        // accepts any alignment.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(v)) }
    }

    #[inline(always)]
    fn load_u24(self, from: &[u8]) -> __m512i {
        let from: &[u8; 48] = from.first_chunk().unwrap();
        // A masked access of all 48 bytes takes twice as long where masks are slow.
        // SAFETY: the token `self` proves the instruction set. The loads read bytes 0 to 31 and 32
        // to 47 of 48; they accept any alignment.
        unsafe {
            let low = _mm256_loadu_si256(from.as_ptr().cast());
            let high = _mm256_zextsi128_si256(_mm_loadu_si128(from.as_ptr().add(32).cast()));
            let dense = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
            // Moves three words to each 128-bit quarter, then three bytes to each 32-bit word.
            #[rustfmt::skip]
            let quarters = _mm512_setr_epi32(0, 1, 2, 15, 3, 4, 5, 15, 6, 7, 8, 15, 9, 10, 11, 15);
            let words = _mm512_permutexvar_epi32(quarters, dense);
            let order = _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1);
            _mm512_shuffle_epi8(words, _mm512_broadcast_i32x4(order))
        }
    }

    #[inline(always)]
    fn store_u24(self, v: __m512i, to: &mut [u8]) {
        let to: &mut [u8; 48] = to.first_chunk_mut().unwrap();
        // SAFETY: the token `self` proves the instruction set. The stores write bytes 0 to 31 and
        // 32 to 47 of 48; they accept any alignment.
        unsafe {
            let order = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
            let words = _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(order));
            #[rustfmt::skip]
            let first = _mm512_setr_epi32(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 3, 7, 11, 15);
            let dense = _mm512_permutexvar_epi32(first, words);
            _mm256_storeu_si256(to.as_mut_ptr().cast(), _mm512_castsi512_si256(dense));
            let rest = _mm512_extracti32x4_epi32::<2>(dense);
            _mm_storeu_si128(to.as_mut_ptr().add(32).cast(), rest);
        }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        op!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        op!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn ceil(self, a: __m512) -> __m512 {
        op!(_mm512_roundscale_ps::<
            { _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC },
        >(a))
    }
    #[inline(always)]
    fn gt(self, a: __m512, b: __m512) -> __mmask16 {
        op!(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b))
    }
    #[inline(always)]
    fn all_gt(self, v: [__m512; 4], limit: __m512) -> bool {
        op!({
            let least = _mm512_min_ps(_mm512_min_ps(v[0], v[1]), _mm512_min_ps(v[2], v[3]));
            _mm512_cmp_ps_mask::<_CMP_GT_OQ>(least, limit) == 0xffff
        })
    }
    #[inline(always)]
    fn select(self, m: __mmask16, yes: __m512, no: __m512) -> __m512 {
        op!(_mm512_mask_blend_ps(m, no, yes))
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> __m512i {
        op!(_mm512_set1_epi32(x))
    }
    #[inline(always)]
    fn and(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_and_si512(a, b))
    }
    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_or_si512(a, b))
    }
    #[inline(always)]
    fn xor(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_xor_si512(a, b))
    }
    #[inline(always)]
    fn mul_i(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_mullo_epi32(a, b))
    }
    #[inline(always)]
    fn count(self) -> __m512i {
        op!(_mm512_setr_epi32(
            0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
        ))
    }
    #[inline(always)]
    fn add_i(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_add_epi32(a, b))
    }
    #[inline(always)]
    fn sub_i(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_sub_epi32(a, b))
    }
    #[inline(always)]
    fn max_i(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_max_epi32(a, b))
    }
    #[inline(always)]
    fn min_i(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_min_epi32(a, b))
    }
    #[inline(always)]
    fn gt_i(self, a: __m512i, b: __m512i) -> __mmask16 {
        op!(_mm512_cmpgt_epi32_mask(a, b))
    }
    #[inline(always)]
    fn increment(self, m: __mmask16, a: __m512i) -> __m512i {
        op!(_mm512_mask_add_epi32(a, m, a, _mm512_set1_epi32(1)))
    }
    #[inline(always)]
    fn subs_u16(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_subs_epu16(a, b))
    }
    #[inline(always)]
    fn mul_halves(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_madd_epi16(a, b))
    }
    #[inline(always)]
    fn any_low_half_below(self, v: [__m512i; 4], limit: i32) -> bool {
        op!({
            let least =
                _mm512_min_epu16(_mm512_min_epu16(v[0], v[1]), _mm512_min_epu16(v[2], v[3]));
            let limit = _mm512_set1_epi16(limit as i16);
            _mm512_mask_cmplt_epu16_mask(0x5555_5555, least, limit) != 0
        })
    }
    #[inline(always)]
    fn any(self, m: __mmask16) -> bool {
        m != 0
    }
    #[inline(always)]
    fn eq_i(self, a: __m512i, b: __m512i) -> __mmask16 {
        op!(_mm512_cmpeq_epi32_mask(a, b))
    }
    #[inline(always)]
    fn select_i(self, m: __mmask16, yes: __m512i, no: __m512i) -> __m512i {
        op!(_mm512_mask_blend_epi32(m, no, yes))
    }
    #[inline(always)]
    fn shl<const S: u32>(self, a: __m512i) -> __m512i {
        op!(_mm512_slli_epi32::<S>(a))
    }
    #[inline(always)]
    fn shr<const S: u32>(self, a: __m512i) -> __m512i {
        op!(_mm512_srli_epi32::<S>(a))
    }

    #[inline(always)]
    fn bits(self, a: __m512) -> __m512i {
        op!(_mm512_castps_si512(a))
    }
    #[inline(always)]
    fn float(self, a: __m512i) -> __m512 {
        op!(_mm512_castsi512_ps(a))
    }
    #[inline(always)]
    fn truncate(self, a: __m512) -> __m512i {
        op!(_mm512_cvttps_epi32(a))
    }
    #[inline(always)]
    fn convert(self, a: __m512i) -> __m512 {
        op!(_mm512_cvtepi32_ps(a))
    }
    #[inline(always)]
    fn narrow_f16(self, a: __m512) -> __m512i {
        op!(_mm512_cvtepu16_epi32(_mm512_cvtps_ph::<
            _MM_FROUND_TO_NEAREST_INT,
        >(a)))
    }
    #[inline(always)]
    fn widen_f16(self, a: __m512i) -> __m512 {
        op!(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)))
    }

    #[inline(always)]
    fn table16(self, table: &[f32; 16]) -> __m512 {
        self.load(table)
    }
    #[inline(always)]
    fn table128(self, table: &[f32; 128]) -> [__m512; 8] {
        [
            self.load(table),
            self.load(&table[16..]),
            self.load(&table[32..]),
            self.load(&table[48..]),
            self.load(&table[64..]),
            self.load(&table[80..]),
            self.load(&table[96..]),
            self.load(&table[112..]),
        ]
    }

    #[inline(always)]
    fn lookup16(self, table: __m512, at: __m512i) -> __m512 {
        op!(_mm512_permutexvar_ps(at, table))
    }
    #[inline(always)]
    fn lookup_upper(self, table: __m512, at: __m512i) -> __m512 {
        self.lookup16(table, at)
    }
    /// Looks up a quarter of the table with each two-register permutation, which reads bits 0 to 4
    /// of the index. Bits 5 and 6 then select the quarter.
    #[inline(always)]
    fn lookup128(self, table: [__m512; 8], at: __m512i) -> __m512 {
        op!({
            let quarter = [
                _mm512_permutex2var_ps(table[0], at, table[1]),
                _mm512_permutex2var_ps(table[2], at, table[3]),
                _mm512_permutex2var_ps(table[4], at, table[5]),
                _mm512_permutex2var_ps(table[6], at, table[7]),
            ];
            let bit5 = _mm512_test_epi32_mask(at, _mm512_set1_epi32(32));
            let bit6 = _mm512_test_epi32_mask(at, _mm512_set1_epi32(64));
            let low = _mm512_mask_blend_ps(bit5, quarter[0], quarter[1]);
            let high = _mm512_mask_blend_ps(bit5, quarter[2], quarter[3]);
            _mm512_mask_blend_ps(bit6, low, high)
        })
    }

    #[inline(always)]
    fn gather(self, table: &[i32], at: __m512i) -> __m512i {
        let last = last_index(table);
        // SAFETY: the token `self` proves the instruction set. As an unsigned number, `min_epu32`
        // limits each index to the last entry of `table`.
        unsafe {
            let at = _mm512_min_epu32(at, _mm512_set1_epi32(last));
            _mm512_i32gather_epi32::<4>(at, table.as_ptr())
        }
    }

    #[inline(always)]
    fn reduce_max(self, a: __m512i) -> i32 {
        op!(_mm512_reduce_max_epi32(a))
    }

    #[inline(always)]
    fn reduce_sum(self, a: __m512i) -> u64 {
        let mut elements = [0i32; 16];
        // SAFETY: the token `self` proves the instruction set. `elements` has 64 bytes; the
        // instruction accepts any alignment.
        unsafe { _mm512_storeu_si512(elements.as_mut_ptr().cast(), a) };
        elements.into_iter().map(|x| x as u64).sum()
    }

    #[inline(always)]
    fn zero_sum(self) -> (__m512d, __m512d) {
        op!((_mm512_setzero_pd(), _mm512_setzero_pd()))
    }

    #[inline(always)]
    fn add_squares(self, sum: (__m512d, __m512d), a: __m512) -> (__m512d, __m512d) {
        op!({
            let low = _mm512_cvtps_pd(_mm512_castps512_ps256(a));
            let high = _mm512_cvtps_pd(_mm512_extractf32x8_ps::<1>(a));
            (
                _mm512_fmadd_pd(low, low, sum.0),
                _mm512_fmadd_pd(high, high, sum.1),
            )
        })
    }

    #[inline(always)]
    fn add_by_sign(
        self,
        above: (__m512d, __m512d),
        below: (__m512d, __m512d),
        a: __m512,
    ) -> ((__m512d, __m512d), (__m512d, __m512d)) {
        // A sum starts at +0, which neither zero changes. The second operand is returned if it is NaN.
        op!({
            let zero = _mm512_setzero_pd();
            let low = _mm512_cvtps_pd(_mm512_castps512_ps256(a));
            let high = _mm512_cvtps_pd(_mm512_extractf32x8_ps::<1>(a));
            (
                (
                    _mm512_add_pd(above.0, _mm512_max_pd(zero, low)),
                    _mm512_add_pd(above.1, _mm512_max_pd(zero, high)),
                ),
                (
                    _mm512_add_pd(below.0, _mm512_min_pd(zero, low)),
                    _mm512_add_pd(below.1, _mm512_min_pd(zero, high)),
                ),
            )
        })
    }

    #[inline(always)]
    fn sums(self, sum: (__m512d, __m512d), to: &mut [f64]) {
        let to: &mut [f64; 16] = to.first_chunk_mut().unwrap();
        // SAFETY: the token `self` proves the instruction set. `to` has 16 doubles; the instruction
        // accepts any alignment.
        unsafe {
            _mm512_storeu_pd(to.as_mut_ptr(), sum.0);
            _mm512_storeu_pd(to.as_mut_ptr().add(8), sum.1);
        }
    }

    #[inline(always)]
    fn total(self, sum: (__m512d, __m512d)) -> f64 {
        op!(_mm512_reduce_add_pd(_mm512_add_pd(sum.0, sum.1)))
    }
}
