#include "entry/oneshot_coded.cuh"

CINCH_ONESHOT_CODED(linear8, Linear8)
