// The fused exchanges of small messages: moves, and sums of each element type.
#include "fused/oneshot.cuh"

#define CINCH_ONESHOT(name, Does)                                          \
  extern "C" __global__ void __launch_bounds__(ONESHOT_THREADS, 1)         \
      cinch_oneshot_##name(const __grid_constant__ cinch_oneshot_args args) { \
    oneshot<Does>(args);                                                   \
  }

namespace cinch {

CINCH_ONESHOT(move, OneshotMove)
CINCH_ONESHOT(i8, OneshotSum<I8>)
CINCH_ONESHOT(u8, OneshotSum<U8>)
CINCH_ONESHOT(i32, OneshotSum<I32>)
CINCH_ONESHOT(u32, OneshotSum<U32>)
CINCH_ONESHOT(i64, OneshotSum<I64>)
CINCH_ONESHOT(u64, OneshotSum<U64>)
CINCH_ONESHOT(f16, OneshotSum<F16>)
CINCH_ONESHOT(f32, OneshotSum<F32>)
CINCH_ONESHOT(f64, OneshotSum<F64>)
CINCH_ONESHOT(bf16, OneshotSum<BF16>)
CINCH_ONESHOT(f8e4m3, OneshotSum<F8E4M3>)
CINCH_ONESHOT(f8e5m2, OneshotSum<F8E5M2>)

}  // namespace cinch
