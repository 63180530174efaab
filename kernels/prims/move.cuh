// Steps that move raw bytes, in protocol simple. A lane has up to 2 * UNROLL pieces of 16 bytes in
// flight.
#pragma once

#include "abi.h"
#include "channel/channel.cuh"
#include "fifo/wait.cuh"
#include "prims/user.cuh"
#include "prims/verdict.cuh"

namespace cinch {

// Number of 16-byte pieces of a tile that each lane moves.
constexpr uint32_t UNROLL = 4;
constexpr uint32_t TILE_PIECES = UNROLL * WARP;
constexpr uint32_t TILE_BYTES = 16 * TILE_PIECES;

// Returns how many tiles of a chunk can be moved entirely by 16-byte accesses.
__device__ __forceinline__ uint32_t whole_tiles(const Job &job, uint32_t bytes) {
  return job.aligned ? bytes / TILE_BYTES : 0;
}

// Moves the whole 16-byte pieces of an aligned chunk's last, partial tile. Returns how many whole
// pieces the chunk has.
template <class Output>
__device__ __forceinline__ uint32_t move_last_tile(const Job &job, uint32_t tile, uint32_t bytes,
                                                   uint32_t size, bool writes) {
  const uint32_t inside = bytes & ~15u, first = tile * TILE_PIECES + lane_id();
  const uint8_t *source = job.nrecv == 0 ? job.input : job.source(0);
  uint4 v[UNROLL];
#pragma unroll
  for (uint32_t u = 0; u < UNROLL; ++u) {
    v[u] = load_piece<Pieces::INSIDE>(source, first + u * WARP, inside, size);
  }
#pragma unroll 1
  for (uint32_t t = 0; t < job.nsend; ++t) {
    uint8_t *target = job.target(t);
#pragma unroll
    for (uint32_t u = 0; u < UNROLL; ++u) {
      store_piece<Pieces::INSIDE>(target, first + u * WARP, inside, size, v[u]);
    }
  }
  if (writes) {
#pragma unroll
    for (uint32_t u = 0; u < UNROLL; ++u) {
      Output::inspect_end(v[u], first + u * WARP, inside);
      store_piece<Pieces::INSIDE>(job.output, first + u * WARP, inside, size, v[u]);
    }
  }
  return inside / 16;
}

// Moves a partial or unaligned tile of elements of `size` bytes. The function is out of line, so
// that the loop over whole tiles need not keep its registers.
template <class Output>
static __device__ __noinline__ void move_ragged_tile(const Job &job, uint32_t tile, uint32_t bytes,
                                                     uint32_t size) {
  const uint32_t pieces = (bytes + 15) / 16;
  const bool from_input = job.nrecv == 0;
  const bool writes = job.writes() && !(from_input && job.output == job.input);
  uint32_t i = tile * TILE_PIECES + lane_id();
  if (job.aligned) i = max(i, move_last_tile<Output>(job, tile, bytes, size, writes) + lane_id());
#pragma unroll 1
  for (; i < min(pieces, (tile + 1) * TILE_PIECES); i += WARP) {
    const uint4 v = from_input ? load_piece<Pieces::ANY>(job.input, i, bytes, size)
                               : load_piece<Pieces::WHOLE>(job.source(0), i, bytes, size);
#pragma unroll 1
    for (uint32_t t = 0; t < job.nsend; ++t) {
      store_piece<Pieces::WHOLE>(job.target(t), i, bytes, size, v);
    }
    if (writes) {
      Output::inspect_end(v, i, bytes);
      store_piece<Pieces::ANY>(job.output, i, bytes, size, v);
    }
  }
}

// Moves tiles first to last - 1 of a chunk. Output is Inspected or Uninspected.
template <class Output>
__device__ __forceinline__ void move_tiles(const Job &job, uint32_t first, uint32_t last,
                                           uint32_t bytes, uint32_t size) {
  const bool from_input = job.nrecv == 0;
  const bool writes = job.writes() && !(from_input && job.output == job.input);
  const uint32_t nsend = job.nsend;
  const uint32_t whole = min(last, whole_tiles(job, bytes));
  const uint64_t begin = (uint64_t)first * TILE_BYTES + 16 * lane_id();
  const uint8_t *source = (from_input ? job.input : job.source(0)) + begin;
  uint8_t *target = nsend > 0 ? job.target(0) + begin : nullptr;
  uint8_t *output = job.output + begin;
  uint4 next[UNROLL];
  if (first < whole) {
#pragma unroll
    for (uint32_t u = 0; u < UNROLL; ++u) next[u] = load_vector(source + 16 * WARP * u);
  }
#pragma unroll 1
  for (uint32_t tile = first; tile < whole; ++tile) {
    uint4 v[UNROLL];
#pragma unroll
    for (uint32_t u = 0; u < UNROLL; ++u) v[u] = next[u];
    source += TILE_BYTES;
    // Loads the next tile while this one is stored.
    if (tile + 1 < whole) {
#pragma unroll
      for (uint32_t u = 0; u < UNROLL; ++u) next[u] = load_vector(source + 16 * WARP * u);
    }
    if (nsend > 0) {
#pragma unroll
      for (uint32_t u = 0; u < UNROLL; ++u) store_vector(target + 16 * WARP * u, v[u]);
#pragma unroll 1
      for (uint32_t t = 1; t < nsend; ++t) {
        uint8_t *other = job.target(t) + (uint64_t)tile * TILE_BYTES + 16 * lane_id();
#pragma unroll
        for (uint32_t u = 0; u < UNROLL; ++u) store_vector(other + 16 * WARP * u, v[u]);
      }
    }
    if (writes) {
      Output::inspect(v);
#pragma unroll
      for (uint32_t u = 0; u < UNROLL; ++u) store_vector(output + 16 * WARP * u, v[u]);
    }
    target += TILE_BYTES;
    output += TILE_BYTES;
  }
#pragma unroll 1
  for (uint32_t tile = max(first, whole); tile < last; ++tile) {
    move_ragged_tile<Output>(job, tile, bytes, size);
  }
}

// Moves the data of calls that neither reduce nor encode. The codec's parameters hold the size of
// an element in word[0]: 1, 2, 4 or 8.
class MoveSimple {
 public:
  static constexpr int protocol = CINCH_SIMPLE;
  static constexpr bool draws = false;
  static constexpr bool keeps_scales = false;
  static constexpr bool takes_verdict = false;

  static __device__ __forceinline__ void prepare(uint32_t) {}
  static __device__ __forceinline__ uint64_t factor_at(uint64_t address) { return address; }

  __device__ __forceinline__ MoveSimple(const cinch_work &work, const cinch_comm_view &, Stop)
      : work_(work) {}

  __device__ __forceinline__ bool has_fast_path(const Job &) const { return false; }
  __device__ __forceinline__ uint32_t element_bytes() const { return work_.codec.word[0]; }
  __device__ __forceinline__ uint32_t tile_elements() const {
    return TILE_BYTES / element_bytes();
  }

  __device__ __forceinline__ void tiles(const Job &job, uint32_t first, uint32_t last) const {
    move_tiles<Uninspected>(job, first, last, job.elements * element_bytes(), element_bytes());
  }

 private:
  const cinch_work &work_;
};

}  // namespace cinch
