#include "entry/raw.cuh"

CINCH_RAW(i32, I32)
CINCH_RAW(u32, U32)
