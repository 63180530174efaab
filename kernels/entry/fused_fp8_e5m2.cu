#include "entry/fused_coded.cuh"

CINCH_FUSED_CODED(fp8_e5m2, Fp8E5M2)
