// Completes the sums of an average.
//
// Where a sum could overflow, the host sets CINCH_PREMULTIPLY beside CINCH_AVERAGE, and the factor is
// a power of two s (plan/average.rs): contributions are multiplied by s, the sum is divided by
// nranks * s. Averages of narrow floats are limited to the finite numbers of the type, in which their
// exact values are; only rounding and the errors of a codec exceed them.
#pragma once

#include "abi.h"
#include "dtype/element.cuh"

namespace cinch {

// Returns x with a magnitude of at most `most`; infinity and NaN stay.
CINCH_HD float limited(float x, float most) {
  const uint32_t sign = bits_of(x) & 0x80000000u;
  const bool beyond = magnitude_of(x) > most && (bits_of(x) & 0x7fffffffu) < 0x7f800000u;
  return beyond ? float_of(bits_of(most) | sign) : x;
}

template <class E, bool FP32 = std::is_same<typename E::Acc, float>::value>
struct Average {
  using Acc = typename E::Acc;

  CINCH_HD Average(uint32_t, uint64_t, uint32_t nranks) : nranks(nranks) {}

  CINCH_HD Acc of(Acc sum) const { return E::divide(sum, nranks); }
  static CINCH_HD Acc partial(Acc sum) { return sum; }

  uint32_t nranks;
};

template <class E>
struct Average<E, true> {
  CINCH_HD Average(uint32_t flags, uint64_t factor, uint32_t nranks)
      : divisor(flags & CINCH_PREMULTIPLY ? mul((float)nranks, float_of((uint32_t)factor))
                                          : (float)nranks) {}

  // Returns the quotient of a complete sum. Both products are exact for up to 2^13 ranks, so the
  // quotient of a limited sum is the limit.
  CINCH_HD float of(float sum) const { return canonical(divide(limit(sum), divisor)); }
  // Returns a sum that is to be divided by `divisor`, limited.
  CINCH_HD float limit(float sum) const {
    return E::limits ? limited(sum, mul(E::largest(), divisor)) : sum;
  }
  // Returns a partial sum as it travels without a codec.
  static CINCH_HD float partial(float sum) {
    return E::limits ? limited(sum, E::largest()) : sum;
  }

  float divisor;
};

}  // namespace cinch
