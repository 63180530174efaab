// mantissa8: sign, 3-bit decimal exponent, 4-bit integer m, worth m times a power of ten. Of equal
// codes the smallest is used: m = 0 and m = 1 in the smallest decade alone.
#pragma once

#include "codec/decimal.cuh"

namespace cinch {

struct MantissaMeaning : DecimalMeaning<MantissaMeaning> {
  using DecimalMeaning<MantissaMeaning>::DecimalMeaning;

  static CINCH_HD float whole(uint32_t code) { return (float)(code & 15); }

  // The code of the magnitude just below w, and the one after it: roughly, where w is close to a
  // magnitude. w counts units of the largest decade.
  static CINCH_HD void place(float w, uint32_t &code, uint32_t &next) {
    w = w < 15.5f ? w : 15.5f;
    const uint32_t decade = 7 - raise_decades(w, 2.0f);
    const uint32_t m = w < 15.0f ? (uint32_t)w : 15;
    code = decade << 4 | m;
    next = m < 15 ? code + 1 : decade < 7 ? (decade + 1) << 4 | 2 : code;
  }
};

using Mantissa8Format = Elementwise<MantissaMeaning>;

}  // namespace cinch
