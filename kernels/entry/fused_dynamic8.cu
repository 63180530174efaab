#include "entry/fused_coded.cuh"

CINCH_FUSED_CODED(dynamic8, Dynamic8Nearest)
