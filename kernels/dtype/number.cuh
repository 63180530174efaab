// Arithmetic of the accumulator types: what src/reduce/number.rs specifies, bit for bit.
//
// What arithmetic makes NaN is the canonical quiet NaN (0x7fc00000, 0x7ff8000000000000), which
// is not the one that the device makes: that of Loose. NaN stays NaN in all of it, so that what is
// combined from many terms need be settled but once. Integers wrap.
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
  using Loose = Integer;

  static CINCH_HD T settle(T a) { return a; }
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
struct LooseFloating;

// IEEE 754-2019 maximum and minimum. Equal numbers have equal bits but for zeros, of which `and`
// finds a positive and `or` a negative one.
template <>
struct LooseFloating<float> {
  static CINCH_HD float sum(float a, float b) { return add(a, b); }
  static CINCH_HD float prod(float a, float b) { return mul(a, b); }
  static CINCH_HD float maximum(float a, float b) {
#if defined(__CUDA_ARCH__)
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
#else
    const float larger = a > b ? a : b;
    return a != a || b != b ? NAN : a == b ? float_of(bits_of(a) & bits_of(b)) : larger;
#endif
  }
  static CINCH_HD float minimum(float a, float b) {
#if defined(__CUDA_ARCH__)
    float smaller;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(b));
    return smaller;
#else
    const float smaller = a < b ? a : b;
    return a != a || b != b ? NAN : a == b ? float_of(bits_of(a) | bits_of(b)) : smaller;
#endif
  }
  static CINCH_HD float divide(float a, uint32_t n) { return cinch::divide(a, (float)n); }
};

template <>
struct LooseFloating<double> {
  static CINCH_HD double sum(double a, double b) {
#if defined(__CUDA_ARCH__)
    return __dadd_rn(a, b);
#else
    return a + b;
#endif
  }
  static CINCH_HD double prod(double a, double b) {
#if defined(__CUDA_ARCH__)
    return __dmul_rn(a, b);
#else
    return a * b;
#endif
  }
  static CINCH_HD double maximum(double a, double b) {
    const double larger = a > b ? a : b;
    const double ordered = a == b ? double_of(bits_of(a) & bits_of(b)) : larger;
    return a != a || b != b ? (double)NAN : ordered;
  }
  static CINCH_HD double minimum(double a, double b) {
    const double smaller = a < b ? a : b;
    const double ordered = a == b ? double_of(bits_of(a) | bits_of(b)) : smaller;
    return a != a || b != b ? (double)NAN : ordered;
  }
  static CINCH_HD double divide(double a, uint32_t n) {
#if defined(__CUDA_ARCH__)
    return __ddiv_rn(a, (double)n);
#else
    return a / (double)n;
#endif
  }
};

template <class T>
struct Floating {
  using Loose = LooseFloating<T>;
  using Word = typename std::conditional<sizeof(T) == 4, uint32_t, uint64_t>::type;

  static CINCH_HD T settle(T a) { return canonical(a); }
  static CINCH_HD T sum(T a, T b) { return settle(Loose::sum(a, b)); }
  static CINCH_HD T prod(T a, T b) { return settle(Loose::prod(a, b)); }
  static CINCH_HD T maximum(T a, T b) { return settle(Loose::maximum(a, b)); }
  static CINCH_HD T minimum(T a, T b) { return settle(Loose::minimum(a, b)); }
  static CINCH_HD T divide(T a, uint32_t n) { return settle(Loose::divide(a, n)); }
  static CINCH_HD T from_word(uint64_t word) { return number_of((Word)word); }
  static CINCH_HD uint64_t to_word(T number) { return bits_of(number); }

 private:
  static CINCH_HD float number_of(uint32_t bits) { return float_of(bits); }
  static CINCH_HD double number_of(uint64_t bits) { return double_of(bits); }
};

template <class T>
using Number = typename std::conditional<std::is_floating_point<T>::value, Floating<T>,
                                         Integer<T>>::type;

// As combine, before it is settled.
template <class T>
CINCH_HD T combine_loosely(T a, T b, Combine op) {
  using Loose = typename Number<T>::Loose;
  switch (op) {
    case Combine::sum: return Loose::sum(a, b);
    case Combine::prod: return Loose::prod(a, b);
    case Combine::max: return Loose::maximum(a, b);
    default: return Loose::minimum(a, b);
  }
}

template <class T>
CINCH_HD T combine(T a, T b, Combine op) {
  return Number<T>::settle(combine_loosely(a, b, op));
}

}  // namespace cinch
