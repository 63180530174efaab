// Statistics of a call, in three levels of partial sums:
//
//   thread  LaneSums               registers, during a loop over tiles
//   block   BlockSums              shared memory, with an entry for each warp
//   call    cinch_statistics_sums  device memory, to which blocks add
//
// Elements that are not finite, or whose squares leave the range of fp32, take a slow path. The interpreter takes part at
// the level of the call: its blocks add the verdicts of their outputs.
#pragma once

#include "channel/block.cuh"
#include "codec/scaled.cuh"
#include "channel/statistics.h"

namespace cinch {

// States that one of the call's blocks has ended; there are `blocks` of them. The last one to arrive writes the result,
// and leaves the sums zero. One thread of each block calls this, once its part is in the sums.
__device__ __forceinline__ void end_statistics(cinch_statistics_sums &sums, cinch_statistics &result,
                                               uint32_t has_input, uint32_t blocks) {
  __threadfence();  // SYNC POINT statistics: this block's part is there
  if (atomicAdd(&sums.arrived, 1u) + 1 != blocks) return;
  __threadfence();  // SYNC POINT statistics: the parts of all blocks are there
  volatile cinch_statistics_sums &all = sums;
  result.saturated = all.saturated;
  result.non_finite = all.non_finite;
  result.sum_squares = all.sum_squares;
  result.abs_max = double_of(all.abs_max);
  result.verdict = all.verdict;
  result.known = CINCH_VERDICT_NON_FINITE;
  result.has_input = has_input;
  for (uint32_t k = 0; k < 5; ++k) result.unused[k] = 0;
  all.saturated = 0;
  all.non_finite = 0;
  all.sum_squares = 0;
  all.abs_max = 0;
  all.verdict = 0;
  all.arrived = 0;
}

// Returns the sums of a communicator's calls.
__device__ __forceinline__ cinch_statistics_sums &statistics_sums(const cinch_comm_view &comm) {
  const cinch_cursor *end = comm.cursors + (uint64_t)CINCH_PROTOCOLS * CINCH_MAX_CHANNELS * comm.nranks;
  return *(cinch_statistics_sums *)((uintptr_t)end + CINCH_SUMS_OFFSET);
}

// The partial sums of a block. Warps add to entries of their own, and count rare elements in common.
struct BlockSums {
  static constexpr uint32_t WARPS = CINCH_STATISTICS_THREADS / WARP;
  double sum_squares[WARPS];
  double abs_max[WARPS];
  unsigned long long non_finite, saturated;
  uint32_t verdict;

  // Sets all sums to zero. One thread calls this before a barrier.
  __device__ __forceinline__ void clear() {
#pragma unroll 1
    for (uint32_t warp = 0; warp < WARPS; ++warp) {
      sum_squares[warp] = 0;
      abs_max[warp] = 0;
    }
    non_finite = saturated = 0;
    verdict = 0;
  }

  // Adds a sum and a magnitude of each lane to the warp's entry. All lanes call this.
  __device__ __forceinline__ void add(double sum, double most) {
#pragma unroll
    for (uint32_t lanes = WARP / 2; lanes > 0; lanes /= 2) {
      sum = __dadd_rn(sum, from_lane(sum, lanes));
      const double other = from_lane(most, lanes);
      most = other > most ? other : most;
    }
    if (lane_id() == 0) {
      const uint32_t warp = threadIdx.x / WARP;
      sum_squares[warp] = __dadd_rn(sum_squares[warp], sum);
      abs_max[warp] = most > abs_max[warp] ? most : abs_max[warp];
    }
  }

  // Adds these sums to those of the call. One thread of each block calls this after a barrier.
  __device__ __forceinline__ void add_to(cinch_statistics_sums &all) const {
    double sum = 0, most = 0;
#pragma unroll 1
    for (uint32_t warp = 0; warp < WARPS; ++warp) {
      sum = __dadd_rn(sum, sum_squares[warp]);
      most = abs_max[warp] > most ? abs_max[warp] : most;
    }
    // Squares of small f64 vanish, so the sum may be zero beside a magnitude.
    if (most != 0) {
      atomicAdd(&all.sum_squares, sum);
      // Bits of numbers that are not negative compare as the numbers do.
      atomicMax((unsigned long long *)&all.abs_max, (unsigned long long)bits_of(most));
    }
    if (non_finite != 0) atomicAdd((unsigned long long *)&all.non_finite, non_finite);
    if (saturated != 0) atomicAdd((unsigned long long *)&all.saturated, saturated);
    if (verdict != 0) atomicOr(&all.verdict, verdict);
  }

  // Records that the output has an element that is not finite. Many elements may be so; only the
  // first ones are worth a store.
  __device__ __forceinline__ void record_non_finite() {
    volatile uint32_t &recorded = verdict;
    if (recorded == 0) recorded = CINCH_VERDICT_NON_FINITE;
  }
};

// The partial sums of the elements that one thread has seen.
class LaneSums {
 public:
  // Adds the first `valid` of 16 elements; the others are zeros, or products of zeros.
  __device__ __forceinline__ void add(const float (&x)[16], uint32_t valid, BlockSums &block) {
    // Squares of magnitudes far below 2^-63 would vanish in fp32, but not beside a sum from here on.
    constexpr float SMALLEST = 0x1p-80f, LARGEST = 0x1p120f;
    const float most = largest_of(x);
    float sum[2] = {0, 0};
#pragma unroll
    for (uint32_t k = 0; k < 16; ++k) sum[k % 2] = fused(x[k], x[k], sum[k % 2]);
    const float squares = cinch::add(sum[0], sum[1]);
    if (squares >= SMALLEST && squares <= LARGEST && is_finite(most)) {
      sum_squares_ = __dadd_rn(sum_squares_, (double)squares);
      abs_max_ = larger_magnitude(abs_max_, most);
    } else if (squares != 0 || most != 0) {
      add_one_by_one(x, valid, block);
    }
  }

  // Adds the sums of the warp's lanes to the warp's entry. All lanes call this at the end of a loop.
  __device__ __forceinline__ void end(BlockSums &block) const {
    block.add(sum_squares_, (double)abs_max_);
  }

 private:
  // Adds elements whatever their bits.
  __device__ __forceinline__ void add_one_by_one(const float (&x)[16], uint32_t valid,
                                                 BlockSums &block) {
    uint32_t non_finite = 0;
#pragma unroll
    for (uint32_t k = 0; k < 16; ++k) {
      if (k >= valid) continue;
      if (is_finite(x[k])) {
        sum_squares_ = __fma_rn((double)x[k], (double)x[k], sum_squares_);
        abs_max_ = larger_magnitude(abs_max_, x[k]);
      } else {
        ++non_finite;
      }
    }
    if (non_finite > 0) atomicAdd(&block.non_finite, (unsigned long long)non_finite);
  }

  double sum_squares_ = 0;
  float abs_max_ = 0;
};

// Counts those of the first `valid` of 16 elements that are finite, but beyond `largest`.
__device__ __forceinline__ void count_saturated(const float (&x)[16], uint32_t valid, float largest,
                                                BlockSums &block) {
  if (largest_of(x) <= largest) return;
  uint32_t count = 0;
#pragma unroll
  for (uint32_t k = 0; k < 16; ++k) {
    count += k < valid && is_finite(x[k]) && magnitude_of(x[k]) > largest;
  }
  if (count > 0) atomicAdd(&block.saturated, (unsigned long long)count);
}

}  // namespace cinch
