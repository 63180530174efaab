// The residuals of error feedback for the elements of one lane.
#pragma once

#include "abi.h"
#include "prims/held.cuh"

namespace cinch {

class Residuals {
 public:
  // Finds the residuals of the message's elements from index `first` on. Each array has `span`
  // residuals.
  __device__ __forceinline__ Residuals(const cinch_residuals *all, uint64_t span, uint64_t first) {
    float *const arrays = (float *)((uint8_t *)all + CINCH_RESIDUALS_BYTES);
    now_ = arrays + all->turn * span + first;
    next_ = arrays + (1 ^ all->turn) * span + first;
  }

  // Adds the residuals of the previous call to x. A residual that would make a finite element
  // infinite is ignored.
  __device__ __forceinline__ void add_to(float (&x)[HELD], uint32_t there) const {
#pragma unroll
    for (uint32_t k = 0; k < HELD; ++k) {
      if (k < there) {
        const float sum = add(x[k], now_[k]);
        if (is_finite(sum)) x[k] = sum;
      }
    }
  }

  // Stores the residuals x - `seen`, where `seen` is the decoded form of x. If a difference is not
  // finite, the old residual stays, so that a block with a NaN neither spreads NaN nor loses its
  // residuals.
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

  // Keeps the old residuals.
  __device__ __forceinline__ void keep_old(uint32_t there) const {
#pragma unroll
    for (uint32_t k = 0; k < HELD; ++k) {
      if (k < there) next_[k] = now_[k];
    }
  }

 private:
  const float *now_;
  float *next_;
};

}  // namespace cinch
