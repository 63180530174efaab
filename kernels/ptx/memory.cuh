// Loads and stores with a memory order, and clocks: all inline assembly that touches memory.
//
// Scope is the system everywhere: the other side may be another GPU or the host.
#pragma once

#include <stdint.h>

namespace cinch {

// Relaxed: polls, credits and in-band flags. Never cached in L1.
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

// Orders the loads that follow, of the whole block after a barrier, behind a value that a poll
// has seen. Polling itself stays relaxed: an acquire in the loop would drop L1 on every turn.
__device__ __forceinline__ uint64_t load_acquire(const uint64_t *at) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

// Publishes what this thread, and through a barrier before it the whole block, has written.
__device__ __forceinline__ void store_release(uint64_t *at, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

// 16 bytes of payload. Reads of a slot must not be served by a line that L1 kept from an earlier
// message; the acquire of the counter drops those, so plain loads will do.
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

// Packets and lines that announce themselves: one access, seen whole in units of 8 bytes by
// every transport (NVLink and the local L2 keep the 16 bytes, and a warp's line, together).
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

// 16 bytes of each lane of a warp, with one instruction of all lanes: the 128 bytes of a line, if its
// 8 lanes have one behind the other, are seen whole over NVLink. Lanes that have none come along.
__device__ __forceinline__ uint4 load_line(bool has_line, const void *at) {
  return has_line ? load_packet(at) : make_uint4(0, 0, 0, 0);
}
__device__ __forceinline__ void store_line(bool has_line, void *at, uint4 v) {
  if (has_line) store_packet(at, v);
}

// Nanoseconds; coarse, but the same pace on every clock setting.
__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

}  // namespace cinch
