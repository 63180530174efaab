#include "entry/coded.cuh"

CINCH_CODED(dynamic8, Dynamic8Tabled)
