#include "entry/coded.cuh"

CINCH_CODED(terngrad, TernGrad)
