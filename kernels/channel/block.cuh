// The thread roles of a block of the schedule interpreter, and the named barriers between them.
//
// A block drives one channel with three roles:
//
//   warps 0 to 15   movers      load, reduce, encode and store the payload
//   warps 16, 17    waiters     thread p polls the connection from (to) rank p
//   warp 18         publishers  thread p publishes to rank p and returns credit to it
//
// Polling and publishing have warps of their own because both are slow: a release store waits for
// every earlier store of the block. While the movers work on one batch of steps, the waiters poll
// for the next batch and the publishers publish the last one. Fewer than sixteen mover warps leave
// a multiprocessor idle; benches/FIGURES.md, "Choices in the kernels", has the cost.
#pragma once

#include "abi.h"
#include "ptx/block.cuh"

namespace cinch {

constexpr uint32_t WARP = 32;
// Below sm_90 the code also runs on GPUs with 99 KiB of shared memory for a block. They have room
// for the stages of only eight mover warps.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool SMALL_BLOCKS = true;
#else
constexpr bool SMALL_BLOCKS = false;
#endif
constexpr uint32_t MOVERS = SMALL_BLOCKS ? 256 : 512;  // threads
constexpr uint32_t WAITERS = 2 * WARP;                 // a receiving and a sending end for each peer
constexpr uint32_t PUBLISHERS = WARP;                  // one thread for each peer
constexpr uint32_t BLOCK_THREADS = MOVERS + WAITERS + PUBLISHERS;
constexpr uint32_t BLOCKS_PER_MULTIPROCESSOR = SMALL_BLOCKS ? 2 : 1;
constexpr uint32_t MOVER_WARPS = MOVERS / WARP;
constexpr uint32_t LOG2_MOVER_WARPS = SMALL_BLOCKS ? 3 : 4;

static_assert(BLOCK_THREADS == (SMALL_BLOCKS ? CINCH_SMALL_BLOCK_THREADS : CINCH_BLOCK_THREADS),
              "the host launches CINCH_BLOCK_THREADS");
static_assert(MOVER_WARPS == 1u << LOG2_MOVER_WARPS, "warps divide tiles by a shift");

__device__ __forceinline__ uint32_t lane_id() { return threadIdx.x % WARP; }
__device__ __forceinline__ uint32_t mover_warp() { return threadIdx.x / WARP; }

enum class Role { move, wait, publish };

__device__ __forceinline__ Role role() {
  return threadIdx.x < MOVERS             ? Role::move
         : threadIdx.x < MOVERS + WAITERS ? Role::wait
                                          : Role::publish;
}

// Named barriers of the block. The shared state has two halves, and batches alternate between them.
//
//   READY  waiters -> movers             the messages and slots of the batch are there
//   MOVED  movers -> publishers          the payload of the batch is moved
//   FREE   movers, publishers -> waiters the half may hold another batch
//
// Publishers arrive at FREE too: otherwise movers could arrive at a half's MOVED twice before the
// publishers sync there once.
constexpr uint32_t READY_BARRIER = 1, MOVED_BARRIER = 3, FREE_BARRIER = 5, WAITERS_BARRIER = 7,
                   MOVERS_BARRIER = 8;

__device__ __forceinline__ void arrive_ready(uint32_t half) {
  arrive_at(READY_BARRIER + half, MOVERS + WAITERS);
}
__device__ __forceinline__ void wait_ready(uint32_t half) {
  sync_at(READY_BARRIER + half, MOVERS + WAITERS);
}
__device__ __forceinline__ void arrive_free(uint32_t half) {
  arrive_at(FREE_BARRIER + half, BLOCK_THREADS);
}
__device__ __forceinline__ void arrive_moved(uint32_t half) {
  arrive_at(MOVED_BARRIER + half, MOVERS + PUBLISHERS);
  arrive_free(half);
}
__device__ __forceinline__ void wait_moved(uint32_t half) {
  sync_at(MOVED_BARRIER + half, MOVERS + PUBLISHERS);
}
__device__ __forceinline__ void wait_free(uint32_t half) {
  sync_at(FREE_BARRIER + half, BLOCK_THREADS);
}
__device__ __forceinline__ void sync_waiters() { sync_at(WAITERS_BARRIER, WAITERS); }
__device__ __forceinline__ void sync_movers() { sync_at(MOVERS_BARRIER, MOVERS); }

}  // namespace cinch
