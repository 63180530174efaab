// The verdict of a call's output. Warps inspect what they store, if the call takes statistics, and record in their block's
// shared memory that an element is not finite. The interpreter adds the blocks' records at its end.
#pragma once

#include "channel/channel.cuh"
#include "dtype/element.cuh"

namespace cinch {

// Returns whether outputs are inspected.
__device__ __forceinline__ bool inspects() { return this_channel().work.statistics != nullptr; }

// Records that the output has an element that is not finite.
__device__ __forceinline__ void record_non_finite() { this_channel().has_non_finite = 1; }

// Stores of output elements of type E.
template <class E>
struct Inspected {
  // Inspects the elements in P vectors.
  template <int P>
  static __device__ __forceinline__ void inspect(const uint4 (&vectors)[P]) {
    if (!inspects()) return;
    bool are_finite = true;
#pragma unroll
    for (int p = 0; p < P; ++p) are_finite &= E::are_finite(vectors[p]);
    if (!are_finite) record_non_finite();
  }

  // Inspects those of the elements in `vector`, piece i of a buffer of `bytes` bytes, that the buffer has.
  static __device__ __forceinline__ void inspect_end(uint4 vector, uint32_t i, uint32_t bytes) {
    const uint32_t left = bytes > 16 * i ? bytes - 16 * i : 0;
    if (!inspects() || left == 0) return;
    const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
    uint32_t kept[4];
#pragma unroll
    for (uint32_t w = 0; w < 4; ++w) {
      const uint32_t there = left > 4 * w ? min(left - 4 * w, 4u) : 0;
      kept[w] = there == 0 ? 0 : words[w] & ~0u >> (32 - 8 * there);
    }
    if (!E::are_finite(make_uint4(kept[0], kept[1], kept[2], kept[3]))) record_non_finite();
  }
};

// Stores of output elements whose type is unknown or has finite elements only.
struct Uninspected {
  template <int P>
  static __device__ __forceinline__ void inspect(const uint4 (&)[P]) {}
  static __device__ __forceinline__ void inspect_end(uint4, uint32_t, uint32_t) {}
};

}  // namespace cinch
