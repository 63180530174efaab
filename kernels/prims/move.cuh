// Steps that move bytes as they are, over SIMPLE slots.
//
// A lane of a warp has UNROLL pieces of 16 bytes in flight. `Bits` is an unsigned integer as large
// as an element, for buffers that are not aligned to 16 bytes and for the end of a message.
#pragma once

#include "abi.h"
#include "exec/interpret.cuh"
#include "prims/user.cuh"

namespace cinch {

// Pieces of a tile, for each lane.
constexpr uint32_t UNROLL = 4;
constexpr uint32_t TILE_PIECES = UNROLL * WARP;

// `bytes` is the length of the chunk.
template <class Bits, bool ALIGNED>
__device__ __forceinline__ void move_tile(const Job &job, uint32_t tile, uint32_t bytes) {
  const uint32_t pieces = (bytes + 15) / 16;
  const uint32_t first = tile * TILE_PIECES + threadIdx.x % WARP;
  const bool from_input = job.nrecv == 0;
  const uint8_t *source = from_input ? job.input : job.source(0);
  const bool writes = job.writes() && !(from_input && job.output == job.input);
  if (first >= pieces) return;
  uint4 v[UNROLL];
#pragma unroll
  for (uint32_t u = 0; u < UNROLL; ++u) {
    const uint32_t i = first + u * WARP;
    if (i >= pieces) break;
    v[u] = from_input ? load_piece16<Bits, ALIGNED>(source, i, bytes)
                      : load_vector(source + 16 * (uint64_t)i);
  }
  for (uint32_t t = 0; t < job.nsend; ++t) {
    uint8_t *target = job.target(t);
#pragma unroll
    for (uint32_t u = 0; u < UNROLL; ++u) {
      const uint32_t i = first + u * WARP;
      if (i < pieces) store_vector(target + 16 * (uint64_t)i, v[u]);
    }
  }
  if (!writes) return;
#pragma unroll
  for (uint32_t u = 0; u < UNROLL; ++u) {
    const uint32_t i = first + u * WARP;
    if (i < pieces) store_piece16<Bits, ALIGNED>(job.output, i, bytes, v[u]);
  }
}

// The kernel for calls that neither reduce nor encode. word[0] of the codec's parameters is the
// size of an element: 1, 2, 4 or 8.
class MoveSimple {
 public:
  static constexpr int protocol = CINCH_SIMPLE;

  __device__ __forceinline__ MoveSimple(const cinch_work &work, const cinch_comm_view &, Stop)
      : work_(work) {}

  __device__ __forceinline__ uint32_t element_bytes() const { return work_.codec.word[0]; }
  __device__ __forceinline__ uint32_t tile_elements() const {
    return 16 * TILE_PIECES / element_bytes();
  }

  __device__ __forceinline__ void tile(const Job &job, uint32_t tile) {
    // Moving is the same for all sizes; only ends and odd addresses need to know them.
    const uint32_t bytes = job.elements * element_bytes();
    if (work_.flags & CINCH_ALIGNED) {
      move_tile<uint8_t, true>(job, tile, bytes);
    } else if (((uintptr_t)work_.input | (uintptr_t)work_.output | bytes) % 4 == 0) {
      move_tile<uint32_t, false>(job, tile, bytes);
    } else {
      move_tile<uint8_t, false>(job, tile, bytes);
    }
  }

 private:
  const cinch_work &work_;
};

}  // namespace cinch
