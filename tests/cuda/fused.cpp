// The fused kernels, run on the host: what tests/fused_kernels.rs loads. The blocks of all ranks with one
// number run side by side, since each waits for the others. See block.h.
#include "block.h"

#include <algorithm>

using std::max;
using std::min;

inline int __ffs(uint32_t x) { return __builtin_ffs((int)x); }
inline void __threadfence() {}
inline void __threadfence_system() {}
template <class T, class More>
T atomicAdd(T *at, More more) {
  const T was = *at;
  *at = was + (T)more;
  return was;
}
inline uint32_t atomicCAS_system(uint32_t *at, uint32_t from, uint32_t to) {
  const uint32_t was = *at;
  if (was == from) *at = to;
  return was;
}

#include "fused/coded.cuh"
#include "fused/lines.cuh"
#include "fused/oneshot.cuh"

using namespace cinch;

namespace {

struct Named {
  const char *name;
  void (*kernel)(const cinch_oneshot_args &);
};

#define SUMS(type, Type)                                                   \
  {#type, oneshot<OneshotSum<Type>>},                                      \
      {"twice_" #type, oneshot<OneshotSum<Type, Sends::A_PART_EACH>>},     \
      {"scatter_" #type, oneshot<OneshotSum<Type, Sends::A_BLOCK_EACH>>},  \
      {#type "_ll128", oneshot<LinesSum<Type>>},                           \
      {"twice_" #type "_ll128", oneshot<LinesSum<Type, Sends::A_PART_EACH>>}, \
      {"scatter_" #type "_ll128", oneshot<LinesSum<Type, Sends::A_BLOCK_EACH>>}, \
      {"to_root_" #type "_ll128", oneshot<LinesSum<Type, Sends::TO_ROOT>>}

#define CODED(codec, Codec)                                              \
  {#codec "_f32_ll128", oneshot<CodedExchange<F32, Codec>>},             \
      {#codec "_f16_ll128", oneshot<CodedExchange<F16, Codec>>},         \
      {#codec "_bf16_ll128", oneshot<CodedExchange<BF16, Codec>>}

const Named KERNELS[] = {CODED(linear8, Linear8),
                         CODED(dynamic8, Dynamic8Tabled),
                         CODED(minmax4, MinMax4),
                         SUMS(f32, F32),
                         SUMS(f16, F16),
                         SUMS(bf16, BF16),
                         {"move", oneshot<OneshotMove<>>},
                         {"scatter_move", oneshot<OneshotMove<Sends::A_BLOCK_EACH>>},
                         {"move_ll128", oneshot<LinesMove<>>},
                         {"scatter_move_ll128", oneshot<LinesMove<Sends::A_BLOCK_EACH>>},
                         {"from_root_move_ll128", oneshot<LinesMove<Sends::FROM_ROOT>>}};

}  // namespace

// Runs kernels by their names, one after the other, on all ranks, with the arguments of each call and of
// each rank in it; whether there are such. Between its calls a rank lets all others go on so many times,
// and waits for nobody. Several calls have one block. Rank `slow` takes so many turns more for each look at
// what others send in lines.
extern "C" bool test_fused(uint32_t calls, const char *const *names, uint32_t ranks, uint32_t blocks,
                           const cinch_oneshot_args *args, const uint32_t *pauses, uint32_t slow,
                           uint32_t slow_turns) {
  Block::slow_copy = slow;
  Block::slow_turns = slow_turns;
  std::vector<void (*)(const cinch_oneshot_args &)> kernels;
  for (uint32_t call = 0; call < calls; ++call) {
    for (const Named &one : KERNELS) {
      if (strcmp(one.name, names[call]) == 0) kernels.push_back(one.kernel);
    }
  }
  static_assert(MOVERS == ONESHOT_THREADS, "all are launched alike here");
  if (kernels.size() != calls || (calls > 1 && blocks > 1)) return false;
  const auto all = [&] {
    for (uint32_t call = 0; call < calls; ++call) {
      const uint32_t at = call * ranks + Block::current().copy();
      if (calls > 1) {
        for (uint32_t i = 0; i < pauses[at]; ++i) Block::current().pause();
        __syncthreads();
      }
      kernels[call](args[at]);
    }
  };
  launch(blocks, ONESHOT_THREADS, all, ranks);
  return true;
}
