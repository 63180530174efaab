// minmax: b-bit integers between the smallest (low) and the largest element of a block. The code is
// round((x - low) * (levels/range)), half to even or stochastic; it decodes to code *
// (range/levels) + low. Ranges below 2^-100 are scaled up by 2^64 for the arithmetic, ranges from
// 2^126 up are scaled down by 4.
//
// MinMaxFormat<4> fixes the width at compile time, because 4 bits save the most on the wire. The
// other widths share MinMaxFormat<0>, which decodes from bytes.
//
// Rounding is one addition of 2^23, whose low bits are the code. Codes are joined while the
// constant is still above them; arithmetic modulo 2^32 removes it from the last sum. For decoding,
// a code under the exponent of 2^23 is 2^23 + code * 2^k: one subtraction makes it a number, and
// the gap absorbs the power of two.
#pragma once

#include <type_traits>

#include "codec/blocked.cuh"
#include "codec/dynamic8.cuh"

namespace cinch {

// The wire layout of codes whose width is a parameter: 1, 2, 4 or 8 bits for each code.
struct AnyBits {
  static constexpr int code_bits = 8;
  using Params = cinch_bits_params;
  // In registers each word has four codes, in its lowest 4 * `bits` bits.
  using Codes = CodeVectors<1>;

  static CINCH_HD uint32_t bits(const Params &params) { return params.bits; }

  // Packs the 16 codes into the lowest 16 * `bits` bits of `word`.
  static CINCH_HD void squeeze(uint32_t bits, const Codes &codes, uint32_t (&word)[4]) {
    const uint4 v = codes.vector[0];
    word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
    if (bits == 8) return;
    if (bits == 4) {
      word[0] |= word[1] << 16, word[1] = word[2] | word[3] << 16;
    } else {
      const uint32_t step = 4 * bits;
      word[0] |= word[1] << step | word[2] << 2 * step | word[3] << 3 * step;
    }
  }

  static CINCH_HD void spread(uint32_t bits, const uint32_t (&word)[4], Codes &codes) {
    if (bits == 8) {
      codes.vector[0] = make_uint4(word[0], word[1], word[2], word[3]);
      return;
    }
    const uint32_t step = 4 * bits;
    uint32_t four[4];
    CINCH_UNROLL
    for (int w = 0; w < 4; ++w) {
      four[w] = (bits == 4 ? word[w / 2] : word[0]) >> (step * w & 31) & ((1u << step) - 1);
    }
    codes.vector[0] = make_uint4(four[0], four[1], four[2], four[3]);
  }

  // Returns the four codes of a word, a byte each.
  static CINCH_HD uint32_t bytes_of(uint32_t bits, uint32_t word) {
    if (bits == 8) return word;
    const uint32_t pairs = (word | word << (16 - 2 * bits)) & (((1u << 2 * bits) - 1) * 0x00010001u);
    return (pairs | pairs << (8 - bits)) & (((1u << bits) - 1) * 0x01010101u);
  }

  template <class Size>
  static CINCH_HD void load(const Params &params, const uint8_t *wire, Size n, Size i,
                            Codes &codes) {
    if (params.bits == 8) return load_codes(wire, n, i, codes);
    uint32_t word[4] = {0, 0, 0, 0};
    if (params.bits == 4) {
      load_few<4>(wire, n, i, word);
    } else if (params.bits == 2) {
      load_few<2>(wire, n, i, word);
    } else {
      load_few<1>(wire, n, i, word);
    }
    spread(params.bits, word, codes);
  }

  template <class Size>
  static CINCH_HD void store(const Params &params, uint8_t *wire, Size n, Size i,
                             const Codes &codes) {
    uint32_t word[4];
    squeeze(params.bits, codes, word);
    if (params.bits == 8) {
      // Codes beyond the end are zeros.
      if (i + 16 > n) clear_bits_from(word, i < n ? (uint32_t)(n - i) * 8 : 0);
      store_codes(wire, n, i, CodeVectors<1>{{make_uint4(word[0], word[1], word[2], word[3])}});
    } else if (params.bits == 4) {
      store_codes(wire, n, i, CodeWords<4>{{word[0], word[1]}});
    } else if (params.bits == 2) {
      store_codes(wire, n, i, CodeWords<2>{{word[0]}});
    } else {
      store_codes(wire, n, i, CodeWords<1>{{word[0]}});
    }
  }

 private:
  template <int BITS, class Size>
  static CINCH_HD void load_few(const uint8_t *wire, Size n, Size i, uint32_t (&word)[4]) {
    CodeWords<BITS> packed;
    load_codes(wire, n, i, packed);
    word[0] = packed.word[0];
    if (BITS == 4) word[1] = packed.word[BITS / 4];
  }
};

// Returns whether the elements of a block of this range (largest minus smallest) can be encoded and
// decoded without scaling. It is false if the range is not finite, as it is with an element that is
// not finite.
CINCH_HD bool is_ordinary(float range) {
  const float size = magnitude_of(range);
  return (size >= TINY && size < 0x1p126f) || size == 0;
}

// Returns the factor by which elements of a block of this range are scaled before the arithmetic:
// 1, RAISE or 1/4.
CINCH_HD float regime_of(float range) {
  return is_ordinary(range) ? 1.0f : magnitude_of(range) < TINY ? RAISE : 0.25f;
}

template <int BITS>
struct MinMaxFormat : std::conditional<BITS == 4, FewBits<4>, AnyBits>::type {
  using Base = typename std::conditional<BITS == 4, FewBits<4>, AnyBits>::type;
  using Params = cinch_bits_params;
  using Codes = typename Base::Codes;
  static constexpr int numbers = 2;
  static constexpr bool draws = true;
  static constexpr bool damps = true;

  // The smallest and the largest element of a block; they are not finite if any element is not.
  using Summary = Ends;

  static CINCH_HD void prepare(uint32_t) {}

  static CINCH_HD Summary empty_summary() { return {float_of(INFINITE), -float_of(INFINITE)}; }

  static CINCH_HD void summarize(const float (&x)[16], uint32_t valid, uint32_t, Summary &summary) {
    if (valid == 16) {
      summary = join(summary, ends_of(x));
    } else {
      CINCH_UNROLL
      for (int k = 0; k < 15; ++k) {
        if ((uint32_t)k >= valid) break;
        summary = join(summary, {x[k], x[k]});
      }
    }
  }

#if defined(__CUDACC__)
  // Even lanes find the smallest element, odd lanes the smallest negated element, which gives the
  // largest element. Blocks have at least two lanes.
  static __device__ __forceinline__ void combine_lanes(uint32_t log2_block, Summary &summary) {
    const bool is_odd = threadIdx.x % 2 == 1;
    float own = is_odd ? -summary.high : summary.low;
    own = smaller_of(own, from_lane(is_odd ? summary.low : -summary.high, 1));
    join_lanes<1>(log2_block, [&](uint32_t lanes) {
      own = smaller_of(own, from_lane(own, lanes));
    });
    const float other = from_lane(own, 1);
    summary = {is_odd ? other : own, is_odd ? -own : -other};
  }
#endif

  static CINCH_HD void encode16(const Params &params, const float (&x)[16], Summary summary,
                                uint32_t, const Random &random, Codes &codes, float (&number)[2]) {
    // Adding 0 turns -0 into +0.
    const float low = add(summary.low, 0.0f), high = add(summary.high, 0.0f);
    const float range = add(high, -low);
    number[0] = low, number[1] = high;
    if (is_ordinary(range) && !params.draws) {
      const float factor = factor_of(range, levels_of(params));
      codes = codes_of(params, [&](int k) { return rounded(mul(add(x[k], -low), factor)); });
    } else if (is_finite(low) && is_finite(high)) {
      codes = encode_otherwise(params, x, low, high, random);
    } else {
      number[0] = number[1] = float_of(QUIET_NAN);
      codes = {};
    }
  }

  template <bool REDUCE>
  static CINCH_HD void decode16(const Params &params, const Codes &codes, const float (&number)[2],
                                float (&acc)[16]) {
    if constexpr (REDUCE) {
      // Decodes all 16 elements before adding them, so that their chains of four instructions
      // overlap.
      float value[16];
      decode16<false>(params, codes, number, value);
      CINCH_UNROLL
      for (int k = 0; k < 16; ++k) acc[k] = add(acc[k], value[k]);
    } else {
      // Adding 0 turns a -0 of the smallest element into +0, so that no sum with it can be -0
      // either.
      const float low = add(number[0], 0.0f);
      const float range = add(number[1], -low);
      if (is_ordinary(range)) {
        each(params, codes, gap_of(params, range), [&](int k, float code, float gap) {
          acc[k] = fused(code, gap, low);
        });
      } else {
        decode_otherwise(params, codes, number[0], number[1], acc);
      }
    }
  }

 private:
  static CINCH_HD uint32_t levels_of(const Params &params) {
    return BITS == 4 ? 15 : (1u << params.bits) - 1;
  }

  // Returns the factor that converts x - low into the code of x before rounding.
  static CINCH_HD float factor_of(float range, uint32_t levels) {
    if (range == 0) return 0;
    // With one level, the factor of the largest ranges is subnormal, which divide_ordinary does not
    // compute.
    return levels == 1 ? DynamicMeaning::factor(range) : divide_ordinary((float)levels, range);
  }

  // Rounds `place` to an integer, which is in the low bits of the result.
  static CINCH_HD uint32_t rounded(float place) { return bits_of(add(place, INTEGERS)); }

  // Packs 16 codes; `of(k)` returns INTEGERS_BITS plus code k.
  template <class Of>
  static CINCH_HD Codes codes_of(const Params &params, Of &&of) {
    Codes codes;
    if constexpr (BITS == 4) {
      CINCH_UNROLL
      for (int w = 0; w < 2; ++w) {
        // Each of the eight terms adds INTEGERS_BITS, shifted. Modulo 2^32 only the shifts of the
        // two lowest codes remain, and one subtraction removes them.
        uint32_t word = of(8 * w + 7);
        CINCH_UNROLL
        for (int k = 6; k >= 0; --k) word = word * 16 + of(8 * w + k);
        codes.word[w] = word - INTEGERS_BITS * 17;
      }
    } else {
      // Products instead of shifts join the codes of every width, so that the sums above serve it, too.
      const uint32_t step = power_factor(params.bits);
      const uint32_t integers = INTEGERS_BITS * (((step + 1) * step + 1) * step + 1);
      // Elements behind the end of a chunk may have any code, which must not reach the codes before it.
      const uint32_t mask = (2u << (4 * params.bits - 1)) - 1;
      uint32_t word[4];
      CINCH_UNROLL
      for (int w = 0; w < 4; ++w) {
        word[w] = ((of(4 * w + 3) * step + of(4 * w + 2)) * step + of(4 * w + 1)) * step + of(4 * w) - integers;
        word[w] &= mask;
      }
      codes.vector[0] = make_uint4(word[0], word[1], word[2], word[3]);
    }
    return codes;
  }

  // Encodes with stochastic rounding, or with a range that needs scaling.
  static CINCH_HD Codes encode_otherwise(const Params &params, const float (&x)[16], float low, float high,
                                         const Random &random) {
    const uint32_t levels = levels_of(params);
    const float raise = regime_of(add(high, -low));
    low = mul(low, raise), high = mul(high, raise);
    const float factor = factor_of(add(high, -low), levels);
    return codes_of(params, [&](int k) {
      const float place = mul(add(mul(x[k], raise), -low), factor);
      if (params.draws == 0) return rounded(place);
      const float sum = add_down(place, INTEGERS);
      const float fraction = add(place, -add(sum, -INTEGERS));
      const uint32_t above = fraction > random.fraction(k) ? 1 : 0;
      const uint32_t code = bits_of(sum) - INTEGERS_BITS + above;
      return INTEGERS_BITS + (code < levels ? code : levels);
    });
  }

  static CINCH_HD void decode_otherwise(const Params &params, const Codes &codes, float low,
                                        float high, float (&out)[16]) {
    if (!(is_finite(low) && is_finite(high))) return all_nan(out);
    const float raise = regime_of(add(high, -low));
    low = add(mul(low, raise), 0.0f), high = mul(high, raise);
    float gap = gap_of(params, add(high, -low));
    // The factor slightly below 1 keeps decoded elements of a scaled-down range at or below its
    // largest element.
    if (raise < 1) gap = mul(gap, 1 - 0x1p-22f);
    const float lower = raise < 1 ? 4.0f : LOWER;
    each(params, codes, gap, [&](int k, float code, float gap) {
      out[k] = add(mul(fused(code, gap, low), lower), 0.0f);
    });
  }

  static CINCH_HD float gap_of(const Params &params, float range) {
    if (BITS == 4 || params.bits == 4) return divided_by<15>(range);
    if (params.bits == 8) return divided_by<255>(range);
    return params.bits == 2 ? divided_by<3>(range) : range;
  }

  // Calls take(k, code, gap) for each of the 16 codes. The arguments' product is exactly code k
  // times `gap`; `code` may carry a power of two that its `gap` compensates.
  template <class Take>
  static CINCH_HD void each(const Params &params, const Codes &codes, float gap, Take &&take) {
    if constexpr (BITS == 4) {
      CINCH_UNROLL
      for (int w = 0; w < 2; ++w) {
        CINCH_UNROLL
        for (int k = 0; k < 8; ++k) {
          // Five 4-bit codes fit in the mantissa below the exponent of 2^23; the word is shifted
          // for the other three.
          const uint32_t word = k < 5 ? codes.word[w] : codes.word[w] >> 20;
          const int place = 4 * (k % 5);
          const uint32_t bits = bits_among(word, 15u << place, INTEGERS_BITS);
          const float unit = mul(gap, 1.0f / (float)(1 << place));
          take(8 * w + k, add(float_of(bits), -INTEGERS), unit);
        }
      }
    } else {
      const uint4 v = codes.vector[0];
      const uint32_t word[4] = {Base::bytes_of(params.bits, v.x), Base::bytes_of(params.bits, v.y),
                                Base::bytes_of(params.bits, v.z), Base::bytes_of(params.bits, v.w)};
      CINCH_UNROLL
      for (int k = 0; k < 16; ++k) {
        const uint32_t bits = byte_permute(word[k / 4], INTEGERS_BITS, 0x7650 | k % 4);
        // byte_permute picks the whole byte of code k: the bits above a code narrower than a byte
        // are zeros.
        take(k, add(float_of(bits), -INTEGERS), gap);
      }
    }
  }
};

}  // namespace cinch
