// The fused kernels over ll128 lines. They exist only for the element types of gradients, which are
// sent most.
#include "entry/name.cuh"
#include "fused/ll128.cuh"

#define CINCH_FUSED_LL128(does, ...)                              \
  extern "C" __global__ void __launch_bounds__(FUSED_THREADS, 1)  \
      CINCH_KERNEL_NAME(fused_##does##_ll128)(                    \
          const __grid_constant__ cinch_oneshot_args args) {      \
    run_fused<__VA_ARGS__>(args);                                 \
  }

#define CINCH_FUSEDS_LL128(type, Type)                                   \
  CINCH_FUSED_LL128(type, LinesSum<Type>)                                \
  CINCH_FUSED_LL128(scatter_##type, LinesSum<Type, Sends::A_BLOCK_EACH>) \
  CINCH_FUSED_LL128(two_shot_##type, LinesSum<Type, Sends::A_PART_EACH>) \
  CINCH_FUSED_LL128(to_root_##type, LinesSum<Type, Sends::TO_ROOT>)

namespace cinch {

CINCH_FUSED_LL128(move, LinesMove<>)
CINCH_FUSED_LL128(scatter_move, LinesMove<Sends::A_BLOCK_EACH>)
CINCH_FUSED_LL128(from_root_move, LinesMove<Sends::FROM_ROOT>)

CINCH_FUSEDS_LL128(f16, F16)
CINCH_FUSEDS_LL128(f32, F32)
CINCH_FUSEDS_LL128(bf16, BF16)

}  // namespace cinch
