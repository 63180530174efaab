// A warp at work on a chunk: tiles of 512 elements, of which lane l holds the 16 from
// `at + 16 * l`, zeros where the chunk has ended. Device only; all 32 lanes take part.
#pragma once

#include "codec/scaled.cuh"

#if defined(__CUDACC__)

namespace cinch {

constexpr uint32_t TILE = 512;

// The largest magnitude of all elements of the tile that share this lane's block: those of 2^(log2_block - 4)
// neighbouring lanes. A block beyond the tile gives what is in the tile. It is not finite if an
// element is not.
__device__ __forceinline__ float block_abs_max(const float (&x)[16], uint32_t log2_block) {
  float largest = largest_of(x);
  CINCH_UNROLL
  for (uint32_t level = 0; level < 5; ++level) {
    // The same for all lanes: no lane waits for one that has gone another way.
    if (log2_block >= 5 + level) {
      largest = larger_magnitude(largest, __shfl_xor_sync(~0u, largest, 1u << level));
    }
  }
  return largest;
}

// The same for a block of more than one tile, from `at`: `reload(tile, x)` fetches this lane's
// elements of the tile that starts there.
template <class Reload>
__device__ __forceinline__ float long_block_abs_max(Reload &&reload, uint64_t at, uint64_t n,
                                                    uint32_t log2_block) {
  const uint64_t past = at + ((uint64_t)1 << log2_block);
  const uint64_t end = past < n ? past : n;
  float largest = 0;
  for (uint64_t tile = at; tile < end; tile += TILE) {
    float x[16];
    reload(tile, x);
    largest = larger_magnitude(largest, block_abs_max(x, 9));
  }
  return largest;
}

}  // namespace cinch

#endif
