// The schedule kernels of calls that neither reduce nor encode. They move bytes only, so one kernel
// for each protocol serves all element types.
#include "entry/launch.cuh"
#include "prims/ll.cuh"
#include "prims/ll128.cuh"
#include "prims/move.cuh"

CINCH_INTERPRETER(move, cinch::MoveSimple)
CINCH_INTERPRETER(move_ll, cinch::RawLL<cinch::U8, false>)
CINCH_INTERPRETER(move_ll128, cinch::RawLL128<cinch::U8, false>)
