// The end of a call with error feedback, for the interpreter and the fused kernels.
#pragma once

#include "abi.h"

namespace cinch {

// Swaps the two residual arrays, so that the next call, or the next replay, reads the residuals
// that this call has written. The last of the launch's `blocks` to arrive swaps them, because other
// blocks read `turn` until they end. One thread of each block calls this after a barrier. A block
// of a call that failed must not call it.
static __device__ __noinline__ void end_feedback(cinch_residuals &residuals, uint32_t blocks) {
  __threadfence();  // SYNC POINT residuals: this block has read `turn`
  if (atomicAdd(&residuals.arrived, 1) + 1 == blocks) {
    __threadfence();  // SYNC POINT residuals: all blocks have read it
    residuals.arrived = 0;
    residuals.turn ^= 1;
  }
}

}  // namespace cinch
