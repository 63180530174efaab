// onebit: the mean of the elements from 0 up, or of those below, of a block: sums in fp64 in the order
// of src/codec/blocked/sums.rs, rounded to fp32 once.
#pragma once

#include "codec/blocked.cuh"
#include "codec/terngrad.cuh"

namespace cinch {

struct OneBitFormat : FewBits<1> {
  static constexpr int numbers = 2;
  static constexpr bool draws = false;

  struct Summary {
    float most;  // the largest magnitude; not finite if an element is not
    uint32_t negative;
    double sum[2];  // of those from 0 up, and below
  };

  static CINCH_HD void prepare(uint32_t) {}
  static CINCH_HD Summary nothing() { return {0, 0, {0, 0}}; }

#if defined(__CUDACC__)
  static __device__ __forceinline__ void look(const float (&all)[16], uint32_t valid,
                                              uint32_t log2_block, Summary &summary) {
    // Beyond the end of a chunk a sum holds what codes 0 decode to, which is a mean here.
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
      // A partial sum is never -0, so that adding 0 would change nothing.
      if (one < 0) {
        part[1] = __dadd_rn(part[1], one);
      } else {
        part[0] = __dadd_rn(part[0], one);
      }
    });
  }

  static __device__ __forceinline__ void conclude(uint32_t log2_block, Summary &summary) {
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

  static CINCH_HD void decode16(const Params &, const Codes &codes, const float (&number)[2],
                                float (&out)[16]) {
    decode<false>(codes, number, out);
  }

  static CINCH_HD void decode_reduce16(const Params &, const Codes &codes,
                                       const float (&number)[2], float (&acc)[16]) {
    decode<true>(codes, number, acc);
  }

 private:
  // A bit for each of these finite elements that is below 0.
  static CINCH_HD uint32_t below(const float (&x)[16]) {
    uint32_t bits = 0;
    CINCH_UNROLL
    for (int k = 15; k >= 0; --k) {
      // Adding 0: -0 is not below it.
      bits = shifted_in(bits, bits_of(add(x[k], 0.0f)), 1);
    }
    return bits;
  }

  // Adding 0: a sum of -0 alone is none.
  static CINCH_HD float mean(double sum, uint32_t count) {
    return count == 0 ? 0.0f : add((float)divide_wide(sum, (double)count), 0.0f);
  }

  template <bool REDUCE>
  static CINCH_HD void decode(const Codes &codes, const float (&number)[2], float (&acc)[16]) {
    if (!(is_finite(number[0]) && is_finite(number[1]))) return all_nan(acc);
    CINCH_UNROLL
    for (int k = 0; k < 16; ++k) {
      take<REDUCE>(acc[k], codes.word[0] >> k & 1 ? number[0] : number[1]);
    }
  }
};

}  // namespace cinch
