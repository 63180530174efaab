// Waiting without hanging: every wait watches the abort word and a deadline.
#pragma once

#include "abi.h"
#include "ptx/memory.cuh"

namespace cinch {

// Polls between two looks at the clock, and nanoseconds between two looks at the abort word: it
// lies in host memory, and a look costs a trip over PCIe.
constexpr uint32_t POLLS_PER_CLOCK = 256;
constexpr uint64_t ABORT_PERIOD = 20000;

// Sources whose packets or lines are polled together.
constexpr uint32_t POLLED = 8;

// Set by threads whose wait ends early; the block looks at it after the next barrier. The second
// word is 1 + the number of a source whose data did not come in time.
struct Stop {
  volatile uint32_t *words;
  __device__ __forceinline__ bool is_set() const { return words[0] != 0; }
  __device__ __forceinline__ void set() const { words[0] = 1; }
  __device__ __forceinline__ void missing(uint32_t source) const { words[1] = 1 + source; }
  // The number of that source, plus 1; 0 if there is none.
  __device__ __forceinline__ uint32_t missing() const { return words[1]; }
};

// What a wait is for, for the report.
struct Waiting {
  uint32_t peer;
  uint32_t sends;
  uint32_t lane;
  uint32_t step;
  uint32_t pass;
};

// Fills the report if nobody has yet. The host reads it after `state` is 2.
static __device__ __noinline__ void report(const cinch_comm_view &comm, uint32_t kind,
                                           const Waiting &waiting, uint64_t expected,
                                           uint64_t seen, const uint64_t *mine,
                                           const uint64_t *theirs) {
  cinch_trouble *trouble = &comm.control->trouble;
  if (atomicCAS_system(&trouble->state, 0u, 1u) != 0) return;
  trouble->kind = kind;
  trouble->peer = waiting.peer;
  trouble->sends = waiting.sends;
  trouble->lane = waiting.lane;
  trouble->step = waiting.step;
  trouble->pass = waiting.pass;
  trouble->protocol = comm.protocol;
  trouble->expected = expected;
  trouble->seen = seen;
  for (int i = 0; i < CINCH_SIGNATURE_WORDS; ++i) {
    trouble->mine[i] = mine ? mine[i] : 0;
    trouble->theirs[i] = theirs ? theirs[i] : 0;
  }
  // SYNC POINT trouble: publishes the report to the watchdog, which acquires `state`.
  __threadfence_system();
  *(volatile uint32_t *)&trouble->state = 2;
}

// The patience of one wait. `expired` is asked after each fruitless poll.
class Patience {
 public:
  __device__ __forceinline__ Patience() : polls_(0), since_(0), looked_(0) {}

  // True if the wait must end: another thread has given up, the communicator was aborted, or
  // time is up (then the caller reports).
  __device__ __forceinline__ bool gone(const cinch_comm_view &comm, Stop stop, bool &timeout) {
    timeout = false;
    if (++polls_ % POLLS_PER_CLOCK != 0) return false;
    return stop.is_set() || slow(comm, timeout);
  }

 private:
  __device__ __noinline__ bool slow(const cinch_comm_view &comm, bool &timeout) {
    uint64_t now = nanoseconds();
    if (since_ == 0) since_ = looked_ = now;
    if (now - looked_ < ABORT_PERIOD) return false;
    looked_ = now;
    if (load_relaxed(&comm.control->abort) != 0) return true;
    timeout = now - since_ > comm.timeout_ns;
    return timeout;
  }

  uint32_t polls_;
  uint64_t since_;
  uint64_t looked_;
};

}  // namespace cinch
