// Replaces kernels/ptx/block.cuh where tests run kernels on the host. Each copy of a block has
// barriers and shared memory of its own.
#pragma once

#include <stdint.h>

namespace cinch {

template <class T>
T &block_shared() {
  static std::vector<std::unique_ptr<T>> values;
  const uint32_t copy = Block::current().copy();
  if (values.size() <= copy) values.resize(copy + 1);
  // The bytes differ from zero, because a kernel must not rely on what it has not written.
  if (!values[copy]) {
    values[copy].reset(new T);
    memset((void *)values[copy].get(), 0xa5, sizeof(T));
  }
  return *values[copy];
}

inline void arrive_at(uint32_t barrier, uint32_t threads) {
  Block::current().arrive_named(barrier, threads);
}
inline void sync_at(uint32_t barrier, uint32_t threads) {
  Block::current().sync_named(barrier, threads);
}

}  // namespace cinch
