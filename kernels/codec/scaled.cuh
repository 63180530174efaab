// The base of codecs with one scale for each block (linear8, dynamic8, fp8). Each of them adds a
// Meaning, which converts numbers to codes and back. src/codec/blocked/scaled.rs is the
// specification of zero, tiny and non-finite scales.
//
// A Meaning has these functions for scales from 2^-100 up. Their results for other scales are not
// used.
//   factor(scale)                    the factor of the elements that encode4 takes
//   encode4(x, factor) -> uint32_t   four codes of finite elements that do not exceed the scale
//   unit(scale)                      the factor from a magnitude to what it decodes to
//   nearest(y, factor) -> uint32_t   the rank of the magnitude nearest to y, which does not exceed
//                                    the largest. Ranks ascend to LAST_RANK.
//   magnitude(rank)                  the magnitude with this rank, before the unit
//   codes_of(ranks, x) -> uint32_t   the codes of four elements from the ranks of their magnitudes
//   values4(codes, value)            the values of four codes, in a unit of the Meaning's own
//   step(scale)                      the factors by which `scaled` converts values4's results
//   scaled(value, step, acc)         value in units of the scale + acc, rounded once
//   is_short(step), shortened(step)  whether that is value * factor + acc, and the factor
//   prepare(threads)                 fills tables: the first `threads` threads of a block call it,
//                                    then synchronise
//
// unit, nearest, magnitude and codes_of are for stochastic rounding: a Meaning that never draws
// needs none of them.
#pragma once

#include "codec/params.h"
#include "codec/random.cuh"
#include "codec/warp.cuh"
#include "codec/wire.cuh"
#include "ptx/arithmetic.cuh"

namespace cinch {

// The base of a Meaning whose step is one fp32 factor.
struct FactorStep {
  static CINCH_HD float scaled(float value, float step, float acc) {
    return fused(value, step, acc);
  }
  static CINCH_HD bool is_short(float) { return true; }
  static CINCH_HD float shortened(float step) { return step; }
};

// A block with a scale below TINY is multiplied by RAISE, scale and elements, so that no
// intermediate value is subnormal.
constexpr float TINY = 0x1p-100f;
constexpr float RAISE = 0x1p64f;
constexpr float LOWER = 0x1p-64f;
constexpr uint32_t INFINITE = 0x7f800000u;
constexpr uint32_t QUIET_NAN = 0x7fc00000u;

// Returns the scale that a block with this largest magnitude has on the wire.
CINCH_HD float scale_of(float abs_max) {
  return is_finite(abs_max) ? abs_max : float_of(QUIET_NAN);
}

// The wire layout of codes of BITS bits each.
template <class PARAMS, class CODES, int BITS>
struct FixedWidth {
  static constexpr int code_bits = BITS;
  using Params = PARAMS;
  using Codes = CODES;

  static CINCH_HD uint32_t bits(const Params &) { return BITS; }
  template <class Size>
  static CINCH_HD void load(const Params &, const uint8_t *wire, Size n, Size i, Codes &codes) {
    load_codes(wire, n, i, codes);
  }
  template <class Size>
  static CINCH_HD void store(const Params &, uint8_t *wire, Size n, Size i, const Codes &codes) {
    store_codes(wire, n, i, codes);
  }
};

template <int BYTES>
using WholeBytes = FixedWidth<cinch_codec_params, CodeVectors<BYTES>, 8 * BYTES>;

// With DRAWS, encoding rounds stochastically if the parameters request it.
template <class Meaning, bool DRAWS = false>
struct Scaled : FixedWidth<cinch_scaled_params, CodeVectors<1>, 8> {
  using Params = cinch_scaled_params;
  static constexpr int numbers = 1;
  static constexpr bool draws = DRAWS;
  static constexpr bool damps = false;

  // The largest magnitude of a block; it is not finite if any element is not.
  using Summary = float;

  static CINCH_HD void prepare(uint32_t threads) { Meaning::prepare(threads); }

  static CINCH_HD Summary empty_summary() { return 0; }
  static CINCH_HD void summarize(const float (&x)[16], uint32_t, uint32_t, Summary &largest) {
    largest = larger_magnitude(largest, largest_of(x));
  }
#if defined(__CUDACC__)
  static __device__ __forceinline__ void combine_lanes(uint32_t log2_block, Summary &largest) {
    join_lanes(log2_block, [&](uint32_t lanes) {
      largest = larger_magnitude(largest, from_lane(largest, lanes));
    });
  }
#endif

  // `number` becomes the block's scale, or under a tensor scale the scale from the parameters. It
  // becomes NaN if the tensor scale is negative or not finite, or if an element is not finite.
  static CINCH_HD void encode16(const Params &params, const float (&x)[16], Summary largest,
                                uint32_t, const Random &random, Codes &codes,
                                float (&number)[1]) {
    const bool tensor = params.log2_block == 0;
    const float scale = tensor ? params.scale : scale_of(largest);
    const bool poisoned = tensor && !(is_finite(largest) && is_finite(scale) && scale >= 0);
    number[0] = poisoned ? float_of(QUIET_NAN) : scale;
    if constexpr (DRAWS) {
      if (params.draws != 0) {
        // Only the copy of x has an address, so that x itself stays in registers.
        float y[16];
        CINCH_UNROLL
        for (int i = 0; i < 16; ++i) y[i] = x[i];
        codes = drawn(scale, random, y);
        return;
      }
    }
    encode(x, factor(scale, largest), codes);
  }

  // Decodes 16 elements into `acc`. With REDUCE it adds them: acc = value * unit + acc, rounded
  // once.
  template <bool REDUCE>
  static CINCH_HD void decode16(const Params &, const Codes &codes, const float (&number)[1],
                                float (&acc)[16]) {
    if (!REDUCE) return decode<false>(codes, unit(number[0]), acc);
    // A scale that is not finite must decode to NaN. NaN as the step does so on the ordinary path.
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

  // Returns the factor that encodes elements of at most `largest`, which is not finite if an
  // element is not. It is `ordinary` if no element needs clamping or raising. Under a tensor scale,
  // elements beyond the scale saturate and need clamp_to_scale.
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
    if (!factor.ordinary) multiplier = clamp_to_scale(y, factor.scale);
    codes.vector[0] =
        make_uint4(Meaning::encode4(y, multiplier), Meaning::encode4(y + 4, multiplier),
                   Meaning::encode4(y + 8, multiplier), Meaning::encode4(y + 12, multiplier));
  }

  // Returns the codes of 16 elements that are rounded stochastically. A magnitude between two that
  // codes decode to becomes the upper of them with a probability equal to its share of the gap.
  // src/codec/blocked/scaled.rs is the specification. Elements that are not finite have code 0.
  static CINCH_HD_APART Codes drawn(float scale, Random random, const float (&x)[16]) {
    if (!(scale > 0 && is_finite(scale))) return {{make_uint4(0, 0, 0, 0)}};
    const bool is_tiny = scale < TINY;
    const float raise = is_tiny ? RAISE : 1.0f, own = mul(scale, raise);
    const float factor = Meaning::factor(own), unit = Meaning::unit(own);
    // A tiny block decodes to multiples of the smallest subnormal number.
    const auto decoded = [&](uint32_t rank) {
      const float raised = mul(Meaning::magnitude(rank), unit);
      return is_tiny ? mul(mul(raised, LOWER), RAISE) : raised;
    };
    const float most = decoded(Meaning::LAST_RANK);
    uint32_t word[4];
    CINCH_UNROLL
    for (int w = 0; w < 4; ++w) {
      uint32_t ranks = 0;
      CINCH_ROLL
      for (int i = 0; i < 4; ++i) {
        const int k = 4 * w + i;
        const float size = mul(magnitude_of(x[k]), raise);
        const float y = !is_finite(x[k]) ? 0.0f : size < most ? size : most;
        const uint32_t nearest = Meaning::nearest(y, factor);
        const uint32_t below = nearest - (decoded(nearest) > y ? 1 : 0);
        const uint32_t above = below < Meaning::LAST_RANK ? below + 1 : below;
        const float low = decoded(below), gap = add(decoded(above), -low);
        const uint32_t rank = add(y, -low) > mul(random.fraction(k), gap) ? above : below;
        ranks |= rank << (8 * i);
      }
      word[w] = Meaning::codes_of(ranks, x + 4 * w);
    }
    return {{make_uint4(word[0], word[1], word[2], word[3])}};
  }

  // Replaces elements so that encode4 gives their codes, and returns the factor to pass to it. Tiny
  // elements are multiplied by RAISE; elements beyond the scale become the scale. Elements that are
  // not finite become 0; all do if the scale is not positive and finite.
  static CINCH_HD float clamp_to_scale(float (&x)[16], float scale) {
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
    // Computes all values before the branch: otherwise the compiler serialises them.
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
        // The product plus -0 is the product, even if the product is -0.
        const float product = Meaning::scaled(value[i], step, -0.0f);
        acc[i] = fused(product, LOWER, REDUCE ? acc[i] : 0.0f);
      }
    }
  }
};

}  // namespace cinch
