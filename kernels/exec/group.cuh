// Groups: the threads that drive one channel.
//
// A block holds GROUPS of them, each with a barrier of its own, so that one moves data while
// another waits for its peers: what several blocks on one multiprocessor would do, but with a
// number of multiprocessors that is known.
#pragma once

#include <stdint.h>

namespace cinch {

constexpr uint32_t WARP = 32;

#ifndef CINCH_THREADS
#define CINCH_THREADS 512
#endif
#ifndef CINCH_GROUPS
#define CINCH_GROUPS 1
#endif

constexpr uint32_t THREADS = CINCH_THREADS;  // of a group
constexpr uint32_t WARPS = THREADS / WARP;
constexpr uint32_t GROUPS = CINCH_GROUPS;    // of a block
constexpr uint32_t BLOCK_THREADS = THREADS * GROUPS;

__device__ __forceinline__ uint32_t lane_id() { return threadIdx.x % WARP; }
__device__ __forceinline__ uint32_t thread() { return threadIdx.x % THREADS; }
__device__ __forceinline__ uint32_t group() { return threadIdx.x / THREADS; }

// Barrier of the group.
__device__ __forceinline__ void sync() {
  if (GROUPS == 1) {
    __syncthreads();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(group() + 1), "n"(THREADS) : "memory");
  }
}

}  // namespace cinch
