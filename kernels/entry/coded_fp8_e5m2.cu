#include "entry/coded.cuh"

CINCH_CODED(fp8_e5m2, Fp8E5M2)
