// Macros and bit casts that let one header compile by nvcc, for device and host, and by a plain
// C++17 compiler.
//
// Arithmetic whose bits must agree everywhere goes through the functions of `ptx/`: each is one
// instruction on the device and its exact equivalent on the host. Nothing else may contract: device
// code is compiled with -fmad=false, host code with -ffp-contract=off.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define CINCH_HD __host__ __device__ __forceinline__
#define CINCH_HD_APART __host__ __device__ __noinline__
#define CINCH_UNROLL _Pragma("unroll")
#define CINCH_ROLL _Pragma("unroll 1")
#else
#define CINCH_HD inline __attribute__((always_inline))
#define CINCH_HD_APART inline
#define CINCH_UNROLL
#define CINCH_ROLL
#endif
// CINCH_HD_APART marks a function that is never inlined, so that its callers need no registers for
// it.

// Lets the compiler assume that a condition is true, so that it omits code for the opposite case.
#if defined(__CUDA_ARCH__)
#define CINCH_ASSUME(condition) __builtin_assume(condition)
#else
#define CINCH_ASSUME(condition) ((void)0)
#endif

// 1 where code runs in a thread block: on the device, and in tests that emulate blocks on the host.
#if defined(__CUDA_ARCH__) || (defined(__CUDACC__) && !defined(__NVCC__))
#define CINCH_IN_BLOCK 1
#else
#define CINCH_IN_BLOCK 0
#endif

namespace cinch {

#if !defined(__CUDACC__)
// The vector types of CUDA that hold codes and raw elements.
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
CINCH_HD uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
CINCH_HD uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
#endif

CINCH_HD uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
#endif
}

CINCH_HD float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  memcpy(&x, &bits, 4);
  return x;
#endif
}

CINCH_HD uint64_t bits_of(double x) {
#if defined(__CUDA_ARCH__)
  return (uint64_t)__double_as_longlong(x);
#else
  uint64_t bits;
  memcpy(&bits, &x, 8);
  return bits;
#endif
}

CINCH_HD double double_of(uint64_t bits) {
#if defined(__CUDA_ARCH__)
  return __longlong_as_double((long long)bits);
#else
  double x;
  memcpy(&x, &bits, 8);
  return x;
#endif
}

}  // namespace cinch
