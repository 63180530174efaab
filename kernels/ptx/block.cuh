// Named barriers of a thread block, and its shared memory of a fixed size.
#pragma once

#include <stdint.h>

namespace cinch {

// Returns the block's only value of type T, which lies in shared memory and is not initialised.
template <class T>
__device__ __forceinline__ T &block_shared() {
  __shared__ T value;
  return value;
}

// Counts this thread at a named barrier, without waiting there. The barrier opens when `threads`
// threads have arrived.
__device__ __forceinline__ void arrive_at(uint32_t barrier, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Counts this thread at a named barrier, and waits until `threads` threads have arrived.
__device__ __forceinline__ void sync_at(uint32_t barrier, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace cinch
