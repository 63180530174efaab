#include "entry/coded.cuh"

CINCH_CODED(minmax, MinMax)
