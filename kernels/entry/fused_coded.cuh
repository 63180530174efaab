// Defines the fused kernels for one codec, for each element type that codecs accept.
#pragma once

#include "entry/name.cuh"
#include "fused/coded.cuh"

#define CINCH_FUSED_OVER(protocol, Lines, codec, Codec, type, Type)                        \
  extern "C" __global__ void __launch_bounds__(cinch::MOVERS, 1)                           \
      CINCH_KERNEL_NAME(fused_##codec##_##type##_##protocol)(                              \
          const __grid_constant__ cinch_oneshot_args args) {                               \
    cinch::Codec::prepare(cinch::MOVERS);                                                  \
    cinch::run_fused<cinch::CodedExchange<cinch::Type, cinch::Codec, cinch::Lines>>(args); \
  }

#define CINCH_FUSED_THROUGH(codec, Codec, type, Type)              \
  CINCH_FUSED_OVER(ll, Packets, codec, Codec, type, Type)          \
  CINCH_FUSED_OVER(ll128, WholeLines, codec, Codec, type, Type)

#define CINCH_FUSED_CODED(codec, Codec) CINCH_CODED_ELEMENTS(CINCH_FUSED_THROUGH, codec, Codec)
