// Codecs without scales: each element stands for itself. A Meaning has code_bytes and, if it needs
// no parameters, encode(x) and decode(code).
#pragma once

#include "codec/scaled.cuh"

namespace cinch {

template <class Meaning>
struct Elementwise {
  static constexpr bool scaled = false;
  static constexpr int code_bytes = Meaning::code_bytes;
  using Params = cinch_codec_params;
  using Codes = CodeVectors<code_bytes>;
  using Factor = Meaning;
  using Unit = Meaning;

  static CINCH_HD Factor factor(const Params &params, float, float) { return Meaning(params); }
  static CINCH_HD Unit unit(const Params &params, float) { return Meaning(params); }

  static CINCH_HD void encode16(const float (&x)[16], const Factor &meaning, Codes &codes) {
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

  static CINCH_HD void decode16(const Codes &codes, const Unit &meaning, float (&out)[16]) {
    decode<false>(codes, meaning, out);
  }

  static CINCH_HD void decode_reduce16(const Codes &codes, const Unit &meaning, float (&acc)[16]) {
    decode<true>(codes, meaning, acc);
  }

 private:
  template <bool REDUCE>
  static CINCH_HD void decode(const Codes &codes, const Unit &meaning, float (&acc)[16]) {
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
        out = REDUCE ? add(out, value) : value;
      }
    }
  }
};

}  // namespace cinch
