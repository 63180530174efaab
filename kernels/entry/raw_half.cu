#include "entry/raw.cuh"

CINCH_FLOATS_16(CINCH_RAW)
