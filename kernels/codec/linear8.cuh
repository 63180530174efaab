// linear8: a code is a sign and a 7-bit integer k, and stands for k * s/127, where s is the block's
// scale. Encoding rounds |x| * 127/s to the nearest integer, ties to the smaller. This is the
// ceiling of |x| * 127/s - 1/2.
//
// The ceiling is one addition that rounds up. In fp32 the last place of 1.5 * 2^23 is worth 1, so
// adding it leaves the ceiling in the low byte of the sum. If no element exceeds the scale, no code
// exceeds 127: the factor is at most 127/s * (1 + 2^-24), so the largest product is below
// 127.00001.
//
// Decoding puts the byte into the upper seven bits of an fp32 mantissa whose exponent is 0. The
// resulting subnormal is the byte times 2^-133, sign included. For scales below 2, one product by
// 2^133 * s/127 gives the value. For larger scales that factor overflows, so two exact powers of
// two replace it.
//
// A 127th of the largest fp32 number rounds up, so the unit is one step smaller there: 127 units
// must not be infinite.
#pragma once

#include "codec/scaled.cuh"

namespace cinch {

// 2^6 times the largest unit for which 127 units are finite.
constexpr float LARGEST_RAISED_UNIT = 0x1.020406p127f;

struct LinearMeaning {
  static CINCH_HD void prepare(uint32_t) {}

  static CINCH_HD float factor(float scale) { return divide_ordinary(127.0f, scale); }

  struct Step {
    float raised;  // 2^6 times the unit: the largest is below 2^128
    bool is_short;
  };
  static CINCH_HD Step step(float scale) {
    return {mul(divided_by<127>(scale), 0x1p6f), magnitude_of(scale) < 2.0f};
  }
  static CINCH_HD float scaled(float value, Step step, float acc) {
    return fused(mul(value, 0x1p127f), smaller_of(step.raised, LARGEST_RAISED_UNIT), acc);
  }

  static CINCH_HD bool is_short(Step step) { return step.is_short; }
  static CINCH_HD float shortened(Step step) { return mul(step.raised, 0x1p127f); }

  static CINCH_HD uint32_t encode4(const float *x, float factor) {
    uint32_t k[4];
    CINCH_UNROLL
    for (int i = 0; i < 4; ++i) {
      k[i] = bits_of(add_up(fused(magnitude_of(x[i]), factor, -0.5f), 0x1.8p23f));
    }
    const uint32_t magnitudes = first_bytes(k[0], k[1], k[2], k[3]);
    return with_signs(magnitudes, x);
  }

  static CINCH_HD void values4(uint32_t codes, float *value) {
    const uint32_t magnitudes = codes & 0x7f7f7f7fu;
    const uint32_t signs = codes & 0x80808080u;
    CINCH_UNROLL
    for (int i = 0; i < 4; ++i) {
      // The two low bytes become zeros: each repeats the sign bit of a magnitude, which is 0, eight
      // times.
      const uint32_t selector = (4 + i) << 12 | i << 8 | (8 + i) << 4 | (8 + i);
      value[i] = float_of(byte_permute(magnitudes, signs, selector));
    }
  }

  static constexpr uint32_t LAST_RANK = 127;
  static CINCH_HD float unit(float scale) {
    return smaller_of(divided_by<127>(scale), mul(LARGEST_RAISED_UNIT, 0x1p-6f));
  }
  static CINCH_HD uint32_t nearest(float y, float factor) {
    return bits_of(add_up(fused(y, factor, -0.5f), 0x1.8p23f)) & 0xff;
  }
  static CINCH_HD float magnitude(uint32_t rank) { return (float)rank; }
  static CINCH_HD uint32_t codes_of(uint32_t ranks, const float *x) {
    return with_signs(ranks, x);
  }

  // Packs the low bytes of four words.
  static CINCH_HD uint32_t first_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return byte_permute(byte_permute(a, b, 0x0040), byte_permute(c, d, 0x0040), 0x5410);
  }

  // Returns the four magnitudes with the signs of x[0] to x[3]; a zero magnitude gets no sign.
  static CINCH_HD uint32_t with_signs(uint32_t magnitudes, const float *x) {
    const uint32_t nonzero = magnitudes + 0x7f7f7f7fu;
    return magnitudes | (sign_bytes(x) & nonzero & 0x80808080u);
  }

  // Returns four bytes, of which byte i has the sign of x[i] in bit 7.
  static CINCH_HD uint32_t sign_bytes(const float *x) {
    const uint32_t low = byte_permute(bits_of(x[0]), bits_of(x[1]), 0x0073);
    const uint32_t high = byte_permute(bits_of(x[2]), bits_of(x[3]), 0x0073);
    return byte_permute(low, high, 0x5410);
  }
};

using Linear8Format = Scaled<LinearMeaning, true>;
using Linear8NearestFormat = Scaled<LinearMeaning>;

}  // namespace cinch
