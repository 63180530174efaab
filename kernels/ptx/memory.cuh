// Loads and stores with a memory order, and the clock: all inline assembly that touches global
// memory. The scope is the system, because the other side may be another GPU or the host.
#pragma once

#include <stdint.h>

namespace cinch {

// Relaxed loads and stores, for polls, credits and in-band flags. L1 never caches them.
__device__ __forceinline__ uint64_t load_relaxed(const uint64_t *at) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_relaxed(const uint32_t *at) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ void store_relaxed(uint64_t *at, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

// Loads a counter that a relaxed poll has seen, and orders the following loads of this thread
// behind it. After a barrier it orders the loads of the whole block. The poll itself is relaxed
// because an acquire would invalidate L1 at every iteration.
__device__ __forceinline__ uint64_t load_acquire(const uint64_t *at) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

// Stores a counter, and publishes the earlier stores of this thread and, after a barrier, of the
// whole block.
__device__ __forceinline__ void store_release(uint64_t *at, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

// Load and store 16 bytes of payload. A load from a slot must not hit a line that L1 kept from an
// earlier message. The acquire of the counter invalidates such lines, so plain loads suffice.
__device__ __forceinline__ uint4 load_vector(const void *at) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_vector(void *at, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// Load and store a packet, or the part of a line that a lane holds, by one access. Every transport
// delivers each 8 bytes whole; NVLink and the local L2 keep all 16 bytes together.
__device__ __forceinline__ uint4 load_packet(const void *at) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_packet(void *at, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Load and store 16 bytes a lane, by one instruction of the warp. If 8 lanes access one aligned
// line, its 128 bytes arrive whole over NVLink. Lanes without a line take part.
__device__ __forceinline__ uint4 load_line(bool has_line, const void *at) {
  return has_line ? load_packet(at) : make_uint4(0, 0, 0, 0);
}
__device__ __forceinline__ void store_line(bool has_line, void *at, uint4 v) {
  if (has_line) store_packet(at, v);
}

// Returns nanoseconds of the global timer: coarse, but independent of the clock rate.
__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

}  // namespace cinch
