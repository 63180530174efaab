#include "entry/raw.cuh"

CINCH_INTEGERS_32(CINCH_RAW)
