// What static8 and mantissa8 share: sign, and a magnitude m * 10^d in units that the host prepares.
// 0x80 stands for an element that is not finite.
//
// A unit is a sum of two fp32 numbers, and m * 10^(d mod 4) is a whole number that fp32 holds, so
// that one fused step rounds the exact value. Encoding finds the place among the magnitudes by
// arithmetic that may be off by little and compares the distances to the two around, exactly.
#pragma once

#include "codec/elementwise.cuh"

namespace cinch {

// Multiplies w by as many tens, seven at most, as make it reach `least`, and says how many. Rounding
// may make that one more or less where w is close to a decade's end.
CINCH_HD uint32_t raise_decades(float &w, float least) {
  uint32_t decades = 0;
  if (w < least * 1e-3f) w = mul(w, 1e4f), decades = 4;
  if (w < least * 1e-1f) w = mul(w, 1e2f), decades += 2;
  if (w < least) w = mul(w, 1e1f), decades += 1;
  return decades;
}

// Self has whole(code), m of a magnitude; place(w), which see; after(code), that of the next larger
// magnitude; for tables is_used(code), whether encoding gives it, and settled(codes), four codes of
// which those above a boundary count up by one where after(code) may skip some.
template <class Self>
struct DecimalMeaning : PlainMeaning<1> {
  CINCH_HD explicit DecimalMeaning(const cinch_codec_params &params) : params(params) {}

  // The value of a magnitude code.
  CINCH_HD float magnitude(uint32_t code) const {
    const uint32_t decade = code >> 4;
    const float ten = decade & 1 ? 10.0f : 1.0f;
    const float q = mul(Self::whole(code), decade & 2 ? mul(ten, 100.0f) : ten);
    const float high = decade & 4 ? params.upper[0] : params.lower[0];
    const float low = decade & 4 ? params.upper[1] : params.lower[1];
    return mul(fused(q, high, mul(q, low)), params.shrink);
  }

  CINCH_HD uint32_t encode(float x) const {
    const float y = magnitude_of(x);
    const uint32_t low = Self::place(mul(y, params.reciprocal)), high = Self::after(low);
    // Both differences are exact where they are close to each other.
    const uint32_t code = add(y, -magnitude(low)) > add(magnitude(high), -y) ? high : low;
    const uint32_t sign = bits_of(x) >> 24 & 0x80;
    // A choice, not a branch: neighbours would wait for each other.
    return !is_finite(x) ? 0x80 : code == 0 ? 0 : code | sign;
  }

  CINCH_HD float decode(uint32_t code) const {
    const float value = float_of(bits_of(magnitude(code & 0x7f)) | (code & 0x80) << 24);
    return code == 0x80 ? float_of(QUIET_NAN) : value;
  }

  cinch_codec_params params;
};

}  // namespace cinch
