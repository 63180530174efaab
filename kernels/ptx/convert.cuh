// Conversions between fp32 and pairs of 16-bit or 8-bit floats, for numbers that are not NaN.
#pragma once

#include "ptx/arithmetic.cuh"

namespace cinch {

#if defined(__CUDA_ARCH__)

// Round two numbers to bf16 or f16, to nearest even; `low` goes to the low half of the result. NaN
// becomes 0x7fff.
__device__ __forceinline__ uint32_t narrow_bf16_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ uint32_t narrow_f16_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Return a pair with the smaller or the larger of each half of a and b; NaN in a half where either
// is NaN.
__device__ __forceinline__ uint32_t smaller_f16_pair(uint32_t a, uint32_t b) {
  uint32_t smaller;
  asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(smaller) : "r"(a), "r"(b));
  return smaller;
}

__device__ __forceinline__ uint32_t smaller_bf16_pair(uint32_t a, uint32_t b) {
  uint32_t smaller;
  asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(smaller) : "r"(a), "r"(b));
  return smaller;
}

__device__ __forceinline__ uint32_t larger_f16_pair(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

__device__ __forceinline__ uint32_t larger_bf16_pair(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

// Return the pair without signs.
__device__ __forceinline__ uint32_t magnitudes_of_f16_pair(uint32_t pair) {
  uint32_t magnitudes;
  asm("abs.f16x2 %0, %1;" : "=r"(magnitudes) : "r"(pair));
  return magnitudes;
}

__device__ __forceinline__ uint32_t magnitudes_of_bf16_pair(uint32_t pair) {
  uint32_t magnitudes;
  asm("abs.bf16x2 %0, %1;" : "=r"(magnitudes) : "r"(pair));
  return magnitudes;
}

// Return the pair with 0 in place of -0.
__device__ __forceinline__ uint32_t add_zero_to_f16_pair(uint32_t pair) {
  uint32_t sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(pair), "r"(0));
  return sum;
}

__device__ __forceinline__ uint32_t add_zero_to_bf16_pair(uint32_t pair) {
  uint32_t sum;
  // A sum alone needs sm_90.
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(pair), "r"(0x3f803f80), "r"(0));
  return sum;
}

// Returns whether either half is NaN.
__device__ __forceinline__ bool has_nan_f16(uint32_t pair) {
  return (pair & 0x7fff) > 0x7c00 || (pair & 0x7fff0000u) > 0x7c000000u;
}

__device__ __forceinline__ bool has_nan_bf16(uint32_t pair) {
  return (pair & 0x7fff) > 0x7f80 || (pair & 0x7fff0000u) > 0x7f800000u;
}

// Return the f16 in the low or the high half as fp32, exactly. A NaN may become another NaN.
__device__ __forceinline__ float widen_f16_low(uint32_t pair) {
  float x;
  asm("{\n .reg .f16 low, high;\n mov.b32 {low, high}, %1;\n cvt.f32.f16 %0, low;\n}"
      : "=f"(x)
      : "r"(pair));
  return x;
}

__device__ __forceinline__ float widen_f16_high(uint32_t pair) {
  float x;
  asm("{\n .reg .f16 low, high;\n mov.b32 {low, high}, %1;\n cvt.f32.f16 %0, high;\n}"
      : "=f"(x)
      : "r"(pair));
  return x;
}

#if __CUDA_ARCH__ >= 890

// Round two magnitudes to 8-bit floats, to nearest even, saturating at the largest finite number.
// `low` goes to the low byte of the result.
__device__ __forceinline__ uint32_t narrow_f8e4m3_pair(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ uint32_t narrow_f8e5m2_pair(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

#endif
#endif

}  // namespace cinch
