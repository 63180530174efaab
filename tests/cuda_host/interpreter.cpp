// Exports the schedule kernels of one file of kernels/entry/, which CINCH_ENTRY names, and a
// function that runs such a kernel on the host for interpreter.rs. All blocks of all ranks run side
// by side, since a block waits for blocks of other ranks. block.h emulates the GPU.
#include "block.h"
#include "device.h"

#include CINCH_ENTRY

// Runs a kernel on all ranks. Rank r has blocks[r] blocks and the arguments args[r].
extern "C" void test_interpreter(void (*kernel)(const cinch_args), uint32_t ranks,
                                 const uint32_t *blocks, const cinch_args *args) {
  const uint32_t most = *std::max_element(blocks, blocks + ranks);
  launch_together(
      most, cinch::BLOCK_THREADS,
      [&] {
        const uint32_t rank = Block::current().copy() % ranks;
        if (blockIdx.x < blocks[rank]) kernel(args[rank]);
      },
      ranks);
}
