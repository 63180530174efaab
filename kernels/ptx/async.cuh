// Dynamic shared memory, and asynchronous copies to it from global memory (cp.async).
#pragma once

#include <stdint.h>

namespace cinch {

// Returns the block's dynamic shared memory, aligned to 128 bytes.
__device__ __forceinline__ uint8_t *launched_shared() {
  extern __shared__ __align__(128) uint4 stages[];
  return (uint8_t *)stages;
}

__device__ __forceinline__ uint32_t shared_address(const void *at) {
  return (uint32_t)__cvta_generic_to_shared(at);
}

// Load and store 16 bytes of shared memory at a shared-space address.
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

// Starts a copy of 16 bytes that bypasses L1. Both addresses are multiples of 16.
__device__ __forceinline__ void copy16(void *to, const void *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}

// Starts a copy of 4 bytes, which passes through L1.
__device__ __forceinline__ void copy4(void *to, const void *from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}

// Closes this thread's current group of copies.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the last GROUPS groups of this thread's copies are complete.
template <int GROUPS>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

}  // namespace cinch
