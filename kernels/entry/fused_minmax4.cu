#include "entry/fused_coded.cuh"

CINCH_FUSED_CODED(minmax4, MinMax4)
