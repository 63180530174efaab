// Exports a function that runs fused kernels on the host, for fused_kernels.rs. The blocks of all
// ranks with one index run side by side, since each waits for the others. block.h emulates the GPU.
#include "block.h"
#include "device.h"

#include "fused/coded.cuh"
#include "fused/ll128.cuh"
#include "fused/ll.cuh"

using namespace cinch;

namespace {

struct Named {
  const char *name;
  void (*kernel)(const cinch_oneshot_args &);
};

#define SUMS(type, Type)                                                   \
  {#type "_ll", run_fused<PacketsSum<Type>>},                                      \
      {"two_shot_" #type "_ll", run_fused<PacketsSum<Type, Sends::A_PART_EACH>>},     \
      {"scatter_" #type "_ll", run_fused<PacketsSum<Type, Sends::A_BLOCK_EACH>>},  \
      {#type "_ll128", run_fused<LinesSum<Type>>},                           \
      {"two_shot_" #type "_ll128", run_fused<LinesSum<Type, Sends::A_PART_EACH>>}, \
      {"scatter_" #type "_ll128", run_fused<LinesSum<Type, Sends::A_BLOCK_EACH>>}, \
      {"to_root_" #type "_ll128", run_fused<LinesSum<Type, Sends::TO_ROOT>>}

#define CODED_OVER(codec, Codec, protocol, Lines)                                     \
  {#codec "_f32_" protocol, run_fused<CodedExchange<F32, Codec, Lines>>},              \
      {#codec "_f16_" protocol, run_fused<CodedExchange<F16, Codec, Lines>>},          \
      {#codec "_bf16_" protocol, run_fused<CodedExchange<BF16, Codec, Lines>>}
#define CODED(codec, Codec)                   \
  CODED_OVER(codec, Codec, "ll", Packets),     \
      CODED_OVER(codec, Codec, "ll128", WholeLines)

const Named KERNELS[] = {CODED(linear8, Linear8Nearest),
                         CODED(dynamic8, Dynamic8Nearest),
                         CODED(minmax4, MinMax4),
                         CODED(fp8_e4m3, Fp8E4M3),
                         CODED(fp8_e5m2, Fp8E5M2),
                         SUMS(f32, F32),
                         SUMS(f16, F16),
                         SUMS(bf16, BF16),
                         {"move_ll", run_fused<PacketsMove<>>},
                         {"scatter_move_ll", run_fused<PacketsMove<Sends::A_BLOCK_EACH>>},
                         {"move_ll128", run_fused<LinesMove<>>},
                         {"scatter_move_ll128", run_fused<LinesMove<Sends::A_BLOCK_EACH>>},
                         {"from_root_move_ll128", run_fused<LinesMove<Sends::FROM_ROOT>>}};

}  // namespace

// Runs calls of the named kernels on all ranks. `args` and `pauses` have an element for each rank
// of each call. Several calls must have one block each. Before each, a rank switches `pauses` times
// to the other ranks. Rank `slow` takes `slow_turns` more turns for each poll of lines. Returns
// false if a name is unknown or several calls have several blocks.
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
  static_assert(MOVERS == FUSED_THREADS, "all are launched alike here");
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
  launch(blocks, FUSED_THREADS, all, ranks);
  return true;
}
