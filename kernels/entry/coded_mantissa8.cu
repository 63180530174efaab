#include "entry/coded.cuh"

CINCH_CODED(mantissa8, Mantissa8)
