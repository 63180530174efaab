// cast16: converts to IEEE binary16, rounding to the nearest even and keeping subnormals. A finite
// element beyond 65,504 becomes 65,504. Infinity stays; NaN becomes a quiet NaN with the upper bits
// of its payload.
#pragma once

#include "codec/elementwise.cuh"
#include "dtype/format.cuh"
#include "dtype/number.cuh"

namespace cinch {

struct F16Meaning : PlainMeaning<2> {
  CINCH_HD explicit F16Meaning(const cinch_codec_params &) {}

  static CINCH_HD uint32_t encode(float x) {
    // Clamps elements by integer operations on their bits: floating-point instructions would change
    // the payload of a NaN.
    constexpr uint32_t LARGEST = 0x477fe000u;  // 65504
    const uint32_t size = bits_of(x) & 0x7fffffffu;
    const uint32_t kept = size > LARGEST && size < INFINITE ? LARGEST : size;
    return SmallF16::narrow(float_of(kept | (bits_of(x) & 0x80000000u)));
  }

  static CINCH_HD float decode(uint32_t code) { return SmallF16::widen(code); }

#if defined(__CUDA_ARCH__)
  // Encodes by the device's conversion instructions. Returns false if an element saturates or is
  // NaN, which these instructions do not convert as the format requires.
  static CINCH_HD bool encode16(const float (&x)[16], CodeVectors<2> &codes) {
    if (!(largest_of(x) <= 65504.0f)) return false;
    narrow_pairs(x, codes, narrow_f16_pair);
    return true;
  }

  template <bool REDUCE>
  static CINCH_HD bool decode16(const CodeVectors<2> &codes, float (&acc)[16]) {
    const uint4 a = codes.vector[0], b = codes.vector[1];
    const uint32_t pairs[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    uint32_t largest = pairs[0];
    CINCH_UNROLL
    for (int i = 1; i < 8; ++i) largest = larger_f16_pair(largest, pairs[i]);
    if (has_nan_f16(largest)) return false;
    CINCH_UNROLL
    for (int i = 0; i < 8; ++i) {
      const float low = widen_f16_low(pairs[i]), high = widen_f16_high(pairs[i]);
      acc[2 * i] = REDUCE ? canonical(add(acc[2 * i], low)) : low;
      acc[2 * i + 1] = REDUCE ? canonical(add(acc[2 * i + 1], high)) : high;
    }
    return true;
  }
#endif
};

using Cast16Format = Elementwise<F16Meaning>;

}  // namespace cinch
