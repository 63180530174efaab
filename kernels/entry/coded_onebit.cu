#include "entry/coded.cuh"

CINCH_CODED(onebit, OneBit)
