// The fused kernels over ll packets: all_gather and all_to_all, and for each element type
// all_reduce (one-shot and two-shot) and reduce_scatter.
#include "fused/ll.cuh"

#define CINCH_FUSED_LL(name, ...)                                                \
  extern "C" __global__ void __launch_bounds__(FUSED_THREADS, 1)                 \
      cinch_fused_##name##_ll(const __grid_constant__ cinch_oneshot_args args) { \
    run_fused<__VA_ARGS__>(args);                                                \
  }

#define CINCH_FUSEDS_LL(type, Type)                                     \
  CINCH_FUSED_LL(type, PacketsSum<Type>)                                \
  CINCH_FUSED_LL(scatter_##type, PacketsSum<Type, Sends::A_BLOCK_EACH>) \
  CINCH_FUSED_LL(two_shot_##type, PacketsSum<Type, Sends::A_PART_EACH>)

namespace cinch {

CINCH_FUSED_LL(move, PacketsMove<>)
CINCH_FUSED_LL(scatter_move, PacketsMove<Sends::A_BLOCK_EACH>)

CINCH_FUSEDS_LL(i8, I8)
CINCH_FUSEDS_LL(u8, U8)
CINCH_FUSEDS_LL(i32, I32)
CINCH_FUSEDS_LL(u32, U32)
CINCH_FUSEDS_LL(i64, I64)
CINCH_FUSEDS_LL(u64, U64)
CINCH_FUSEDS_LL(f16, F16)
CINCH_FUSEDS_LL(f32, F32)
CINCH_FUSEDS_LL(f64, F64)
CINCH_FUSEDS_LL(bf16, BF16)
CINCH_FUSEDS_LL(f8e4m3, F8E4M3)
CINCH_FUSEDS_LL(f8e5m2, F8E5M2)

}  // namespace cinch
