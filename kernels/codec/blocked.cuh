// What codecs share whose blocks carry one or two numbers besides codes of a few bits: the rules of
// src/codec/blocked. A block with an element that is not finite has codes 0 and NaN for its numbers;
// one whose numbers are not all finite decodes to NaN throughout.
#pragma once

#include "codec/params.h"
#include "codec/random.cuh"
#include "codec/scaled.cuh"
#include "codec/warp.cuh"
#include "codec/wire.cuh"
#include "ptx/arithmetic.cuh"

namespace cinch {

// How codes of a fixed number of bits, fewer than 8, lie on the wire.
template <int BITS>
struct FewBits {
  static constexpr int code_bits = BITS;
  using Params = cinch_bits_params;
  using Codes = CodeWords<BITS>;

  static CINCH_HD uint32_t bits(const Params &) { return BITS; }
  template <class Size>
  static CINCH_HD void load(const Params &, const uint8_t *wire, Size n, Size i, Codes &codes) {
    load_codes(wire, n, i, codes);
  }
  template <class Size>
  static CINCH_HD void store(const Params &, uint8_t *wire, Size n, Size i, const Codes &codes) {
    store_codes(wire, n, i, codes);
  }

  // From 16 codes that fit; `of(k)` gives number k.
  template <class Of>
  static CINCH_HD Codes packed(Of &&of) {
    constexpr int PER_WORD = 32 / BITS;
    Codes codes;
    CINCH_UNROLL
    for (int w = 0; w < (16 * BITS + 31) / 32; ++w) {
      codes.word[w] = 0;
      CINCH_UNROLL
      for (int k = 0; k < PER_WORD && k < 16; ++k) {
        codes.word[w] |= of(w * PER_WORD + k) << (BITS * k);
      }
    }
    return codes;
  }

  // Code number k.
  static CINCH_HD uint32_t code_of(const Codes &codes, int k) {
    constexpr int PER_WORD = 32 / BITS;
    return codes.word[k / PER_WORD] >> (BITS * (k % PER_WORD)) & ((1u << BITS) - 1);
  }

  static CINCH_HD Codes no_codes() {
    return packed([](int) { return 0u; });
  }
};

// acc = value, or acc + value.
template <bool REDUCE>
CINCH_HD void take(float &acc, float value) {
  acc = REDUCE ? add(acc, value) : value;
}

// 2^23: from here on fp32 has integers only, so that adding it rounds to one and leaves it in the
// low bits.
constexpr float INTEGERS = 0x1p23f;
constexpr uint32_t INTEGERS_BITS = 0x4b000000u;

CINCH_HD void all_nan(float (&x)[16]) {
  CINCH_UNROLL
  for (int k = 0; k < 16; ++k) x[k] = float_of(QUIET_NAN);
}

}  // namespace cinch
