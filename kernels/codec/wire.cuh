// Where codes and scales of a chunk lie: codes, zeros up to a multiple of 16 bytes, little-endian
// fp32 scales. The same as src/codec/wire.rs.
#pragma once

#include "ptx/base.cuh"

namespace cinch {

// 16 codes of BYTES bytes: what one lane holds.
template <int BYTES>
struct CodeVectors {
  uint4 vector[BYTES];
};

// Index is uint32_t or uint64_t: chunks of a collective need no more than the first.
template <class Index>
CINCH_HD Index padded_code_bytes(Index n, uint32_t code_bytes) {
  return (n * code_bytes + 15) & ~(Index)15;
}

// Of a chunk of n elements. log2_block 0: one scale, if there is any element.
CINCH_HD uint64_t scale_count(uint64_t n, uint32_t log2_block) {
  if (log2_block == 0) return n > 0;
  return (n + ((uint64_t)1 << log2_block) - 1) >> log2_block;
}

CINCH_HD uint64_t wire_bytes(uint64_t n, uint32_t code_bytes, bool scaled, uint32_t log2_block) {
  return padded_code_bytes(n, code_bytes) + (scaled ? 4 * scale_count(n, log2_block) : 0);
}

// Number of the scale of element i.
template <class Index>
CINCH_HD Index scale_index(Index i, uint32_t log2_block) {
  return log2_block == 0 ? 0 : i >> log2_block;
}

// Wire memory is global memory, which the compiler does not see through a pointer that was kept
// elsewhere.
CINCH_HD uint4 load_codes16(const uint8_t *at) {
#if defined(__CUDA_ARCH__)
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
#else
  return *reinterpret_cast<const uint4 *>(at);
#endif
}

CINCH_HD void store_codes16(uint8_t *at, uint4 v) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
#else
  *reinterpret_cast<uint4 *>(at) = v;
#endif
}

CINCH_HD float load_scale(const float *at) {
#if defined(__CUDA_ARCH__)
  float scale;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(scale) : "l"(at) : "memory");
  return scale;
#else
  return *at;
#endif
}

// Codes of the lane whose first element is i, a multiple of 16. Elements beyond n are zero codes,
// which fill the padding.
template <int BYTES, class Index>
CINCH_HD void store_codes(uint8_t *wire, Index n, Index i, const CodeVectors<BYTES> &codes) {
  CINCH_UNROLL
  for (int v = 0; v < BYTES; ++v) {
    if (i * BYTES + 16 * v < n * BYTES) {
      store_codes16(wire + i * BYTES + 16 * v, codes.vector[v]);
    }
  }
}

template <int BYTES, class Index>
CINCH_HD void load_codes(const uint8_t *wire, Index n, Index i, CodeVectors<BYTES> &codes) {
  CINCH_UNROLL
  for (int v = 0; v < BYTES; ++v) {
    codes.vector[v] = i * BYTES + 16 * v < n * BYTES
                          ? load_codes16(wire + i * BYTES + 16 * v)
                          : make_uint4(0, 0, 0, 0);
  }
}

}  // namespace cinch
