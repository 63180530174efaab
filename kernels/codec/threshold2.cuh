// threshold2: codes 0, 1 and 2 stand for -T, 0 and T, where T is the threshold. An element becomes
// T or -T if its magnitude is at least T, otherwise 0. Code 3 stands for an element that is not
// finite and decodes to NaN.
#pragma once

#include "codec/blocked.cuh"
#include "codec/elementwise.cuh"

namespace cinch {

struct Threshold2Format : Unnumbered, FewBits<2> {
  static CINCH_HD void encode16(const Params &params, const float (&x)[16], Summary, uint32_t,
                                const Random &, Codes &codes, float (&)[1]) {
    codes = packed([&](int k) {
      const float size = magnitude_of(x[k]);
      const uint32_t side = x[k] < 0 ? 0 : 2;
      // NaN compares false with the threshold, so is_finite is tested first.
      return is_finite(x[k]) ? size >= params.threshold ? side : 1 : 3u;
    });
  }

  template <bool REDUCE>
  static CINCH_HD void decode16(const Params &params, const Codes &codes, const float (&)[1],
                                float (&acc)[16]) {
    CINCH_UNROLL
    for (int k = 0; k < 16; ++k) {
      const uint32_t code = code_of(codes, k);
      const float side = add(float_of(INTEGERS_BITS | code), -INTEGERS - 1);
      const float value = code == 3 ? float_of(QUIET_NAN) : mul(side, params.threshold);
      acc[k] = REDUCE ? canonical(add(acc[k], value)) : value;
    }
  }
};

}  // namespace cinch
