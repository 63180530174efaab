// A macro that defines a kernel of the schedule interpreter, with its name and launch bounds.
#pragma once

#include "entry/name.cuh"
#include "exec/interpret.cuh"

// Defines the kernel CINCH_KERNEL_NAME(does) of the schedule interpreter. The other arguments are
// the mover type, which sends, receives and reduces the kernel's data (exec/interpret.cuh).
#define CINCH_INTERPRETER(does, ...)                                     \
  extern "C" __global__ void __launch_bounds__(                          \
      cinch::BLOCK_THREADS, cinch::BLOCKS_PER_MULTIPROCESSOR)            \
      CINCH_KERNEL_NAME(does)(const __grid_constant__ cinch_args args) { \
    cinch::interpret<__VA_ARGS__>(args);                                 \
  }
