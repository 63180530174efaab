// mantissa8: a code is a sign, a 3-bit decimal exponent and a 4-bit integer m, and stands for m
// times a power of ten. If several codes have the value, encoding gives the smallest, so m = 0 and
// m = 1 appear in the smallest decade alone.
#pragma once

#include "codec/decimal.cuh"

namespace cinch {

struct MantissaMeaning : DecimalMeaning<MantissaMeaning> {
  using DecimalMeaning<MantissaMeaning>::DecimalMeaning;
  static constexpr bool may_limit = true;

  static CINCH_HD float mantissa(uint32_t code) { return (float)(code & 15); }

  // Returns the code of the largest magnitude below w; the code next to it if w is close to a
  // magnitude. w counts units of the largest decade.
  static CINCH_HD uint32_t code_below(float w) {
    w = w < 15.5f ? w : 15.5f;
    const uint32_t decade = 7 - raise_decades(w, 2.0f);
    const uint32_t m = w < 15.0f ? (uint32_t)w : 15;
    return decade << 4 | m;
  }

  static CINCH_HD uint32_t next_code(uint32_t code) {
    return (code & 15) < 15 ? code + 1 : code < 127 ? code + 3 : code;
  }
  static CINCH_HD bool is_used(uint32_t code) { return code < 16 || (code & 15) >= 2; }

  // Replaces codes with m = 0 by those with m = 2 in all but the smallest decade. The table's sum
  // yields m = 0 for an element above the last code of a decade.
  static CINCH_HD uint32_t skip_unused(uint32_t codes) {
    // In each byte, bit 4 of `low` is set if m is not 0, and bit 7 of `any` if the code is not 0.
    // Code 0 is valid.
    const uint32_t low = (codes & 0x0f0f0f0fu) + 0x0f0f0f0fu, any = codes + 0x7f7f7f7fu;
    return codes | (~low >> 3 & any >> 6 & 0x02020202u);
  }
};

using Mantissa8Format = Elementwise<MantissaMeaning>;

}  // namespace cinch
