// A lane's 16 elements of an array of any alignment that its type allows.
#pragma once

#include "dtype/element.cuh"

namespace cinch {

// Whether vectors of 16 bytes may be loaded and stored.
__device__ __forceinline__ bool is_aligned(const void *at) { return (uintptr_t)at % 16 == 0; }

// How many of the 16 elements from i on there are.
__device__ __forceinline__ uint32_t elements_from(uint64_t n, uint64_t i) {
  return i >= n ? 0 : n - i < 16 ? (uint32_t)(n - i) : 16;
}

// Elements from i on, zeros beyond n.
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

}  // namespace cinch
