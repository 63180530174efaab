// Replaces kernels/ptx/memory.cuh where tests run kernels on the host. The functions access the
// memory of this process. A thread that polls switches to the other threads.
#pragma once

#include <stdint.h>

namespace cinch {

// Loads first and switches to other fibers then, so that a poll may see an outdated counter.
inline uint64_t load_relaxed(const uint64_t *at) {
  const uint64_t value = __atomic_load_n(at, __ATOMIC_RELAXED);
  Block::current().pause();
  return value;
}
inline uint32_t load_relaxed(const uint32_t *at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }
inline void store_relaxed(uint64_t *at, uint64_t value) {
  __atomic_store_n(at, value, __ATOMIC_RELAXED);
}
inline uint64_t load_acquire(const uint64_t *at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
inline void store_release(uint64_t *at, uint64_t value) {
  __atomic_store_n(at, value, __ATOMIC_RELEASE);
}

inline uint4 load_vector(const void *at) { return *(const uint4 *)at; }
inline void store_vector(void *at, uint4 v) { *(uint4 *)at = v; }

// Loads first and switches to other fibers then, so that a poll may see an outdated packet.
inline uint4 load_packet(const void *at) {
  const uint4 packet = *(const uint4 *)at;
  Block::current().pause();
  return packet;
}
inline void store_packet(void *at, uint4 v) { *(uint4 *)at = v; }

// Access 16 bytes for each lane of a warp, all at one time; stores become visible line by line. A
// lane without a line accesses a local variable instead.
inline uint4 load_line(bool has_line, const void *at) {
  uint4 line, nothing = {};
  Block::current().warp_loads(&line, has_line ? at : &nothing);
  Block::current().pause_after_poll();
  return line;
}
inline void store_line(bool has_line, void *at, uint4 v) {
  uint4 nowhere;
  Block::current().warp_stores(has_line ? at : &nowhere, &v);
}

// Returns the emulated clock. Each call advances it, so that a wait for a message that never
// arrives ends.
inline uint64_t nanoseconds() {
  static uint64_t now = 0;
  return now += 20000;
}

}  // namespace cinch
