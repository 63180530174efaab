// The entry of a schedule kernel: its name and its launch bounds.
#pragma once

#include "exec/interpret.cuh"

// Defines a kernel of the schedule interpreter for a Mover.
#define CINCH_INTERPRETER(name, ...)                          \
  extern "C" __global__ void __launch_bounds__(               \
      cinch::BLOCK_THREADS, cinch::BLOCKS_PER_MULTIPROCESSOR) \
      name(const __grid_constant__ cinch_args args) {         \
    cinch::interpret<__VA_ARGS__>(args);                      \
  }
