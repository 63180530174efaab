// dynamic8: sign and a 7-bit dynamic tree, times s.
//
// In closed form. A code c from 2 up has b = floor(log2 c) tree bits, decade n = 6 - b. With
// z = (c + 1/2) * 2^n, from 64 to 128, the leaf's middle is q / (1280 * 10^n) with the integer
// q = max(14 z - 768, 22 z - 1536): the two lines cross at z = 96, which is 0.45.
// Encoding finds the place among the magnitudes by the inverse lines, which may be off by little,
// and then compares the distances to the two magnitudes around, which is exact: each difference is.
#pragma once

#include "codec/linear8.cuh"

namespace cinch {

struct DynamicMeaning {
  static CINCH_HD float factor(float scale) { return divide(1.0f, scale); }
  static CINCH_HD float unit(float scale) { return scale; }

  struct Step {
    float unit;
  };
  static CINCH_HD Step step(float scale) { return {scale}; }

  static CINCH_HD uint32_t encode4(const float *x, float factor) {
    uint32_t magnitudes = 0;
    CINCH_UNROLL
    for (int i = 0; i < 4; ++i) magnitudes |= nearest(magnitude_of(x[i]), factor) << (8 * i);
    return LinearMeaning::with_signs(magnitudes, x);
  }

  template <bool REDUCE>
  static CINCH_HD void decode4(uint32_t codes, Step step, float *acc) {
    CINCH_UNROLL
    for (int i = 0; i < 4; ++i) {
      acc[i] = fused(value(codes >> (8 * i) & 0xff), step.unit, REDUCE ? acc[i] : 0.0f);
    }
  }

  static CINCH_HD uint32_t nearest(float x, float factor) {
    const float product = mul(x, factor);
    const float y = product < 1.0f ? product : 1.0f;
    float w = y, p = 1.0f;
    CINCH_UNROLL
    for (int n = 0; n < 5; ++n) {
      const bool deeper = w < 0.1f;
      w = deeper ? mul(w, 10.0f) : w;
      p = deeper ? mul(p, 0.5f) : p;
    }
    const float z = w < 0.45f ? fused(add(w, -0.1f), 32 / 0.35f, 64.0f)
                              : fused(add(w, -0.45f), 32 / 0.55f, 96.0f);
    // The rank of the magnitude below y: 1 for 0, 2 to 127 as their code, 128 for 1.
    const uint32_t below = (uint32_t)fused(z, p, -0.5f);
    const float low = magnitude(below), high = magnitude(below + 1);
    const uint32_t rank = below + (add(y, -low) > add(high, -y));
    return rank > 127 ? 1 : rank < 2 ? 0 : rank;
  }

  static CINCH_HD float value(uint32_t code) {
    const uint32_t c = code & 0x7f;
    const float y = magnitude(c == 0 ? 1 : c == 1 ? 128 : c);
    return code & 0x80 ? -y : y;
  }

  // By rank.
  static CINCH_HD float magnitude(uint32_t rank) {
    if (rank < 2) return 0.0f;
    if (rank > 127) return 1.0f;
    const float half = add((float)rank, 0.5f);
    const uint32_t octave = bits_of(half) >> 23;
    const float z = float_of((bits_of(half) & 0x7fffffu) | (127 + 6) << 23);
    const float below = fused(z, 14.0f, -768.0f), above = fused(z, 22.0f, -1536.0f);
    const float q = below > above ? below : above;
    float high = upper(0), low = lower(0);
    CINCH_UNROLL
    for (int n = 1; n < 6; ++n) {
      const bool here = octave + n == 127 + 6;
      high = here ? upper(n) : high;
      low = here ? lower(n) : low;
    }
    return fused(q, high, mul(q, low));
  }

  // 1 / (1280 * 10^n), in fp64 and as a sum of two fp32 numbers. Folded where n is a constant.
  static CINCH_HD constexpr double exact(int n) {
    return n == 0   ? 1 / 1280.0
           : n == 1 ? 1 / 12800.0
           : n == 2 ? 1 / 128000.0
           : n == 3 ? 1 / 1280000.0
           : n == 4 ? 1 / 12800000.0
                    : 1 / 128000000.0;
  }
  static CINCH_HD constexpr float upper(int n) { return (float)exact(n); }
  static CINCH_HD constexpr float lower(int n) { return (float)(exact(n) - (double)upper(n)); }
};

using Dynamic8Format = Scaled<DynamicMeaning>;

}  // namespace cinch
