// Enough of CUDA for a plain C++ compiler to run a kernel, a block at a time: each thread is a fiber,
// and what threads do together (shuffles, barriers) hands over to the next one until all are there.
// Arithmetic takes the paths for the host, which are those of the device bit for bit.
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
// Blocks run one after the other.
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

// Goes on with the fiber whose stack is at `*to`, and leaves in `*from` where this one stands. A switch of
// the C library would ask the kernel for the signal mask each time, which took longer than all else.
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

// A block of threads, or several that run side by side, all on the caller's thread.
class Block {
 public:
  static constexpr uint32_t STACK = 256 << 10;

  Block(uint32_t threads, std::function<void()> kernel, uint32_t copies = 1)
      : kernel_(std::move(kernel)),
        threads_(threads),
        fibers_(threads * copies),
        left_(threads * copies),
        all_(copies),
        warps_((threads * copies + 31) / 32) {
    current_ = this;
    blockDim.x = threads;
    for (uint32_t i = 0; i < threads * copies; ++i) {
      Fiber &fiber = fibers_[i];
      fiber.stack.reset(new char[STACK]);
      // As if `enter` had been called, and had come to a switch at once: six registers and where to go on,
      // below a return address that is never used.
      const uintptr_t end = (uintptr_t)(fiber.stack.get() + STACK) / 16 * 16;
      void **top = (void **)end - 8;
      memset(top, 0, 8 * sizeof(void *));
      top[6] = (void *)&Block::enter;
      fiber.at = top;
    }
  }

  // Runs all threads to their ends.
  void run() {
    while (left_ > 0) {
      for (at_ = 0; at_ < fibers_.size(); ++at_) {
        if (!fibers_[at_].goes_on()) continue;
        threadIdx.x = at_ % threads_;
        switch_fiber(&home_, &fibers_[at_].at);
      }
    }
  }

  static Block &current() { return *current_; }

  // A copy that takes so many turns more for a look at what others send, for its first few looks.
  static inline uint32_t slow_copy = UINT32_MAX, slow_turns = 0;

  // Which of the blocks that run side by side this one is.
  uint32_t copy() const { return at_ / threads_; }

  // Lets all other threads go on.
  void pause() {
    switch_fiber(&fibers_[at_].at, &home_);
  }

  // The same behind a look at what others send.
  void pause_after_a_look() {
    uint32_t &looks = fibers_[at_].slow_looks;
    if (copy() == slow_copy && looks > 0) {
      --looks;
      for (uint32_t i = 0; i < slow_turns; ++i) pause();
    }
    pause();
  }

  // Waits for all threads, or for those of the warp.
  void meet_all() { meet(all_[copy()], threads_); }
  void meet_warp() { meet(warps_[at_ / 32], 32); }
  // The last one to come does something with the fibers of all of them before any goes on.
  template <class Does>
  void meet_warp(Does &&does) {
    if (warps_[at_ / 32].arrived == 31) does(&fibers_[at_ / 32 * 32]);
    meet_warp();
  }

  // Copies 16 bytes for each thread of the warp, with nothing in between.
  void warp_loads(void *to, const void *from) { warp_copies(to, from, 0, 32); }

  // The same, but only 8 neighbours at a time have nothing in between, and the last ones come first.
  void warp_stores(void *to, const void *from) {
    for (uint32_t lane = 32; lane > 0; lane -= 8) {
      warp_copies(to, from, lane - 8, lane);
      pause();
    }
  }

  // Whether `value` is true of all threads of the warp.
  bool warp_agrees(bool value) {
    fibers_[at_].said[0] = value;
    meet_warp([](Fiber *warp) {
      char all = 1;
      for (int lane = 0; lane < 32; ++lane) all &= warp[lane].said[0];
      for (int lane = 0; lane < 32; ++lane) warp[lane].heard = all;
    });
    return fibers_[at_].heard;
  }

  // A copy that this thread makes now, or when it waits for its copies: there is no telling.
  void copy_sometime(void *to, const void *from, uint32_t bytes) {
    chance_ = chance_ * 6364136223846793005u + 1442695040888963407u;
    if (chance_ >> 63) {
      memcpy(to, from, bytes);
    } else {
      fibers_[at_].copies.push_back({to, from, bytes});
    }
  }
  void make_copies() {
    for (const Copy &copy : fibers_[at_].copies) memcpy(copy.to, copy.from, copy.bytes);
    fibers_[at_].copies.clear();
  }

  template <class T>
  T shuffle_xor(T value, uint32_t lanes) {
    memcpy(fibers_[at_].said, &value, sizeof(value));
    meet_warp();
    T other;
    memcpy(&other, fibers_[at_ ^ lanes].said, sizeof(other));
    // Nobody says the next value before all have heard this one.
    meet_warp();
    return other;
  }

 private:
  struct Meeting {
    uint32_t arrived = 0;
    uint64_t round = 0;
  };
  struct Copy {
    void *to;
    const void *from;
    uint32_t bytes;
  };
  struct Fiber {
    std::unique_ptr<char[]> stack;
    std::vector<Copy> copies;
    void *at;  // in its stack, where it goes on
    bool done = false;
    const Meeting *meeting = nullptr;  // that it is in, since this round
    uint64_t round = 0;
    bool goes_on() const { return !done && (meeting == nullptr || meeting->round != round); }
    uint32_t slow_looks = 8;
    char said[8];
    char heard;
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
    meet_warp([begin, end](Fiber *warp) {
      for (uint32_t lane = begin; lane < end; ++lane) memcpy(warp[lane].to, warp[lane].from, 16);
    });
  }

  void meet(Meeting &meeting, uint32_t threads) {
    Fiber &own = fibers_[at_];
    own.round = meeting.round;
    if (++meeting.arrived == threads) {
      meeting.arrived = 0;
      ++meeting.round;
      return;
    }
    own.meeting = &meeting;
    pause();
    own.meeting = nullptr;
  }

  static inline Block *current_;
  static inline uint64_t chance_ = 1;
  std::function<void()> kernel_;
  uint32_t threads_;
  std::vector<Fiber> fibers_;
  void *home_;
  uint32_t at_ = 0, left_;
  std::vector<Meeting> all_, warps_;
};

template <class T>
T __shfl_xor_sync(uint32_t, T value, uint32_t lanes) {
  return Block::current().shuffle_xor(value, lanes);
}
inline bool __all_sync(uint32_t, bool value) { return Block::current().warp_agrees(value); }
inline bool __any_sync(uint32_t, bool value) { return !Block::current().warp_agrees(!value); }
inline void __syncwarp() { Block::current().meet_warp(); }
inline void __syncthreads() { Block::current().meet_all(); }

// Runs a kernel, block after block; each so many times side by side.
template <class Kernel>
void launch(uint32_t blocks, uint32_t threads, Kernel &&kernel, uint32_t copies = 1) {
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) Block(threads, kernel, copies).run();
}
