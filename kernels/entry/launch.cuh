// How the kernels of the interpreter are named and launched.
#pragma once

#include "exec/interpret.cuh"

// One kernel of the schedule interpreter.
#define CINCH_INTERPRETER(name, ...)                          \
  extern "C" __global__ void __launch_bounds__(               \
      cinch::BLOCK_THREADS, cinch::BLOCKS_PER_MULTIPROCESSOR) \
      name(const __grid_constant__ cinch_args args) {         \
    cinch::interpret<__VA_ARGS__>(args);                      \
  }
