// Replaces kernels/ptx/async.cuh where tests run kernels on the host. Each copy of a block has its
// own dynamic shared memory. An asynchronous copy happens at once, or when the thread waits for its
// group.
#pragma once

#include <stdint.h>

namespace cinch {

inline uint8_t *launched_shared() {
  constexpr uint32_t BLOCKS = 128, BYTES = 192 << 10;
  alignas(128) static uint8_t memory[BLOCKS][BYTES];
  return memory[Block::current().copy()];
}

// Returns the shared-space address of `at`. In this host build, the address is the offset in shared
// memory.
inline uint32_t shared_address(const void *at) {
  return (uint32_t)((const uint8_t *)at - launched_shared());
}
inline uint4 load_shared(uint32_t at) { return *(const uint4 *)(launched_shared() + at); }
inline void store_shared(uint32_t at, uint4 v) { *(uint4 *)(launched_shared() + at) = v; }

inline void copy16(void *to, const void *from) { Block::current().copy_sometime(to, from, 16); }
inline void copy4(void *to, const void *from) { Block::current().copy_sometime(to, from, 4); }
inline void commit_copies() { Block::current().commit_copies(); }
template <int GROUPS>
void wait_copies() {
  Block::current().make_copies(GROUPS);
}

}  // namespace cinch
