// The stage of a warp: its part of the dynamic shared memory, for tiles in flight.
//
//   tiles of elements and encoded tiles, STAGE_ROOM bytes
//   source addresses, 8 bytes a lane
//   target addresses, 8 bytes a lane
//   numbers of blocks, 8 bytes a lane
//
// Asynchronous copies to the stage need no registers, so several tiles are in flight while the warp
// computes; a warp that waits for its own loads is idle most of the time. Elements also cross
// memory in whole lines that way, although a lane works on 16 consecutive elements.
#pragma once

#include "abi.h"
#include "channel/block.cuh"
#include "codec/codec.cuh"
#include "ptx/async.cuh"

namespace cinch {

constexpr uint32_t HELD = 16;  // elements of a lane
constexpr uint32_t WARP_TILE = HELD * WARP;

constexpr uint32_t STAGE_BYTES = SMALL_BLOCKS ? CINCH_SMALL_STAGE_BYTES : CINCH_STAGE_BYTES;
// Code below sm_90 fetches half as many tiles ahead, because its stage is small.
constexpr uint32_t STAGE_DEPTH = SMALL_BLOCKS ? 1 : 2;

// Offsets in the stage.
constexpr uint32_t STAGE_ROOM = STAGE_BYTES - 3 * 8 * WARP;
constexpr uint32_t SOURCES_AT = STAGE_ROOM, TARGETS_AT = SOURCES_AT + 8 * WARP,
                   NUMBERS_AT = TARGETS_AT + 8 * WARP;

// Returns this warp's stage.
__device__ __forceinline__ uint8_t *this_stage() {
  return launched_shared() + mover_warp() * STAGE_BYTES;
}

// Whole tiles of elements of SIZE bytes. In shared memory piece k of 16 bytes lies at k ^ (k / 8 %
// PIECES), within its group of eight. Then neither lanes with neighbouring pieces nor lanes with
// every PIECES-th piece have a bank conflict. Tiles are aligned to 128 bytes there.
template <uint32_t SIZE>
struct ElementTiles {
  static constexpr uint32_t BYTES = WARP_TILE * SIZE;
  static constexpr uint32_t PIECES = HELD * SIZE / 16;
  static constexpr uint32_t ROW = 16 * WARP;  // bytes of a piece of each lane

  // Returns the offset of this lane's piece in row 0; lane l holds piece l of each row of 32
  // pieces. A row is four groups of eight.
  static __device__ __forceinline__ uint32_t in_row() {
    return 16 * (lane_id() ^ (lane_id() / 8 % PIECES));
  }
  // Returns the offset of this lane's first piece if each lane has PIECES consecutive pieces. Its
  // piece p lies at this offset ^ 16 p.
  static __device__ __forceinline__ uint32_t own() {
    return 16 * (lane_id() * PIECES | (lane_id() * PIECES / 8 % PIECES));
  }

  // Starts the copy of a tile into the stage.
  static __device__ __forceinline__ void fetch(uint8_t *tile, const uint8_t *from) {
    uint8_t *to = tile + in_row();
    from += 16 * lane_id();
#pragma unroll
    for (uint32_t p = 0; p < PIECES; ++p) copy16(to + ROW * p, from + ROW * p);
  }

  // Loads this lane's 16 elements.
  static __device__ __forceinline__ void take(const uint8_t *tile, uint4 (&v)[PIECES]) {
    const uint32_t at = shared_address(tile) + own();
#pragma unroll
    for (uint32_t p = 0; p < PIECES; ++p) v[p] = load_shared(at ^ 16 * p);
  }

  // Stores all lanes' elements to memory by way of `tile`. The warp may use `tile` again after the
  // next tile.
  static __device__ __forceinline__ void give(uint8_t *tile, const uint4 (&v)[PIECES], uint8_t *to) {
    const uint32_t at = shared_address(tile) + own();
#pragma unroll
    for (uint32_t p = 0; p < PIECES; ++p) store_shared(at ^ 16 * p, v[p]);
    __syncwarp();
    const uint8_t *row = tile + in_row();
    to += 16 * lane_id();
#pragma unroll
    for (uint32_t p = 0; p < PIECES; ++p) {
      store_vector(to + ROW * p, *(const uint4 *)(row + ROW * p));
    }
  }
};

// Whole encoded tiles in the stage, as chunks of WARP_TILE elements with the wire layout of a
// chunk, so that a codec can load them.
template <class C>
class EncodedTiles {
 public:
  static constexpr uint32_t CODE_BYTES = WARP_TILE / 8 * C::code_bits;  // of the widest codes
  static constexpr uint32_t SMALLEST_BLOCK = 32;
  static constexpr uint32_t BYTES = CODE_BYTES + C::numbers * 4 * WARP_TILE / SMALLEST_BLOCK;

  // Describes the tiles of a chunk of n elements.
  __device__ __forceinline__ EncodedTiles(const C &codec, uint32_t n)
      : code_bytes_(WARP_TILE / 8 * codec.bits()),
        numbers_(padded_code_bytes(n, codec.bits())),
        numbers_of_tile_(!C::scaled ? 0
                         : codec.log2_block() == 0
                             ? 1
                             : C::numbers * (WARP_TILE >> codec.log2_block())),
        distance_(C::keeps_scales && codec.log2_block() == 0 ? 0 : numbers_of_tile_) {}

  // Starts the copy of a tile of a chunk into the stage.
  __device__ __forceinline__ void fetch(uint8_t *encoded, const uint8_t *chunk,
                                        uint32_t tile) const {
#pragma unroll
    for (uint32_t c = 0; c < CODE_BYTES; c += 16 * WARP) {
      const uint32_t at = c + 16 * lane_id();
      if (at < code_bytes_) copy16(encoded + at, chunk + tile * code_bytes_ + at);
    }
    if (C::scaled && lane_id() < numbers_of_tile_) {
      const uint32_t number = tile * distance_ + lane_id();
      copy4(encoded + code_bytes_ + 4 * lane_id(), chunk + numbers_ + 4 * number);
    }
  }

  // Loads this lane's codes.
  template <class Codes>
  static __device__ __forceinline__ void take(const C &codec, const uint8_t *encoded, Codes &codes) {
    codec.load(encoded, WARP_TILE, HELD * lane_id(), codes);
  }

 private:
  uint32_t code_bytes_;  // of a tile
  uint32_t numbers_;     // offset in a chunk of its numbers
  uint32_t numbers_of_tile_;
  uint32_t distance_;  // numbers from a tile's to the next tile's
};

// A list in the stage of the slot addresses of up to 32 peers. A load from the list is uniform
// across the warp and cheaper than two shuffles.
class PeerSlots {
 public:
  // Builds the list at offset `at` of the stage. Lane l passes entry l as `own`.
  __device__ __forceinline__ PeerSlots(uint32_t at, const uint8_t *own)
      : list_((uint8_t **)(this_stage() + at)) {
    __syncwarp();  // all lanes have finished with the last contents of the stage
    list_[lane_id()] = (uint8_t *)own;
    __syncwarp();
  }

  __device__ __forceinline__ uint8_t *at(uint32_t r) const { return list_[r]; }

 private:
  uint8_t **list_;
};

// Gathers the fp32 numbers of consecutive encoded tiles in the stage, until they fill a line, which
// one store sends. A small store for each tile would lower the rate into a peer's memory
// (benches/FIGURES.md, "Choices in the kernels").
template <class C>
class NumberLine {
 public:
  // The fp32 numbers that a codec stores for one block.
  struct alignas(C::numbers == 2 ? 8 : 4) Numbers {
    float number[C::numbers == 2 ? 2 : 1];
  };

  // Gathers the numbers of whole tiles `first` to `last` - 1 of a chunk of n elements. Each block
  // must lie within a tile. A chunk with one scale has no numbers to take.
  __device__ __forceinline__ NumberLine(const C &codec, uint32_t n, uint32_t first, uint32_t last)
      : line_((Numbers *)(this_stage() + NUMBERS_AT)),
        begin_(padded_code_bytes(n, codec.bits())),
        log2_(C::scaled && codec.log2_block() != 0 ? LOG2_TILE - codec.log2_block() : 0),
        first_(first),
        last_(last) {
    static_assert(sizeof(Numbers) <= 8, "a line is a block for each lane");
  }

  // The numbers of a full line that this lane stores.
  struct Share {
    bool is_there;
    uint32_t offset;  // in the chunk
    Numbers numbers;
  };

  // Adds the numbers of tile t. If t is the last tile of its line, the result has this lane's
  // numbers to store.
  __device__ __forceinline__ Share take(uint32_t t, const typename C::Codes &codes) const {
    Share share = {};
    if constexpr (C::scaled) {
      const uint32_t tiles = WARP >> log2_;  // tiles of a line
      // The first lane of each block writes its numbers.
      if ((lane_id() & (tiles - 1)) == 0) {
        Numbers &own = line_[((t & (tiles - 1)) << log2_) + (lane_id() >> (5 - log2_))];
#pragma unroll
        for (uint32_t k = 0; k < C::numbers; ++k) own.number[k] = codes.number[k];
      }
      if (((t + 1) & (tiles - 1)) == 0 || t + 1 == last_) {
        const uint32_t line = t & ~(tiles - 1);  // its first tile
        const uint32_t tile = line + (lane_id() >> log2_);
        __syncwarp();
        share.is_there = tile >= first_ && tile <= t;
        share.offset = begin_ + ((line << log2_) + lane_id()) * sizeof(Numbers);
        share.numbers = line_[lane_id()];
        __syncwarp();
      }
    }
    return share;
  }

 private:
  Numbers *line_;
  uint32_t begin_;  // offset in a chunk of its numbers
  uint32_t log2_;   // log2 of the blocks of a tile
  uint32_t first_;
  uint32_t last_;
};

}  // namespace cinch
