// Steps that move bytes as they are, over SIMPLE slots.
//
// A lane of a warp has UNROLL pieces of 16 bytes in flight. WHOLE: all pieces of the tile are.
#pragma once

#include "abi.h"
#include "exec/interpret.cuh"
#include "prims/user.cuh"

namespace cinch {

// Pieces of a tile, for each lane.
constexpr uint32_t UNROLL = 4;
constexpr uint32_t TILE_PIECES = UNROLL * WARP;
constexpr uint32_t TILE_BYTES = 16 * TILE_PIECES;

// `bytes` is the length of the chunk, `size` that of an element.
template <bool WHOLE>
__device__ __forceinline__ void move_tile(const Job &job, uint32_t tile, uint32_t bytes,
                                          uint32_t size) {
  const uint32_t pieces = (bytes + 15) / 16;
  const uint32_t first = tile * TILE_PIECES + lane_id();
  const bool from_input = job.nrecv == 0;
  const uint8_t *source = from_input ? job.input : job.source(0);
  const bool writes = job.writes() && !(from_input && job.output == job.input);
  uint4 v[UNROLL];
#pragma unroll
  for (uint32_t u = 0; u < UNROLL; ++u) {
    const uint32_t i = first + u * WARP;
    if (!WHOLE && i >= pieces) break;
    v[u] = from_input ? load_piece<WHOLE>(source, i, bytes, size)
                      : load_piece<true>(source, i, bytes, size);
  }
#pragma unroll 1
  for (uint32_t t = 0; t < job.nsend; ++t) {
    uint8_t *target = job.target(t);
#pragma unroll
    for (uint32_t u = 0; u < UNROLL; ++u) {
      const uint32_t i = first + u * WARP;
      if (WHOLE || i < pieces) store_piece<true>(target, i, bytes, size, v[u]);
    }
  }
  if (!writes) return;
#pragma unroll
  for (uint32_t u = 0; u < UNROLL; ++u) {
    const uint32_t i = first + u * WARP;
    if (WHOLE || i < pieces) store_piece<WHOLE>(job.output, i, bytes, size, v[u]);
  }
}

// Whether a tile's pieces of the user's buffers are single accesses.
__device__ __forceinline__ bool is_whole(const Job &job, uint32_t tile, uint32_t bytes) {
  return job.aligned && (tile + 1) * TILE_BYTES <= bytes;
}

// The kernel for calls that neither reduce nor encode. word[0] of the codec's parameters is the
// size of an element: 1, 2, 4 or 8.
class MoveSimple {
 public:
  static constexpr int protocol = CINCH_SIMPLE;

  static __device__ __forceinline__ void prepare() {}

  __device__ __forceinline__ MoveSimple(const cinch_work &work, const cinch_comm_view &, Stop)
      : work_(work) {}

  __device__ __forceinline__ uint32_t element_bytes() const { return work_.codec.word[0]; }
  __device__ __forceinline__ uint32_t tile_elements() const {
    return TILE_BYTES / element_bytes();
  }

  __device__ __forceinline__ void tile(const Job &job, uint32_t tile) {
    const uint32_t bytes = job.elements * element_bytes();
    if (is_whole(job, tile, bytes)) {
      move_tile<true>(job, tile, bytes, element_bytes());
    } else {
      move_tile<false>(job, tile, bytes, element_bytes());
    }
  }

 private:
  const cinch_work &work_;
};

}  // namespace cinch
