// What a warp has fetched ahead into shared memory: tiles of elements, and images of encoded tiles.
//
// A warp that waits for its own loads computes a third of the time. Copies that go on beside it need
// no registers, so that several tiles are on their way while one is at work, and elements cross
// memory in whole lines although a lane works on 16 consecutive ones.
#pragma once

#include "abi.h"
#include "codec/codec.cuh"
#include "exec/interpret.cuh"
#include "ptx/async.cuh"

namespace cinch {

constexpr uint32_t HELD = 16;  // elements of a lane
constexpr uint32_t WARP_TILE = HELD * WARP;

constexpr uint32_t STAGE_BYTES = SMALL_BLOCKS ? CINCH_SMALL_STAGE_BYTES : CINCH_STAGE_BYTES;
// Where shared memory is short, a warp fetches half as far ahead.
constexpr uint32_t STAGE_DEPTH = SMALL_BLOCKS ? 1 : 2;

// The part of the block's dynamic shared memory that this warp alone uses.
__device__ __forceinline__ uint8_t *this_stage() {
  extern __shared__ uint4 stages[];
  return (uint8_t *)stages + mover_warp() * STAGE_BYTES;
}

// Whole tiles of elements of SIZE bytes. In shared memory pieces of 16 bytes are moved within groups
// of eight, so that neither lanes with neighbouring pieces nor lanes with every PIECES-th meet in a
// bank.
template <uint32_t SIZE>
struct ElementTiles {
  static constexpr uint32_t BYTES = WARP_TILE * SIZE;
  static constexpr uint32_t PIECES = HELD * SIZE / 16;

  static __device__ __forceinline__ uint32_t place(uint32_t piece) {
    return 16 * (piece ^ ((piece >> 3) & (PIECES - 1)));
  }

  // Starts to copy a tile.
  static __device__ __forceinline__ void fetch(uint8_t *tile, const uint8_t *from) {
#pragma unroll
    for (uint32_t p = 0; p < PIECES; ++p) {
      const uint32_t piece = p * WARP + lane_id();
      copy16(tile + place(piece), from + 16 * piece);
    }
  }

  // This lane's 16 elements.
  static __device__ __forceinline__ void take(const uint8_t *tile, uint4 (&v)[PIECES]) {
#pragma unroll
    for (uint32_t p = 0; p < PIECES; ++p) {
      v[p] = *(const uint4 *)(tile + place(lane_id() * PIECES + p));
    }
  }

  // Stores all lanes' elements, by way of `tile`, which may be used again one tile later.
  static __device__ __forceinline__ void give(uint8_t *tile, const uint4 (&v)[PIECES], uint8_t *to) {
#pragma unroll
    for (uint32_t p = 0; p < PIECES; ++p) {
      *(uint4 *)(tile + place(lane_id() * PIECES + p)) = v[p];
    }
    __syncwarp();
#pragma unroll
    for (uint32_t p = 0; p < PIECES; ++p) {
      const uint32_t piece = p * WARP + lane_id();
      store_vector(to + 16 * piece, *(const uint4 *)(tile + place(piece)));
    }
  }
};

// Images of whole encoded tiles: chunks of WARP_TILE elements, with the layout of a chunk, so that a
// codec reads them as such.
template <class C>
class Images {
 public:
  static constexpr uint32_t CODE_BYTES = WARP_TILE / 8 * C::code_bits;  // at most
  static constexpr uint32_t SMALLEST_BLOCK = 32;
  static constexpr uint32_t BYTES = CODE_BYTES + C::numbers * 4 * WARP_TILE / SMALLEST_BLOCK;

  // Of chunks of n elements.
  __device__ __forceinline__ Images(const C &codec, uint32_t n)
      : code_bytes_(WARP_TILE / 8 * codec.bits()),
        numbers_(padded_code_bytes(n, codec.bits())),
        numbers_of_tile_(C::scaled ? C::numbers * WARP_TILE / codec.block() : 0) {}

  // Starts to copy a tile of a chunk.
  __device__ __forceinline__ void fetch(uint8_t *image, const uint8_t *chunk, uint32_t tile) const {
#pragma unroll
    for (uint32_t c = 0; c < CODE_BYTES; c += 16 * WARP) {
      const uint32_t at = c + 16 * lane_id();
      if (at < code_bytes_) copy16(image + at, chunk + tile * code_bytes_ + at);
    }
    if (C::scaled && lane_id() < numbers_of_tile_) {
      const uint32_t number = tile * numbers_of_tile_ + lane_id();
      copy4(image + code_bytes_ + 4 * lane_id(), chunk + numbers_ + 4 * number);
    }
  }

  // This lane's codes.
  template <class Codes>
  static __device__ __forceinline__ void take(const C &codec, const uint8_t *image, Codes &codes) {
    codec.load(image, WARP_TILE, HELD * lane_id(), codes);
  }

 private:
  uint32_t code_bytes_;  // of a tile
  uint32_t numbers_;     // where they begin in a chunk
  uint32_t numbers_of_tile_;
};

}  // namespace cinch
