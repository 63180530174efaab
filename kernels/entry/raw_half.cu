#include "entry/raw.cuh"

CINCH_RAW(f16, F16)
CINCH_RAW(bf16, BF16)
