// Tiles of a chunk, as a warp works on them: 512 elements, of which lane l holds the 16 from `at +
// 16 * l`, zeros behind the end of the chunk. Device only; all 32 lanes call these functions.
//
// A block of 2^log2_block elements belongs to 2^(log2_block - 4) neighbouring lanes, or to several
// tiles.
#pragma once

#include "ptx/arithmetic.cuh"

#if defined(__CUDACC__)

#include "ptx/block.cuh"

namespace cinch {

constexpr uint32_t TILE = 512;
constexpr uint32_t LOG2_TILE = 9;

// Returns how many of the elements i to i + 15 exist, in `n` elements.
template <class Size>
__device__ __forceinline__ uint32_t elements_from(Size n, Size i) {
  return i >= n ? 0 : n - i < 16 ? (uint32_t)(n - i) : 16;
}

// Returns the value that another lane passes: its index is this lane's with the bits of `lanes`
// flipped.
template <class T>
__device__ __forceinline__ T from_lane(T own, uint32_t lanes) {
  return __shfl_xor_sync(~0u, own, lanes);
}

// Combines a value across the lanes of each block by butterfly exchange: calls join(lanes) for the
// distances 2^FIRST, 2^(FIRST + 1) and so on. Afterwards all lanes of a block have the combination
// of the block's elements in this tile. The operation must be commutative, associative and
// idempotent: where a distance leaves the block, the lane exchanges with itself (distance 0). There
// is no branch, so the lanes of the warp never diverge.
template <uint32_t FIRST = 0, class Join>
__device__ __forceinline__ void join_lanes(uint32_t log2_block, Join &&join) {
  const uint32_t others = ((1u << log2_block) - 1) >> 4;  // bits in which lanes of a block differ
  CINCH_UNROLL
  for (uint32_t level = FIRST; level < 5; ++level) join(others & 1u << level);
}

// Adds the 32 partial sums of a block in the order of src/codec/blocked/sums.rs. Lane p passes
// partial sum p; all lanes receive the total.
__device__ __forceinline__ double folded(double part) {
  CINCH_UNROLL
  for (uint32_t half = 16; half > 0; half /= 2) {
    part = __dadd_rn(part, __shfl_xor_sync(~0u, part, half));
  }
  return part;
}

// Adds the 32 partial sums of each of two blocks; lane p passes partial sum p of each block. Lanes
// 0 to 15 receive the total of the first block, lanes 16 to 31 the total of the second.
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

// Half a tile of each of up to 16 warps. The elements of neighbouring lanes are 20 words apart, so
// that 16-byte vectors have no bank conflicts.
struct RowScratch {
  static constexpr uint32_t WARPS = 16, PITCH = 20;
  alignas(16) float of_warp[WARPS][16 * PITCH];
};

// Adds a tile to K sums for each block, in the order of src/codec/blocked/sums.rs; `add(x, part)`
// adds an element to K partial sums. Sums of blocks that fit in the tile are complete afterwards.
// For longer blocks each lane keeps partial sums.
//
// Lanes exchange elements through shared memory, half a tile at a time, so that lane l gets element
// l of each row of 32.
template <int K, class Add>
__device__ __forceinline__ void add_rows(const float (&x)[16], uint32_t log2_block,
                                         double (&sum)[K], Add &&add) {
  constexpr uint32_t PITCH = RowScratch::PITCH, ROWS = 8;  // rows of half a tile
  float *own = block_shared<RowScratch>().of_warp[threadIdx.x / 32 % RowScratch::WARPS];
  const uint32_t lane = threadIdx.x % 32;
  const float *column = own + lane / 16 * PITCH + lane % 16;
  const bool is_long = log2_block >= LOG2_TILE;
  const uint32_t rows = is_long ? 16 : 1u << (log2_block - 5);
  const uint32_t block = (lane * 16) >> log2_block;
  // Writes half of the tile to shared memory, where lanes read it in rows of 32 elements.
  const auto hand_over = [&](uint32_t half) {
    // All lanes have finished their loads of the other half.
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
  if (log2_block == LOG2_TILE - 1) {
    // A block of the default size is half a tile, so one exchange adds up the partial sums of two
    // blocks.
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
  // Ends a block after this row: adds up its partial sums and gives the totals to the block's
  // lanes.
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

// Adds `first` of this lane and of the lane at distance LANES in the lower of both, `second` in the upper.
template <uint32_t LANES>
__device__ __forceinline__ double split(double first, double second) {
  const bool is_upper = threadIdx.x & LANES;
  const double own = is_upper ? second : first, other = is_upper ? first : second;
  return __dadd_rn(own, __shfl_xor_sync(~0u, other, LANES));
}

// Log2 of the elements of a block of the default size.
constexpr uint32_t LOG2_DEFAULT_BLOCK = 8;

// Sums over the rows of a tile of 16-bit elements, whose two blocks are rows of 32 elements. The tile is handed over in
// shared memory from lanes that hold 16 neighbouring elements to lanes that add columns: lane j of each half of the warp
// adds columns 2j and 2j + 1 of a block, a pair in each row.
//
// Compared with add_rows, shared memory takes half the accesses, and the sums a third fewer exchanges.
template <class E>
class PairRows {
 public:
  // Stores this lane's elements. It waits until all lanes have finished their loads of the last tile.
  static __device__ __forceinline__ void hand_over(const uint4 (&vectors)[2]) {
    const uint32_t lane = threadIdx.x % 32, swap = lane / 4 % 2;
    uint4 *own = pieces() + 2 * lane + lane / 16 * GAP;
    __syncwarp();
    own[swap] = vectors[0];
    own[swap ^ 1] = vectors[1];
    __syncwarp();
  }

  // Adds each column to K partial sums; `add(x, part)` adds an element.
  template <int K, class Add>
  static __device__ __forceinline__ void add_columns(double (&even)[K], double (&odd)[K], Add &&add) {
    const uint32_t lane = threadIdx.x % 32, word = lane % 16;
    const uint32_t *rows = reinterpret_cast<const uint32_t *>(pieces() + lane / 16 * (32 + GAP));
    const uint32_t *straight = rows + word, *swapped = rows + (word ^ 4);
    CINCH_UNROLL
    for (int k = 0; k < K; ++k) even[k] = odd[k] = 0;
    CINCH_UNROLL
    for (uint32_t row = 0; row < 8; ++row) {
      const uint32_t pair = (row / 2 % 2 == 0 ? straight : swapped)[16 * row];
      add(E::widen_low(pair), even);
      add(E::widen_high(pair), odd);
    }
  }

  // Adds the partial sums of each block in the order of src/codec/blocked/sums.rs; all of the block's lanes receive the
  // total. Half of the lanes add up the even columns, the others the odd ones.
  static __device__ __forceinline__ double folded(const double (&even)[1], const double (&odd)[1]) {
    double part = split<8>(even[0], odd[0]);
    CINCH_UNROLL
    for (uint32_t half = 4; half > 0; half /= 2) {
      part = __dadd_rn(part, __shfl_xor_sync(~0u, part, half));
    }
    return __dadd_rn(part, __shfl_xor_sync(~0u, part, 8));
  }

  // Adds two sums for each block at once. The lower 8 lanes of a block receive the first total, the others the second.
  static __device__ __forceinline__ double folded(const double (&even)[2], const double (&odd)[2]) {
    double part = split<4>(split<8>(even[0], even[1]), split<8>(odd[0], odd[1]));
    CINCH_UNROLL
    for (uint32_t half = 2; half > 0; half /= 2) {
      part = __dadd_rn(part, __shfl_xor_sync(~0u, part, half));
    }
    return __dadd_rn(part, __shfl_xor_sync(~0u, part, 4));
  }

 private:
  // Rows of the second block begin 4 pieces of 16 bytes later, in the other half of the banks. Every second pair of
  // lanes swaps its pieces. So neither stores of pieces nor loads of rows have bank conflicts.
  static constexpr uint32_t GAP = 4;

  static __device__ __forceinline__ uint4 *pieces() {
    static_assert((64 + GAP) * sizeof(uint4) <= sizeof(RowScratch::of_warp[0]), "a tile of pairs");
    return reinterpret_cast<uint4 *>(
        block_shared<RowScratch>().of_warp[threadIdx.x / 32 % RowScratch::WARPS]);
  }
};

}  // namespace cinch

#endif
