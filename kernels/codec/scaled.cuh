// What linear8 and dynamic8 share, which is all but the meaning of a code: the rules of zero,
// tiny and poisoned scales of src/codec/scaled.
//
// A Meaning has, for ordinary scales (2^-100 and above):
//   factor(scale), unit(scale)      what magnitudes are multiplied with, and values
//   encode4(x, factor) -> uint32_t  four codes, of elements that do not exceed the scale
//   decode4<REDUCE>(codes, unit, acc)
// and for any, one by one:
//   nearest(y, factor) -> code      of a magnitude
//   value(code)                     signed
#pragma once

#include "codec/params.h"
#include "codec/wire.cuh"
#include "ptx/arithmetic.cuh"

namespace cinch {

// Scales below this are raised, and what they scale with them.
constexpr float TINY = 0x1p-100f;
constexpr float RAISE = 0x1p64f;
constexpr float LOWER = 0x1p-64f;
constexpr uint32_t INFINITE = 0x7f800000u;
constexpr uint32_t QUIET_NAN = 0x7fc00000u;

CINCH_HD bool is_finite(float x) { return (bits_of(x) & 0x7fffffffu) < INFINITE; }

// The scale on the wire of a block whose largest magnitude this is.
CINCH_HD float scale_of(float abs_max) { return is_finite(abs_max) ? abs_max : float_of(QUIET_NAN); }

template <class Meaning>
struct Scaled {
  static constexpr bool scaled = true;
  static constexpr int code_bytes = 1;
  using Params = cinch_codec_params;
  using Codes = CodeVectors<1>;

  struct Factor {
    float scale;
    float multiplier;
    bool ordinary;
  };
  struct Unit {
    float scale;
    typename Meaning::Step step;
    bool ordinary;
  };

  // For elements of which none is larger than `largest`, which is not finite if one is not. Under
  // a block's scale the two are equal; under a tensor scale elements beyond it saturate, which
  // takes the slow way.
  static CINCH_HD Factor factor(const Params &, float scale, float largest) {
    const bool ordinary = scale >= TINY && largest <= scale && is_finite(scale);
    return {scale, Meaning::factor(scale), ordinary};
  }

  static CINCH_HD Unit unit(const Params &, float scale) {
    const float size = magnitude_of(scale);
    const bool ordinary = (size >= TINY || size == 0) && is_finite(scale);
    return {scale, Meaning::step(scale), ordinary};
  }

  static CINCH_HD void encode16(const float (&x)[16], const Factor &factor, Codes &codes) {
    if (factor.ordinary) {
      codes.vector[0] = make_uint4(Meaning::encode4(x, factor.multiplier),
                                   Meaning::encode4(x + 4, factor.multiplier),
                                   Meaning::encode4(x + 8, factor.multiplier),
                                   Meaning::encode4(x + 12, factor.multiplier));
    } else {
      codes.vector[0] = encode_slowly(x, factor.scale);
    }
  }

  static CINCH_HD void decode16(const Codes &codes, const Unit &unit, float (&out)[16]) {
    decode<false>(codes, unit, out);
  }

  // acc = value * unit + acc, rounded once.
  static CINCH_HD void decode_reduce16(const Codes &codes, const Unit &unit, float (&acc)[16]) {
    decode<true>(codes, unit, acc);
  }

 private:
  template <bool REDUCE>
  static CINCH_HD void decode(const Codes &codes, const Unit &unit, float (&acc)[16]) {
    const uint4 v = codes.vector[0];
    if (unit.ordinary) {
      Meaning::template decode4<REDUCE>(v.x, unit.step, acc);
      Meaning::template decode4<REDUCE>(v.y, unit.step, acc + 4);
      Meaning::template decode4<REDUCE>(v.z, unit.step, acc + 8);
      Meaning::template decode4<REDUCE>(v.w, unit.step, acc + 12);
    } else {
      decode_slowly<REDUCE>(v, unit.scale, acc);
    }
  }

  // Any elements, any scale. Out of line, on copies: what gets here is rare, and must not cost the
  // others registers.
  static CINCH_HD uint4 encode_slowly(const float (&x)[16], float scale) {
    return make_uint4(encode_any(x[0], x[1], x[2], x[3], scale),
                      encode_any(x[4], x[5], x[6], x[7], scale),
                      encode_any(x[8], x[9], x[10], x[11], scale),
                      encode_any(x[12], x[13], x[14], x[15], scale));
  }

  static CINCH_HD_COLD uint32_t encode_any(float a, float b, float c, float d, float scale) {
    // A scale of 0, below it or none at all silences what it scales.
    if (!(scale > 0) || !is_finite(scale)) return 0;
    const float raise = scale < TINY ? RAISE : 1.0f;
    const float factor = Meaning::factor(mul(scale, raise));
    const float x[4] = {a, b, c, d};
    uint32_t word = 0;
    CINCH_UNROLL
    for (int k = 0; k < 4; ++k) {
      const uint32_t code =
          is_finite(x[k]) ? Meaning::nearest(mul(magnitude_of(x[k]), raise), factor) : 0;
      if (code != 0) word |= (code | (bits_of(x[k]) >> 24 & 0x80)) << (8 * k);
    }
    return word;
  }

  template <bool REDUCE>
  static CINCH_HD void decode_slowly(uint4 v, float scale, float (&acc)[16]) {
    float copy[16];
    CINCH_UNROLL
    for (int i = 0; i < 16; ++i) copy[i] = REDUCE ? acc[i] : 0.0f;
    decode_all(v, scale, copy);
    CINCH_UNROLL
    for (int i = 0; i < 16; ++i) acc[i] = copy[i];
  }

  static CINCH_HD_COLD void decode_all(uint4 v, float scale, float (&acc)[16]) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    CINCH_ROLL
    for (int i = 0; i < 16; ++i) {
      acc[i] = decode_any(words[i / 4] >> (8 * (i % 4)) & 0xff, scale, acc[i]);
    }
  }

  static CINCH_HD float decode_any(uint32_t code, float scale, float acc) {
    if (!is_finite(scale)) return float_of(QUIET_NAN);
    const float value = mul(Meaning::value(code), Meaning::unit(mul(scale, RAISE)));
    return fused(value, LOWER, acc);
  }
};

}  // namespace cinch
