// What linear8 and dynamic8 share, which is all but the meaning of a code: the rules of zero,
// tiny and poisoned scales of src/codec/scaled.
//
// A Meaning has, for scales from 2^-100 up, with results that are not used for others:
//   factor(scale)                    what encode4 takes for it
//   encode4(x, factor) -> uint32_t   four codes, of finite elements that do not exceed the scale
//   values4(codes, value)            what four codes are worth, in a unit of the Meaning's own
//   step(scale), scaled(value, step, acc)
//                                    value in units of the scale + acc, rounded once
//   is_short(step), shortened(step)  whether that is value * shortened + acc, and the factor
//   prepare(threads)                 by so many threads of a block, from the first on, before a
//                                    barrier of theirs and any of these
#pragma once

#include "codec/params.h"
#include "codec/random.cuh"
#include "codec/warp.cuh"
#include "codec/wire.cuh"
#include "ptx/arithmetic.cuh"

namespace cinch {

// Of Meanings whose step is a factor.
struct FactorStep {
  static CINCH_HD float scaled(float value, float step, float acc) {
    return fused(value, step, acc);
  }
  static CINCH_HD bool is_short(float) { return true; }
  static CINCH_HD float shortened(float step) { return step; }
};

// Scales below this are raised, and what they scale with them.
constexpr float TINY = 0x1p-100f;
constexpr float RAISE = 0x1p64f;
constexpr float LOWER = 0x1p-64f;
constexpr uint32_t INFINITE = 0x7f800000u;
constexpr uint32_t QUIET_NAN = 0x7fc00000u;

CINCH_HD bool is_finite(float x) { return magnitude_of(x) < float_of(INFINITE); }

// The scale on the wire of a block whose largest magnitude this is.
CINCH_HD float scale_of(float abs_max) {
  return is_finite(abs_max) ? abs_max : float_of(QUIET_NAN);
}

// How codes of a fixed number of whole bytes lie on the wire.
template <int BYTES>
struct WholeBytes {
  static constexpr int code_bits = 8 * BYTES;
  using Params = cinch_codec_params;
  using Codes = CodeVectors<BYTES>;

  static CINCH_HD uint32_t bits(const Params &) { return code_bits; }
  template <class Size>
  static CINCH_HD void load(const Params &, const uint8_t *wire, Size n, Size i, Codes &codes) {
    load_codes(wire, n, i, codes);
  }
  template <class Size>
  static CINCH_HD void store(const Params &, uint8_t *wire, Size n, Size i, const Codes &codes) {
    store_codes(wire, n, i, codes);
  }
};

template <class Meaning>
struct Scaled : WholeBytes<1> {
  static constexpr int numbers = 1;
  static constexpr bool draws = false;

  // The largest magnitude; not finite if an element is not.
  using Summary = float;

  static CINCH_HD void prepare(uint32_t threads) { Meaning::prepare(threads); }

  static CINCH_HD Summary nothing() { return 0; }
  static CINCH_HD void look(const float (&x)[16], uint32_t, uint32_t, Summary &largest) {
    largest = larger_magnitude(largest, largest_of(x));
  }
#if defined(__CUDACC__)
  static __device__ __forceinline__ void conclude(uint32_t log2_block, Summary &largest) {
    join_lanes(log2_block, [&](uint32_t lanes) {
      largest = larger_magnitude(largest, from_lane(largest, lanes));
    });
  }
#endif

  // Under a tensor scale that is the scale, unless an element or it is no number.
  static CINCH_HD void encode16(const Params &params, const float (&x)[16], Summary largest,
                                uint32_t, const Random &, Codes &codes, float (&number)[1]) {
    const bool tensor = params.log2_block == 0;
    const float scale = tensor ? params.scale : scale_of(largest);
    encode(x, factor(scale, largest), codes);
    const bool poisoned = tensor && !(is_finite(largest) && is_finite(scale) && scale >= 0);
    number[0] = poisoned ? float_of(QUIET_NAN) : scale;
  }

  static CINCH_HD void decode16(const Params &, const Codes &codes, const float (&number)[1],
                                float (&out)[16]) {
    decode<false>(codes, unit(number[0]), out);
  }

  // acc = value * unit + acc, rounded once.
  static CINCH_HD void decode_reduce16(const Params &, const Codes &codes,
                                       const float (&number)[1], float (&acc)[16]) {
    // Under a scale that is no number, the usual way has NaN for the step.
    Unit step = unit(is_finite(number[0]) ? number[0] : float_of(QUIET_NAN));
    step.ordinary = !(magnitude_of(number[0]) < TINY) || number[0] == 0;
    decode<true>(codes, step, acc);
  }

 private:
  struct Factor {
    float scale;
    float multiplier;
    bool ordinary;
  };
  using Step = decltype(Meaning::step(1.0f));
  struct Unit {
    float scale;
    Step step;
    bool ordinary;
  };

  // For elements of which none is larger than `largest`, which is not finite if one is not. Under
  // a block's scale the two are equal; under a tensor scale elements beyond it saturate, which
  // takes the slow way.
  static CINCH_HD Factor factor(float scale, float largest) {
    const bool ordinary = scale >= TINY && largest <= scale && is_finite(scale);
    return {scale, Meaning::factor(scale), ordinary};
  }

  static CINCH_HD Unit unit(float scale) {
    const float size = magnitude_of(scale);
    const bool ordinary = (size >= TINY || size == 0) && is_finite(scale);
    return {scale, Meaning::step(scale), ordinary};
  }

  static CINCH_HD void encode(const float (&x)[16], const Factor &factor, Codes &codes) {
    float y[16];
    CINCH_UNROLL
    for (int i = 0; i < 16; ++i) y[i] = x[i];
    float multiplier = factor.multiplier;
    if (!factor.ordinary) multiplier = tame(y, factor.scale);
    codes.vector[0] =
        make_uint4(Meaning::encode4(y, multiplier), Meaning::encode4(y + 4, multiplier),
                   Meaning::encode4(y + 8, multiplier), Meaning::encode4(y + 12, multiplier));
  }

  // Makes any elements under any scale such that ordinary encoding gives their codes, with the
  // multiplier that comes back: raised if they are tiny, at most the scale, which has the code of
  // all beyond it, and 0 if they are not finite or the scale silences them.
  static CINCH_HD float tame(float (&x)[16], float scale) {
    const bool usable = scale > 0 && is_finite(scale);
    const float raise = scale < TINY ? RAISE : 1.0f;
    const float most = usable ? mul(scale, raise) : 0.0f;
    CINCH_UNROLL
    for (int i = 0; i < 16; ++i) {
      const float size = mul(magnitude_of(x[i]), raise);
      const float kept = is_finite(x[i]) ? (size < most ? size : most) : 0.0f;
      x[i] = float_of(bits_of(kept) | (bits_of(x[i]) & 0x80000000u));
    }
    return Meaning::factor(usable ? most : 1.0f);
  }

  template <bool REDUCE>
  static CINCH_HD void decode(const Codes &codes, const Unit &unit, float (&acc)[16]) {
    const uint32_t words[4] = {codes.vector[0].x, codes.vector[0].y, codes.vector[0].z,
                               codes.vector[0].w};
    // All of them before a branch: left to itself the compiler has each wait for the one before.
    float value[16];
    CINCH_UNROLL
    for (int w = 0; w < 4; ++w) Meaning::values4(words[w], value + 4 * w);
    if (unit.ordinary && Meaning::is_short(unit.step)) {
      const float step = Meaning::shortened(unit.step);
      CINCH_UNROLL
      for (int i = 0; i < 16; ++i) acc[i] = fused(value[i], step, REDUCE ? acc[i] : 0.0f);
    } else if (unit.ordinary) {
      CINCH_UNROLL
      for (int i = 0; i < 16; ++i) {
        acc[i] = Meaning::scaled(value[i], unit.step, REDUCE ? acc[i] : 0.0f);
      }
    } else if (!REDUCE && !is_finite(unit.scale)) {
      CINCH_UNROLL
      for (int i = 0; i < 16; ++i) acc[i] = float_of(QUIET_NAN);
    } else {
      const Step step = Meaning::step(mul(unit.scale, RAISE));
      CINCH_UNROLL
      for (int i = 0; i < 16; ++i) {
        // Added to -0 a product stays what it is, its sign included.
        const float product = Meaning::scaled(value[i], step, -0.0f);
        acc[i] = fused(product, LOWER, REDUCE ? acc[i] : 0.0f);
      }
    }
  }
};

}  // namespace cinch
