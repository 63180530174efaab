#include "entry/coded.cuh"

CINCH_CODED(trunc, Trunc)
