// The fused one-shot all-reduce of each element type.
#include "fused/oneshot.cuh"

#define CINCH_ONESHOT(type, Type)                                          \
  extern "C" __global__ void __launch_bounds__(cinch::ONESHOT_THREADS, 1)  \
      cinch_oneshot_##type(const __grid_constant__ cinch_oneshot_args args) { \
    cinch::oneshot<cinch::Type>(args);                                     \
  }

CINCH_ONESHOT(i8, I8)
CINCH_ONESHOT(u8, U8)
CINCH_ONESHOT(i32, I32)
CINCH_ONESHOT(u32, U32)
CINCH_ONESHOT(i64, I64)
CINCH_ONESHOT(u64, U64)
CINCH_ONESHOT(f16, F16)
CINCH_ONESHOT(f32, F32)
CINCH_ONESHOT(f64, F64)
CINCH_ONESHOT(bf16, BF16)
CINCH_ONESHOT(f8e4m3, F8E4M3)
CINCH_ONESHOT(f8e5m2, F8E5M2)
