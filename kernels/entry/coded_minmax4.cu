#include "entry/coded.cuh"

CINCH_CODED(minmax4, MinMax4)
