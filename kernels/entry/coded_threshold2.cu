#include "entry/coded.cuh"

CINCH_CODED(threshold2, Threshold2)
