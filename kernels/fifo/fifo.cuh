// The slot FIFOs of one lane, as one block drives them.
//
// Thread p of the first warp of waiters owns the receiving end from rank p, thread p of the second
// the sending end to rank p: it alone waits for that connection, and leaves the place of the slot
// in shared memory for the movers. Thread p of the publishers publishes what was sent to rank p and
// gives back what was received from it. Each counts the messages for itself.
//
//   SIMPLE  wait for `tail`, read, move `head`       wait for `head`, write, move `tail`
//   LL*     read until the flags match, move `head`  wait for `head`, write with flags
//
// SYNC POINT slot.tail: store_release by the sender's publisher, after a barrier behind which the
//   movers have written the payload; load_acquire by the receiver's waiter, before a barrier behind
//   which its movers read it.
// SYNC POINT slot.head: relaxed. The values that were read have been used before the barrier, so
//   the reads are done; a peer that sees the credit writes later.
#pragma once

#include "abi.h"
#include "exec/group.cuh"
#include "fifo/wait.cuh"

namespace cinch {

static_assert(CINCH_MAX_RANKS <= WARP, "one thread of a warp owns one connection");

// Bits of a flag that count messages. The others are of what the call is: messages of a call that only
// some ranks make are never taken for those of the one that the others make next.
constexpr uint32_t NUMBER_BITS = 20;
constexpr uint32_t NUMBER_MASK = (1u << NUMBER_BITS) - 1;

// Flag of a message, in the protocols that have flags; `mark` has bits above those of the number. Slots
// start as zeros, which no flag is before numbers wrap: they start at 1.
__device__ __forceinline__ uint32_t message_flag(uint64_t number, uint32_t mark) {
  return (mark & ~NUMBER_MASK) | ((uint32_t)(number + 1) & NUMBER_MASK);
}

// Every so many messages senders fill the whole slot, so that no packet keeps a flag that is older than
// half the range of numbers.
constexpr uint32_t REFRESH_PERIOD = 1u << (NUMBER_BITS - 2);

__device__ __forceinline__ bool refreshes(uint32_t flag, uint32_t depth) {
  return (flag & (REFRESH_PERIOD - 1)) < 2 * depth;
}

// What movers learn about one batch.
struct Places {
  uint8_t *at[2 * WARP];    // slot of the message from rank p; to rank p, at 32 + p
  uint32_t flag[2 * WARP];  // its flag
  uint32_t refresh;         // some message fills its whole slot
};

__device__ __forceinline__ cinch_cursor *cursor_of(const cinch_comm_view &comm, uint32_t lane,
                                                   uint32_t peer) {
  return comm.cursors + ((uint64_t)comm.protocol * CINCH_MAX_LANES + lane) * CINCH_MAX_RANKS + peer;
}

// Slot 0 of a lane in a box.
__device__ __forceinline__ uint8_t *slots_of(const cinch_comm_view &comm, uint8_t *box,
                                             uint32_t lane) {
  return box + comm.fifo.slots + (uint64_t)lane * comm.fifo.depth * comm.fifo.stride;
}

__device__ __forceinline__ cinch_counters *counters_of(const cinch_comm_view &comm, uint8_t *box,
                                                       uint32_t lane) {
  return (cinch_counters *)(box + comm.fifo.counters) + lane;
}

// One end of a connection, as its waiter sees it.
template <int PROTOCOL>
class Waiter {
 public:
  __device__ __forceinline__ Waiter(const cinch_comm_view &comm, const cinch_work &work,
                                    uint32_t lane, Stop stop)
      : comm_(comm), work_(work), lane_(lane), stop_(stop) {
    sends_ = threadIdx.x - MOVERS >= WARP;
    peer_ = lane_id();
    owns_ = peer_ < comm.nranks && peer_ != comm.rank;
    if (!owns_) return;
    const cinch_cursor *cursor = cursor_of(comm, lane, peer_);
    count_ = sends_ ? cursor->sent : cursor->received;
    mark_ = (uint32_t)work.mark << 16;
    credit_ = 0;
    fresh_ = true;
    const cinch_counters *counters = counters_of(comm, comm.inbox[peer_], lane);
    counter_ = sends_ ? &counters->head : &counters->tail;
    slots_ = slots_of(comm, sends_ ? comm.outbox[peer_] : comm.inbox[peer_], lane);
  }

  // Waits until this end's message of the batch is there, or the slot that it fills is free.
  // `index` is the number of the batch's first step.
  __device__ __forceinline__ void wait(const cinch_step &batch, uint32_t index, uint32_t pass,
                                       Places &places) {
    const uint32_t mask = sends_ ? batch.send_mask : batch.recv_mask;
    if (!owns_ || (mask >> peer_ & 1) == 0) return;
    const Waiting waiting = {peer_, sends_, lane_, index, pass};
    if (sends_) {
      const uint64_t depth = comm_.fifo.depth;
      if (credit_ + depth <= count_) until(count_ + 1 - depth, waiting);
      if (PROTOCOL != CINCH_SIMPLE && refreshes(flag(), depth)) places.refresh = 1;
    } else if (PROTOCOL == CINCH_SIMPLE) {
      if (credit_ <= count_) until(count_ + 1, waiting);
      // SYNC POINT slot.tail
      load_acquire(counter_);
      if (fresh_) check(waiting);
    }
    fresh_ = false;
    const uint32_t end = sends_ ? WARP + peer_ : peer_;
    places.at[end] = slot();
    places.flag[end] = flag();
    count_ += 1;
  }

 private:
  __device__ __forceinline__ uint32_t flag() const { return message_flag(count_, mark_); }

  __device__ __forceinline__ uint8_t *slot() const {
    return slots_ + (uint32_t)(count_ % comm_.fifo.depth) * (uint64_t)comm_.fifo.stride;
  }

  // Polls until the counter has reached `target`.
  __device__ __forceinline__ void until(uint64_t target, const Waiting &waiting) {
    credit_ = load_relaxed(counter_);
    Patience patience;
    while ((int64_t)(credit_ - target) < 0) {
      bool timeout;
      if (patience.gone(comm_, stop_, timeout)) {
        if (timeout) {
          report(comm_, CINCH_TROUBLE_TIMEOUT, waiting, target, credit_, work_.signature, nullptr);
        }
        stop_.set();
        break;
      }
      credit_ = load_relaxed(counter_);
    }
  }

  // The first message of a connection carries the signature of its call.
  __device__ __forceinline__ void check(const Waiting &waiting) {
    const uint64_t *header = (const uint64_t *)(slot() - CINCH_LINE_BYTES);
    uint64_t theirs[CINCH_SIGNATURE_WORDS];
    bool same = true;
#pragma unroll
    for (int i = 0; i < CINCH_SIGNATURE_WORDS; ++i) theirs[i] = load_relaxed(header + i);
#pragma unroll
    for (int i = 0; i < CINCH_SIGNATURE_WORDS; ++i) same &= theirs[i] == work_.signature[i];
    if (!same && !stop_.is_set()) {
      report(comm_, CINCH_TROUBLE_MISMATCH, waiting, 0, 0, work_.signature, theirs);
      stop_.set();
    }
  }

  const cinch_comm_view &comm_;
  const cinch_work &work_;
  const uint32_t lane_;
  const Stop stop_;
  bool sends_;
  bool owns_;
  bool fresh_;
  uint32_t peer_;
  uint32_t mark_;
  uint64_t count_;   // messages so far
  uint64_t credit_;  // last value seen of `counter_`
  const uint64_t *counter_;
  uint8_t *slots_;
};

// Both ends of the connections with one peer, as their publisher sees them.
template <int PROTOCOL>
class Publisher {
 public:
  __device__ __forceinline__ Publisher(const cinch_comm_view &comm, const cinch_work &work,
                                       uint32_t lane)
      : comm_(comm), work_(work), lane_(lane), fresh_(true), took_(false) {
    peer_ = lane_id();
    owns_ = peer_ < comm.nranks && peer_ != comm.rank;
    if (!owns_) return;
    cursor_ = *cursor_of(comm, lane, peer_);
    counters_ = counters_of(comm, comm.outbox[peer_], lane);
  }

  // After a barrier behind which the batch's data is moved.
  __device__ __forceinline__ void publish(uint32_t recv_mask, uint32_t send_mask) {
    if (!owns_) return;
    if (recv_mask >> peer_ & 1) {
      took_ = true;
      cursor_.received += 1;
      store_relaxed(&counters_->head, cursor_.received);  // SYNC POINT slot.head
    }
    if (send_mask >> peer_ & 1) {
      if (PROTOCOL == CINCH_SIMPLE && fresh_) sign();
      fresh_ = false;
      cursor_.sent += 1;
      if (PROTOCOL == CINCH_SIMPLE) {
        store_release(&counters_->tail, cursor_.sent);  // SYNC POINT slot.tail
      }
    }
  }

  // Keeps the numbers for the next launch.
  // Another block may work on the other direction of the same connection: what has not moved here
  // is not touched.
  __device__ __forceinline__ void finish() {
    if (!owns_) return;
    cinch_cursor *cursor = cursor_of(comm_, lane_, peer_);
    if (took_) cursor->received = cursor_.received;
    if (!fresh_) cursor->sent = cursor_.sent;
  }

 private:
  __device__ __forceinline__ void sign() {
    const uint32_t place = (uint32_t)(cursor_.sent % comm_.fifo.depth);
    uint8_t *slot = slots_of(comm_, comm_.outbox[peer_], lane_) +
                    place * (uint64_t)comm_.fifo.stride;
    uint64_t *header = (uint64_t *)(slot - CINCH_LINE_BYTES);
#pragma unroll
    for (int i = 0; i < CINCH_SIGNATURE_WORDS; ++i) header[i] = work_.signature[i];
  }

  const cinch_comm_view &comm_;
  const cinch_work &work_;
  const uint32_t lane_;
  bool owns_;
  bool fresh_;  // nothing sent yet
  bool took_;   // something received
  uint32_t peer_;
  cinch_cursor cursor_;
  cinch_counters *counters_;
};

}  // namespace cinch
