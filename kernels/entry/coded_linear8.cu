#include "entry/coded.cuh"

CINCH_CODED(linear8, Linear8)
