#include "entry/fused_coded.cuh"

CINCH_FUSED_CODED(fp8_e4m3, Fp8E4M3)
