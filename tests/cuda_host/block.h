// Emulates CUDA for a plain C++ compiler: it runs a kernel one thread block after another, or all
// blocks side by side. Each CUDA thread is a fiber; shuffles and barriers switch to the next fiber
// until all have arrived.
// Arithmetic takes the host paths of the headers, which equal the device's bit for bit.
#pragma once

#include <stdint.h>
#include <string.h>

#include <functional>
#include <memory>
#include <vector>

#define __CUDACC__ 1
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)
// Shared memory may be static, since thread blocks run one after the other.
#define __shared__ static

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct Dim3 {
  uint32_t x;
};
inline Dim3 threadIdx, blockIdx, blockDim, gridDim;

inline uint32_t __popc(uint32_t x) { return (uint32_t)__builtin_popcount(x); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }

// Switches to the fiber whose stack pointer is `*to`, and saves this fiber's in `*from`. The C
// library's swapcontext is too slow: it makes a system call for the signal mask at every switch.
extern "C" __attribute__((visibility("hidden"))) void switch_fiber(void **from, void *const *to);
asm(R"(
  .text
  .hidden switch_fiber
  .globl switch_fiber
  .type switch_fiber, @function
switch_fiber:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq (%rsi), %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size switch_fiber, . - switch_fiber
)");

// A thread block, or several copies of it that run side by side (one for each rank), all on the
// caller's thread. `blocks` groups of `copies` copies run side by side too; the group's number is
// then the index of the block.
class Block {
 public:
  static constexpr uint32_t STACK = 256 << 10;

  Block(uint32_t threads, std::function<void()> kernel, uint32_t copies = 1, uint32_t blocks = 0)
      : kernel_(std::move(kernel)),
        threads_(threads),
        group_(blocks == 0 ? 0 : copies),
        fibers_(threads * copies * max_of(blocks, 1)),
        left_((uint32_t)fibers_.size()),
        all_(fibers_.size() / threads),
        named_(fibers_.size() / threads * NAMED),
        warps_((fibers_.size() + 31) / 32) {
    current_ = this;
    blockDim.x = threads;
    for (uint32_t i = 0; i < fibers_.size(); ++i) {
      Fiber &fiber = fibers_[i];
      if (i == stacks_.size()) stacks_.emplace_back(new char[STACK]);
      // Prepares the stack as if `enter` had just switched away: six registers and the address to
      // resume at, below a return address that is never used.
      const uintptr_t end = (uintptr_t)(stacks_[i].get() + STACK) / 16 * 16;
      void **top = (void **)end - 8;
      memset(top, 0, 8 * sizeof(void *));
      top[6] = (void *)&Block::enter;
      fiber.at = top;
    }
  }

  // Runs all threads of the block until they return.
  void run() {
    while (left_ > 0) {
      for (at_ = 0; at_ < fibers_.size(); ++at_) {
        if (!fibers_[at_].is_ready()) continue;
        threadIdx.x = at_ % threads_;
        if (group_ > 0) blockIdx.x = copy() / group_;
        switch_fiber(&scheduler_, &fibers_[at_].at);
      }
    }
  }

  static Block &current() { return *current_; }

  // The copy of the thread block with index `slow_copy` is slow: each of its polls takes
  // `slow_turns` more turns of the scheduler.
  static inline uint32_t slow_copy = UINT32_MAX, slow_turns = 0;

  // Returns the index of the copy to which the current thread belongs, over all groups.
  uint32_t copy() const { return at_ / threads_; }

  // Switches to the other threads once.
  void pause() {
    switch_fiber(&fibers_[at_].at, &scheduler_);
  }

  // Switches to the other threads after a poll of a peer's message, several times if this is the
  // slow copy.
  void pause_after_poll() {
    uint32_t &polls = fibers_[at_].slow_polls;
    if (copy() == slow_copy && polls > 0) {
      --polls;
      for (uint32_t i = 0; i < slow_turns; ++i) pause();
    }
    pause();
  }

  // Count the thread at a named barrier, which opens when `threads` threads have arrived.
  // sync_named waits until it opens.
  void arrive_named(uint32_t barrier, uint32_t threads) { arrive(named(barrier), threads); }
  void sync_named(uint32_t barrier, uint32_t threads) { sync(named(barrier), threads); }

  // Wait for all threads of the block, or for all threads of the warp.
  void sync_all() { sync(all_[copy()], threads_); }
  void sync_warp() { sync(warps_[at_ / 32], 32); }
  // Waits for all threads of the warp. The last thread to arrive calls `does` with the fibers of
  // the warp.
  template <class Does>
  void sync_warp(Does &&does) {
    if (warps_[at_ / 32].arrived == 31) does(&fibers_[at_ / 32 * 32]);
    sync_warp();
  }

  // Loads 16 bytes for each thread of the warp; all loads happen at one time.
  void warp_loads(void *to, const void *from) { warp_copies(to, from, 0, 32); }

  // Stores 16 bytes for each thread of the warp, by lines of 8 threads, the last line first. Each
  // line is stored at one time.
  void warp_stores(void *to, const void *from) {
    for (uint32_t lane = 32; lane > 0; lane -= 8) {
      warp_copies(to, from, lane - 8, lane);
      pause();
    }
  }

  // Returns whether `value` is true in all threads of the warp.
  bool warp_agrees(bool value) {
    fibers_[at_].sent[0] = value;
    sync_warp([](Fiber *warp) {
      char all = 1;
      for (int lane = 0; lane < 32; ++lane) all &= warp[lane].sent[0];
      for (int lane = 0; lane < 32; ++lane) warp[lane].received = all;
    });
    return fibers_[at_].received;
  }

  // Makes an asynchronous copy either now or when this thread waits for it; the choice is random.
  void copy_sometime(void *to, const void *from, uint32_t bytes) {
    chance_ = chance_ * 6364136223846793005u + 1442695040888963407u;
    if (chance_ >> 63) {
      memcpy(to, from, bytes);
    } else {
      fibers_[at_].copies.push_back({to, from, bytes, fibers_[at_].groups});
    }
  }
  // Closes this thread's current group of asynchronous copies.
  void commit_copies() { ++fibers_[at_].groups; }
  // Makes the copies of all closed groups but the last `groups` ones.
  void make_copies(uint32_t groups) {
    Fiber &own = fibers_[at_];
    const auto is_due = [&](const Copy &copy) { return copy.group + groups < own.groups; };
    size_t kept = 0;
    for (const Copy &copy : own.copies) {
      if (is_due(copy)) {
        memcpy(copy.to, copy.from, copy.bytes);
      } else {
        own.copies[kept++] = copy;
      }
    }
    own.copies.resize(kept);
  }

  template <class T>
  T shuffle_xor(T value, uint32_t lanes) {
    memcpy(fibers_[at_].sent, &value, sizeof(value));
    sync_warp();
    T other;
    memcpy(&other, fibers_[at_ ^ lanes].sent, sizeof(other));
    // No thread overwrites its value before all threads of the warp have read it.
    sync_warp();
    return other;
  }

 private:
  struct Barrier {
    uint32_t arrived = 0;
    uint64_t round = 0;
  };
  struct Copy {
    void *to;
    const void *from;
    uint32_t bytes;
    uint32_t group;
  };
  struct Fiber {
    std::vector<Copy> copies;
    uint32_t groups = 0;  // of copies that the thread has closed
    void *at;             // stack pointer to resume at
    bool done = false;
    const Barrier *barrier = nullptr;  // that the fiber waits at
    uint64_t round = 0;                // of that barrier, when it arrived
    bool is_ready() const { return !done && (barrier == nullptr || barrier->round != round); }
    uint32_t slow_polls = 8;
    char sent[8];
    char received;
    void *to;
    const void *from;
  };
  static void enter() {
    Block &block = current();
    block.kernel_();
    block.fibers_[block.at_].done = true;
    --block.left_;
    block.pause();
  }

  void warp_copies(void *to, const void *from, uint32_t begin, uint32_t end) {
    fibers_[at_].to = to;
    fibers_[at_].from = from;
    sync_warp([begin, end](Fiber *warp) {
      for (uint32_t lane = begin; lane < end; ++lane) memcpy(warp[lane].to, warp[lane].from, 16);
    });
  }

  Barrier &named(uint32_t barrier) { return named_[copy() * NAMED + barrier]; }

  // Returns whether the barrier has opened.
  static bool arrive(Barrier &barrier, uint32_t threads) {
    if (++barrier.arrived < threads) return false;
    barrier.arrived = 0;
    ++barrier.round;
    return true;
  }

  void sync(Barrier &barrier, uint32_t threads) {
    Fiber &own = fibers_[at_];
    own.round = barrier.round;
    if (arrive(barrier, threads)) return;
    own.barrier = &barrier;
    pause();
    own.barrier = nullptr;
  }

  static inline Block *current_;
  // Stacks of fibers, which later blocks reuse: new memory costs more than a small kernel.
  static inline std::vector<std::unique_ptr<char[]>> stacks_;
  static inline uint64_t chance_ = 1;
  static constexpr uint32_t NAMED = 16;  // named barriers of a thread block
  static uint32_t max_of(uint32_t a, uint32_t b) { return a > b ? a : b; }
  std::function<void()> kernel_;
  uint32_t threads_;
  uint32_t group_;  // copies of a group; 0 if all copies have one block index
  std::vector<Fiber> fibers_;
  void *scheduler_;
  uint32_t at_ = 0, left_;
  std::vector<Barrier> all_, named_, warps_;
};

template <class T>
T __shfl_xor_sync(uint32_t, T value, uint32_t lanes) {
  return Block::current().shuffle_xor(value, lanes);
}
template <class T>
T __shfl_sync(uint32_t, T value, uint32_t lane) {
  return Block::current().shuffle_xor(value, threadIdx.x % 32 ^ lane);
}
inline uint32_t __ballot_sync(uint32_t, bool value) {
  uint32_t votes = (uint32_t)value << threadIdx.x % 32;
  for (uint32_t lanes = 1; lanes < 32; lanes *= 2) votes |= Block::current().shuffle_xor(votes, lanes);
  return votes;
}
inline bool __all_sync(uint32_t, bool value) { return Block::current().warp_agrees(value); }
inline bool __any_sync(uint32_t, bool value) { return !Block::current().warp_agrees(!value); }
inline void __syncwarp() { Block::current().sync_warp(); }
inline void __syncthreads() { Block::current().sync_all(); }

// Runs the thread blocks of a kernel one after another, each as `copies` copies side by side.
template <class Kernel>
void launch(uint32_t blocks, uint32_t threads, Kernel &&kernel, uint32_t copies = 1) {
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) Block(threads, kernel, copies).run();
}

// Runs all thread blocks of a kernel side by side, each as `copies` copies.
template <class Kernel>
void launch_together(uint32_t blocks, uint32_t threads, Kernel &&kernel, uint32_t copies) {
  gridDim.x = blocks;
  Block(threads, kernel, copies, blocks).run();
}
