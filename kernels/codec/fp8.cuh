// fp8_e4m3, fp8_e5m2: 8-bit floats times a scale. The scale maps the largest magnitude of a block
// to the format's largest, 448 or 57,344. Codes of infinity and NaN decode to NaN.
//
// From sm_89 on the device converts pairs to either format. Back, a code becomes the upper bits of
// an f16, subnormals included. The f16 of an e4m3 code is too small by a factor of 2^8, which the
// unit corrects.
#pragma once

#include "codec/linear8.cuh"
#include "dtype/format.cuh"

namespace cinch {

// The meaning of 8-bit float codes. MANTISSA is the number of mantissa bits: 3 for e4m3, 2 for
// e5m2.
template <int MANTISSA>
struct Fp8Meaning : FactorStep {
  // A seventh of the format's largest number.
  static constexpr float SEVENTH = MANTISSA == 3 ? 64.0f : 8192.0f;
  static constexpr uint32_t TOP = MANTISSA == 3 ? 0x7e : 0x7b;
  // The factor from the f16 whose bits are made of a code's bits to the value of the code.
  static constexpr float LIFT = MANTISSA == 3 ? 256.0f : 1.0f;

  static CINCH_HD void prepare(uint32_t) {}

  static CINCH_HD float factor(float scale) {
    return mul(divide_ordinary(7.0f, scale), SEVENTH);
  }

  static CINCH_HD float step(float scale) { return mul(divided_by<7>(scale), LIFT / SEVENTH); }

  static CINCH_HD uint32_t encode4(const float *x, float factor) {
    float y[4];
    CINCH_UNROLL
    for (int i = 0; i < 4; ++i) y[i] = mul(magnitude_of(x[i]), factor);
#if __CUDA_ARCH__ >= 890
    const uint32_t low = MANTISSA == 3 ? narrow_f8e4m3_pair(y[0], y[1])
                                       : narrow_f8e5m2_pair(y[0], y[1]);
    const uint32_t high = MANTISSA == 3 ? narrow_f8e4m3_pair(y[2], y[3])
                                        : narrow_f8e5m2_pair(y[2], y[3]);
    const uint32_t magnitudes = byte_permute(low, high, 0x5410);
#else
    uint32_t magnitudes = 0;
    CINCH_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float most = 7 * SEVENTH;
      const float kept = y[i] < most ? y[i] : most;
      const uint32_t code =
          MANTISSA == 3 ? SmallF8E4M3::narrow(kept) : SmallF8E5M2::narrow(kept);
      magnitudes |= code << (8 * i);
    }
#endif
    return LinearMeaning::with_signs(magnitudes, x);
  }

  static CINCH_HD void values4(uint32_t codes, float *value) {
    CINCH_UNROLL
    for (int pair = 0; pair < 2; ++pair) {
      // Puts each code into the upper byte of an f16: sign, then exponent and mantissa.
      uint32_t halves = byte_permute(codes, 0, pair == 0 ? 0x1404 : 0x3424);
      if (MANTISSA == 3) halves = (halves & 0x80008000u) | (halves & 0x7f007f00u) >> 1;
#if defined(__CUDA_ARCH__)
      value[2 * pair] = widen_f16_low(halves);
      value[2 * pair + 1] = widen_f16_high(halves);
#else
      value[2 * pair] = SmallF16::widen(halves & 0xffff);
      value[2 * pair + 1] = SmallF16::widen(halves >> 16);
#endif
    }
    // Adding 0x7f - TOP sets bit 7 of a byte whose magnitude exceeds TOP: a code of infinity or
    // NaN.
    const uint32_t beyond = ((codes & 0x7f7f7f7fu) + (0x7f - TOP) * 0x01010101u) & 0x80808080u;
    CINCH_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (beyond >> (8 * i) & 0x80) value[i] = float_of(QUIET_NAN);
    }
  }
};

using Fp8E4M3Format = Scaled<Fp8Meaning<3>>;
using Fp8E5M2Format = Scaled<Fp8Meaning<2>>;

}  // namespace cinch
