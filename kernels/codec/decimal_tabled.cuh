// static8 and mantissa8, encoded and decoded with tables in shared memory. Codes and values equal
// those of decimal.cuh to the bit. The tables depend on the parameters. So a kernel may use only
// one of these codecs, with one set of parameters, and must call prepare(params, threads) first.
//
// Encoding: a power of two, exact, brings the largest magnitude of the codec below 1; larger
// elements saturate. The numbers from 0 to 1 are cut at fp32 bit patterns into 16 buckets an
// octave, so that a bucket has at most one boundary between codes. The top byte of `32 * pattern +
// word of the bucket` is the code. If the pattern is above the boundary, the low bits of both terms
// carry into the top byte, which increases the code by one. An element costs one load and one
// addition. Decoding: a table of the values of the 256 codes.
//
// benches/FIGURES.md, "Choices in the kernels", has the instructions for each element.
#pragma once

#include "codec/linear8.cuh"
#include "codec/mantissa8.cuh"
#include "codec/static8.cuh"

namespace cinch {

template <class Meaning>
struct DecimalTables {
  static constexpr int SHIFT = 19;
  static constexpr uint32_t REST = (1u << SHIFT) - 1;
  // The index of the bucket that holds the number 1.
  static constexpr uint32_t LAST = 0x3f800000u >> SHIFT;

  float values[256];
  uint32_t buckets[LAST + 1];

  // Returns the power of two that brings the largest magnitude into [1/2, 1).
  static CINCH_HD float factor(const Meaning &meaning) {
    return float_of((253 - (bits_of(meaning.magnitude(127)) >> 23)) << 23);
  }

  // Returns the largest number, multiplied by factor(), whose nearest magnitude is that of `code`.
  // It is the midpoint between that magnitude and the next larger one, rounded down.
  static CINCH_HD float boundary(const Meaning &meaning, uint32_t code) {
    const float low = meaning.magnitude(code), high = meaning.magnitude(Meaning::next_code(code));
    return mul(mul(add_down(low, high), 0.5f), factor(meaning));
  }

  // Fills the buckets from the bucket of this code's boundary up to, but not including, the bucket
  // of the next code's boundary.
  CINCH_HD void fill_from(const Meaning &meaning, uint32_t code) {
    const uint32_t pattern = bits_of(boundary(meaning, code)), bucket = pattern >> SHIFT;
    const uint32_t above = Meaning::next_code(code);
    const uint32_t next =
        above < 127 ? bits_of(boundary(meaning, above)) >> SHIFT : LAST + 1;
    buckets[bucket] = ((code - bucket) << 24) + ((REST - (pattern & REST)) << (24 - SHIFT));
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
    for (uint32_t other = bucket + 1; other < next; ++other) buckets[other] = (above - other) << 24;
  }

  // Fills the table entries of this thread; `threads` threads together fill the whole tables.
  CINCH_HD void fill(const Meaning &meaning, uint32_t thread, uint32_t threads) {
    for (uint32_t code = thread; code < 256; code += threads) values[code] = meaning.decode(code);
    for (uint32_t code = thread; code < 127; code += threads) {
      if (Meaning::is_used(code)) fill_from(meaning, code);
    }
    const uint32_t first = bits_of(boundary(meaning, 0)) >> SHIFT;
    for (uint32_t bucket = thread; bucket < first; bucket += threads) {
      buckets[bucket] = (0 - bucket) << 24;
    }
  }
};

template <class Meaning>
struct DecimalTabled : Unnumbered, WholeBytes<1> {
  using Tables = DecimalTables<Meaning>;

  // Fills the tables. The first `threads` threads of the block call it once, then synchronise.
  static CINCH_HD void prepare(const Params &params, uint32_t threads) {
    const Meaning meaning(params);
#if CINCH_IN_BLOCK
    tables().fill(meaning, threadIdx.x, threads);
#else
    (void)threads;
    tables().fill(meaning, 0, 1);
#endif
  }

  static CINCH_HD void encode16(const Params &params, const float (&x)[16], Summary, uint32_t,
                                const Random &, Codes &codes, float (&)[1]) {
    if constexpr (Meaning::may_limit) {
      float y[16];
      limit_f16(params, x, y);
      encode_limited(params, y, codes);
    } else {
      encode_limited(params, x, codes);
    }
  }

  static CINCH_HD void encode_limited(const Params &params, const float (&x)[16], Codes &codes) {
    const float factor = Tables::factor(Meaning(params));
    // The sum is 0 if all elements are finite, and NaN otherwise. Two independent sums let their
    // instructions overlap.
    float wild[2] = {0, 0};
    CINCH_UNROLL
    for (int k = 0; k < 16; ++k) wild[k % 2] = fused(x[k], 0.0f, wild[k % 2]);
    uint32_t words[4];
    CINCH_UNROLL
    for (int w = 0; w < 4; ++w) words[w] = encode4(x + 4 * w, factor);
    if (!(add(wild[0], wild[1]) == 0)) {
      CINCH_UNROLL
      for (int k = 0; k < 16; ++k) {
        const uint32_t mask = 0xffu << (8 * (k % 4));
        if (!is_finite(x[k])) words[k / 4] = (words[k / 4] & ~mask) | (0x80808080u & mask);
      }
    }
    codes.vector[0] = make_uint4(words[0], words[1], words[2], words[3]);
  }

  template <bool REDUCE>
  static CINCH_HD void decode16(const Params &, const Codes &codes, const float (&)[1],
                                float (&acc)[16]) {
    const uint4 vector = codes.vector[0];
    const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
    const Tables &own = tables();
    CINCH_UNROLL
    for (int k = 0; k < 16; ++k) {
      const float value = own.values[words[k / 4] >> (8 * (k % 4)) & 0xff];
      acc[k] = REDUCE ? canonical(add(acc[k], value)) : value;
    }
  }

 private:
  static CINCH_HD Tables &tables() {
#if defined(__CUDA_ARCH__)
    __shared__ Tables tables;
#else
    static thread_local Tables tables;
#endif
    return tables;
  }

  // Returns the codes of the four finite elements x[0] to x[3].
  static CINCH_HD uint32_t encode4(const float *x, float factor) {
    const Tables &own = tables();
    uint32_t sum[4];
    CINCH_UNROLL
    for (int k = 0; k < 4; ++k) {
      const uint32_t pattern = bits_of(saturated_product(magnitude_of(x[k]), factor));
      sum[k] = (pattern << (24 - Tables::SHIFT)) + own.buckets[pattern >> Tables::SHIFT];
    }
    const uint32_t magnitudes = byte_permute(byte_permute(sum[0], sum[1], 0x0073),
                                             byte_permute(sum[2], sum[3], 0x0073), 0x5410);
    return LinearMeaning::with_signs(Meaning::skip_unused(magnitudes), x);
  }
};

using Static8TabledFormat = DecimalTabled<StaticMeaning>;
using Mantissa8TabledFormat = DecimalTabled<MantissaMeaning>;

}  // namespace cinch
