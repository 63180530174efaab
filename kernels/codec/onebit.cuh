// onebit: each element becomes one of two means of its block: that of the elements from 0 up, or
// that of the elements below 0. The sums are fp64, in the order of src/codec/blocked/sums.rs, and
// each mean is rounded to fp32 once.
#pragma once

#include "codec/blocked.cuh"
#include "codec/terngrad.cuh"

namespace cinch {

struct OneBitFormat : FewBits<1> {
  static constexpr int numbers = 2;
  static constexpr bool draws = false;
  static constexpr bool damps = false;

  struct Summary {
    float most;  // the largest magnitude; not finite if an element is not
    uint32_t negative;
    double sum[2];  // of elements from 0 up, and of elements below 0
  };

  static CINCH_HD void prepare(uint32_t) {}
  static CINCH_HD Summary empty_summary() { return {0, 0, {0, 0}}; }

#if defined(__CUDACC__)
  static __device__ __forceinline__ void summarize(const float (&all)[16], uint32_t valid,
                                              uint32_t log2_block, Summary &summary) {
    // Sets elements beyond the end of the chunk to 0. They may differ from 0 if x is a sum of
    // decoded chunks, because their codes 0 decode to a mean.
    float x[16];
    CINCH_UNROLL
    for (int k = 0; k < 16; ++k) x[k] = all[k];
    if (valid < 16) {
      CINCH_UNROLL
      for (uint32_t k = 0; k < 16; ++k) x[k] = k < valid ? x[k] : 0.0f;
    }
    summary.most = larger_magnitude(summary.most, largest_of(x));
    summary.negative += __popc(below(x));
    add_rows(x, log2_block, summary.sum, [](float one, double(&part)[2]) {
      // A partial sum is never -0, so skipping the addition of 0 changes nothing.
      if (one < 0) {
        part[1] = __dadd_rn(part[1], one);
      } else {
        part[0] = __dadd_rn(part[0], one);
      }
    });
  }

  static __device__ __forceinline__ void combine_lanes(uint32_t log2_block, Summary &summary) {
    join_lanes(log2_block, [&](uint32_t lanes) {
      summary.most = larger_magnitude(summary.most, from_lane(summary.most, lanes));
      const uint32_t theirs = from_lane(summary.negative, lanes);
      summary.negative += lanes != 0 ? theirs : 0;
    });
    if (log2_block >= LOG2_TILE) {
      summary.sum[0] = folded(summary.sum[0]), summary.sum[1] = folded(summary.sum[1]);
    }
  }
#endif

  static CINCH_HD void encode16(const Params &, const float (&x)[16], const Summary &summary,
                                uint32_t count, const Random &, Codes &codes, float (&number)[2]) {
    if (!is_finite(summary.most)) {
      codes = no_codes();
      number[0] = number[1] = float_of(QUIET_NAN);
      return;
    }
    number[0] = mean(summary.sum[0], count - summary.negative);
    number[1] = mean(summary.sum[1], summary.negative);
    codes = {{below(x) ^ 0xffff}};
  }

  template <bool REDUCE>
  static CINCH_HD void decode16(const Params &, const Codes &codes, const float (&number)[2],
                                float (&acc)[16]) {
    if (!(is_finite(number[0]) && is_finite(number[1]))) return all_nan(acc);
    CINCH_UNROLL
    for (int k = 0; k < 16; ++k) {
      take<REDUCE>(acc[k], codes.word[0] >> k & 1 ? number[0] : number[1]);
    }
  }

 private:
  // Returns 16 bits: bit k is 1 if the finite element k is below 0.
  static CINCH_HD uint32_t below(const float (&x)[16]) {
    uint32_t bits = 0;
    CINCH_UNROLL
    for (int k = 15; k >= 0; --k) {
      // Adding 0 makes -0 positive: it is not below 0.
      bits = shifted_in(bits, bits_of(add(x[k], 0.0f)), 1);
    }
    return bits;
  }

  // Adding 0 makes a mean of -0 positive.
  static CINCH_HD float mean(double sum, uint32_t count) {
    return count == 0 ? 0.0f : add((float)divide_wide(sum, (double)count), 0.0f);
  }
};

}  // namespace cinch
