// The slot FIFOs of one lane, as one group of threads drives them.
//
// Thread p of the first warp owns the receiving end from rank p, thread 32 + p the sending end to
// rank p: it alone waits for, publishes and counts the messages of that connection, and leaves
// the place of the slot in shared memory for the others.
//
//   SIMPLE  wait for `tail`, read, move `head`       wait for `head`, write, move `tail`
//   LL*     read until the flags match, move `head`  wait for `head`, write with flags
//
// SYNC POINT slot.tail: store_release by the sender's thread, after a barrier behind which its
//   block has written the payload and the header; load_acquire by the receiver's thread, before a
//   barrier behind which its block reads them.
// SYNC POINT slot.head: relaxed. The values that were read have been used before the barrier, so
//   the reads are done; a peer that sees the credit writes later.
#pragma once

#include "abi.h"
#include "exec/group.cuh"
#include "fifo/wait.cuh"

namespace cinch {

static_assert(CINCH_MAX_RANKS <= WARP, "one thread of a warp owns one connection");

// Flag of a message, in the protocols that have flags. Zero, as slots start, is not one before
// flags wrap: numbers start at 1.
__device__ __forceinline__ uint32_t message_flag(uint64_t number) { return (uint32_t)(number + 1); }

// Every so many messages LL senders fill the whole slot, so that no packet keeps a flag that is
// older than half the range of flags.
constexpr uint32_t REFRESH_PERIOD = 1u << 30;

__device__ __forceinline__ bool refreshes(uint32_t flag, uint32_t depth) {
  return (flag & (REFRESH_PERIOD - 1)) < 2 * depth;
}

// One end of a connection, as its thread keeps it between batches: in shared memory, because all
// threads of the block would carry it in registers otherwise.
struct End {
  uint64_t count;                  // messages so far
  uint64_t credit;                 // last value seen of the counter that is waited for
  const cinch_counters *counters;  // that the peer moves
  cinch_counters *remote;          // that this end moves
  uint8_t *slots;
  uint32_t fresh;  // no message of this call yet
};

struct LaneState {
  End ends[2 * WARP];
  uint8_t *at[2 * WARP];    // slot of the batch's message from rank p; to rank p, at 32 + p
  uint32_t flag[2 * WARP];  // its flag
  uint32_t stopped[2];
  uint32_t refresh;  // some message of the batch fills its whole slot
};

template <int PROTOCOL>
class Lane {
 public:
  // All threads call it; a barrier follows before anything else.
  __device__ __forceinline__ Lane(const cinch_comm_view &comm, const cinch_work &work,
                                  uint32_t lane, LaneState &state)
      : comm_(comm), work_(work), lane_(lane), state_(state) {
    if (thread() < 2) state.stopped[thread()] = 0;
    if (thread() == 0) state.refresh = 0;
    if (!owns()) return;
    End &end = state.ends[thread()];
    const cinch_cursor *cursor = this->cursor();
    end.count = sends() ? cursor->sent : cursor->received;
    end.credit = 0;
    end.fresh = 1;
    end.counters = (const cinch_counters *)(comm.inbox[peer()] + comm.fifo.counters) + lane;
    end.remote = (cinch_counters *)(comm.outbox[peer()] + comm.fifo.counters) + lane;
    end.slots = (sends() ? comm.outbox[peer()] : comm.inbox[peer()]) + comm.fifo.slots +
                (uint64_t)lane * comm.fifo.depth * comm.fifo.stride;
  }

  __device__ __forceinline__ Stop stop() const { return {state_.stopped}; }

  // Waits until this thread's message of the batch is there, or the slot that it fills is free.
  // The caller's barrier shows the places to the block. `index` is the number of the batch's first
  // step.
  __device__ __forceinline__ void wait(const cinch_step &batch, uint32_t index, uint32_t pass) {
    if (!takes_part(batch)) return;
    End &end = state_.ends[thread()];
    const Waiting waiting = {peer(), sends(), lane_, index, pass};
    if (sends()) {
      const uint64_t depth = comm_.fifo.depth;
      if (end.credit + depth <= end.count) {
        end.credit = until(&end.counters->head, end.count + 1 - depth, waiting);
      }
      if (PROTOCOL != CINCH_SIMPLE && refreshes(message_flag(end.count), depth)) {
        state_.refresh = 1;
      }
    } else if (PROTOCOL == CINCH_SIMPLE) {
      if (end.credit <= end.count) {
        end.credit = until(&end.counters->tail, end.count + 1, waiting);
      }
      // SYNC POINT slot.tail
      load_acquire(&end.counters->tail);
      if (end.fresh) check(end, waiting);
    }
    state_.at[thread()] = slot(end);
    state_.flag[thread()] = message_flag(end.count);
  }

  // Publishes what was sent and gives back what was received, after a barrier.
  __device__ __forceinline__ void post(const cinch_step &batch) {
    if (thread() == 0) state_.refresh = 0;
    if (!takes_part(batch)) return;
    End &end = state_.ends[thread()];
    if (PROTOCOL == CINCH_SIMPLE && sends() && end.fresh) sign(end);
    end.fresh = 0;
    end.count += 1;
    if (!sends()) {
      store_relaxed(&end.remote->head, end.count);  // SYNC POINT slot.head
    } else if (PROTOCOL == CINCH_SIMPLE) {
      store_release(&end.remote->tail, end.count);  // SYNC POINT slot.tail
    }
  }

  // Says whose data did not come, after movers have polled for it in vain.
  __device__ __forceinline__ void report_missing(uint32_t index, uint32_t pass) {
    const uint32_t missing = stop().missing();
    if (thread() != 0 || missing == 0) return;
    const uint64_t number = state_.ends[missing - 1].count + 1;
    const Waiting waiting = {missing - 1, 0, lane_, index, pass};
    report(comm_, CINCH_TROUBLE_TIMEOUT, waiting, number, number - 1, work_.signature, nullptr);
  }

  // Keeps the numbers for the next launch.
  __device__ __forceinline__ void finish() {
    if (!owns()) return;
    cinch_cursor *cursor = this->cursor();
    (sends() ? cursor->sent : cursor->received) = state_.ends[thread()].count;
  }

 private:
  static __device__ __forceinline__ uint32_t peer() { return lane_id(); }
  static __device__ __forceinline__ bool sends() { return thread() >= WARP; }

  __device__ __forceinline__ bool owns() const {
    return thread() < 2 * WARP && peer() < comm_.nranks && peer() != comm_.rank;
  }

  static __device__ __forceinline__ bool takes_part(const cinch_step &batch) {
    const uint32_t mask = sends() ? batch.send_mask : batch.recv_mask;
    return thread() < 2 * WARP && (mask >> peer() & 1) != 0;
  }

  __device__ __forceinline__ cinch_cursor *cursor() const {
    return comm_.cursors + ((uint64_t)PROTOCOL * CINCH_MAX_LANES + lane_) * CINCH_MAX_RANKS +
           peer();
  }

  __device__ __forceinline__ uint8_t *slot(const End &end) const {
    const uint32_t place = (uint32_t)(end.count % comm_.fifo.depth);
    return end.slots + place * (uint64_t)comm_.fifo.stride;
  }

  // Polls until the counter has reached `target`; returns what it was then.
  __device__ __noinline__ uint64_t until(const uint64_t *counter, uint64_t target,
                                         const Waiting &waiting) {
    uint64_t seen = load_relaxed(counter);
    Patience patience;
    while ((int64_t)(seen - target) < 0) {
      bool timeout;
      if (patience.gone(comm_, timeout)) {
        if (timeout) {
          report(comm_, CINCH_TROUBLE_TIMEOUT, waiting, target, seen, work_.signature, nullptr);
        }
        stop().set();
        break;
      }
      seen = load_relaxed(counter);
    }
    return seen;
  }

  // The header of a message: the signature of its call, in the first one of a connection.
  __device__ __forceinline__ void sign(const End &end) {
    uint64_t *header = (uint64_t *)(slot(end) - CINCH_LINE_BYTES);
    for (int i = 0; i < CINCH_SIGNATURE_WORDS; ++i) header[i] = work_.signature[i];
  }

  __device__ __noinline__ void check(const End &end, const Waiting &waiting) {
    const uint64_t *header = (const uint64_t *)(slot(end) - CINCH_LINE_BYTES);
    uint64_t theirs[CINCH_SIGNATURE_WORDS];
    bool same = true;
#pragma unroll
    for (int i = 0; i < CINCH_SIGNATURE_WORDS; ++i) theirs[i] = load_relaxed(header + i);
#pragma unroll
    for (int i = 0; i < CINCH_SIGNATURE_WORDS; ++i) same &= theirs[i] == work_.signature[i];
    if (!same && !stop().is_set()) {
      report(comm_, CINCH_TROUBLE_MISMATCH, waiting, 0, 0, work_.signature, theirs);
      stop().set();
    }
  }

  const cinch_comm_view &comm_;
  const cinch_work &work_;
  uint32_t lane_;
  LaneState &state_;
};

}  // namespace cinch
