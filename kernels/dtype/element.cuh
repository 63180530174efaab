// Element types: conversion of 16-byte vectors to and from the accumulator type, and the arithmetic
// of reductions. DType has the same names.
//
// - Storage: an element in memory.
// - Bits: an unsigned integer of that size.
// - Acc: the type that arithmetic uses: fp32 for floats of up to 32 bits, else Storage.
// - N: elements of a 16-byte vector.
#pragma once

#include "dtype/format.cuh"
#include "dtype/number.cuh"

namespace cinch {

// The base of all element types. Self defines widen(Bits) and narrow(Acc).
template <class Self, class STORAGE, class BITS, class ACC>
struct ElementBase {
  using Storage = STORAGE;
  using Bits = BITS;
  using Acc = ACC;
  static constexpr int N = 16 / sizeof(Bits);
  // Whether the type is a PairElement.
  static constexpr bool pairs = false;

  static CINCH_HD void unpack(uint4 vector, Acc (&out)[N]) {
    Bits raw[N];
    spread(vector, raw);
    CINCH_UNROLL
    for (int k = 0; k < N; ++k) out[k] = Self::widen(raw[k]);
  }

  static CINCH_HD uint4 pack(const Acc (&in)[N]) {
    Bits raw[N];
    CINCH_UNROLL
    for (int k = 0; k < N; ++k) raw[k] = Self::narrow(in[k]);
    return gather(raw);
  }

  // Unpacks a vector. It is faster than unpack, but may turn a NaN into a NaN with other bits.
  static CINCH_HD void unpack_any_nan(uint4 vector, Acc (&out)[N]) { Self::unpack(vector, out); }

  // Packs numbers of which none is NaN. It is faster than pack.
  static CINCH_HD uint4 pack_numbers(const Acc (&in)[N]) { return Self::pack(in); }

  // Returns whether no element of a vector is NaN or infinite. Integers are finite.
  static CINCH_HD bool are_finite(uint4 vector) {
    bool all = true;
    if constexpr (std::is_floating_point<Acc>::value) {
      Acc x[N];
      Self::unpack_any_nan(vector, x);
      CINCH_UNROLL
      for (int k = 0; k < N; ++k) all &= is_finite(x[k]);
    }
    return all;
  }

  // Returns the smallest and the largest element in P vectors.
  template <int P>
  static CINCH_HD Ends ends_of(const uint4 (&vectors)[P]) {
    Ends ends;
    CINCH_UNROLL
    for (int p = 0; p < P; ++p) {
      float x[N];
      Self::unpack(vectors[p], x);
      const Ends part = cinch::ends_of(x);
      ends = p == 0 ? part : join(ends, part);
    }
    return ends;
  }

  static CINCH_HD Acc combine(Acc a, Acc b, Combine op) { return cinch::combine(a, b, op); }
  static CINCH_HD Acc combine(Acc a, Acc b, uint32_t op) {
    return cinch::combine(a, b, static_cast<Combine>(op));
  }
  // combine_any_nan and canonical together are `combine`: a sum of many terms canonicalizes a NaN
  // once, at the end.
  static CINCH_HD Acc combine_any_nan(Acc a, Acc b, Combine op) {
    return cinch::combine_any_nan(a, b, op);
  }
  static CINCH_HD Acc canonicalize(Acc a) { return Number<Acc>::canonicalize(a); }
  // Multiplies an element by the factor of a pre-multiplied sum, which is in the low bits of
  // `factor`.
  static CINCH_HD Acc premultiply(Acc a, uint64_t factor) {
    return Number<Acc>::prod(a, Number<Acc>::from_word(factor));
  }
  // Loads the factor of a pre-multiplied sum from memory, where it is stored as an element.
  static CINCH_HD uint64_t factor_at(uint64_t address) {
    return Number<Acc>::to_word(Self::widen(*reinterpret_cast<const Bits *>(address)));
  }
  // Whether averages are limited to the finite numbers of the type; `largest` is the largest of them.
  static constexpr bool limits = false;
  static CINCH_HD float largest() { return INFINITY; }
  // Divides the sum of an average by the number of ranks.
  static CINCH_HD Acc divide(Acc a, uint32_t nranks) { return Number<Acc>::divide(a, nranks); }

 protected:
  static CINCH_HD void spread(uint4 vector, Bits (&raw)[N]) {
    const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
    CINCH_UNROLL
    for (int k = 0; k < N; ++k) {
      if (sizeof(Bits) == 8) {
        raw[k] = (Bits)((uint64_t)words[(2 * k + 1) & 3] << 32 | words[(2 * k) & 3]);
      } else {
        raw[k] = (Bits)(words[k * sizeof(Bits) / 4] >> (8 * sizeof(Bits) * k & 31));
      }
    }
  }

  static CINCH_HD uint4 gather(const Bits (&raw)[N]) {
    uint32_t words[4] = {0, 0, 0, 0};
    CINCH_UNROLL
    for (int k = 0; k < N; ++k) {
      if (sizeof(Bits) == 8) {
        words[(2 * k) & 3] = (uint32_t)raw[k];
        words[(2 * k + 1) & 3] = (uint32_t)((uint64_t)raw[k] >> 32);
      } else {
        words[k * sizeof(Bits) / 4] |= (uint32_t)raw[k] << (8 * sizeof(Bits) * k & 31);
      }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
};

// Unpacks 16 elements of E.
template <class E>
CINCH_HD void unpack_elements(const uint4 (&vectors)[16 / E::N], float (&x)[16]) {
  CINCH_UNROLL
  for (int v = 0; v < 16 / E::N; ++v) {
    float part[E::N];
    E::unpack(vectors[v], part);
    CINCH_UNROLL
    for (int k = 0; k < E::N; ++k) x[v * E::N + k] = part[k];
  }
}

template <class Self, class T, class BITS>
struct IntegerElement : ElementBase<Self, T, BITS, T> {
  static CINCH_HD T widen(BITS bits) { return (T)bits; }
  static CINCH_HD BITS narrow(T number) { return (BITS)number; }
};

struct I8 : IntegerElement<I8, int8_t, uint8_t> {};
struct U8 : IntegerElement<U8, uint8_t, uint8_t> {};
struct I32 : IntegerElement<I32, int32_t, uint32_t> {};
struct U32 : IntegerElement<U32, uint32_t, uint32_t> {};
struct I64 : IntegerElement<I64, int64_t, uint64_t> {};
struct U64 : IntegerElement<U64, uint64_t, uint64_t> {};

struct F32 : ElementBase<F32, float, uint32_t, float> {
  static CINCH_HD float widen(uint32_t bits) { return float_of(bits); }
  static CINCH_HD uint32_t narrow(float number) { return bits_of(number); }
};

struct F64 : ElementBase<F64, double, uint64_t, double> {
  static CINCH_HD double widen(uint64_t bits) { return double_of(bits); }
  static CINCH_HD uint64_t narrow(double number) { return bits_of(number); }
};

struct F8E4M3 : ElementBase<F8E4M3, uint8_t, uint8_t, float> {
  static constexpr bool limits = true;
  static CINCH_HD float largest() { return 448.0f; }
  static CINCH_HD float widen(uint8_t bits) { return SmallF8E4M3::widen(bits); }
  static CINCH_HD uint8_t narrow(float number) { return (uint8_t)SmallF8E4M3::narrow(number); }
};

struct F8E5M2 : ElementBase<F8E5M2, uint8_t, uint8_t, float> {
  static constexpr bool limits = true;
  static CINCH_HD float largest() { return 57344.0f; }
  static CINCH_HD float widen(uint8_t bits) { return SmallF8E5M2::widen(bits); }
  static CINCH_HD uint8_t narrow(float number) { return (uint8_t)SmallF8E5M2::narrow(number); }
};

// The base of the 16-bit floats. On the device it converts pairs of elements by one instruction
// where none of them is NaN. Self defines narrow_pair, smaller_pair, larger_pair, magnitudes, add_zero,
// has_nan, widen_low and widen_high there.
template <class Self>
struct PairElement : ElementBase<Self, uint16_t, uint16_t, float> {
  using Base = ElementBase<Self, uint16_t, uint16_t, float>;
  static constexpr bool pairs = true;

#if defined(__CUDA_ARCH__)
  static CINCH_HD uint4 pack_numbers(const float (&in)[8]) {
    return make_uint4(Self::narrow_pair(in[0], in[1]), Self::narrow_pair(in[2], in[3]),
                      Self::narrow_pair(in[4], in[5]), Self::narrow_pair(in[6], in[7]));
  }

  static CINCH_HD uint4 pack(const float (&in)[8]) {
    const uint4 v = pack_numbers(in);
    const uint32_t largest =
        Self::larger_pair(Self::larger_pair(v.x, v.y), Self::larger_pair(v.z, v.w));
    if (!Self::has_nan(largest)) return v;
    return Base::pack(in);
  }

  // Returns the smallest and the largest element in P vectors. It compares pairs, then the results
  // in the low and the high halves.
  template <int P>
  static CINCH_HD Ends ends_of(const uint4 (&vectors)[P]) {
    uint32_t low, high;
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const uint4 v = vectors[p];
      const uint32_t part_low =
          Self::smaller_pair(Self::smaller_pair(Self::smaller_pair(v.x, v.y), v.z), v.w);
      const uint32_t part_high =
          Self::larger_pair(Self::larger_pair(Self::larger_pair(v.x, v.y), v.z), v.w);
      low = p == 0 ? part_low : Self::smaller_pair(low, part_low);
      high = p == 0 ? part_high : Self::larger_pair(high, part_high);
    }
    return join({Self::widen_low(low), Self::widen_low(high)},
                {Self::widen_high(low), Self::widen_high(high)});
  }

  static CINCH_HD bool are_finite(uint4 vector) { return is_finite(larger_of_halves(magnitudes_of(vector))); }

  // Returns the largest magnitude in two vectors; it is not finite if any element is not.
  static CINCH_HD float largest_of(const uint4 (&vectors)[2]) {
    return larger_of_halves(Self::larger_pair(magnitudes_of(vectors[0]), magnitudes_of(vectors[1])));
  }

  // Return the largest magnitudes of the low and of the high halves, and the larger of the two.
  static CINCH_HD uint32_t magnitudes_of(uint4 v) {
    return Self::larger_pair(Self::larger_pair(Self::magnitudes(v.x), Self::magnitudes(v.y)),
                             Self::larger_pair(Self::magnitudes(v.z), Self::magnitudes(v.w)));
  }
  static CINCH_HD float larger_of_halves(uint32_t pair) {
    return larger_magnitude(Self::widen_low(pair), Self::widen_high(pair));
  }

  // Returns 16 bits: bit k is 1 if the finite element k of two vectors is below 0.
  static CINCH_HD uint32_t below(const uint4 (&vectors)[2]) {
    const auto signs = [](uint4 v) {
      const uint32_t x = Self::add_zero(v.x), y = Self::add_zero(v.y);
      const uint32_t z = Self::add_zero(v.z), w = Self::add_zero(v.w);
      // Byte j repeats the sign of element j or 4 + j. It keeps the bit of that element.
      const uint32_t first = byte_permute(x, y, 0xfdb9), second = byte_permute(z, w, 0xfdb9);
      return sum_of_bytes((first & 0x08040201u) | (second & 0x80402010u));
    };
    return signs(vectors[0]) | signs(vectors[1]) << 8;
  }
#else
  static CINCH_HD float widen_low(uint32_t pair) { return Self::widen((uint16_t)pair); }
  static CINCH_HD float widen_high(uint32_t pair) { return Self::widen((uint16_t)(pair >> 16)); }

  static CINCH_HD float largest_of(const uint4 (&vectors)[2]) {
    float x[16];
    unpack_elements<Self>(vectors, x);
    return cinch::largest_of(x);
  }

  static CINCH_HD uint32_t below(const uint4 (&vectors)[2]) {
    float x[16];
    unpack_elements<Self>(vectors, x);
    uint32_t bits = 0;
    for (int k = 0; k < 16; ++k) bits |= (x[k] < 0 ? 1u : 0u) << k;
    return bits;
  }
#endif
};

struct BF16 : PairElement<BF16> {
  static constexpr bool limits = true;
  static CINCH_HD float largest() { return float_of(0x7f7f0000u); }
  static CINCH_HD float widen(uint16_t bits) { return widen_bf16(bits); }
  static CINCH_HD uint16_t narrow(float number) { return (uint16_t)narrow_bf16(number); }

#if defined(__CUDA_ARCH__)
  static CINCH_HD uint32_t narrow_pair(float low, float high) { return narrow_bf16_pair(low, high); }
  static CINCH_HD uint32_t smaller_pair(uint32_t a, uint32_t b) { return smaller_bf16_pair(a, b); }
  static CINCH_HD uint32_t larger_pair(uint32_t a, uint32_t b) { return larger_bf16_pair(a, b); }
  static CINCH_HD uint32_t magnitudes(uint32_t pair) { return magnitudes_of_bf16_pair(pair); }
  static CINCH_HD uint32_t add_zero(uint32_t pair) { return add_zero_to_bf16_pair(pair); }
  static CINCH_HD bool has_nan(uint32_t pair) { return has_nan_bf16(pair); }
  static CINCH_HD float widen_low(uint32_t pair) { return float_of(pair << 16); }
  static CINCH_HD float widen_high(uint32_t pair) { return float_of(pair & 0xffff0000u); }
#endif
};

struct F16 : PairElement<F16> {
  static constexpr bool limits = true;
  static CINCH_HD float largest() { return 65504.0f; }
  static CINCH_HD float widen(uint16_t bits) { return SmallF16::widen(bits); }
  static CINCH_HD uint16_t narrow(float number) { return (uint16_t)SmallF16::narrow(number); }

#if defined(__CUDA_ARCH__)
  static CINCH_HD uint32_t narrow_pair(float low, float high) { return narrow_f16_pair(low, high); }
  static CINCH_HD uint32_t smaller_pair(uint32_t a, uint32_t b) { return smaller_f16_pair(a, b); }
  static CINCH_HD uint32_t larger_pair(uint32_t a, uint32_t b) { return larger_f16_pair(a, b); }
  static CINCH_HD uint32_t magnitudes(uint32_t pair) { return magnitudes_of_f16_pair(pair); }
  static CINCH_HD uint32_t add_zero(uint32_t pair) { return add_zero_to_f16_pair(pair); }
  static CINCH_HD bool has_nan(uint32_t pair) { return has_nan_f16(pair); }
  static CINCH_HD float widen_low(uint32_t pair) { return widen_f16_low(pair); }
  static CINCH_HD float widen_high(uint32_t pair) { return widen_f16_high(pair); }

  static CINCH_HD void unpack(uint4 v, float (&out)[8]) {
    const uint32_t largest =
        larger_f16_pair(larger_f16_pair(v.x, v.y), larger_f16_pair(v.z, v.w));
    if (!has_nan_f16(largest)) return unpack_any_nan(v, out);
    Base::unpack(v, out);
  }

  static CINCH_HD void unpack_any_nan(uint4 v, float (&out)[8]) {
    out[0] = widen_f16_low(v.x), out[1] = widen_f16_high(v.x);
    out[2] = widen_f16_low(v.y), out[3] = widen_f16_high(v.y);
    out[4] = widen_f16_low(v.z), out[5] = widen_f16_high(v.z);
    out[6] = widen_f16_low(v.w), out[7] = widen_f16_high(v.w);
  }
#endif
};

}  // namespace cinch

// All element types, in groups: X(name, Type) for each. The types of a group are compiled together
// in one file. The reduction kernels exist for every type of these lists.
#define CINCH_INTEGERS_8(X) X(i8, I8) X(u8, U8)
#define CINCH_INTEGERS_32(X) X(i32, I32) X(u32, U32)
#define CINCH_INTEGERS_64(X) X(i64, I64) X(u64, U64)
#define CINCH_FLOATS_8(X) X(f8e4m3, F8E4M3) X(f8e5m2, F8E5M2)
#define CINCH_FLOATS_16(X) X(f16, F16) X(bf16, BF16)
#define CINCH_FLOATS_32_64(X) X(f32, F32) X(f64, F64)
#define CINCH_ELEMENTS(X) \
  CINCH_INTEGERS_8(X) CINCH_INTEGERS_32(X) CINCH_INTEGERS_64(X) \
  CINCH_FLOATS_8(X) CINCH_FLOATS_16(X) CINCH_FLOATS_32_64(X)

// The element types that codecs accept, which are the types of gradients: X(further arguments,
// name, Type) for each.
#define CINCH_CODED_ELEMENTS(X, ...) \
  X(__VA_ARGS__, f32, F32) X(__VA_ARGS__, f16, F16) X(__VA_ARGS__, bf16, BF16)
