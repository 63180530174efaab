// CUDA's built-in functions that kernels call, for sources which block.h emulates on one thread.
#pragma once

#include <stdint.h>

#include <algorithm>

using std::max;
using std::min;

inline int __ffs(uint32_t x) { return __builtin_ffs((int)x); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
template <class T, class More>
T atomicAdd(T *at, More more) {
  const T was = *at;
  *at = was + (T)more;
  return was;
}
template <class T>
T atomicMax(T *at, T other) {
  const T was = *at;
  *at = max(was, other);
  return was;
}
inline uint32_t atomicOr(uint32_t *at, uint32_t bits) {
  const uint32_t was = *at;
  *at |= bits;
  return was;
}
inline uint32_t atomicCAS_system(uint32_t *at, uint32_t from, uint32_t to) {
  const uint32_t was = *at;
  if (was == from) *at = to;
  return was;
}
