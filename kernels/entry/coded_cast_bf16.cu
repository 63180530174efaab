#include "entry/coded.cuh"

CINCH_CODED(cast_bf16, CastBf16)
