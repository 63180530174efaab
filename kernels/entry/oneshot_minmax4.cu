#include "entry/oneshot_coded.cuh"

CINCH_ONESHOT_CODED(minmax4, MinMax4)
