#include "entry/raw.cuh"

CINCH_INTEGERS_64(CINCH_RAW)
