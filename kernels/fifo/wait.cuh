// Polling loops that cannot hang: each checks the abort word and a deadline.
#pragma once

#include "abi.h"
#include "ptx/memory.cuh"

namespace cinch {

// Number of polls between two reads of the clock.
constexpr uint32_t POLLS_PER_CLOCK = 256;
// Nanoseconds between two reads of the abort word, which lies in host memory: each read is a round
// trip over PCIe.
constexpr uint64_t ABORT_POLL_INTERVAL = 20000;

// Largest number of messages that one thread polls together.
constexpr uint32_t POLLED = 8;

// The stop flag of a block, in shared memory. A thread whose wait fails sets words[0], and the
// block reads it after its next barrier. words[1] is 1 + the peer whose data did not arrive in
// time.
struct Stop {
  volatile uint32_t *words;
  __device__ __forceinline__ bool is_set() const { return words[0] != 0; }
  __device__ __forceinline__ void set() const { words[0] = 1; }
  __device__ __forceinline__ void missing(uint32_t source) const { words[1] = 1 + source; }
  // Returns 1 + the peer whose data did not arrive in time; 0 if no data was missing.
  __device__ __forceinline__ uint32_t missing() const { return words[1]; }
};

// Identifies the connection and the step of a wait in the communicator's report of a failure.
struct WaitInfo {
  uint32_t peer;
  uint32_t sends;
  uint32_t channel;
  uint32_t step;
  uint32_t pass;
};

// Fills the communicator's report of a failure, unless an earlier failure has filled it. The host
// reads the report when its `state` is 2.
static __device__ __noinline__ void report(const cinch_comm_view &comm, uint32_t kind,
                                           const WaitInfo &wait, uint64_t expected, uint64_t seen,
                                           const uint64_t *mine, const uint64_t *theirs) {
  cinch_trouble *trouble = &comm.control->trouble;
  if (atomicCAS_system(&trouble->state, 0u, 1u) != 0) return;
  trouble->kind = kind;
  trouble->peer = comm.ranks[wait.peer];
  trouble->sends = wait.sends;
  trouble->channel = wait.channel;
  trouble->step = wait.step;
  trouble->pass = wait.pass;
  trouble->protocol = comm.protocol;
  trouble->expected = expected;
  trouble->seen = seen;
  for (int i = 0; i < CINCH_SIGNATURE_WORDS; ++i) {
    trouble->mine[i] = mine ? mine[i] : 0;
    trouble->theirs[i] = theirs ? theirs[i] : 0;
  }
  // SYNC POINT trouble: publishes the report to the host's watchdog, which acquires `state`.
  __threadfence_system();
  *(volatile uint32_t *)&trouble->state = 2;
}

// Limits one wait in time. A poll loop calls `is_over` after each poll that found nothing.
class WaitLimit {
 public:
  __device__ __forceinline__ WaitLimit() : polls_(0), began_(0), read_abort_(0) {}

  // Returns true if the wait must end: another thread of the block has stopped, the host aborted
  // the communicator, or the deadline passed. Only the last case sets `timeout`, and the caller
  // then reports it.
  __device__ __forceinline__ bool is_over(const cinch_comm_view &comm, Stop stop, bool &timeout) {
    timeout = false;
    if (++polls_ % POLLS_PER_CLOCK != 0) return false;
    return stop.is_set() || check_clock(comm, timeout);
  }

 private:
  __device__ __noinline__ bool check_clock(const cinch_comm_view &comm, bool &timeout) {
    uint64_t now = nanoseconds();
    if (began_ == 0) began_ = read_abort_ = now;
    if (now - read_abort_ < ABORT_POLL_INTERVAL) return false;
    read_abort_ = now;
    if (load_relaxed(&comm.control->abort) != 0) return true;
    timeout = now - began_ > comm.timeout_ns;
    return timeout;
  }

  uint32_t polls_;
  uint64_t began_;
  uint64_t read_abort_;
};

}  // namespace cinch
