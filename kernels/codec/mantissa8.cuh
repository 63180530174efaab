// mantissa8: a sign, a 3-bit decimal exponent and a 4-bit integer m: m times a power of ten. Of
// several codes with one value encoding gives the smallest, so m = 0 and m = 1 appear in the
// smallest decade alone.
#pragma once

#include "codec/decimal.cuh"

namespace cinch {

struct MantissaMeaning : DecimalMeaning<MantissaMeaning> {
  using DecimalMeaning<MantissaMeaning>::DecimalMeaning;

  static CINCH_HD float mantissa(uint32_t code) { return (float)(code & 15); }

  // Returns the code of the magnitude just below w, or of a neighbour where w is close to a
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

  // Above the last code of a decade the table's sum is m = 0 of the next decade; this turns it into
  // m = 2.
  static CINCH_HD uint32_t skip_unused(uint32_t codes) {
    // Bit 4 of a byte: m is not 0. Bit 7: the byte is not 0; a 0 byte is valid in the smallest
    // decade.
    const uint32_t low = (codes & 0x0f0f0f0fu) + 0x0f0f0f0fu, any = codes + 0x7f7f7f7fu;
    return codes | (~low >> 3 & any >> 6 & 0x02020202u);
  }
};

using Mantissa8Format = Elementwise<MantissaMeaning>;

}  // namespace cinch
