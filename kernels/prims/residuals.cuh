// What a lane has of the residuals of error feedback, from one element on.
#pragma once

#include "abi.h"
#include "prims/held.cuh"

namespace cinch {

class Residuals {
 public:
  // Those of the message's elements from `first` on, of `span` in an array.
  __device__ __forceinline__ Residuals(const cinch_residuals *all, uint64_t span, uint64_t first) {
    float *const arrays = (float *)((uint8_t *)all + CINCH_RESIDUALS_BYTES);
    now_ = arrays + all->turn * span + first;
    next_ = arrays + (1 ^ all->turn) * span + first;
  }

  // Adds what the last call dropped. A residual that would make a finite value infinite is dropped.
  __device__ __forceinline__ void add_to(float (&x)[HELD], uint32_t there) const {
#pragma unroll
    for (uint32_t k = 0; k < HELD; ++k) {
      if (k < there) {
        const float sum = add(x[k], now_[k]);
        if (is_finite(sum)) x[k] = sum;
      }
    }
  }

  // Keeps what was dropped of x, of which the others see `seen`. Where the difference is not finite the old
  // residual stays, so that a block with a NaN neither poisons nor loses it.
  __device__ __forceinline__ void keep(const float (&x)[HELD], const float (&seen)[HELD],
                                       uint32_t there) const {
#pragma unroll
    for (uint32_t k = 0; k < HELD; ++k) {
      if (k < there) {
        const float dropped = add(x[k], -seen[k]);
        next_[k] = is_finite(dropped) ? dropped : now_[k];
      }
    }
  }

 private:
  const float *now_;
  float *next_;
};

}  // namespace cinch
