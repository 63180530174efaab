// Random numbers by counter, for stochastic rounding: src/codec/random.rs, bit for bit.
#pragma once

#include "ptx/arithmetic.cuh"

namespace cinch {

// Which numbers a chunk draws: a key, and the index of the chunk's first element in its message.
struct Random {
  uint32_t key[2];
  uint32_t first;

  // The number in [0, 1) that an element of the chunk draws: a multiple of 2^-24.
  CINCH_HD float fraction(uint32_t element) const { return mul(drawn(element), 0x1p-32f); }

  // 2^32 times that number.
  CINCH_HD float drawn(uint32_t element) const {
    const uint32_t x = (first + element) ^ key[0];
    return mixed(x ^ x >> 16);
  }

  // The same of elements 0 to 15, of which the first one is at a multiple of 16: they differ in four
  // bits, and what is made of the others is common.
  CINCH_HD bool is_at_16() const { return first % 16 == 0; }
  CINCH_HD uint32_t common() const { return (first ^ key[0]) ^ (first ^ key[0]) >> 16; }
  CINCH_HD float drawn_near(uint32_t common, uint32_t element) const {
    return mixed(common ^ element);
  }

 private:
  CINCH_HD float mixed(uint32_t x) const {
    x *= 0x7feb352du;
    x ^= x >> 15 ^ key[1];
    x *= 0x846ca68bu;
    // 24 bits, so that fp32 holds the number.
    return (float)((x ^ x >> 16) & 0xffffff00u);
  }
};

}  // namespace cinch
