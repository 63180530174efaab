// The base of codecs without scales, which encode each element alone. A Meaning is a class with a
// constructor from the codec's parameters, and with code_bytes, encode(x) and decode(code). Its
// encode16 and decode16 may convert 16 elements by faster device instructions; they return false
// where these cannot be used.
#pragma once

#include "codec/scaled.cuh"
#include "dtype/number.cuh"

namespace cinch {

// The base of a Meaning that has no faster conversion of 16 elements.
template <int BYTES>
struct PlainMeaning {
  static constexpr int code_bytes = BYTES;
  // Whether some magnitude below 65,520, where f16 overflows, may decode to 65,520 or more.
  static constexpr bool may_limit = false;

  static CINCH_HD bool encode16(const float (&)[16], CodeVectors<BYTES> &) { return false; }
  template <bool REDUCE>
  static CINCH_HD bool decode16(const CodeVectors<BYTES> &, float (&)[16]) {
    return false;
  }
};

// Converts 16 elements to pairs of narrow floats by a function of ptx/convert.cuh.
template <class Narrow>
CINCH_HD void narrow_pairs(const float (&x)[16], CodeVectors<2> &codes, Narrow &&narrow) {
  CINCH_UNROLL
  for (int v = 0; v < 2; ++v) {
    const float *at = x + 8 * v;
    codes.vector[v] = make_uint4(narrow(at[0], at[1]), narrow(at[2], at[3]), narrow(at[4], at[5]),
                                 narrow(at[6], at[7]));
  }
}

// Returns x with a magnitude above `limit` but below 65,520 limited: it would become infinite as an element of f16.
CINCH_HD float limited_f16(float x, float limit) {
  const float m = magnitude_of(x);
  const bool beyond = m > limit && m < 65520.0f;
  return beyond ? float_of(bits_of(limit) | (bits_of(x) & 0x80000000u)) : x;
}

// Sets y to x, limited if params have a limit.
CINCH_HD void limit_f16(const cinch_codec_params &params, const float (&x)[16], float (&y)[16]) {
  const float limit = params.scale;
  CINCH_UNROLL
  for (int k = 0; k < 16; ++k) y[k] = limit != 0.0f ? limited_f16(x[k], limit) : x[k];
}

// The Summary of formats that store no numbers for a block; it holds nothing.
struct Unnumbered {
  static constexpr int numbers = 0;
  static constexpr bool draws = false;
  static constexpr bool damps = false;
  struct Summary {};

  static CINCH_HD void prepare(uint32_t) {}
  static CINCH_HD Summary empty_summary() { return {}; }
  static CINCH_HD void summarize(const float (&)[16], uint32_t, uint32_t, Summary &) {}
#if defined(__CUDACC__)
  static __device__ __forceinline__ void combine_lanes(uint32_t, Summary &) {}
#endif
};

template <class Meaning>
struct Elementwise : Unnumbered, WholeBytes<Meaning::code_bytes> {
  static constexpr int code_bytes = Meaning::code_bytes;
  using Params = cinch_codec_params;
  using Codes = CodeVectors<code_bytes>;

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
#if defined(__CUDA_ARCH__)
    if (Meaning::encode16(x, codes)) return;
#endif
    const Meaning meaning(params);
    constexpr int PER_WORD = 4 / code_bytes;
    uint32_t words[4 * code_bytes];
    CINCH_UNROLL
    for (int w = 0; w < 4 * code_bytes; ++w) {
      words[w] = 0;
      CINCH_UNROLL
      for (int k = 0; k < PER_WORD; ++k) {
        words[w] |= meaning.encode(x[PER_WORD * w + k]) << (8 * code_bytes * k);
      }
    }
    CINCH_UNROLL
    for (int v = 0; v < code_bytes; ++v) {
      codes.vector[v] =
          make_uint4(words[4 * v], words[4 * v + 1], words[4 * v + 2], words[4 * v + 3]);
    }
  }

  template <bool REDUCE>
  static CINCH_HD void decode16(const Params &params, const Codes &codes, const float (&)[1],
                                float (&acc)[16]) {
#if defined(__CUDA_ARCH__)
    if (Meaning::template decode16<REDUCE>(codes, acc)) return;
#endif
    const Meaning meaning(params);
    constexpr int PER_WORD = 4 / code_bytes;
    CINCH_UNROLL
    for (int v = 0; v < code_bytes; ++v) {
      const uint4 vector = codes.vector[v];
      const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
      CINCH_UNROLL
      for (int k = 0; k < 4 * PER_WORD; ++k) {
        const uint32_t mask = code_bytes == 1 ? 0xff : 0xffff;
        const uint32_t code = words[k / PER_WORD] >> (8 * code_bytes * (k % PER_WORD)) & mask;
        const float value = meaning.decode(code);
        float &out = acc[4 * PER_WORD * v + k];
        out = REDUCE ? canonical(add(out, value)) : value;
      }
    }
  }
};

}  // namespace cinch
