// The base of codecs that store one or two fp32 numbers for each block, and a code of a few bits
// for each element. src/codec/blocked is the specification. A block with an element that is not
// finite has codes 0 and NaN numbers. A block whose numbers are not all finite decodes to NaN.
#pragma once

#include "codec/params.h"
#include "codec/random.cuh"
#include "codec/scaled.cuh"
#include "codec/warp.cuh"
#include "codec/wire.cuh"
#include "ptx/arithmetic.cuh"

namespace cinch {

// Packs and unpacks codes of BITS bits each, where BITS is less than 8.
template <int BITS>
struct FewBits : FixedWidth<cinch_bits_params, CodeWords<BITS>, BITS> {
  using Codes = CodeWords<BITS>;

  // Packs 16 codes that fit BITS bits; `of(k)` returns code k.
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

  // Returns code k.
  static CINCH_HD uint32_t code_of(const Codes &codes, int k) {
    constexpr int PER_WORD = 32 / BITS;
    return codes.word[k / PER_WORD] >> (BITS * (k % PER_WORD)) & ((1u << BITS) - 1);
  }

  static CINCH_HD Codes no_codes() {
    return packed([](int) { return 0u; });
  }
};

// Sets acc to value, or adds value to acc.
template <bool REDUCE>
CINCH_HD void take(float &acc, float value) {
  acc = REDUCE ? add(acc, value) : value;
}

// 2^23. fp32 numbers from 2^23 up are integers, so adding 2^23 to a smaller number rounds it to an
// integer. The low bits of the sum hold that integer.
constexpr float INTEGERS = 0x1p23f;
constexpr uint32_t INTEGERS_BITS = 0x4b000000u;

CINCH_HD void all_nan(float (&x)[16]) {
  CINCH_UNROLL
  for (int k = 0; k < 16; ++k) x[k] = float_of(QUIET_NAN);
}

}  // namespace cinch
