// What a warp has in shared memory: what it fetched ahead, tiles of elements and images of encoded
// tiles; tiles on their way out; and what it would else shuffle from lane to lane.
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

// A stage: tiles and images, then a list of places each for sources and targets, then a line of numbers.
constexpr uint32_t STAGE_ROOM = STAGE_BYTES - 3 * 8 * WARP;
constexpr uint32_t SOURCES_AT = STAGE_ROOM, TARGETS_AT = SOURCES_AT + 8 * WARP,
                   NUMBERS_AT = TARGETS_AT + 8 * WARP;

// The part of the block's dynamic shared memory that this warp alone uses.
__device__ __forceinline__ uint8_t *this_stage() {
  return launched_shared() + mover_warp() * STAGE_BYTES;
}

// Whole tiles of elements of SIZE bytes. In shared memory pieces of 16 bytes are moved within groups
// of eight, so that neither lanes with neighbouring pieces nor lanes with every PIECES-th meet in a
// bank: piece k lies at k ^ (k / 8 % PIECES). Tiles are aligned to 128 bytes there.
template <uint32_t SIZE>
struct ElementTiles {
  static constexpr uint32_t BYTES = WARP_TILE * SIZE;
  static constexpr uint32_t PIECES = HELD * SIZE / 16;
  static constexpr uint32_t ROW = 16 * WARP;  // bytes of a piece of each lane

  // Where the neighbouring pieces of all lanes lie: this lane's of row 0. Rows are whole groups.
  static __device__ __forceinline__ uint32_t in_row() {
    return 16 * (lane_id() ^ (lane_id() / 8 % PIECES));
  }
  // Where this lane's first piece lies of PIECES in a row; piece p is at this ^ 16 p.
  static __device__ __forceinline__ uint32_t own() {
    return 16 * (lane_id() * PIECES | (lane_id() * PIECES / 8 % PIECES));
  }

  // Starts to copy a tile.
  static __device__ __forceinline__ void fetch(uint8_t *tile, const uint8_t *from) {
    uint8_t *to = tile + in_row();
    from += 16 * lane_id();
#pragma unroll
    for (uint32_t p = 0; p < PIECES; ++p) copy16(to + ROW * p, from + ROW * p);
  }

  // This lane's 16 elements.
  static __device__ __forceinline__ void take(const uint8_t *tile, uint4 (&v)[PIECES]) {
    const uint32_t at = shared_address(tile) + own();
#pragma unroll
    for (uint32_t p = 0; p < PIECES; ++p) v[p] = load_shared(at ^ 16 * p);
  }

  // Stores all lanes' elements, by way of `tile`, which may be used again one tile later.
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

// Where the slots of up to a warp of peers lie, in the stage: a load from there is the same for all
// lanes and less than two shuffles.
class PeerPlaces {
 public:
  // `own` is that of the peer of this lane; the list is to be at `at` in the stage.
  __device__ __forceinline__ PeerPlaces(uint32_t at, const uint8_t *own)
      : list_((uint8_t **)(this_stage() + at)) {
    __syncwarp();  // nobody reads what an older loop has left in the stage
    list_[lane_id()] = (uint8_t *)own;
    __syncwarp();
  }

  __device__ __forceinline__ uint8_t *at(uint32_t r) const { return list_[r]; }

 private:
  uint8_t **list_;
};

// The numbers of tiles that a warp encodes in a row, gathered in its stage until they are a line:
// stores of two numbers for each tile cost 8 to 12 % of the rate into a peer's memory.
template <class C>
class NumberLine {
 public:
  // Of a block.
  struct alignas(C::numbers == 2 ? 8 : 4) Numbers {
    float number[C::numbers == 2 ? 2 : 1];
  };

  // Of tiles from `first` to `last` - 1, whole ones of a chunk of n elements with blocks within a
  // tile.
  __device__ __forceinline__ NumberLine(const C &codec, uint32_t n, uint32_t first, uint32_t last)
      : line_((Numbers *)(this_stage() + NUMBERS_AT)),
        begin_(padded_code_bytes(n, codec.bits())),
        log2_(C::scaled ? LOG2_TILE - codec.log2_block() : 0),
        first_(first),
        last_(last) {
    static_assert(sizeof(Numbers) <= 8, "a line is a block for each lane");
  }

  // What a lane stores of a line.
  struct Share {
    bool is_there;
    uint32_t place;  // in the chunk
    Numbers numbers;
  };

  // Takes those of tile t. The share is that of the line, where this is its last tile.
  __device__ __forceinline__ Share take(uint32_t t, const typename C::Codes &codes) const {
    Share share = {};
    if constexpr (C::scaled) {
      const uint32_t tiles = WARP >> log2_;  // of a line
      // By the first lane of each block.
      if ((lane_id() & (tiles - 1)) == 0) {
        Numbers &own = line_[((t & (tiles - 1)) << log2_) + (lane_id() >> (5 - log2_))];
#pragma unroll
        for (int k = 0; k < C::numbers; ++k) own.number[k] = codes.number[k];
      }
      if ((t + 1 & (tiles - 1)) == 0 || t + 1 == last_) {
        const uint32_t line = t & ~(tiles - 1);  // its first tile
        const uint32_t tile = line + (lane_id() >> log2_);
        __syncwarp();
        share.is_there = tile >= first_ && tile <= t;
        share.place = begin_ + ((line << log2_) + lane_id()) * sizeof(Numbers);
        share.numbers = line_[lane_id()];
        __syncwarp();
      }
    }
    return share;
  }

 private:
  Numbers *line_;
  uint32_t begin_;  // where numbers begin in a chunk
  uint32_t log2_;   // of the blocks of a tile
  uint32_t first_;
  uint32_t last_;
};

}  // namespace cinch
