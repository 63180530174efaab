#include "entry/raw.cuh"

CINCH_RAW(i64, I64)
CINCH_RAW(u64, U64)
