// Counter-based random numbers for stochastic rounding; src/codec/random.rs is the specification,
// bit for bit.
#pragma once

#include "ptx/arithmetic.cuh"

namespace cinch {

// The random numbers of a chunk: a key, and the index in the message of the chunk's first element.
struct Random {
  uint32_t key[2];
  uint32_t first;

  // Returns the random number in [0, 1), a multiple of 2^-24, for element `element` of the chunk.
  CINCH_HD float fraction(uint32_t element) const { return mul(drawn(element), 0x1p-32f); }

  // Returns 2^32 times the random number for element `element` of the chunk.
  CINCH_HD float drawn(uint32_t element) const {
    const uint32_t x = (first + element) ^ key[0];
    return mixed(x ^ x >> 16);
  }

  // Returns whether drawn_near() may replace drawn() for elements 0 to 15, because `first` is a
  // multiple of 16. The counters of these elements differ in four bits only, so they share the
  // first mixing step.
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
    // Keeps only 24 bits, so that fp32 holds the number exactly.
    return (float)((x ^ x >> 16) & 0xffffff00u);
  }
};

}  // namespace cinch
