#include "entry/coded.cuh"

CINCH_CODED(fp8_e4m3, Fp8E4M3)
