// The fused exchanges in lines: those of what is mostly sent, and so of the types of gradients.
#include "fused/lines.cuh"

#define CINCH_ONESHOT_LL128(name, ...)                                       \
  extern "C" __global__ void __launch_bounds__(ONESHOT_THREADS, 1)           \
      cinch_oneshot_##name##_ll128(const __grid_constant__ cinch_oneshot_args args) { \
    oneshot<__VA_ARGS__>(args);                                              \
  }

#define CINCH_ONESHOTS_LL128(type, Type)                \
  CINCH_ONESHOT_LL128(type, LinesSum<Type>)             \
  CINCH_ONESHOT_LL128(scatter_##type, LinesSum<Type, Sends::A_BLOCK_EACH>) \
  CINCH_ONESHOT_LL128(twice_##type, LinesSum<Type, Sends::A_PART_EACH>) \
  CINCH_ONESHOT_LL128(to_root_##type, LinesSum<Type, Sends::TO_ROOT>)

namespace cinch {

CINCH_ONESHOT_LL128(move, LinesMove<>)
CINCH_ONESHOT_LL128(scatter_move, LinesMove<Sends::A_BLOCK_EACH>)
CINCH_ONESHOT_LL128(from_root_move, LinesMove<Sends::FROM_ROOT>)

CINCH_ONESHOTS_LL128(f16, F16)
CINCH_ONESHOTS_LL128(f32, F32)
CINCH_ONESHOTS_LL128(bf16, BF16)

}  // namespace cinch
