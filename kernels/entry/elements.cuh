// Loads and stores of 16 elements for each lane, at any alignment of the element type. Thread
// blocks have 256 threads.
#pragma once

#include "codec/warp.cuh"
#include "dtype/element.cuh"

namespace cinch {

constexpr uint32_t THREADS = 256;

// Returns whether `at` is aligned for accesses of 16 bytes.
__device__ __forceinline__ bool is_aligned(const void *at) { return (uintptr_t)at % 16 == 0; }

// Returns the index of this warp in the block. Lane 0 broadcasts it, so that the compiler knows it to be equal in all
// lanes: branches on it need no second form for lanes that have diverged.
__device__ __forceinline__ uint32_t warp_index() {
  return __shfl_sync(~0u, threadIdx.x / 32, 0);
}

// Loads elements i to i + 15 of an array of n elements, with zeros for those from n on.
template <class E>
__device__ __forceinline__ void load_elements(const void *elements, bool aligned, uint64_t n,
                                              uint64_t i, float (&x)[16]) {
  using Bits = typename E::Bits;
  const Bits *from = static_cast<const Bits *>(elements) + i;
  if (aligned && i + 16 <= n) {
    uint4 vector[16 / E::N];
    CINCH_UNROLL
    for (int v = 0; v < 16 / E::N; ++v) vector[v] = reinterpret_cast<const uint4 *>(from)[v];
    unpack_elements<E>(vector, x);
  } else {
    CINCH_UNROLL
    for (int k = 0; k < 16; ++k) x[k] = i + k < n ? E::widen(from[k]) : 0.0f;
  }
}

// The tiles of an array of n elements. Their indices have 32 bits: 2^41 elements are more than a GPU's memory holds.
struct ArrayTiles {
  uint32_t count;
  uint32_t whole;  // tiles of 512 elements; the last may have fewer
  uint32_t rest;   // elements of that one

  explicit __device__ __forceinline__ ArrayTiles(uint64_t n)
      : count((uint32_t)((n + TILE - 1) / TILE)), whole((uint32_t)(n / TILE)), rest((uint32_t)n % TILE) {}

  // Returns how many elements tile `tile` has.
  __device__ __forceinline__ uint32_t elements_of(uint32_t tile) const { return tile < whole ? TILE : rest; }
};

// Loads a tile of an array, packed as in memory, with zeros behind the end of the array. Lane l receives the 16 elements
// from 16 * l on. All lanes of the warp call this.
template <class E>
__device__ __forceinline__ void load_tile(const void *elements, bool aligned, const ArrayTiles &tiles, uint32_t tile,
                                          uint4 (&vectors)[16 / E::N]) {
  using Bits = typename E::Bits;
  constexpr uint32_t PIECES = 16 / E::N;
  const uint32_t lane = threadIdx.x % 32;
  const Bits *from = static_cast<const Bits *>(elements) + (uint64_t)tile * TILE;
  if (aligned && tile < tiles.whole) {
    CINCH_UNROLL
    for (uint32_t p = 0; p < PIECES; ++p) {
      vectors[p] = reinterpret_cast<const uint4 *>(from)[PIECES * lane + p];
    }
    return;
  }
  // Half a tile at a time goes through shared memory, element by element. A loop is a fraction of the code that loads of
  // 16 elements by each lane take.
  __shared__ uint4 rooms[THREADS / 32][16 * PIECES];
  uint4 *room = rooms[threadIdx.x / 32];
  const uint32_t there = tiles.elements_of(tile);
  CINCH_ROLL
  for (uint32_t half = 0; half < 2; ++half) {
    __syncwarp();
    CINCH_ROLL
    for (uint32_t k = lane; k < TILE / 2; k += 32) {
      const uint32_t i = TILE / 2 * half + k;
      reinterpret_cast<Bits *>(room)[k] = i < there ? from[i] : (Bits)0;
    }
    __syncwarp();
    if (lane / 16 == half) {
      CINCH_UNROLL
      for (uint32_t p = 0; p < PIECES; ++p) vectors[p] = room[lane % 16 * PIECES + p];
    }
  }
}

template <class E>
__device__ __forceinline__ void store_elements(void *elements, bool aligned, uint64_t n, uint64_t i,
                                               const float (&x)[16]) {
  using Bits = typename E::Bits;
  Bits *to = static_cast<Bits *>(elements) + i;
  if (aligned && i + 16 <= n) {
    CINCH_UNROLL
    for (int v = 0; v < 16 / E::N; ++v) {
      float part[E::N];
      CINCH_UNROLL
      for (int k = 0; k < E::N; ++k) part[k] = x[v * E::N + k];
      reinterpret_cast<uint4 *>(to)[v] = E::pack(part);
    }
  } else {
    CINCH_UNROLL
    for (int k = 0; k < 16; ++k) {
      if (i + k < n) to[k] = E::narrow(x[k]);
    }
  }
}

// Calls use(begin) for each tile of this warp, where `begin` is the tile's first element; all lanes
// call `use` together.
template <class Use>
__device__ __forceinline__ void each_tile(uint64_t n, Use &&use) {
  const uint64_t warps = (uint64_t)gridDim.x * (THREADS / 32);
  const uint64_t first = (uint64_t)blockIdx.x * (THREADS / 32) + warp_index();
  for (uint64_t begin = first * TILE; begin < n; begin += warps * TILE) use(begin);
}

// Stores the elements of a tile; this lane holds the 16 elements from begin + 16 * lane. Direct
// stores would touch half of each memory sector at a time. Half a tile at a time goes through
// shared memory, so that stores cover whole lines.
template <class E>
__device__ __forceinline__ void store_tile(void *elements, bool aligned, uint64_t n, uint64_t begin,
                                           const float (&x)[16]) {
  constexpr uint32_t PIECES = 16 / E::N;  // of 16 bytes, of a lane
  __shared__ uint4 rooms[THREADS / 32][16 * PIECES];
  const uint32_t lane = threadIdx.x % 32;
  if (!aligned || begin + TILE > n) {
    return store_elements<E>(elements, aligned, n, begin + 16 * lane, x);
  }
  uint4 *room = rooms[threadIdx.x / 32];
  uint4 *to = reinterpret_cast<uint4 *>(static_cast<typename E::Bits *>(elements) + begin);
  // Permutes pieces so that there is no bank conflict, neither between lanes with neighbouring
  // pieces nor between lanes whose pieces are PIECES apart.
  const auto place = [](uint32_t piece) { return piece ^ ((piece >> 3) & (PIECES - 1)); };
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    if (lane / 16 == half) {
#pragma unroll
      for (uint32_t p = 0; p < PIECES; ++p) {
        float part[E::N];
#pragma unroll
        for (uint32_t k = 0; k < E::N; ++k) part[k] = x[p * E::N + k];
        room[place(lane % 16 * PIECES + p)] = E::pack(part);
      }
    }
    __syncwarp();
#pragma unroll
    for (uint32_t p = 0; p < PIECES / 2; ++p) {
      const uint32_t piece = 32 * p + lane;
      to[half * 16 * PIECES + piece] = room[place(piece)];
    }
    __syncwarp();
  }
}

}  // namespace cinch
