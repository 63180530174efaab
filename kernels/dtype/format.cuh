// Floats narrower than fp32; src/reduce/format.rs is the specification, bit for bit.
//
// Rounding is to nearest, ties to even, subnormals included. Beyond the largest finite value f16,
// bf16 and f8e5m2 give infinity, f8e4m3 gives NaN. A NaN keeps its sign and the upper bits of its
// payload and becomes quiet. The device's conversion instructions change a NaN's payload, so they
// serve only numbers.
#pragma once

#include "ptx/convert.cuh"

namespace cinch {

// A float format. SPECIAL is the smallest magnitude code that stands for infinity or NaN.
// OVERFLOW_BITS are the fp32 bits of the smallest magnitude that rounds beyond the largest finite
// number.
template <int EXPONENT_BITS, int MANTISSA_BITS, uint32_t SPECIAL, uint32_t OVERFLOW_BITS>
struct SmallFloat {
  static constexpr int WIDTH = EXPONENT_BITS + MANTISSA_BITS;
  static constexpr int DROP = 23 - MANTISSA_BITS;
  static constexpr uint32_t BIAS = (1u << (EXPONENT_BITS - 1)) - 1;
  // The bits of infinity; in f8e4m3, which has no infinity, the bits of a finite magnitude.
  static constexpr uint32_t INFINITE_CODE = ((1u << EXPONENT_BITS) - 1) << MANTISSA_BITS;
  // The fp32 bits of the distance between neighbouring subnormals.
  static constexpr uint32_t STEP_BITS = (127 + 1 - BIAS - MANTISSA_BITS) << 23;

  static CINCH_HD float widen(uint32_t bits) {
    const uint32_t magnitude = bits & ((1u << WIDTH) - 1);
    const uint32_t shifted = magnitude << DROP;
    const uint32_t normal = shifted + ((127 - BIAS) << 23);
    const uint32_t subnormal = bits_of(mul((float)(int32_t)magnitude, float_of(STEP_BITS)));
    const uint32_t finite = magnitude < 1u << MANTISSA_BITS ? subnormal : normal;
    const uint32_t nan = 0x7fc00000u | (shifted & 0x7fffffu);
    const uint32_t special = magnitude == INFINITE_CODE ? 0x7f800000u : nan;
    return float_of((magnitude >= SPECIAL ? special : finite) | (bits >> WIDTH & 1) << 31);
  }

  static CINCH_HD uint32_t narrow(float number) {
    const uint32_t bits = bits_of(number);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t half = (1u << (DROP - 1)) - 1 + (magnitude >> DROP & 1);
    const uint32_t rounded = (magnitude + half) >> DROP;
    const uint32_t normal = rounded - ((127 - BIAS) << MANTISSA_BITS);
    // The last bit of `anchor` is worth one subnormal step, so adding `anchor` rounds a number to a
    // multiple of that step.
    const uint32_t anchor = STEP_BITS + (23u << 23);
    const uint32_t subnormal = bits_of(add(float_of(magnitude), float_of(anchor))) - anchor;
    const uint32_t finite = magnitude < (127 + 1 - BIAS) << 23 ? subnormal : normal;
    const uint32_t payload = magnitude >> DROP & ((1u << MANTISSA_BITS) - 1);
    const uint32_t quiet = SPECIAL | 1u << (MANTISSA_BITS - 1) | payload;
    const uint32_t nan = INFINITE_CODE == SPECIAL ? quiet : SPECIAL;
    const uint32_t special = magnitude > 0x7f800000u ? nan : SPECIAL;
    return (magnitude >= OVERFLOW_BITS ? special : finite) | (bits >> 31) << WIDTH;
  }
};

using SmallF16 = SmallFloat<5, 10, 0x7c00, 0x477ff000u>;     // 65520
using SmallF8E5M2 = SmallFloat<5, 2, 0x7c, 0x47700000u>;     // 61440
using SmallF8E4M3 = SmallFloat<4, 3, 0x7f, 0x43e80001u>;     // just above 464

CINCH_HD float widen_bf16(uint32_t bits) { return float_of(bits << 16); }

CINCH_HD uint32_t narrow_bf16(float number) {
  const uint32_t bits = bits_of(number);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (number != number ? bits >> 16 | 0x40 : rounded) & 0xffff;
}

}  // namespace cinch
