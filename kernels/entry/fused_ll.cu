// The fused kernels over ll packets: all_gather and all_to_all, and for each element type
// all_reduce (one-shot and two-shot) and reduce_scatter.
#include "entry/name.cuh"
#include "fused/ll.cuh"

#define CINCH_FUSED_LL(does, ...)                                 \
  extern "C" __global__ void __launch_bounds__(FUSED_THREADS, 1)  \
      CINCH_KERNEL_NAME(fused_##does##_ll)(                       \
          const __grid_constant__ cinch_oneshot_args args) {      \
    run_fused<__VA_ARGS__>(args);                                 \
  }

#define CINCH_FUSEDS_LL(type, Type)                                     \
  CINCH_FUSED_LL(type, PacketsSum<Type>)                                \
  CINCH_FUSED_LL(scatter_##type, PacketsSum<Type, Sends::A_BLOCK_EACH>) \
  CINCH_FUSED_LL(two_shot_##type, PacketsSum<Type, Sends::A_PART_EACH>)

namespace cinch {

CINCH_FUSED_LL(move, PacketsMove<>)
CINCH_FUSED_LL(scatter_move, PacketsMove<Sends::A_BLOCK_EACH>)

CINCH_ELEMENTS(CINCH_FUSEDS_LL)

}  // namespace cinch
