// trunc8, trunc16, trunc24: the upper bytes of each fp32 number, little endian, element after
// element. NaN becomes quiet first, because the quiet bit lies in the upper two bytes. In trunc8
// codes 0x7f and 0xff stand for elements that are not finite, and finite elements from 2^127 up
// saturate at 0x7e.
//
// A single kernel serves all three widths, since a code is only moved bytes.
#pragma once

#include "codec/blocked.cuh"
#include "codec/elementwise.cuh"
#include "codec/linear8.cuh"

namespace cinch {

struct TruncFormat : Unnumbered {
  static constexpr int code_bits = 24;
  using Params = cinch_bits_params;
  // The codes of 16 elements, of up to 3 bytes each. A vector has 16 bytes, so a lane uses one
  // vector for each byte of a code.
  using Codes = CodeVectors<3>;

  static CINCH_HD uint32_t bits(const Params &params) { return params.bits; }

  template <class Size>
  static CINCH_HD void load(const Params &params, const uint8_t *wire, Size n, Size i,
                            Codes &codes) {
    each_vector(params, n, i, [&](int v, Size at) {
      codes.vector[v] = *reinterpret_cast<const uint4 *>(wire + at);
    });
  }

  template <class Size>
  static CINCH_HD void store(const Params &params, uint8_t *wire, Size n, Size i,
                             const Codes &codes) {
    each_vector(params, n, i, [&](int v, Size at) {
      *reinterpret_cast<uint4 *>(wire + at) = codes.vector[v];
    });
  }

  static CINCH_HD void encode16(const Params &params, const float (&x)[16], Summary, uint32_t,
                                const Random &, Codes &codes, float (&)[1]) {
    uint32_t word[16];
    CINCH_UNROLL
    for (int k = 0; k < 16; ++k) word[k] = bits_of(x[k]);
    const float limit = params.bits == 8 ? 0x1p127f : float_of(INFINITE);
    if (!(largest_of(x) < limit)) {
      CINCH_UNROLL
      for (int k = 0; k < 16; ++k) word[k] = adjusted(params, word[k]);
    }
    pack(params.bits, word, codes);
  }

  template <bool REDUCE>
  static CINCH_HD void decode16(const Params &params, const Codes &codes, const float (&)[1],
                                float (&acc)[16]) {
    uint32_t word[16];
    unpack(params.bits, codes, word);
    CINCH_UNROLL
    for (int k = 0; k < 16; ++k) {
      const bool wild = params.bits == 8 && (word[k] & 0x7fffffffu) == 0x7f000000u;
      const float value = wild ? float_of(QUIET_NAN) : float_of(word[k]);
      acc[k] = REDUCE ? canonical(add(acc[k], value)) : value;
    }
  }

  // Packs the upper `bits` bits of each of 16 words, unchanged.
  static CINCH_HD void pack(uint32_t bits, const uint32_t (&word)[16], Codes &codes) {
    if (bits == 16) {
      CINCH_UNROLL
      for (int v = 0; v < 2; ++v) {
        uint32_t pair[4];
        CINCH_UNROLL
        for (int k = 0; k < 4; ++k) {
          pair[k] = byte_permute(word[8 * v + 2 * k], word[8 * v + 2 * k + 1], 0x7632);
        }
        codes.vector[v] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
      }
    } else if (bits == 8) {
      uint32_t four[4];
      CINCH_UNROLL
      for (int k = 0; k < 4; ++k) {
        const uint32_t low = byte_permute(word[4 * k], word[4 * k + 1], 0x0073);
        const uint32_t high = byte_permute(word[4 * k + 2], word[4 * k + 3], 0x0073);
        four[k] = byte_permute(low, high, 0x5410);
      }
      codes.vector[0] = make_uint4(four[0], four[1], four[2], four[3]);
    } else {
      uint32_t packed[12];
      CINCH_UNROLL
      for (int k = 0; k < 4; ++k) {
        packed[3 * k] = byte_permute(word[4 * k], word[4 * k + 1], 0x5321);
        packed[3 * k + 1] = byte_permute(word[4 * k + 1], word[4 * k + 2], 0x6532);
        packed[3 * k + 2] = byte_permute(word[4 * k + 2], word[4 * k + 3], 0x7653);
      }
      CINCH_UNROLL
      for (int v = 0; v < 3; ++v) {
        codes.vector[v] =
            make_uint4(packed[4 * v], packed[4 * v + 1], packed[4 * v + 2], packed[4 * v + 3]);
      }
    }
  }

  // Unpacks 16 codes into the upper bytes of 16 words; the lower bytes become zeros.
  static CINCH_HD void unpack(uint32_t bits, const Codes &codes, uint32_t (&word)[16]) {
    uint32_t packed[12];
    CINCH_UNROLL
    for (int v = 0; v < 3; ++v) {
      const uint4 vector = codes.vector[v];
      packed[4 * v] = vector.x, packed[4 * v + 1] = vector.y;
      packed[4 * v + 2] = vector.z, packed[4 * v + 3] = vector.w;
    }
    if (bits == 16) {
      CINCH_UNROLL
      for (int k = 0; k < 8; ++k) {
        word[2 * k] = packed[k] << 16;
        word[2 * k + 1] = packed[k] & 0xffff0000u;
      }
    } else if (bits == 8) {
      CINCH_UNROLL
      for (int k = 0; k < 16; ++k) {
        word[k] = byte_permute(packed[k / 4], 0, (uint32_t)(k % 4) << 12 | 0x444);
      }
    } else {
      CINCH_UNROLL
      for (int k = 0; k < 4; ++k) {
        const uint32_t *from = packed + 3 * k;
        word[4 * k] = from[0] << 8;
        word[4 * k + 1] = byte_permute(from[0], from[1], 0x5430) & 0xffffff00u;
        word[4 * k + 2] = byte_permute(from[1], from[2], 0x4320) & 0xffffff00u;
        word[4 * k + 3] = from[2] & 0xffffff00u;
      }
    }
  }

 private:
  // Calls use(v, byte) for each vector v of this lane that begins within the chunk's codes; `byte`
  // is its offset in the chunk.
  template <class Size, class Use>
  static CINCH_HD void each_vector(const Params &params, Size n, Size i, Use &&use) {
    const uint32_t bytes = params.bits / 8;
    CINCH_UNROLL
    for (int v = 0; v < 3; ++v) {
      const Size at = i * bytes + 16 * v;
      if (v < (int)bytes && at < n * bytes) use(v, at);
    }
  }

  // Returns the bits of an element, changed so that its upper bytes alone are its code: NaN becomes
  // quiet, and in trunc8 large elements saturate.
  static CINCH_HD uint32_t adjusted(const Params &params, uint32_t bits) {
    const uint32_t size = bits & 0x7fffffffu, sign = bits & 0x80000000u;
    if (params.bits == 8) {
      return sign | (size >= INFINITE ? 0x7f000000u : size >= 0x7f000000u ? 0x7e000000u : size);
    }
    return size > INFINITE ? bits | 0x00400000u : bits;
  }
};

}  // namespace cinch
