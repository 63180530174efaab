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
  // multiple of 16. The counters of these elements differ in four bits only.
  CINCH_HD bool is_at_16() const { return first % 16 == 0; }

  // The products of the first mixing step for elements 0 to 15: each differs from an earlier one by a power of two times
  // the factor. A sum takes one instruction, a product of the element's counter two.
  struct Products {
    uint32_t of[16];
  };
  CINCH_HD Products products() const {
    const uint32_t common = (first ^ key[0]) ^ (first ^ key[0]) >> 16;
    Products products;
    products.of[0] = common * FIRST;
    CINCH_UNROLL
    for (uint32_t k = 1; k < 16; ++k) {
      // A flip of the lowest bit of k subtracts its value if it is 1.
      const uint32_t bit = k & (0u - k);
      products.of[k] = products.of[k ^ bit] + (common & bit ? 0u - FIRST * bit : FIRST * bit);
    }
    return products;
  }
  CINCH_HD float drawn_near(const Products &products, uint32_t element) const {
    return mixed_product(products.of[element]);
  }

 private:
  static constexpr uint32_t FIRST = 0x7feb352du;

  CINCH_HD float mixed(uint32_t x) const { return mixed_product(x * FIRST); }

  CINCH_HD float mixed_product(uint32_t x) const {
    x ^= x >> 15 ^ key[1];
    x *= 0x846ca68bu;
    // Keeps only 24 bits, so that fp32 holds the number exactly.
    return (float)((x ^ x >> 16) & 0xffffff00u);
  }
};

}  // namespace cinch
