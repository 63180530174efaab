// static8: a sign, a 3-bit decimal exponent and a 4-bit index k. A magnitude is node k of sixteen,
// times a power of ten. The smallest magnitude of all is replaced by 0.
//
// Node k has the value m/800 with m = max(80 + 35 k, 54 k - 72); the two terms are equal at k = 8.
// The nodes are the cuts of a bisection of (0.1, 0.99) whose first cut is at 0.45.
#pragma once

#include "codec/decimal.cuh"

namespace cinch {

struct StaticMeaning : DecimalMeaning<StaticMeaning> {
  using DecimalMeaning<StaticMeaning>::DecimalMeaning;

  static CINCH_HD float mantissa(uint32_t code) {
    const float k = (float)(code & 15);
    const float lower = fused(k, 35.0f, 80.0f), upper = fused(k, 54.0f, -72.0f);
    return code == 0 ? 0.0f : lower > upper ? lower : upper;
  }

  // Returns the code of the largest magnitude below w. If w is close to a magnitude, the result may
  // be a neighbouring code. w is 1 at the upper end of the largest decade.
  static CINCH_HD uint32_t code_below(float w) {
    w = w < 0.95f ? w : 0.95f;
    const uint32_t decade = 7 - raise_decades(w, 0.1f);
    const float k = w < 0.45f ? mul(add(w, -0.1f), 1 / 0.04375f)
                              : fused(add(w, -0.45f), 1 / 0.0675f, 8.0f);
    const uint32_t node = k > 15.0f ? 15 : k > 0.0f ? (uint32_t)k : 0;
    return decade << 4 | node;
  }

  static CINCH_HD uint32_t next_code(uint32_t code) { return code < 127 ? code + 1 : 127; }
  static CINCH_HD bool is_used(uint32_t) { return true; }
  static CINCH_HD uint32_t skip_unused(uint32_t codes) { return codes; }
};

using Static8Format = Elementwise<StaticMeaning>;

}  // namespace cinch
