// Stands before kernels/ptx/memory.cuh where tests run kernels on the host: the same functions, on memory
// of this process. Threads that poll let the others go on.
#pragma once

#include <stdint.h>

namespace cinch {

inline uint64_t load_relaxed(const uint64_t *at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }
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

// What is there already is seen before anybody else goes on: a packet of an old message, say.
inline uint4 load_packet(const void *at) {
  const uint4 packet = *(const uint4 *)at;
  Block::current().pause();
  return packet;
}
inline void store_packet(void *at, uint4 v) { *(uint4 *)at = v; }

// All lanes of a warp at once. What a warp stores at once is seen line by line. A lane without a line
// moves a word of its own.
inline uint4 load_line(bool has_line, const void *at) {
  uint4 line, nothing = {};
  Block::current().warp_loads(&line, has_line ? at : &nothing);
  Block::current().pause_after_a_look();
  return line;
}
inline void store_line(bool has_line, void *at, uint4 v) {
  uint4 nowhere;
  Block::current().warp_stores(has_line ? at : &nowhere, &v);
}

// Each look takes a while, so that a wait for what never comes ends, too.
inline uint64_t nanoseconds() {
  static uint64_t now = 0;
  return now += 20000;
}

}  // namespace cinch
