#include "entry/coded.cuh"

CINCH_CODED(cast16, Cast16)
