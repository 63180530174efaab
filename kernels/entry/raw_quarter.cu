#include "entry/raw.cuh"

CINCH_FLOATS_8(CINCH_RAW)
