// minmax: b-bit integers between the smallest and the largest element of a block: round((x - low) *
// (levels/range)), half to even or by chance; back, code * (range/levels) + low. Ranges below 2^-100
// are worked on 2^64 times as large, ranges from 2^126 up four times smaller.
//
// MinMaxFormat<4> has its width at compile time: it is the one that a wire saves most by. The other
// widths share MinMaxFormat<0>, which goes through bytes.
//
// Rounding is one addition of 2^23; the sum's low bits are the code, and codes are joined with the
// constant still above them, which the modulus of the last sum takes away. Back: a code under the
// exponent of 2^23 is 2^23 + code * 2^k, so that one subtraction makes it a number and the power of
// two goes into the gap.
#pragma once

#include <type_traits>

#include "codec/blocked.cuh"
#include "codec/dynamic8.cuh"

namespace cinch {

// How the codes of a format lie whose parameters say how many bits they have: 1, 2, 4 or 8.
struct AnyBits {
  static constexpr int code_bits = 8;
  using Params = cinch_bits_params;
  // A byte each: squeezed only on the wire.
  using Codes = CodeVectors<1>;

  static CINCH_HD uint32_t bits(const Params &params) { return params.bits; }

  // Without what is between them, in the lowest 16 * bits bits.
  static CINCH_HD void squeeze(uint32_t bits, const Codes &codes, uint32_t (&word)[4]) {
    const uint4 v = codes.vector[0];
    word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
    if (bits == 8) return;
    CINCH_UNROLL
    for (int w = 0; w < 4; ++w) {
      const uint32_t x = (word[w] | word[w] >> (8 - bits)) & (((1u << 2 * bits) - 1) * 0x00010001u);
      word[w] = (x | x >> (16 - 2 * bits)) & ((1u << 4 * bits) - 1);
    }
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
    uint32_t bytes[4];
    CINCH_UNROLL
    for (int w = 0; w < 4; ++w) {
      uint32_t x = (bits == 4 ? word[w / 2] : word[0]) >> (step * w & 31) & ((1u << step) - 1);
      x = (x | x << (16 - 2 * bits)) & (((1u << 2 * bits) - 1) * 0x00010001u);
      bytes[w] = (x | x << (8 - bits)) & (((1u << bits) - 1) * 0x01010101u);
    }
    codes.vector[0] = make_uint4(bytes[0], bytes[1], bytes[2], bytes[3]);
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

// Where the arithmetic of a block takes place: what it is multiplied with.
CINCH_HD float regime_of(float range) {
  const float size = magnitude_of(range);
  return size >= 0x1p126f ? 0.25f : size < TINY && size > 0 ? RAISE : 1.0f;
}

template <int BITS>
struct MinMaxFormat : std::conditional<BITS == 4, FewBits<4>, AnyBits>::type {
  using Base = typename std::conditional<BITS == 4, FewBits<4>, AnyBits>::type;
  using Params = cinch_bits_params;
  using Codes = typename Base::Codes;
  static constexpr int numbers = 2;
  static constexpr bool draws = true;

  // Smallest and largest; not finite if an element is not.
  struct Summary {
    float low;
    float high;
  };

  static CINCH_HD void prepare(uint32_t) {}

  static CINCH_HD Summary nothing() { return {float_of(INFINITE), -float_of(INFINITE)}; }

  static CINCH_HD void look(const float (&x)[16], uint32_t valid, uint32_t, Summary &summary) {
    if (valid == 16) {
      // Two chains for each end, so that one need not wait for the other.
      float low[2] = {x[0], x[1]}, high[2] = {x[0], x[1]};
      CINCH_UNROLL
      for (int k = 2; k < 16; ++k) {
        low[k % 2] = smaller_of(low[k % 2], x[k]), high[k % 2] = larger_of(high[k % 2], x[k]);
      }
      summary.low = smaller_of(summary.low, smaller_of(low[0], low[1]));
      summary.high = larger_of(summary.high, larger_of(high[0], high[1]));
    } else {
      CINCH_UNROLL
      for (int k = 0; k < 15; ++k) {
        if ((uint32_t)k >= valid) break;
        summary.low = smaller_of(summary.low, x[k]), summary.high = larger_of(summary.high, x[k]);
      }
    }
  }

#if defined(__CUDACC__)
  static __device__ __forceinline__ void conclude(uint32_t log2_block, Summary &summary) {
    join_lanes(log2_block, [&](uint32_t lanes) {
      summary.low = smaller_of(summary.low, from_lane(summary.low, lanes));
      summary.high = larger_of(summary.high, from_lane(summary.high, lanes));
    });
  }
#endif

  // code = ((x * raise) - low) * factor.
  struct Encoder {
    float raise;
    float low;
    float factor;
  };

  static CINCH_HD void encode16(const Params &params, const float (&x)[16], Summary summary,
                                uint32_t, const Random &random, Codes &codes, float (&number)[2]) {
    // -0 becomes +0.
    const float low = add(summary.low, 0.0f), high = add(summary.high, 0.0f);
    if (!(is_finite(low) && is_finite(high))) {
      number[0] = number[1] = float_of(QUIET_NAN);
      codes = {};
      return;
    }
    number[0] = low, number[1] = high;
    const uint32_t levels = levels_of(params);
    const Encoder encoder = encoder_of(low, high, levels);
    if (encoder.raise == 1.0f && !params.draws) {
      codes = codes_of([&](int k) {
        const float place = mul(add(x[k], -encoder.low), encoder.factor);
        return bits_of(add(place, INTEGERS));
      });
    } else {
      // A copy: the elements themselves stay in registers.
      Sixteen all;
      CINCH_UNROLL
      for (int k = 0; k < 16; ++k) all.x[k] = x[k];
      codes = encode_otherwise(all, encoder, levels, random, params.draws != 0);
    }
  }

  static CINCH_HD void decode16(const Params &params, const Codes &codes, const float (&number)[2],
                                float (&out)[16]) {
    decode<false>(params, codes, number, out);
  }

  static CINCH_HD void decode_reduce16(const Params &params, const Codes &codes,
                                       const float (&number)[2], float (&acc)[16]) {
    decode<true>(params, codes, number, acc);
  }

 private:
  static CINCH_HD uint32_t levels_of(const Params &params) {
    return BITS == 4 ? 15 : (1u << params.bits) - 1;
  }

  static CINCH_HD Encoder encoder_of(float low, float high, uint32_t levels) {
    const float raise = regime_of(add(high, -low));
    low = mul(low, raise), high = mul(high, raise);
    const float range = add(high, -low);
    float factor = 0;
    if (range != 0) {
      // A single level over the largest ranges is subnormal.
      factor = levels == 1 ? DynamicMeaning::factor(range) : divide_ordinary((float)levels, range);
    }
    return {raise, low, factor};
  }

  static CINCH_HD float place_of(const Encoder &encoder, float x) {
    return mul(add(mul(x, encoder.raise), -encoder.low), encoder.factor);
  }

  // From 16 sums of which the low bits are codes, below the constant of INTEGERS.
  template <class Of>
  static CINCH_HD Codes codes_of(Of &&of) {
    Codes codes;
    if constexpr (BITS == 4) {
      CINCH_UNROLL
      for (int w = 0; w < 2; ++w) {
        // The constant of the two lowest codes is what the modulus leaves.
        uint32_t word = of(8 * w + 7);
        CINCH_UNROLL
        for (int k = 6; k >= 0; --k) word = word * 16 + of(8 * w + k);
        codes.word[w] = word - INTEGERS_BITS * 17;
      }
    } else {
      uint32_t word[4];
      CINCH_UNROLL
      for (int w = 0; w < 4; ++w) {
        word[w] =
            LinearMeaning::first_bytes(of(4 * w), of(4 * w + 1), of(4 * w + 2), of(4 * w + 3));
      }
      codes.vector[0] = make_uint4(word[0], word[1], word[2], word[3]);
    }
    return codes;
  }

  template <bool REDUCE>
  static CINCH_HD void decode(const Params &params, const Codes &codes, const float (&number)[2],
                              float (&acc)[16]) {
    if (!(is_finite(number[0]) && is_finite(number[1]))) return all_nan(acc);
    const float raise = regime_of(add(number[1], -number[0]));
    // -0 becomes +0, and so does what it is added to.
    const float low = add(mul(number[0], raise), 0.0f), high = mul(number[1], raise);
    const float range = add(high, -low);
    float gap = gap_of(params, range);
    if (raise == 1.0f) {
      each(codes, gap, [&](int k, float code, float gap) {
        take<REDUCE>(acc[k], fused(code, gap, low));
      });
    } else {
      // Just below 1: a lowered range decodes to no more than its largest element.
      if (raise < 1) gap = mul(gap, 1 - 0x1p-22f);
      const Sixteen all = decode_otherwise(codes, gap, low, raise < 1 ? 4.0f : LOWER);
      CINCH_UNROLL
      for (int k = 0; k < 16; ++k) take<REDUCE>(acc[k], all.x[k]);
    }
  }

  struct Sixteen {
    float x[16];
  };

  // By chance, or of ranges that are not worked on as they are.
  CINCH_HD_RARE Codes encode_otherwise(const Sixteen &all, Encoder encoder, uint32_t levels,
                                       Random random, bool draws) {
    return codes_of([&](int k) {
      const float place = place_of(encoder, all.x[k]);
      if (!draws) return bits_of(add(place, INTEGERS));
      const float sum = add_down(place, INTEGERS);
      const float fraction = add(place, -add(sum, -INTEGERS));
      const uint32_t above = fraction > random.fraction(k) ? 1 : 0;
      const uint32_t code = bits_of(sum) - INTEGERS_BITS + above;
      return INTEGERS_BITS + (code < levels ? code : levels);
    });
  }

  CINCH_HD_RARE Sixteen decode_otherwise(Codes codes, float gap, float low, float lower) {
    Sixteen all;
    each(codes, gap, [&](int k, float code, float gap) {
      all.x[k] = add(mul(fused(code, gap, low), lower), 0.0f);
    });
    return all;
  }

  static CINCH_HD float gap_of(const Params &params, float range) {
    if (BITS == 4 || params.bits == 4) return divided_by<15>(range);
    if (params.bits == 8) return divided_by<255>(range);
    return params.bits == 2 ? divided_by<3>(range) : range;
  }

  // Calls take(k, code, gap) for all codes. Their product is that of the code and the gap, exactly.
  template <class Take>
  static CINCH_HD void each(const Codes &codes, float gap, Take &&take) {
    if constexpr (BITS == 4) {
      CINCH_UNROLL
      for (int w = 0; w < 2; ++w) {
        CINCH_UNROLL
        for (int k = 0; k < 8; ++k) {
          // Five codes fit below the exponent.
          const uint32_t word = k < 5 ? codes.word[w] : codes.word[w] >> 20;
          const int place = 4 * (k % 5);
          const uint32_t bits = (word & 15u << place) | INTEGERS_BITS;
          const float unit = mul(gap, 1.0f / (float)(1 << place));
          take(8 * w + k, add(float_of(bits), -INTEGERS), unit);
        }
      }
    } else {
      const uint4 v = codes.vector[0];
      const uint32_t word[4] = {v.x, v.y, v.z, v.w};
      CINCH_UNROLL
      for (int k = 0; k < 16; ++k) {
        const uint32_t bits = byte_permute(word[k / 4], INTEGERS_BITS, 0x7650 | k % 4);
        // A code of less than a byte has zeros above it.
        take(k, add(float_of(bits), -INTEGERS), gap);
      }
    }
  }
};

}  // namespace cinch
