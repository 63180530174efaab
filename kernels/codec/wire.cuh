// The wire layout of a chunk: codes, zeros up to a multiple of 16 bytes, then the little-endian
// fp32 numbers of each block. src/codec/wire.rs is the specification.
//
// Size is uint32_t or uint64_t: for chunks whose byte counts fit in 32 bits, uint32_t halves the
// index arithmetic.
#pragma once

#include "ptx/base.cuh"

namespace cinch {

// 16 codes of BYTES bytes, as one lane holds them.
template <int BYTES>
struct CodeVectors {
  uint4 vector[BYTES];
};

// 16 codes of BITS bits (fewer than 8), which a lane loads or stores by one access. Code k starts
// at bit BITS * k.
template <int BITS>
struct CodeWords {
  uint32_t word[(16 * BITS + 31) / 32];
};

template <class Size>
CINCH_HD Size padded_code_bytes(Size n, uint32_t code_bits) {
  // For codes of whole bytes the product counts bytes, so that it fits Size for every chunk.
  const Size bytes = code_bits < 8 ? (n * code_bits + 7) / 8 : n * (code_bits / 8);
  return (bytes + 15) & ~(Size)15;
}

// Returns the number of blocks in a chunk of n elements. With log2_block 0 the chunk is one block.
template <class Size>
CINCH_HD Size block_count(Size n, uint32_t log2_block) {
  if (log2_block == 0) return n > 0;
  return (n + ((Size)1 << log2_block) - 1) >> log2_block;
}

// Returns the index of the block of element i.
template <class Size>
CINCH_HD Size block_index(Size i, uint32_t log2_block) {
  return log2_block == 0 ? 0 : i >> log2_block;
}

// Store and load the codes of the lane whose first element is i, a multiple of 16. Elements from n
// on have zero codes, which fill the padding.
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

// Clears all bits of an array of words from bit `bits` on.
template <int WORDS>
CINCH_HD void clear_bits_from(uint32_t (&word)[WORDS], uint32_t bits) {
  CINCH_UNROLL
  for (int w = 0; w < WORDS; ++w) {
    const uint32_t begin = 32 * w;
    const uint32_t kept = bits <= begin ? 0 : bits >= begin + 32 ? ~0u : (1u << (bits - begin)) - 1;
    word[w] &= kept;
  }
}

// Store and load codes of fewer than 8 bits. The store clears the codes of elements from n on;
// lanes behind the last element store zeros as padding.
template <int BITS, class Size>
CINCH_HD void store_codes(uint8_t *wire, Size n, Size i, CodeWords<BITS> codes) {
  if (i + 16 > n) {
    if (i / 8 * BITS >= padded_code_bytes(n, BITS)) return;
    clear_bits_from(codes.word, i < n ? (uint32_t)(n - i) * BITS : 0);
  }
  uint8_t *to = wire + i / 8 * BITS;
  if (BITS == 4) {
    *reinterpret_cast<uint2 *>(to) = make_uint2(codes.word[0], codes.word[BITS / 4]);
  } else if (BITS == 2) {
    *reinterpret_cast<uint32_t *>(to) = codes.word[0];
  } else {
    *reinterpret_cast<uint16_t *>(to) = (uint16_t)codes.word[0];
  }
}

template <int BITS, class Size>
CINCH_HD void load_codes(const uint8_t *wire, Size n, Size i, CodeWords<BITS> &codes) {
  const uint8_t *from = wire + i / 8 * BITS;
  CINCH_UNROLL
  for (int w = 0; w < (16 * BITS + 31) / 32; ++w) codes.word[w] = 0;
  if (i >= n) return;
  if (BITS == 4) {
    const uint2 both = *reinterpret_cast<const uint2 *>(from);
    codes.word[0] = both.x, codes.word[BITS / 4] = both.y;
  } else if (BITS == 2) {
    codes.word[0] = *reinterpret_cast<const uint32_t *>(from);
  } else {
    codes.word[0] = *reinterpret_cast<const uint16_t *>(from);
  }
}

}  // namespace cinch
