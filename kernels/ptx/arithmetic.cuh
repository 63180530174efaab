// IEEE arithmetic with a named rounding, on fp32 and on the bytes of a word.
#pragma once

#include <math.h>

#include "ptx/base.cuh"

namespace cinch {

CINCH_HD float add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

CINCH_HD float mul(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// Returns a * b, rounded and clamped to [0, 1]; 0 if the product is NaN.
CINCH_HD float saturated_product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __saturatef(__fmul_rn(a, b));
#else
  const float product = a * b;
  return product > 0 ? product < 1 ? product : 1.0f : 0.0f;
#endif
}

CINCH_HD float divide(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

// Returns a / b rounded once, for a from 1 to 255 and finite b from 2^-100 up. It saves the call
// that general division makes for subnormal and overflowing operands.
//
// An approximate reciprocal is refined once, then the quotient twice by exact remainders. With such
// operands no intermediate value is subnormal.
CINCH_HD float divide_ordinary(float a, float b) {
#if defined(__CUDA_ARCH__)
  const bool large = b >= 0x1p64f;
  b = large ? __fmul_rn(b, 0x1p-64f) : b;
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
  r = __fmaf_rn(r, __fmaf_rn(-b, r, 1.0f), r);
  float q = __fmul_rn(a, r);
  q = __fmaf_rn(__fmaf_rn(-b, q, a), r, q);
  q = __fmaf_rn(__fmaf_rn(-b, q, a), r, q);
  return large ? __fmul_rn(q, 0x1p-64f) : q;
#else
  return a / b;
#endif
}

// Returns a * b + c, rounded once.
CINCH_HD float fused(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

// Returns the quotient of `scale` and N, rounded once; the scale is 0 or at least 2^-100. It is the
// product by the reciprocal, corrected by its remainder, which is exact for such scales. A test
// covers all mantissas for each N in use. The remainder is negated twice, so that a zero keeps its
// sign.
template <int N>
CINCH_HD float divided_by(float scale) {
  constexpr float RECIPROCAL = 1 / (float)N;
  const float near = mul(scale, RECIPROCAL);
  return fused(fused((float)N, near, -scale), -RECIPROCAL, near);
}

// Returns a + b, rounded up.
CINCH_HD float add_up(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_ru(a, b);
#else
  // The rounding error of a sum is a floating-point number, which the next three operations compute
  // exactly.
  const float sum = a + b;
  const float part = sum - a;
  const float error = (a - (sum - part)) + (b - part);
  return error > 0 ? __builtin_nextafterf(sum, __builtin_inff()) : sum;
#endif
}

// Returns a + b, rounded down.
CINCH_HD float add_down(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rd(a, b);
#else
  return -add_up(-a, -b);
#endif
}

// Returns |x|. In this form the compiler folds it into the operand of most device instructions.
CINCH_HD float magnitude_of(float x) { return fabsf(x); }

CINCH_HD bool is_finite(float x) { return magnitude_of(x) < float_of(0x7f800000u); }
CINCH_HD bool is_finite(double x) { return fabs(x) < double_of((uint64_t)0x7ff0 << 48); }

// Returns the larger of two magnitudes; it is not finite if either element is not.
CINCH_HD float larger_magnitude(float a, float b) {
#if defined(__CUDA_ARCH__)
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(a)), "f"(fabsf(b)));
  return larger;
#else
  // Bits of magnitudes compare as the magnitudes do, and NaN is above infinity.
  const uint32_t x = bits_of(a) & 0x7fffffffu, y = bits_of(b) & 0x7fffffffu;
  return float_of(x > y ? x : y);
#endif
}

// smaller_of and larger_of return the smaller and the larger number; NaN if either number is NaN.
CINCH_HD float smaller_of(float a, float b) {
#if defined(__CUDA_ARCH__)
  float smaller;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(b));
  return smaller;
#else
  return a != a || b != b ? float_of(0x7fc00000u) : a < b ? a : b;
#endif
}

CINCH_HD float larger_of(float a, float b) {
#if defined(__CUDA_ARCH__)
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
#else
  return a != a || b != b ? float_of(0x7fc00000u) : a > b ? a : b;
#endif
}

// The smallest and the largest of some numbers; NaN if any of them is NaN.
struct Ends {
  float low;
  float high;
};

CINCH_HD Ends join(Ends a, Ends b) {
  return {smaller_of(a.low, b.low), larger_of(a.high, b.high)};
}

// Returns the smallest and the largest of N numbers; N is even.
template <int N>
CINCH_HD Ends ends_of(const float (&x)[N]) {
  // Even and odd elements have chains of their own, so that their instructions overlap.
  Ends even = {x[0], x[0]}, odd = {x[1], x[1]};
  CINCH_UNROLL
  for (int i = 2; i < N; i += 2) {
    even = join(even, {x[i], x[i]});
    odd = join(odd, {x[i + 1], x[i + 1]});
  }
  return join(even, odd);
}

// Returns the largest of the magnitudes of N numbers; it is not finite if any number is not. N is
// even.
template <int N>
CINCH_HD float largest_of(const float (&x)[N]) {
  // Even and odd elements have chains of their own, so that their instructions overlap.
  float a = magnitude_of(x[0]), b = magnitude_of(x[1]);
  CINCH_UNROLL
  for (int i = 2; i < N; i += 2) {
    a = larger_magnitude(a, x[i]);
    b = larger_magnitude(b, x[i + 1]);
  }
  return larger_magnitude(a, b);
}

// Returns (x & mask) | others.
CINCH_HD uint32_t bits_among(uint32_t x, uint32_t mask, uint32_t others) {
#if defined(__CUDA_ARCH__)
  uint32_t all;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(all) : "r"(x), "r"(mask), "r"(others));
  return all;
#else
  return (x & mask) | others;
#endif
}

// Returns `high` shifted left by `by` bits, filled with the upper bits of `low`. `by` is 1 to 31.
CINCH_HD uint32_t shifted_in(uint32_t high, uint32_t low, uint32_t by) {
#if defined(__CUDA_ARCH__)
  return __funnelshift_l(low, high, by);
#else
  return high << by | low >> (32 - by);
#endif
}

// Picks four bytes, one for each nibble of the selector, lowest first. Values 0 to 3 pick bytes of
// `low`, 4 to 7 bytes of `high`. Bit 3 of a nibble replaces the byte by eight copies of its sign
// bit.
CINCH_HD uint32_t byte_permute(uint32_t low, uint32_t high, uint32_t selector) {
#if defined(__CUDA_ARCH__)
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
  return result;
#else
  const uint64_t all = (uint64_t)high << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> (4 * i) & 15;
    uint32_t byte = (uint32_t)(all >> (8 * (nibble & 7))) & 0xff;
    if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << (8 * i);
  }
  return result;
#endif
}

// Returns 2^by as a factor: the compiler does not replace products by shifts, which cannot add in one instruction.
CINCH_HD uint32_t power_factor(uint32_t by) {
  uint32_t power = 1u << by;
#if defined(__CUDA_ARCH__)
  asm("" : "+r"(power));
#endif
  return power;
}

// Returns the sum of the four bytes of x.
CINCH_HD uint32_t sum_of_bytes(uint32_t x) {
#if defined(__CUDA_ARCH__)
  return __dp4a(x, 0x01010101u, 0u);
#else
  return (x & 0xff) + (x >> 8 & 0xff) + (x >> 16 & 0xff) + (x >> 24);
#endif
}

}  // namespace cinch
