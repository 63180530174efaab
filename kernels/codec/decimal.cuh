// The base of static8 and mantissa8: a code is a sign and a magnitude m * 10^d, in a unit that the
// host prepares. Code 0x80 stands for an element that is not finite.
//
// A unit is the sum of two fp32 numbers, and m * 10^(d mod 4) is an integer that fp32 holds, so one
// fused multiply-add rounds the exact value. Encoding first estimates the code of the largest
// magnitude below the element; the estimate may be one code off. It then compares the exact
// distances of the element to that magnitude and to the next larger one.
#pragma once

#include "codec/elementwise.cuh"

namespace cinch {

// Multiplies w by 10 until it reaches `least`, at most seven times, and returns the number of
// multiplications. If w is close to the end of a decade, rounding may make the number one more or
// less.
CINCH_HD uint32_t raise_decades(float &w, float least) {
  uint32_t decades = 0;
  if (w < least * 1e-3f) w = mul(w, 1e4f), decades = 4;
  if (w < least * 1e-1f) w = mul(w, 1e2f), decades += 2;
  if (w < least) w = mul(w, 1e1f), decades += 1;
  return decades;
}

// Self defines
//   mantissa(code)      m of a magnitude code
//   code_below(w)       the code of the magnitude just below w
//   next_code(code)     the code of the next larger magnitude
//   is_used(code)       whether encoding gives the code
//   skip_unused(codes)  moves four codes past codes that next_code skips: a table adds 1 to each
//                       code above a boundary
template <class Self>
struct DecimalMeaning : PlainMeaning<1> {
  CINCH_HD explicit DecimalMeaning(const cinch_codec_params &params) : params(params) {}

  // Returns the value of a magnitude code.
  CINCH_HD float magnitude(uint32_t code) const {
    const uint32_t decade = code >> 4;
    const float ten = decade & 1 ? 10.0f : 1.0f;
    const float q = mul(Self::mantissa(code), decade & 2 ? mul(ten, 100.0f) : ten);
    const float high = decade & 4 ? params.upper[0] : params.lower[0];
    const float low = decade & 4 ? params.upper[1] : params.lower[1];
    return mul(fused(q, high, mul(q, low)), params.shrink);
  }

  CINCH_HD uint32_t encode(float x) const {
    const float y = magnitude_of(x);
    const uint32_t low = Self::code_below(mul(y, params.reciprocal)), high = Self::next_code(low);
    // If the two distances are close to each other, both differences are exact, so rounding cannot
    // change the choice.
    const uint32_t code = add(y, -magnitude(low)) > add(magnitude(high), -y) ? high : low;
    const uint32_t sign = bits_of(x) >> 24 & 0x80;
    // The selection has no branch, because a branch would make lanes of the warp diverge.
    return !is_finite(x) ? 0x80 : code == 0 ? 0 : code | sign;
  }

  CINCH_HD float decode(uint32_t code) const {
    const float value = float_of(bits_of(magnitude(code & 0x7f)) | (code & 0x80) << 24);
    return code == 0x80 ? float_of(QUIET_NAN) : value;
  }

  cinch_codec_params params;
};

}  // namespace cinch
