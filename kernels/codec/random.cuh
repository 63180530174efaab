// Random numbers by counter, for stochastic rounding: src/codec/random.rs, bit for bit.
#pragma once

#include "ptx/arithmetic.cuh"

namespace cinch {

// Which numbers a chunk draws: a key, and the index of the chunk's first element in its message.
struct Random {
  uint32_t key[2];
  uint32_t first;

  // The number in [0, 1) that an element of the chunk draws: a multiple of 2^-24.
  CINCH_HD float fraction(uint32_t element) const {
    uint32_t x = (first + element) ^ key[0];
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x ^= key[1];
    x *= 0x846ca68bu;
    x ^= x >> 16;
    return mul((float)(x >> 8), 0x1p-24f);
  }
};

}  // namespace cinch
