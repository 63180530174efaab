// The fused exchanges of small messages: all-gather and all-to-all, and all-reduce, in one trip and in
// two, and reduce-scatter of each element type.
#include "fused/oneshot.cuh"

#define CINCH_ONESHOT(name, ...)                                           \
  extern "C" __global__ void __launch_bounds__(ONESHOT_THREADS, 1)         \
      cinch_oneshot_##name(const __grid_constant__ cinch_oneshot_args args) { \
    oneshot<__VA_ARGS__>(args);                                            \
  }

#define CINCH_ONESHOTS(type, Type)                \
  CINCH_ONESHOT(type, OneshotSum<Type>)           \
  CINCH_ONESHOT(scatter_##type, OneshotSum<Type, Sends::A_BLOCK_EACH>) \
  CINCH_ONESHOT(twice_##type, OneshotSum<Type, Sends::A_PART_EACH>)

namespace cinch {

CINCH_ONESHOT(move, OneshotMove<>)
CINCH_ONESHOT(scatter_move, OneshotMove<Sends::A_BLOCK_EACH>)

CINCH_ONESHOTS(i8, I8)
CINCH_ONESHOTS(u8, U8)
CINCH_ONESHOTS(i32, I32)
CINCH_ONESHOTS(u32, U32)
CINCH_ONESHOTS(i64, I64)
CINCH_ONESHOTS(u64, U64)
CINCH_ONESHOTS(f16, F16)
CINCH_ONESHOTS(f32, F32)
CINCH_ONESHOTS(f64, F64)
CINCH_ONESHOTS(bf16, BF16)
CINCH_ONESHOTS(f8e4m3, F8E4M3)
CINCH_ONESHOTS(f8e5m2, F8E5M2)

}  // namespace cinch
