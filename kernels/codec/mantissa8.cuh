// mantissa8: sign, 3-bit decimal exponent, 4-bit integer m, worth m times a power of ten. Of equal
// codes the smallest is used: m = 0 and m = 1 in the smallest decade alone.
#pragma once

#include "codec/decimal.cuh"

namespace cinch {

struct MantissaMeaning : DecimalMeaning<MantissaMeaning> {
  using DecimalMeaning<MantissaMeaning>::DecimalMeaning;

  static CINCH_HD float whole(uint32_t code) { return (float)(code & 15); }

  // The code of the magnitude just below w: roughly, where w is close to a magnitude. w counts units
  // of the largest decade.
  static CINCH_HD uint32_t place(float w) {
    w = w < 15.5f ? w : 15.5f;
    const uint32_t decade = 7 - raise_decades(w, 2.0f);
    const uint32_t m = w < 15.0f ? (uint32_t)w : 15;
    return decade << 4 | m;
  }

  static CINCH_HD uint32_t after(uint32_t code) {
    return (code & 15) < 15 ? code + 1 : code < 127 ? code + 3 : code;
  }
  static CINCH_HD bool is_used(uint32_t code) { return code < 16 || (code & 15) >= 2; }

  // Behind the last code of a decade comes m = 0 of the next: 2 is meant.
  static CINCH_HD uint32_t settled(uint32_t codes) {
    // Bit 4 of a byte: m is not 0. Bit 7: the byte is not 0, as that of the smallest decade may be.
    const uint32_t low = (codes & 0x0f0f0f0fu) + 0x0f0f0f0fu, any = codes + 0x7f7f7f7fu;
    return codes | (~low >> 3 & any >> 6 & 0x02020202u);
  }
};

using Mantissa8Format = Elementwise<MantissaMeaning>;

}  // namespace cinch
