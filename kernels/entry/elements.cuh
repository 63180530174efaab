// Loads and stores of 16 elements for each lane, at any alignment of the element type. Thread
// blocks have 256 threads.
#pragma once

#include "codec/warp.cuh"
#include "dtype/element.cuh"

namespace cinch {

constexpr uint32_t THREADS = 256;

// Returns whether `at` is aligned for accesses of 16 bytes.
__device__ __forceinline__ bool is_aligned(const void *at) { return (uintptr_t)at % 16 == 0; }

// Returns how many of the elements i to i + 15 an array of n elements has.
__device__ __forceinline__ uint32_t elements_from(uint64_t n, uint64_t i) {
  return i >= n ? 0 : n - i < 16 ? (uint32_t)(n - i) : 16;
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
    CINCH_UNROLL
    for (int v = 0; v < 16 / E::N; ++v) {
      float part[E::N];
      E::unpack(vector[v], part);
      CINCH_UNROLL
      for (int k = 0; k < E::N; ++k) x[v * E::N + k] = part[k];
    }
  } else {
    CINCH_UNROLL
    for (int k = 0; k < 16; ++k) x[k] = i + k < n ? E::widen(from[k]) : 0.0f;
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
  const uint64_t first = (uint64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
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
