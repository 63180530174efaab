// Defines the kernels of the schedule interpreter that reduce one element type without a codec.
#pragma once

#include "entry/launch.cuh"
#include "prims/ll.cuh"
#include "prims/ll128.cuh"
#include "prims/raw.cuh"

#define CINCH_RAW(type, Type)                                               \
  CINCH_INTERPRETER(raw_##type, cinch::RawSimple<cinch::Type>)        \
  CINCH_INTERPRETER(raw_##type##_ll, cinch::RawLL<cinch::Type, true>) \
  CINCH_INTERPRETER(raw_##type##_ll128, cinch::RawLL128<cinch::Type, true>)
