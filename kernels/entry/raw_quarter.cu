#include "entry/raw.cuh"

CINCH_RAW(f8e4m3, F8E4M3)
CINCH_RAW(f8e5m2, F8E5M2)
