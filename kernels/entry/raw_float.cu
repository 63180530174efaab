#include "entry/raw.cuh"

CINCH_FLOATS_32_64(CINCH_RAW)
