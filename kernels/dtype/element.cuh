// Element types: how 16 bytes of each become numbers of its accumulator type and back, and the
// arithmetic of reductions. Names are those of DType.
//
// Storage: an element as it lies in memory. Bits: an unsigned integer as large. Acc: what it is
// computed in, fp32 for floats of up to 32 bits and the type itself otherwise. N: elements of a
// 16-byte vector.
#pragma once

#include "dtype/format.cuh"
#include "dtype/number.cuh"

namespace cinch {

// What all types share; Self has widen(Bits) and narrow(Acc).
template <class Self, class STORAGE, class BITS, class ACC>
struct ElementBase {
  using Storage = STORAGE;
  using Bits = BITS;
  using Acc = ACC;
  static constexpr int N = 16 / sizeof(Bits);

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

  // As unpack, where what is NaN may become any NaN.
  static CINCH_HD void unpack_loosely(uint4 vector, Acc (&out)[N]) { Self::unpack(vector, out); }

  // Of numbers that are not NaN.
  static CINCH_HD uint4 pack_numbers(const Acc (&in)[N]) { return Self::pack(in); }

  // The ends of the elements of P vectors.
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
  // The same in two: many terms, and then what has become of them.
  static CINCH_HD Acc combine_loosely(Acc a, Acc b, Combine op) {
    return cinch::combine_loosely(a, b, op);
  }
  static CINCH_HD Acc settle(Acc a) { return Number<Acc>::settle(a); }
  // The factor of a pre-multiplied sum, in the accumulator type, is in the low bits of the word.
  static CINCH_HD Acc premultiply(Acc a, uint64_t factor) {
    return Number<Acc>::prod(a, Number<Acc>::from_word(factor));
  }
  // The word of a factor that lies in memory as an element.
  static CINCH_HD uint64_t factor_at(uint64_t address) {
    return Number<Acc>::to_word(Self::widen(*reinterpret_cast<const Bits *>(address)));
  }
  // An average: what is left when all have been added.
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
  static CINCH_HD float widen(uint8_t bits) { return SmallF8E4M3::widen(bits); }
  static CINCH_HD uint8_t narrow(float number) { return (uint8_t)SmallF8E4M3::narrow(number); }
};

struct F8E5M2 : ElementBase<F8E5M2, uint8_t, uint8_t, float> {
  static CINCH_HD float widen(uint8_t bits) { return SmallF8E5M2::widen(bits); }
  static CINCH_HD uint8_t narrow(float number) { return (uint8_t)SmallF8E5M2::narrow(number); }
};

#if defined(__CUDA_ARCH__)
// The ends of the pairs in P vectors, a pair each.
template <int P, class Smaller, class Larger>
__device__ __forceinline__ void ends_of_pairs(const uint4 (&vectors)[P], Smaller &&smaller,
                                              Larger &&larger, uint32_t &low, uint32_t &high) {
#pragma unroll
  for (int p = 0; p < P; ++p) {
    const uint4 v = vectors[p];
    const uint32_t part_low = smaller(smaller(smaller(v.x, v.y), v.z), v.w);
    const uint32_t part_high = larger(larger(larger(v.x, v.y), v.z), v.w);
    low = p == 0 ? part_low : smaller(low, part_low);
    high = p == 0 ? part_high : larger(high, part_high);
  }
}
#endif

// The 16-bit floats take the device's conversions of pairs where no element is NaN.
struct BF16 : ElementBase<BF16, uint16_t, uint16_t, float> {
  using Base = ElementBase<BF16, uint16_t, uint16_t, float>;

  static CINCH_HD float widen(uint16_t bits) { return widen_bf16(bits); }
  static CINCH_HD uint16_t narrow(float number) { return (uint16_t)narrow_bf16(number); }

  static CINCH_HD uint4 pack_numbers(const float (&in)[8]) {
#if defined(__CUDA_ARCH__)
    return make_uint4(narrow_bf16_pair(in[0], in[1]), narrow_bf16_pair(in[2], in[3]),
                      narrow_bf16_pair(in[4], in[5]), narrow_bf16_pair(in[6], in[7]));
#else
    return Base::pack(in);
#endif
  }

  template <int P>
  static CINCH_HD Ends ends_of(const uint4 (&vectors)[P]) {
#if defined(__CUDA_ARCH__)
    uint32_t low, high;
    ends_of_pairs(vectors, smaller_bf16_pair, larger_bf16_pair, low, high);
    return join({float_of(low << 16), float_of(high << 16)},
                {float_of(low & 0xffff0000u), float_of(high & 0xffff0000u)});
#else
    return Base::template ends_of<P>(vectors);
#endif
  }

  static CINCH_HD uint4 pack(const float (&in)[8]) {
#if defined(__CUDA_ARCH__)
    const uint4 v = pack_numbers(in);
    const uint32_t largest =
        larger_bf16_pair(larger_bf16_pair(v.x, v.y), larger_bf16_pair(v.z, v.w));
    if (!has_nan_bf16(largest)) return v;
#endif
    return Base::pack(in);
  }
};

struct F16 : ElementBase<F16, uint16_t, uint16_t, float> {
  using Base = ElementBase<F16, uint16_t, uint16_t, float>;

  static CINCH_HD float widen(uint16_t bits) { return SmallF16::widen(bits); }
  static CINCH_HD uint16_t narrow(float number) { return (uint16_t)SmallF16::narrow(number); }

  static CINCH_HD void unpack(uint4 v, float (&out)[8]) {
#if defined(__CUDA_ARCH__)
    const uint32_t largest =
        larger_f16_pair(larger_f16_pair(v.x, v.y), larger_f16_pair(v.z, v.w));
    if (!has_nan_f16(largest)) return unpack_loosely(v, out);
#endif
    Base::unpack(v, out);
  }

  static CINCH_HD void unpack_loosely(uint4 v, float (&out)[8]) {
#if defined(__CUDA_ARCH__)
    out[0] = widen_f16_low(v.x), out[1] = widen_f16_high(v.x);
    out[2] = widen_f16_low(v.y), out[3] = widen_f16_high(v.y);
    out[4] = widen_f16_low(v.z), out[5] = widen_f16_high(v.z);
    out[6] = widen_f16_low(v.w), out[7] = widen_f16_high(v.w);
#else
    Base::unpack(v, out);
#endif
  }

  static CINCH_HD uint4 pack_numbers(const float (&in)[8]) {
#if defined(__CUDA_ARCH__)
    return make_uint4(narrow_f16_pair(in[0], in[1]), narrow_f16_pair(in[2], in[3]),
                      narrow_f16_pair(in[4], in[5]), narrow_f16_pair(in[6], in[7]));
#else
    return Base::pack(in);
#endif
  }

  template <int P>
  static CINCH_HD Ends ends_of(const uint4 (&vectors)[P]) {
#if defined(__CUDA_ARCH__)
    uint32_t low, high;
    ends_of_pairs(vectors, smaller_f16_pair, larger_f16_pair, low, high);
    return join({widen_f16_low(low), widen_f16_low(high)},
                {widen_f16_high(low), widen_f16_high(high)});
#else
    return Base::template ends_of<P>(vectors);
#endif
  }

  static CINCH_HD uint4 pack(const float (&in)[8]) {
#if defined(__CUDA_ARCH__)
    const uint4 v = pack_numbers(in);
    const uint32_t largest =
        larger_f16_pair(larger_f16_pair(v.x, v.y), larger_f16_pair(v.z, v.w));
    if (!has_nan_f16(largest)) return v;
#endif
    return Base::pack(in);
  }
};

}  // namespace cinch
