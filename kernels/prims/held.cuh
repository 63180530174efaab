// The 16 elements of a lane in fp32: loads from memory and stores to it.
#pragma once

#include "dtype/element.cuh"
#include "prims/stage.cuh"

namespace cinch {

template <class E>
struct Held {
  using Bits = typename E::Bits;
  static constexpr uint32_t SIZE = sizeof(Bits);
  static constexpr uint32_t PIECES = ElementTiles<SIZE>::PIECES;
  static constexpr uint32_t N = 16 / SIZE;

  // Returns the index of this lane's first element, in a tile that begins at `at`.
  static __device__ __forceinline__ uint32_t mine(uint32_t at) { return at + lane_id() * HELD; }

  // Returns how many of this lane's elements, the first of which has index i, have an index below
  // n.
  static __device__ __forceinline__ uint32_t valid(uint32_t n, uint32_t i) {
    return n > i ? min(n - i, HELD) : 0;
  }

  // Unpacks this lane's elements. With ANY_NAN it is faster, but a NaN may become a NaN with other
  // bits.
  template <bool ANY_NAN = false>
  static __device__ __forceinline__ void unpack(const uint4 (&v)[PIECES], float (&x)[HELD]) {
#pragma unroll
    for (uint32_t p = 0; p < PIECES; ++p) {
      float part[N];
      if (ANY_NAN) {
        E::unpack_any_nan(v[p], part);
      } else {
        E::unpack(v[p], part);
      }
#pragma unroll
      for (uint32_t k = 0; k < N; ++k) x[p * N + k] = part[k];
    }
  }

  // Packs this lane's elements; it is faster if no element is NaN.
  static __device__ __forceinline__ void pack(const float (&x)[HELD], bool is_free_of_nan,
                                              uint4 (&v)[PIECES]) {
    if (is_free_of_nan) {
      each_part(x, [&](uint32_t p, const float (&part)[N]) { v[p] = E::pack_numbers(part); });
    } else {
      each_part(x, [&](uint32_t p, const float (&part)[N]) { v[p] = E::pack(part); });
    }
  }

  // Rounds the elements to the element type.
  static __device__ __forceinline__ void round(float (&x)[HELD]) {
#pragma unroll
    for (uint32_t k = 0; k < HELD; ++k) x[k] = E::widen(E::narrow(x[k]));
  }

  static __device__ __forceinline__ void store_pieces(uint8_t *to, const uint4 (&v)[PIECES]) {
#pragma unroll
    for (uint32_t p = 0; p < PIECES; ++p) store_vector(to + 16 * p, v[p]);
  }

  // Returns whether a buffer of n elements has all of this lane's elements, from index i on, and is
  // aligned to 16 bytes.
  static __device__ __forceinline__ bool is_whole(const uint8_t *buffer, uint32_t n, uint32_t i) {
    return (uintptr_t)buffer % 16 == 0 && i + HELD <= n;
  }
  static __device__ __forceinline__ void load_pieces(const uint8_t *buffer, uint32_t i,
                                                     uint4 (&v)[PIECES]) {
#pragma unroll
    for (uint32_t p = 0; p < PIECES; ++p) v[p] = load_vector(buffer + (uint64_t)i * SIZE + 16 * p);
  }

  // Load and store elements one by one, from index i on, in a buffer of n elements. Loads give
  // zeros from n on.
  static __device__ __forceinline__ void load_some(const uint8_t *buffer, uint32_t n, uint32_t i,
                                                   float (&x)[HELD]) {
    if (i < n) {
      const Bits *from = (const Bits *)buffer + i;
#pragma unroll
      for (uint32_t k = 0; k < HELD; ++k) x[k] = i + k < n ? E::widen(from[k]) : 0;
    } else {
      // Zeros need no loads. Tiles of small messages end early, and conditional loads cost latency.
#pragma unroll
      for (uint32_t k = 0; k < HELD; ++k) x[k] = 0;
    }
  }
  static __device__ __forceinline__ void store_some(uint8_t *buffer, uint32_t n, uint32_t i,
                                                    const float (&x)[HELD]) {
    Bits *to = (Bits *)buffer + i;
#pragma unroll
    for (uint32_t k = 0; k < HELD; ++k) {
      if (i + k < n) to[k] = E::narrow(x[k]);
    }
  }

 private:
  // Calls take(p, part) for each 16-byte piece p; `part` has the elements of the piece.
  template <class Take>
  static __device__ __forceinline__ void each_part(const float (&x)[HELD], Take &&take) {
#pragma unroll
    for (uint32_t p = 0; p < PIECES; ++p) {
      float part[N];
#pragma unroll
      for (uint32_t k = 0; k < N; ++k) part[k] = x[p * N + k];
      take(p, part);
    }
  }
};

}  // namespace cinch
