#include "entry/raw.cuh"

CINCH_INTEGERS_8(CINCH_RAW)
