// The schedule kernels of one codec.
#pragma once

#include "entry/launch.cuh"
#include "prims/coded.cuh"

#define CINCH_CODED(codec, Codec)                                                            \
  CINCH_INTERPRETER(cinch_coded_##codec##_f32, cinch::CodedSimple<cinch::F32, cinch::Codec>) \
  CINCH_INTERPRETER(cinch_coded_##codec##_f16, cinch::CodedSimple<cinch::F16, cinch::Codec>) \
  CINCH_INTERPRETER(cinch_coded_##codec##_bf16, cinch::CodedSimple<cinch::BF16, cinch::Codec>)
