// terngrad: -s, 0 or s, s with probability |x|/s. s is the largest magnitude of a block, or 2.5 times
// its root mean square where that is less: a sum of squares in fp64 in the order of
// src/codec/blocked/sums.rs.
#pragma once

#include "codec/blocked.cuh"

namespace cinch {

CINCH_HD double divide_wide(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __ddiv_rn(a, b);
#else
  return a / b;
#endif
}

struct TernGradFormat : FewBits<2> {
  static constexpr int numbers = 1;
  static constexpr bool draws = true;
  struct Summary {
    float most;  // the largest magnitude; not finite if an element is not
    double squares[1];
  };

  static CINCH_HD void prepare() {}
  static CINCH_HD Summary nothing() { return {0, {0}}; }

#if defined(__CUDACC__)
  static __device__ __forceinline__ void look(const float (&x)[16], uint32_t, uint32_t log2_block,
                                              Summary &summary) {
    summary.most = larger_magnitude(summary.most, largest_of(x));
    add_rows(x, log2_block, summary.squares, [](double one, double(&part)[1]) {
      // fp64 holds the square exactly.
      part[0] = __fma_rn(one, one, part[0]);
    });
  }

  static __device__ __forceinline__ void conclude(uint32_t log2_block, Summary &summary) {
    join_lanes(log2_block, [&](uint32_t lanes) {
      summary.most = larger_magnitude(summary.most, from_lane(summary.most, lanes));
    });
    if (log2_block >= LOG2_TILE) summary.squares[0] = folded(summary.squares[0]);
  }
#endif

  static CINCH_HD void encode16(const Params &, const float (&x)[16], const Summary &summary,
                                uint32_t count, const Random &random, Codes &codes,
                                float (&number)[1]) {
    codes = no_codes();
    number[0] = float_of(QUIET_NAN);
    if (!is_finite(summary.most)) return;
    const double deviation = root(divide_wide(summary.squares[0], (double)count));
    const float clip = (float)(2.5 * deviation);
    const float scale = summary.most < clip ? summary.most : clip;
    number[0] = scale;
    if (scale == 0) return;
    const float raise = scale < TINY ? RAISE : scale >= 0x1p100f ? LOWER : 1.0f;
    const float factor = divide_ordinary(1.0f, mul(scale, raise));
    codes = packed([&](int k) {
      const float probability = mul(mul(magnitude_of(x[k]), raise), factor);
      return probability > random.fraction(k) ? 1 + (bits_of(x[k]) >> 31) : 0u;
    });
  }

  static CINCH_HD void decode16(const Params &, const Codes &codes, const float (&number)[1],
                                float (&out)[16]) {
    decode<false>(codes, number[0], out);
  }

  static CINCH_HD void decode_reduce16(const Params &, const Codes &codes,
                                       const float (&number)[1], float (&acc)[16]) {
    decode<true>(codes, number[0], acc);
  }

 private:
  static CINCH_HD double root(double x) {
#if defined(__CUDA_ARCH__)
    return __dsqrt_rn(x);
#else
    return __builtin_sqrt(x);
#endif
  }

  template <bool REDUCE>
  static CINCH_HD void decode(const Codes &codes, float scale, float (&acc)[16]) {
    if (!is_finite(scale)) return all_nan(acc);
    CINCH_UNROLL
    for (int k = 0; k < 16; ++k) {
      const uint32_t code = code_of(codes, k);
      take<REDUCE>(acc[k], code == 1 ? scale : code == 2 ? -scale : 0.0f);
    }
  }
};

}  // namespace cinch
