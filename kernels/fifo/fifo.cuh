// The slot FIFOs of one channel, as one block drives them.
//
// Thread p of the first waiter warp owns the receiving end of the connection from peer p, thread p
// of the second warp the sending end to peer p. Only the owner polls its end; it leaves the address
// of the slot in shared memory for the movers. Thread p of the publishers publishes what the block
// sent to peer p and returns credit for what it received. Waiters and publishers count messages
// separately, and both start from the rank's cursors.
//
//              receiver                                  sender
//   simple     polls `tail`, reads, advances `head`      polls `head`, writes, advances `tail`
//   ll, ll128  polls the flags, reads, advances `head`   polls `head`, writes payload with flags
//
// SYNC POINT slot.tail: publishes the payload of a slot. The sender's publisher does store_release
//   after the barrier MOVED, which follows the movers' stores; the receiver's waiter does
//   load_acquire before the barrier READY, which precedes the movers' loads.
// SYNC POINT slot.head: returns credit for a slot by a relaxed store. The barrier MOVED precedes
//   it and follows the use of every loaded value. So the loads are complete before a sender sees
//   the credit and writes to the slot.
#pragma once

#include "channel/channel.cuh"
#include "fifo/wait.cuh"

namespace cinch {

static_assert(CINCH_MAX_PEERS <= WARP, "one thread of a warp owns one connection");

// Flags of ll and ll128: the low bits are the number of the message, the others bits of a hash of
// the call's signature. If only some ranks make a call, the hash keeps its messages from passing
// for messages of the next call of the others. The 12 bits of an ll flag end most such calls at
// their first packet; the whole hash follows in a packet of its own (load_signature).
constexpr uint32_t NUMBER_BITS = 20;
constexpr uint32_t NUMBER_MASK = (1u << NUMBER_BITS) - 1;

// Returns the flag of message `number`; `hash` has only bits above NUMBER_MASK. Numbers start at 1.
// Thus no flag equals the zeros of a fresh slot before the numbers wrap around.
__device__ __forceinline__ uint32_t message_flag(uint64_t number, uint32_t hash) {
  return (hash & ~NUMBER_MASK) | ((uint32_t)(number + 1) & NUMBER_MASK);
}

// A sender rewrites the whole slot once in this many messages. Otherwise a packet that only long
// messages use could keep a flag until the numbers wrap around, and the receiver would take it for
// new.
constexpr uint32_t REFRESH_PERIOD = 1u << (NUMBER_BITS - 2);

__device__ __forceinline__ bool refreshes(uint32_t flag, uint32_t depth) {
  return (flag & (REFRESH_PERIOD - 1)) < 2 * depth;
}

// Returns the message counts of the connection with a rank.
__device__ __forceinline__ cinch_cursor *cursor_with(const cinch_comm_view &comm, uint32_t channel,
                                                     uint32_t rank) {
  return comm.cursors +
         ((uint64_t)comm.protocol * CINCH_MAX_CHANNELS + channel) * comm.nranks + rank;
}

// Returns the message counts of the connection with a peer.
__device__ __forceinline__ cinch_cursor *cursor_of(const cinch_comm_view &comm, uint32_t channel,
                                                   uint32_t peer) {
  return cursor_with(comm, channel, comm.ranks[peer]);
}

// Returns whether the launch exchanges messages with a peer of this number.
__device__ __forceinline__ bool has_peer(const cinch_comm_view &comm, uint32_t peer) {
  return peer < comm.npeers && comm.ranks[peer] != comm.rank;
}

// Returns the address of the payload of slot 0 of a channel in a peer buffer.
__device__ __forceinline__ uint8_t *slots_of(const cinch_comm_view &comm, uint8_t *peer_buffer,
                                             uint32_t channel) {
  return peer_buffer + comm.fifo.slots + (uint64_t)channel * comm.fifo.depth * comm.fifo.stride;
}

__device__ __forceinline__ cinch_counters *counters_of(const cinch_comm_view &comm,
                                                       uint8_t *peer_buffer, uint32_t channel) {
  return (cinch_counters *)(peer_buffer + comm.fifo.counters) + channel;
}

// The receiving or sending end of a connection, which a thread of the waiters drives.
template <int PROTOCOL>
class Waiter {
 public:
  __device__ __forceinline__ Waiter(const cinch_comm_view &comm, const cinch_work &work,
                                    uint32_t channel, Stop stop)
      : comm_(comm), work_(work), channel_(channel), stop_(stop) {
    sends_ = threadIdx.x - MOVERS >= WARP;
    peer_ = lane_id();
    owns_ = has_peer(comm, peer_);
    if (!owns_) return;
    const cinch_cursor *cursor = cursor_of(comm, channel, peer_);
    count_ = sends_ ? cursor->sent : cursor->received;
    hash_ = (uint32_t)(work.signature_hash >> 32);
    credit_ = 0;
    is_first_ = true;
    const cinch_counters *counters = counters_of(comm, comm.inbox[peer_], channel);
    counter_ = sends_ ? &counters->head : &counters->tail;
    slots_ = slots_of(comm, sends_ ? comm.outbox[peer_] : comm.inbox[peer_], channel);
  }

  // Waits for the message of the batch at a receiving end, or for credit for the slot to fill at a
  // sending end. In ll and ll128 the movers poll the payload themselves. `index` is the index of
  // the batch's first step.
  __device__ __forceinline__ void wait(const cinch_step &batch, uint32_t index, uint32_t pass,
                                       BatchSlots &slots) {
    const uint32_t mask = sends_ ? batch.send_mask : batch.recv_mask;
    if (!owns_ || (mask >> peer_ & 1) == 0) return;
    const WaitInfo info = {peer_, sends_, channel_, index, pass};
    if (sends_) {
      const uint64_t depth = comm_.fifo.depth;
      if (credit_ + depth <= count_) poll_until(count_ + 1 - depth, info);
      if (PROTOCOL != CINCH_SIMPLE && refreshes(flag(), depth)) slots.refresh = 1;
    } else if (PROTOCOL == CINCH_SIMPLE) {
      if (credit_ <= count_) poll_until(count_ + 1, info);
      // SYNC POINT slot.tail: acquires the payload that the sender's publisher has released.
      load_acquire(counter_);
      if (is_first_) check_signature(info);
    }
    is_first_ = false;
    const uint32_t end = sends_ ? WARP + peer_ : peer_;
    slots.at[end] = slot();
    slots.flag[end] = flag();
    count_ += 1;
  }

 private:
  __device__ __forceinline__ uint32_t flag() const { return message_flag(count_, hash_); }

  __device__ __forceinline__ uint8_t *slot() const {
    return slots_ + (uint32_t)(count_ % comm_.fifo.depth) * (uint64_t)comm_.fifo.stride;
  }

  // Polls the counter of this end until it has reached `target`.
  __device__ __forceinline__ void poll_until(uint64_t target, const WaitInfo &info) {
    credit_ = load_relaxed(counter_);
    WaitLimit limit;
    while ((int64_t)(credit_ - target) < 0) {
      bool timeout;
      if (limit.is_over(comm_, stop_, timeout)) {
        if (timeout) {
          report(comm_, CINCH_TROUBLE_TIMEOUT, info, target, credit_, work_.signature, nullptr);
        }
        stop_.set();
        break;
      }
      credit_ = load_relaxed(counter_);
    }
  }

  // Compares the signature in the first message of a call with this rank's own.
  __device__ __forceinline__ void check_signature(const WaitInfo &info) {
    const uint64_t *header = (const uint64_t *)(slot() - CINCH_LINE_BYTES);
    uint64_t theirs[CINCH_SIGNATURE_WORDS];
    bool same = true;
#pragma unroll
    for (int i = 0; i < CINCH_SIGNATURE_WORDS; ++i) theirs[i] = load_relaxed(header + i);
#pragma unroll
    for (int i = 0; i < CINCH_SIGNATURE_WORDS; ++i) same &= theirs[i] == work_.signature[i];
    if (!same && !stop_.is_set()) {
      report(comm_, CINCH_TROUBLE_MISMATCH, info, 0, 0, work_.signature, theirs);
      stop_.set();
    }
  }

  const cinch_comm_view &comm_;
  const cinch_work &work_;
  const uint32_t channel_;
  const Stop stop_;
  bool sends_;
  bool owns_;
  bool is_first_;
  uint32_t peer_;
  uint32_t hash_;
  uint64_t count_;   // messages so far on this end
  uint64_t credit_;  // last value loaded from `counter_`
  const uint64_t *counter_;
  uint8_t *slots_;
};

// The connections to and from one peer. A thread of the publishers advances their counters.
template <int PROTOCOL>
class Publisher {
 public:
  __device__ __forceinline__ Publisher(const cinch_comm_view &comm, const cinch_work &work,
                                       uint32_t channel)
      : comm_(comm), work_(work), channel_(channel), is_first_(true), received_(false) {
    peer_ = lane_id();
    owns_ = has_peer(comm, peer_);
    if (!owns_) return;
    cursor_ = *cursor_of(comm, channel, peer_);
    counters_ = counters_of(comm, comm.outbox[peer_], channel);
  }

  // Returns credit for the message of the batch from the peer, and publishes the message of the
  // batch to the peer. The caller has passed the barrier MOVED of the batch.
  __device__ __forceinline__ void publish(uint32_t recv_mask, uint32_t send_mask) {
    if (!owns_) return;
    if (recv_mask >> peer_ & 1) {
      received_ = true;
      cursor_.received += 1;
      store_relaxed(&counters_->head, cursor_.received);  // SYNC POINT slot.head
    }
    if (send_mask >> peer_ & 1) {
      if (PROTOCOL == CINCH_SIMPLE && is_first_) write_signature();
      is_first_ = false;
      cursor_.sent += 1;
      if (PROTOCOL == CINCH_SIMPLE) {
        store_release(&counters_->tail, cursor_.sent);  // SYNC POINT slot.tail
      }
    }
  }

  // Stores the message counts in the rank's cursors, for the next launch. A count that this block
  // did not advance is left alone: another block may drive the other direction of the connection.
  __device__ __forceinline__ void finish() {
    if (!owns_) return;
    cinch_cursor *cursor = cursor_of(comm_, channel_, peer_);
    if (received_) cursor->received = cursor_.received;
    if (!is_first_) cursor->sent = cursor_.sent;
  }

 private:
  __device__ __forceinline__ void write_signature() {
    const uint32_t index = (uint32_t)(cursor_.sent % comm_.fifo.depth);
    uint8_t *slot = slots_of(comm_, comm_.outbox[peer_], channel_) +
                    index * (uint64_t)comm_.fifo.stride;
    uint64_t *header = (uint64_t *)(slot - CINCH_LINE_BYTES);
#pragma unroll
    for (int i = 0; i < CINCH_SIGNATURE_WORDS; ++i) header[i] = work_.signature[i];
  }

  const cinch_comm_view &comm_;
  const cinch_work &work_;
  const uint32_t channel_;
  bool owns_;
  bool is_first_;  // nothing sent yet
  bool received_;  // something received
  uint32_t peer_;
  cinch_cursor cursor_;
  cinch_counters *counters_;
};

}  // namespace cinch
