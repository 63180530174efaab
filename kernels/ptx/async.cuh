// Shared memory that a launch asks for, and copies from global memory to it that go on while the thread
// does something else.
#pragma once

#include <stdint.h>

namespace cinch {

// Aligned to 128 bytes.
__device__ __forceinline__ uint8_t *launched_shared() {
  extern __shared__ __align__(128) uint4 stages[];
  return (uint8_t *)stages;
}

__device__ __forceinline__ uint32_t shared_address(const void *at) {
  return (uint32_t)__cvta_generic_to_shared(at);
}

// 16 bytes of shared memory, by their address there.
__device__ __forceinline__ uint4 load_shared(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_shared(uint32_t at, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// 16 bytes, past L1. Both addresses are multiples of 16.
__device__ __forceinline__ void copy16(void *to, const void *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}

// 4 bytes, through L1.
__device__ __forceinline__ void copy4(void *to, const void *from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}

// Ends a group of copies of this thread.
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the last GROUPS groups of this thread are there.
template <int GROUPS>
__device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

}  // namespace cinch
