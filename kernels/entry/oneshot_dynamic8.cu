#include "entry/oneshot_coded.cuh"

CINCH_ONESHOT_CODED(dynamic8, Dynamic8Tabled)
