#include "entry/raw.cuh"

CINCH_RAW(f32, F32)
CINCH_RAW(f64, F64)
