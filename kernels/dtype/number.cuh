// Arithmetic of the accumulator types; src/reduce/number.rs is the specification, bit for bit.
//
// Floating-point results that are NaN are the canonical quiet NaN (0x7fc00000, 0x7ff8000000000000).
// The device's instructions make other NaNs. Since NaN stays NaN through every operation here, code
// may combine many terms by the `AnyNan` operations and canonicalize the result once. Integers
// wrap.
#pragma once

#include <type_traits>

#include "ptx/arithmetic.cuh"

namespace cinch {

// The values are those of cinch_combine and of ReduceOp in Rust.
enum class Combine : uint32_t { sum = 0, prod = 1, max = 2, min = 3 };

CINCH_HD float canonical(float x) { return x == x ? x : float_of(0x7fc00000u); }
CINCH_HD double canonical(double x) { return x == x ? x : double_of((uint64_t)0x7ff8 << 48); }

template <class T>
struct Integer {
  using Wide = typename std::make_unsigned<T>::type;
  using AnyNan = Integer;

  static CINCH_HD T canonicalize(T a) { return a; }
  static CINCH_HD T sum(T a, T b) { return (T)((Wide)a + (Wide)b); }
  static CINCH_HD T prod(T a, T b) {
    // Multiplies in 64 bits: C++ promotes 16-bit factors to int, whose product may overflow.
    return (T)((uint64_t)(Wide)a * (uint64_t)(Wide)b);
  }
  static CINCH_HD T maximum(T a, T b) { return a > b ? a : b; }
  static CINCH_HD T minimum(T a, T b) { return a < b ? a : b; }
  static CINCH_HD T from_word(uint64_t word) { return (T)word; }
  static CINCH_HD uint64_t to_word(T number) { return (uint64_t)number; }
  // Rounds towards zero. `n` is a number of ranks, so it is positive and fits T.
  static CINCH_HD T divide(T a, uint32_t n) {
    if (sizeof(T) == 8) return (T)(a / (T)n);
    return (T)(std::is_signed<T>::value ? (T)((int64_t)a / (int64_t)n)
                                        : (T)((uint32_t)a / n));
  }
};

template <class T>
struct AnyNanFloating;

// IEEE 754-2019 maximum and minimum. Equal numbers have equal bits, except the two zeros: `&` of
// their bits gives +0, `|` gives -0.
template <>
struct AnyNanFloating<float> {
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
struct AnyNanFloating<double> {
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
  using AnyNan = AnyNanFloating<T>;
  using Word = typename std::conditional<sizeof(T) == 4, uint32_t, uint64_t>::type;

  static CINCH_HD T canonicalize(T a) { return canonical(a); }
  static CINCH_HD T sum(T a, T b) { return canonicalize(AnyNan::sum(a, b)); }
  static CINCH_HD T prod(T a, T b) { return canonicalize(AnyNan::prod(a, b)); }
  static CINCH_HD T maximum(T a, T b) { return canonicalize(AnyNan::maximum(a, b)); }
  static CINCH_HD T minimum(T a, T b) { return canonicalize(AnyNan::minimum(a, b)); }
  static CINCH_HD T divide(T a, uint32_t n) { return canonicalize(AnyNan::divide(a, n)); }
  static CINCH_HD T from_word(uint64_t word) { return number_of((Word)word); }
  static CINCH_HD uint64_t to_word(T number) { return bits_of(number); }

 private:
  static CINCH_HD float number_of(uint32_t bits) { return float_of(bits); }
  static CINCH_HD double number_of(uint64_t bits) { return double_of(bits); }
};

template <class T>
using Number = typename std::conditional<std::is_floating_point<T>::value, Floating<T>,
                                         Integer<T>>::type;

// Combines two numbers; a NaN in the result has any bits.
template <class T>
CINCH_HD T combine_any_nan(T a, T b, Combine op) {
  using AnyNan = typename Number<T>::AnyNan;
  switch (op) {
    case Combine::sum: return AnyNan::sum(a, b);
    case Combine::prod: return AnyNan::prod(a, b);
    case Combine::max: return AnyNan::maximum(a, b);
    default: return AnyNan::minimum(a, b);
  }
}

template <class T>
CINCH_HD T combine(T a, T b, Combine op) {
  return Number<T>::canonicalize(combine_any_nan(a, b, op));
}

}  // namespace cinch
