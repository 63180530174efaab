// The threads of a block: sixteen warps move data, two wait for peers, one publishes.
//
// Waiting and publishing have warps of their own because both are slow, a publication as slow as
// the slowest store before it, and the movers need neither: while they are at one batch of steps,
// the next one's messages are waited for and the last one's are published. Sixteen warps keep a
// multiprocessor busy; with eight, and two blocks to a multiprocessor, an all-reduce of 256 MiB over
// 4 H200 on 128 channels takes 3 % (linear8) to 16 % (dynamic8) longer.
#pragma once

#include "abi.h"

namespace cinch {

constexpr uint32_t WARP = 32;
// Code that also runs on GPUs with 99 KiB of shared memory has eight, for want of it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool SMALL_BLOCKS = true;
#else
constexpr bool SMALL_BLOCKS = false;
#endif
constexpr uint32_t MOVERS = SMALL_BLOCKS ? 256 : 512;  // threads that move data
constexpr uint32_t WAITERS = 2 * WARP;       // one for each end of a connection
constexpr uint32_t PUBLISHERS = WARP;        // one for each peer
constexpr uint32_t BLOCK_THREADS = MOVERS + WAITERS + PUBLISHERS;
constexpr uint32_t BLOCKS_PER_MULTIPROCESSOR = SMALL_BLOCKS ? 2 : 1;
constexpr uint32_t MOVER_WARPS = MOVERS / WARP;
constexpr uint32_t LOG2_MOVER_WARPS = SMALL_BLOCKS ? 3 : 4;

static_assert(BLOCK_THREADS == (SMALL_BLOCKS ? CINCH_SMALL_BLOCK_THREADS : CINCH_BLOCK_THREADS),
              "what the host launches");
static_assert(MOVER_WARPS == 1u << LOG2_MOVER_WARPS, "shares are shifts");

__device__ __forceinline__ uint32_t lane_id() { return threadIdx.x % WARP; }
__device__ __forceinline__ uint32_t mover_warp() { return threadIdx.x / WARP; }

enum class Role { move, wait, publish };

__device__ __forceinline__ Role role() {
  return threadIdx.x < MOVERS             ? Role::move
         : threadIdx.x < MOVERS + WAITERS ? Role::wait
                                          : Role::publish;
}

// Two batches are on their way at once, in turn in one half of the shared state and the other.
//
// READY: waiters -> movers, the batch's messages and slots are there.
// MOVED: movers -> publisher, its data is moved.
// FREE: movers and publisher -> waiters, its half may be used again. The publisher has a say because
//   movers must not arrive at MOVED for one batch while it has yet to meet them there for another.
constexpr uint32_t READY_BARRIER = 1, MOVED_BARRIER = 3, FREE_BARRIER = 5, WAITERS_BARRIER = 7,
                   MOVERS_BARRIER = 8;

__device__ __forceinline__ void arrive_at(uint32_t barrier, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void meet_at(uint32_t barrier, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void say_ready(uint32_t half) {
  arrive_at(READY_BARRIER + half, MOVERS + WAITERS);
}
__device__ __forceinline__ void await_ready(uint32_t half) {
  meet_at(READY_BARRIER + half, MOVERS + WAITERS);
}
__device__ __forceinline__ void say_free(uint32_t half) {
  arrive_at(FREE_BARRIER + half, BLOCK_THREADS);
}
__device__ __forceinline__ void say_moved(uint32_t half) {
  arrive_at(MOVED_BARRIER + half, MOVERS + PUBLISHERS);
  say_free(half);
}
__device__ __forceinline__ void await_moved(uint32_t half) {
  meet_at(MOVED_BARRIER + half, MOVERS + PUBLISHERS);
}
__device__ __forceinline__ void await_free(uint32_t half) {
  meet_at(FREE_BARRIER + half, BLOCK_THREADS);
}
__device__ __forceinline__ void meet_waiters() { meet_at(WAITERS_BARRIER, WAITERS); }
__device__ __forceinline__ void meet_movers() { meet_at(MOVERS_BARRIER, MOVERS); }

}  // namespace cinch
