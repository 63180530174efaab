// terngrad: an element x becomes -s, 0 or s, and is not 0 with probability |x|/s. The scale s is
// the largest magnitude of the block, or 2.5 times the block's root mean square if that is less.
// The sum of squares is fp64, in the order of src/codec/blocked/sums.rs.
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
  using AddsRows = void;
  static constexpr int numbers = 1;
  static constexpr bool draws = true;
  static constexpr bool damps = true;
  struct Summary {
    float most;  // the largest magnitude; not finite if an element is not
    double squares[1];
  };

  static CINCH_HD void prepare(uint32_t) {}
  static CINCH_HD Summary empty_summary() { return {0, {0}}; }

#if defined(__CUDACC__)
  static __device__ __forceinline__ void summarize(const float (&x)[16], uint32_t, uint32_t log2_block,
                                              Summary &summary) {
    summary.most = larger_magnitude(summary.most, largest_of(x));
    add_rows(x, log2_block, summary.squares, add_square);
  }

  // Summarizes blocks of the default size; their tile is in PairRows.
  template <class E>
  static __device__ __forceinline__ void summarize_pairs(Summary &summary) {
    double even[1], odd[1];
    PairRows<E>::add_columns(even, odd, add_square);
    summary.squares[0] = PairRows<E>::folded(even, odd);
    CINCH_UNROLL
    for (uint32_t lanes = 1; lanes < 16; lanes *= 2) {
      summary.most = larger_magnitude(summary.most, from_lane(summary.most, lanes));
    }
  }

  static __device__ __forceinline__ void combine_lanes(uint32_t log2_block, Summary &summary) {
    join_lanes(log2_block, [&](uint32_t lanes) {
      summary.most = larger_magnitude(summary.most, from_lane(summary.most, lanes));
    });
    if (log2_block >= LOG2_TILE) summary.squares[0] = folded(summary.squares[0]);
  }
#endif

  static CINCH_HD void encode16(const Params &params, const float (&x)[16], const Summary &summary,
                                uint32_t count, const Random &random, Codes &codes,
                                float (&number)[1]) {
    codes = no_codes();
    number[0] = float_of(QUIET_NAN);
    if (!is_finite(summary.most)) return;
    const double deviation = root(mean(params, summary.squares[0], count));
    const float clip = (float)(2.5 * deviation);
    const float scale = summary.most < clip ? summary.most : clip;
    number[0] = scale;
    if (scale == 0) return;
    const float raise = scale < TINY ? RAISE : scale >= 0x1p100f ? LOWER : 1.0f;
    const float factor = divide_ordinary(1.0f, mul(scale, raise));
    if (raise == 1 && random.is_at_16()) {
      const Random::Products products = random.products();
      codes = drawn(x, factor, [&](int k) { return random.drawn_near(products, k); });
    } else {
      // Only the copy has an address, so that x itself stays in registers.
      float y[16];
      CINCH_UNROLL
      for (int k = 0; k < 16; ++k) y[k] = mul(x[k], raise);
      codes = drawn_anywhere(y, factor, random);
    }
  }

  template <bool REDUCE>
  static CINCH_HD void decode16(const Params &, const Codes &codes, const float (&number)[1],
                                float (&acc)[16]) {
    const float scale = number[0];
    if (!is_finite(scale)) return all_nan(acc);
    CINCH_UNROLL
    for (int k = 0; k < 16; ++k) {
      const uint32_t code = code_of(codes, k);
      take<REDUCE>(acc[k], code == 1 ? scale : code == 2 ? -scale : 0.0f);
    }
  }

 private:
#if defined(__CUDACC__)
  static __device__ __forceinline__ void add_square(double x, double (&part)[1]) {
    // fp64 holds the square exactly.
    part[0] = __fma_rn(x, x, part[0]);
  }
#endif

  // Returns the codes of 16 elements that begin at any index of the message.
  static CINCH_HD_APART Codes drawn_anywhere(const float (&x)[16], float factor, Random random) {
    return drawn(x, factor, [&](int k) { return random.drawn(k); });
  }

  // Returns the codes of 16 elements. Element k becomes s or -s with the probability |x[k]| * factor,
  // otherwise 0; `draw(k)` is 2^32 times its random number.
  template <class Draw>
  static CINCH_HD Codes drawn(const float (&x)[16], float factor, Draw &&draw) {
    uint32_t becomes = 0, below = 0;
    CINCH_UNROLL
    for (int k = 15; k >= 0; --k) {
      // Rounding never changes the sign of the difference, and only the sign is used.
      const float rest = fused(draw(k), 0x1p-32f, -mul(magnitude_of(x[k]), factor));
      becomes = shifted_in(becomes, bits_of(rest), 2);
      below = shifted_in(below, bits_of(x[k]), 2);
    }
    becomes = becomes >> 1 & 0x55555555u;
    return {{becomes + (becomes & below >> 1)}};
  }

  // Returns `sum` divided by `count`. A full block has a power of two of elements, so the product
  // by the exact inverse is the quotient.
  static CINCH_HD double mean(const Params &params, double sum, uint32_t count) {
    if (count != 1u << params.log2_block) return divide_wide(sum, (double)count);
    const double inverse = double_of((uint64_t)(1023 - params.log2_block) << 52);
#if defined(__CUDA_ARCH__)
    return __dmul_rn(sum, inverse);
#else
    return sum * inverse;
#endif
  }

  static CINCH_HD double root(double x) {
#if defined(__CUDA_ARCH__)
    return __dsqrt_rn(x);
#else
    return __builtin_sqrt(x);
#endif
  }
};

}  // namespace cinch
