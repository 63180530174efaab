// A warp at work on a chunk: tiles of 512 elements, of which lane l holds the 16 from
// `at + 16 * l`, zeros where the chunk has ended. Device only; all 32 lanes take part.
//
// A block of 2^log2_block elements is that of 2^(log2_block - 4) neighbouring lanes, or of several
// tiles.
#pragma once

#include "ptx/arithmetic.cuh"

#if defined(__CUDACC__)

namespace cinch {

constexpr uint32_t TILE = 512;
constexpr uint32_t LOG2_TILE = 9;

// The value of the lane whose number differs in the bits of `lanes`.
template <class T>
__device__ __forceinline__ T from_lane(T own, uint32_t lanes) {
  return __shfl_xor_sync(~0u, own, lanes);
}

// Calls join(lanes) for the distances, from 2^FIRST on, at which the lanes of each block, as far as the
// tile goes, join what they have, so that all of them get the whole: by operations that do not mind the
// order, nor what they have already, which comes from distance 0 in the place of lanes beyond the block.
// No branch: a lane is never thought to wait for one that has gone another way.
template <uint32_t FIRST = 0, class Join>
__device__ __forceinline__ void join_lanes(uint32_t log2_block, Join &&join) {
  const uint32_t others = ((1u << log2_block) - 1) >> 4;  // bits in which lanes of a block differ
  CINCH_UNROLL
  for (uint32_t level = FIRST; level < 5; ++level) join(others & 1u << level);
}

// 32 partial sums of a block in the order of src/codec/blocked/sums.rs, of which lane p has number
// p, folded in halves: all lanes get the sum.
__device__ __forceinline__ double folded(double part) {
  CINCH_UNROLL
  for (uint32_t half = 16; half > 0; half /= 2) {
    part = __dadd_rn(part, __shfl_xor_sync(~0u, part, half));
  }
  return part;
}

// The same of two blocks: lane p has number p of the first and of the second, and the lower half of
// the lanes get the sum of the first, the others that of the second.
__device__ __forceinline__ double folded(double first, double second) {
  const bool is_lower = threadIdx.x % 32 < 16;
  const double own = is_lower ? first : second, other = is_lower ? second : first;
  double part = __dadd_rn(own, __shfl_xor_sync(~0u, other, 16));
  CINCH_UNROLL
  for (uint32_t half = 8; half > 0; half /= 2) {
    part = __dadd_rn(part, __shfl_xor_sync(~0u, part, half));
  }
  return part;
}

// Brings K block sums in that order up to date with a tile: `add(x, part)` adds an element to partial
// sums. Blocks within the tile come out whole, longer ones as partial sums.
//
// Lanes hand their elements over in shared memory, half a tile at a time, so that lane l gets element
// l of each row of 32. Sixteen warps of a block may do so. The elements of a lane are 20 words from
// those of the next: vectors of 16 bytes meet in no bank.
template <int K, class Add>
__device__ __forceinline__ void add_rows(const float (&x)[16], uint32_t log2_block,
                                         double (&sum)[K], Add &&add) {
  constexpr uint32_t WARPS = 16, PITCH = 20, ROWS = 8;  // rows of half a tile
  alignas(16) __shared__ float scratch[WARPS][16 * PITCH];
  float *own = scratch[threadIdx.x / 32 % WARPS];
  const uint32_t lane = threadIdx.x % 32;
  const float *column = own + lane / 16 * PITCH + lane % 16;
  const bool is_long = log2_block >= LOG2_TILE;
  const uint32_t rows = is_long ? 16 : 1u << (log2_block - 5);
  const uint32_t block = (lane * 16) >> log2_block;
  // Half of a tile becomes rows.
  const auto hand_over = [&](uint32_t half) {
    // The last reads of the warp are done.
    __syncwarp();
    if (lane / 16 == half) {
      CINCH_UNROLL
      for (uint32_t v = 0; v < 4; ++v) {
        *reinterpret_cast<float4 *>(own + lane % 16 * PITCH + 4 * v) =
            make_float4(x[4 * v], x[4 * v + 1], x[4 * v + 2], x[4 * v + 3]);
      }
    }
    __syncwarp();
  };
  if (rows == ROWS) {
    // The usual block is half a tile: two of them fold together.
    double both[2][K];
    CINCH_UNROLL
    for (uint32_t half = 0; half < 2; ++half) {
      hand_over(half);
      CINCH_UNROLL
      for (int k = 0; k < K; ++k) both[half][k] = 0;
      CINCH_UNROLL
      for (uint32_t row = 0; row < ROWS; ++row) add(column[2 * row * PITCH], both[half]);
    }
    CINCH_UNROLL
    for (int k = 0; k < K; ++k) sum[k] = folded(both[0][k], both[1][k]);
    return;
  }
  double part[K];
  CINCH_UNROLL
  for (int k = 0; k < K; ++k) part[k] = is_long ? sum[k] : 0;
  // What the rows up to this one of the tile have added, for the lanes of their block.
  const auto end_block = [&](uint32_t row) {
    CINCH_UNROLL
    for (int k = 0; k < K; ++k) {
      const double total = folded(part[k]);
      if (row / rows == block) sum[k] = total;
      part[k] = 0;
    }
  };
#pragma unroll 1
  for (uint32_t half = 0; half < 2; ++half) {
    hand_over(half);
    if (is_long) {
      CINCH_UNROLL
      for (uint32_t row = 0; row < ROWS; ++row) add(column[2 * row * PITCH], part);
    } else {
#pragma unroll 1
      for (uint32_t row = 0; row < ROWS; ++row) {
        add(column[2 * row * PITCH], part);
        if ((row + 1) % rows == 0) end_block(ROWS * half + row);
      }
    }
  }
  if (is_long) {
    CINCH_UNROLL
    for (int k = 0; k < K; ++k) sum[k] = part[k];
  }
}

}  // namespace cinch

#endif
