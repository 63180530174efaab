#include "entry/raw.cuh"

CINCH_RAW(i8, I8)
CINCH_RAW(u8, U8)
