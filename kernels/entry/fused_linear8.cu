#include "entry/fused_coded.cuh"

CINCH_FUSED_CODED(linear8, Linear8Nearest)
