// cast_bf16: converts to bfloat16, rounding to the nearest even. A finite element beyond the
// largest finite bfloat16 saturates there. Infinity stays; NaN becomes a quiet NaN with the upper
// bits of its payload.
#pragma once

#include "codec/elementwise.cuh"
#include "ptx/convert.cuh"

namespace cinch {

struct Bf16Meaning : PlainMeaning<2> {
  static constexpr bool may_limit = true;

  CINCH_HD explicit Bf16Meaning(const cinch_codec_params &) {}

  static CINCH_HD uint32_t encode(float x) {
    const uint32_t bits = bits_of(x) & 0x7fffffffu;
    uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
    rounded = rounded < 0x7f7f0000u ? rounded : 0x7f7f0000u;
    const uint32_t kept = bits > INFINITE ? bits | 0x400000u : bits;
    return ((bits < INFINITE ? rounded : kept) | (bits_of(x) & 0x80000000u)) >> 16;
  }

  static CINCH_HD float decode(uint32_t code) { return float_of(code << 16); }

#if defined(__CUDA_ARCH__)
  // Encodes by the device's conversion instruction. Returns false if an element saturates or is
  // NaN, which this instruction does not convert as the format requires.
  static CINCH_HD bool encode16(const float (&x)[16], CodeVectors<2> &codes) {
    if (!(largest_of(x) <= float_of(0x7f7f0000u))) return false;
    narrow_pairs(x, codes, narrow_bf16_pair);
    return true;
  }
#endif
};

using CastBf16Format = Elementwise<Bf16Meaning>;

}  // namespace cinch
