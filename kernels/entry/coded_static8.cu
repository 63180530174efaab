#include "entry/coded.cuh"

CINCH_CODED(static8, Static8)
