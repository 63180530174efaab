// Defines the kernels of the schedule interpreter for one codec, for each element type that codecs
// accept.
#pragma once

#include "entry/launch.cuh"
#include "prims/coded.cuh"

#define CINCH_CODED_TYPE(codec, Codec, type, Type) \
  CINCH_INTERPRETER(coded_##codec##_##type, cinch::CodedSimple<cinch::Type, cinch::Codec>)

#define CINCH_CODED(codec, Codec) CINCH_CODED_ELEMENTS(CINCH_CODED_TYPE, codec, Codec)
