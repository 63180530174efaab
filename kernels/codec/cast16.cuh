// cast16: IEEE binary16, nearest even, subnormals kept. A finite element beyond 65,504 becomes
// that; infinity stays, and NaN stays a quiet NaN with the upper bits of its payload.
#pragma once

#include "codec/elementwise.cuh"
#include "dtype/format.cuh"

namespace cinch {

struct F16Meaning {
  static constexpr int code_bytes = 2;

  CINCH_HD explicit F16Meaning(const cinch_codec_params &) {}

  static CINCH_HD uint32_t encode(float x) {
    const float size = magnitude_of(x);
    const float kept = size > 65504.0f && is_finite(x) ? 65504.0f : size;
    return SmallF16::narrow(float_of(bits_of(kept) | (bits_of(x) & 0x80000000u)));
  }

  static CINCH_HD float decode(uint32_t code) { return SmallF16::widen(code); }
};

using Cast16Format = Elementwise<F16Meaning>;

}  // namespace cinch
