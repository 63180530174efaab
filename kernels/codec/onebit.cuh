// onebit: each element becomes one of two means of its block: that of the elements from 0 up, or
// that of the elements below 0. The sums are fp64, in the order of src/codec/blocked/sums.rs, and
// each mean is rounded to fp32 once.
#pragma once

#include "codec/blocked.cuh"
#include "codec/terngrad.cuh"

namespace cinch {

struct OneBitFormat : FewBits<1> {
  using AddsRows = void;
  using CodesAreSigns = void;
  static constexpr int numbers = 2;
  static constexpr bool draws = false;
  static constexpr bool damps = false;

  struct Summary {
    float most;  // the largest magnitude; not finite if an element is not
    // Elements below 0, and elements from 0 up times 2^13. Both numbers are at most 2^12.
    uint32_t counts;
    double sum[2];  // of elements from 0 up, and of elements below 0
    float mean[2];  // of those elements; NaN if an element is not finite
  };

  static CINCH_HD void prepare(uint32_t) {}
  static CINCH_HD Summary empty_summary() { return {0, 0, {0, 0}, {0, 0}}; }

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
    summarize_padded(x, valid, log2_block, summary);
  }

  // Adds 16 elements, of which the first `valid` exist and the others are 0.
  static __device__ __forceinline__ void summarize_padded(const float (&x)[16], uint32_t valid,
                                                     uint32_t log2_block, Summary &summary) {
    summary.most = larger_magnitude(summary.most, largest_of(x));
    summary.counts += counts_of(below(x), valid);
    add_rows(x, log2_block, summary.sum, add_by_sign);
  }

  static __device__ __forceinline__ void combine_lanes(uint32_t log2_block, Summary &summary) {
    summary.counts += flag_of(summary.most);
    join_lanes(log2_block, [&](uint32_t lanes) {
      const uint32_t theirs = from_lane(summary.counts, lanes);
      summary.counts += lanes != 0 ? theirs : 0;
    });
    if (log2_block >= LOG2_TILE) {
      summary.sum[0] = folded(summary.sum[0]), summary.sum[1] = folded(summary.sum[1]);
    }
    share_means<1>(summary.sum[threadIdx.x % 2], summary);
  }

  // Summarizes blocks of the default size; their tile is in PairRows.
  template <class E>
  static __device__ __forceinline__ void summarize_pairs(uint32_t below, uint32_t valid, Summary &summary) {
    summary.counts = counts_of(below, valid) + flag_of(summary.most);
    CINCH_UNROLL
    for (uint32_t lanes = 1; lanes < 16; lanes *= 2) summary.counts += from_lane(summary.counts, lanes);
    double even[2], odd[2];
    PairRows<E>::add_columns(even, odd, add_by_sign);
    share_means<8>(PairRows<E>::folded(even, odd), summary);
  }

  // Encodes a whole tile of fp32 at `from` with blocks of the default size. Lanes load rows instead of 16 neighbouring
  // elements, and a vote of the warp gives the codes of a row. Lane l below 16 returns word l of the codes. Lanes 0 to 15
  // receive the numbers of the first block, the others those of the second.
  static __device__ __forceinline__ uint32_t encode_rows(const float *from, float (&number)[2]) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t below;
    const double sum = sum_rows(from, below);
    uint32_t count = __popc(below);  // in a row
    CINCH_UNROLL
    for (uint32_t lanes = 1; lanes < 8; lanes *= 2) count += from_lane(count, lanes);
    count = __shfl_sync(~0u, count, lane / 16 * 8);  // in the block
    const bool is_upper = lane & 8;
    // Sums of finite elements are finite.
    const float mean = is_finite(sum) ? mean_of(sum, is_upper ? count : (1u << LOG2_DEFAULT_BLOCK) - count)
                                      : float_of(QUIET_NAN);
    const float other = from_lane(mean, 8);
    number[0] = is_upper ? other : mean, number[1] = is_upper ? mean : other;
    const bool poisoned = mean != mean || other != other;
    if (poisoned) number[0] = number[1] = float_of(QUIET_NAN);
    return __shfl_sync(~0u, poisoned, lane % 16 / 8 * 16) ? 0 : ~below;
  }
#endif

  static CINCH_HD void encode16(const Params &, const float (&x)[16], const Summary &summary,
                                uint32_t, const Random &, Codes &codes, float (&number)[2]) {
    encode_signs(below(x), summary, codes, number);
  }

  // Encodes 16 elements of which bit k of `below` is 1 if element k is below 0.
  static CINCH_HD void encode_signs(uint32_t below, const Summary &summary, Codes &codes,
                                    float (&number)[2]) {
    number[0] = summary.mean[0], number[1] = summary.mean[1];
    codes = {{number[0] == number[0] ? below ^ 0xffff : 0}};
  }

  // Returns the mean of `count` elements; 0 if there are none.
  static CINCH_HD float mean_of(double sum, uint32_t count) {
    // Adding 0 makes a mean of -0 positive.
    return count == 0 ? 0.0f : add((float)divide_wide(sum, (double)count), 0.0f);
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

#if defined(__CUDACC__)
  // Returns the sum of the elements from 0 up of the block of this lane's half of the warp; lanes whose index has the bit
  // 8 receive that of the elements below 0. Lane l below 16 receives row l of 32 elements: bit k is 1 if element k is below 0.
  static __device__ __forceinline__ double sum_rows(const float *from, uint32_t &below) {
    const uint32_t lane = threadIdx.x % 32;
    float x[16];
    CINCH_UNROLL
    for (uint32_t row = 0; row < 16; ++row) x[row] = from[32 * row + lane];
    double part[2][2] = {{0, 0}, {0, 0}};
    below = 0;
    CINCH_UNROLL
    for (uint32_t row = 0; row < 16; ++row) {
      const uint32_t vote = __ballot_sync(~0u, x[row] < 0);
      below = lane == row ? vote : below;
      add_by_sign(x[row], part[row / 8]);
    }
    double sum = split<8>(split<16>(part[0][0], part[1][0]), split<16>(part[0][1], part[1][1]));
    CINCH_UNROLL
    for (uint32_t half = 4; half > 0; half /= 2) sum = __dadd_rn(sum, from_lane(sum, half));
    return sum;
  }

  static __device__ __forceinline__ void add_by_sign(float x, double (&part)[2]) {
    // A partial sum is never -0, so skipping the addition of 0 changes nothing.
    if (x < 0) {
      part[1] = __dadd_rn(part[1], x);
    } else {
      part[0] = __dadd_rn(part[0], x);
    }
  }

  // Returns the counts of 16 elements, of which the first `valid` exist.
  static __device__ __forceinline__ uint32_t counts_of(uint32_t below, uint32_t valid) {
    const uint32_t negative = __popc(below);
    return negative + ((valid - negative) << 13);
  }

  // Returns what a lane adds to the counts if an element is not finite; the sum over a tile fits 32 bits.
  static __device__ __forceinline__ uint32_t flag_of(float most) { return is_finite(most) ? 0 : 1u << 26; }

  // Computes both means from the block's counts. Lanes whose index has the bit LANES pass the sum of the elements below
  // 0, other lanes the other sum: each lane divides once, and receives the other mean.
  template <uint32_t LANES>
  static __device__ __forceinline__ void share_means(double sum, Summary &summary) {
    const bool is_upper = threadIdx.x & LANES;
    const uint32_t count = summary.counts >> (is_upper ? 0 : 13) & 0x1fff;
    const float mean = summary.counts >> 26 ? float_of(QUIET_NAN) : mean_of(sum, count);
    const float other = from_lane(mean, LANES);
    summary.mean[0] = is_upper ? other : mean, summary.mean[1] = is_upper ? mean : other;
  }
#endif
};

}  // namespace cinch
