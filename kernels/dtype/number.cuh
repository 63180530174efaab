// Arithmetic of the accumulator types: what src/reduce/number.rs specifies, bit for bit.
//
// What arithmetic makes NaN is the canonical quiet NaN (0x7fc00000, 0x7ff8000000000000), which
// is not the one that the device makes. Integers wrap.
#pragma once

#include <type_traits>

#include "ptx/arithmetic.cuh"

namespace cinch {

// Numbers of cinch_combine and ReduceOp.
enum class Combine : uint32_t { sum = 0, prod = 1, max = 2, min = 3 };

CINCH_HD float canonical(float x) { return x == x ? x : float_of(0x7fc00000u); }
CINCH_HD double canonical(double x) { return x == x ? x : double_of((uint64_t)0x7ff8 << 48); }

template <class T>
struct Integer {
  using Wide = typename std::make_unsigned<T>::type;

  static CINCH_HD T sum(T a, T b) { return (T)((Wide)a + (Wide)b); }
  static CINCH_HD T prod(T a, T b) {
    // 64 bits, so that two factors of 16 bits are not promoted to a signed product.
    return (T)((uint64_t)(Wide)a * (uint64_t)(Wide)b);
  }
  static CINCH_HD T maximum(T a, T b) { return a > b ? a : b; }
  static CINCH_HD T minimum(T a, T b) { return a < b ? a : b; }
  static CINCH_HD T from_word(uint64_t word) { return (T)word; }
  static CINCH_HD uint64_t to_word(T number) { return (uint64_t)number; }
  // Towards zero. A number of ranks is positive and fits.
  static CINCH_HD T divide(T a, uint32_t n) {
    if (sizeof(T) == 8) return (T)(a / (T)n);
    return (T)(std::is_signed<T>::value ? (T)((int64_t)a / (int64_t)n)
                                        : (T)((uint32_t)a / n));
  }
};

template <class T>
struct Floating;

// IEEE 754-2019 maximum and minimum. Equal numbers have equal bits but for zeros, of which `and`
// finds a positive and `or` a negative one.
template <>
struct Floating<float> {
  static CINCH_HD float sum(float a, float b) { return canonical(add(a, b)); }
  static CINCH_HD float prod(float a, float b) { return canonical(mul(a, b)); }
  static CINCH_HD float maximum(float a, float b) {
#if defined(__CUDA_ARCH__)
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return canonical(larger);
#else
    const float larger = a > b ? a : b;
    return a != a || b != b ? canonical(NAN) : a == b ? float_of(bits_of(a) & bits_of(b)) : larger;
#endif
  }
  static CINCH_HD float minimum(float a, float b) {
#if defined(__CUDA_ARCH__)
    float smaller;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(b));
    return canonical(smaller);
#else
    const float smaller = a < b ? a : b;
    return a != a || b != b ? canonical(NAN) : a == b ? float_of(bits_of(a) | bits_of(b)) : smaller;
#endif
  }
  static CINCH_HD float from_word(uint64_t word) { return float_of((uint32_t)word); }
  static CINCH_HD uint64_t to_word(float number) { return bits_of(number); }
  static CINCH_HD float divide(float a, uint32_t n) {
    return canonical(cinch::divide(a, (float)n));
  }
};

template <>
struct Floating<double> {
  static CINCH_HD double sum(double a, double b) {
#if defined(__CUDA_ARCH__)
    return canonical(__dadd_rn(a, b));
#else
    return canonical(a + b);
#endif
  }
  static CINCH_HD double prod(double a, double b) {
#if defined(__CUDA_ARCH__)
    return canonical(__dmul_rn(a, b));
#else
    return canonical(a * b);
#endif
  }
  static CINCH_HD double maximum(double a, double b) {
    const double larger = a > b ? a : b;
    const double ordered = a == b ? double_of(bits_of(a) & bits_of(b)) : larger;
    return a != a || b != b ? canonical((double)NAN) : ordered;
  }
  static CINCH_HD double minimum(double a, double b) {
    const double smaller = a < b ? a : b;
    const double ordered = a == b ? double_of(bits_of(a) | bits_of(b)) : smaller;
    return a != a || b != b ? canonical((double)NAN) : ordered;
  }
  static CINCH_HD double from_word(uint64_t word) { return double_of(word); }
  static CINCH_HD uint64_t to_word(double number) { return bits_of(number); }
  static CINCH_HD double divide(double a, uint32_t n) {
#if defined(__CUDA_ARCH__)
    return canonical(__ddiv_rn(a, (double)n));
#else
    return canonical(a / (double)n);
#endif
  }
};

template <class T>
using Number = typename std::conditional<std::is_floating_point<T>::value, Floating<T>,
                                         Integer<T>>::type;

template <class T>
CINCH_HD T combine(T a, T b, Combine op) {
  switch (op) {
    case Combine::sum: return Number<T>::sum(a, b);
    case Combine::prod: return Number<T>::prod(a, b);
    case Combine::max: return Number<T>::maximum(a, b);
    default: return Number<T>::minimum(a, b);
  }
}

}  // namespace cinch
