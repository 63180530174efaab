// Where codes and scales of a chunk lie: codes, zeros up to a multiple of 16 bytes, little-endian
// fp32 scales. The same as src/codec/wire.rs.
//
// Size is uint32_t or uint64_t: a kernel whose chunks are small saves half of its index arithmetic.
#pragma once

#include "ptx/base.cuh"

namespace cinch {

// 16 codes of BYTES bytes: what one lane holds.
template <int BYTES>
struct CodeVectors {
  uint4 vector[BYTES];
};

template <class Size>
CINCH_HD Size padded_code_bytes(Size n, uint32_t code_bytes) {
  return (n * code_bytes + 15) & ~(Size)15;
}

// Of a chunk of n elements. log2_block 0: one scale, if there is any element.
template <class Size>
CINCH_HD Size scale_count(Size n, uint32_t log2_block) {
  if (log2_block == 0) return n > 0;
  return (n + ((Size)1 << log2_block) - 1) >> log2_block;
}

template <class Size>
CINCH_HD Size wire_bytes(Size n, uint32_t code_bytes, bool scaled, uint32_t log2_block) {
  return padded_code_bytes(n, code_bytes) + (scaled ? 4 * scale_count(n, log2_block) : 0);
}

// Number of the scale of element i.
template <class Size>
CINCH_HD Size scale_index(Size i, uint32_t log2_block) {
  return log2_block == 0 ? 0 : i >> log2_block;
}

// Codes of the lane whose first element is i, a multiple of 16. Elements beyond n are zero codes,
// which fill the padding.
template <int BYTES, class Size>
CINCH_HD void store_codes(uint8_t *wire, Size n, Size i, const CodeVectors<BYTES> &codes) {
  CINCH_UNROLL
  for (int v = 0; v < BYTES; ++v) {
    if (i * BYTES + 16 * v < n * BYTES) {
      *reinterpret_cast<uint4 *>(wire + i * BYTES + 16 * v) = codes.vector[v];
    }
  }
}

template <int BYTES, class Size>
CINCH_HD void load_codes(const uint8_t *wire, Size n, Size i, CodeVectors<BYTES> &codes) {
  CINCH_UNROLL
  for (int v = 0; v < BYTES; ++v) {
    codes.vector[v] = i * BYTES + 16 * v < n * BYTES
                          ? *reinterpret_cast<const uint4 *>(wire + i * BYTES + 16 * v)
                          : make_uint4(0, 0, 0, 0);
  }
}

}  // namespace cinch
