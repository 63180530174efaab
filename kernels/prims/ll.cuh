// Steps in protocol ll: packets of 16 bytes, which hold 8 bytes of payload and the same 4-byte flag
// twice.
//
//   byte 0        4        8        12       16
//        | word 0 | flag   | word 1 | flag   |
//
// Every transport delivers each 8-byte half of a packet whole, so a packet is complete when both
// flags match. The receiver needs no counter and no fence, and a message takes one network latency.
// Half of the bytes on the wire are flags.
//
// A packet in the header of the slot carries the hash of the call's signature, which the 12 bits of
// a flag do not hold. The lane of packet 0 sends it and waits for it.
#pragma once

#include "abi.h"
#include "prims/flagged.cuh"

namespace cinch {

__device__ __forceinline__ void store_ll(uint8_t *slot, uint32_t i, uint64_t payload,
                                         uint32_t flag) {
  store_packet(slot + 16 * (uint64_t)i,
               make_uint4((uint32_t)payload, flag, (uint32_t)(payload >> 32), flag));
}

// Waits for the packet at `at` with this flag and the hash of this call's signature: a message of
// another call never passes for one of this call. Returns false if the wait failed. Few threads of
// a launch call it, so it is not inlined.
static __device__ __noinline__ bool load_signature(const cinch_comm_view &comm, Stop stop,
                                                   const uint8_t *at, uint32_t flag,
                                                   uint64_t hash, uint32_t sender) {
  WaitLimit limit;
  while (true) {
    const uint4 packet = load_packet(at);
    if (packet.y == flag && packet.w == flag && packet.x == (uint32_t)hash &&
        packet.z == (uint32_t)(hash >> 32)) {
      return true;
    }
    bool timeout;
    if (limit.is_over(comm, stop, timeout)) {
      if (timeout) stop.missing(sender);
      stop.set();
      return false;
    }
  }
}

// The N elements in the 8 bytes of payload of a packet. E converts 16 bytes at a time, so arrays
// have room for 2 N elements.
template <class E>
struct PacketElements {
  using Word = uint64_t;
  using Acc = typename E::Acc;
  static constexpr int N = 8 / sizeof(typename E::Storage);
  static constexpr int ROOM = 2 * N;

  static __device__ __forceinline__ void unpack(uint64_t payload, Acc (&into)[2 * N]) {
    E::unpack(make_uint4((uint32_t)payload, (uint32_t)(payload >> 32), 0, 0), into);
  }
  static __device__ __forceinline__ void unpack_any_nan(uint64_t payload, Acc (&into)[2 * N]) {
    E::unpack_any_nan(make_uint4((uint32_t)payload, (uint32_t)(payload >> 32), 0, 0), into);
  }

  // Packs the first N elements; it overwrites the others.
  static __device__ __forceinline__ uint64_t pack(Acc (&from)[2 * N]) {
#pragma unroll
    for (int k = N; k < 2 * N; ++k) from[k] = from[0];
    const uint4 v = E::pack(from);
    return v.x | (uint64_t)v.y << 32;
  }
};

// Polls for packet `i` of up to POLLED sources, `first` and following but below `count`, until all
// are complete. Source r lies at `source(r)`, carries `flag(r)` and a payload for which
// `accepts(r, payload)` is true, and is sent by rank `name(r)`. Source `except` is skipped. Returns
// false if the wait failed.
template <class Source, class Flag, class Name, class Accepts>
__device__ __forceinline__ bool load_ll(const cinch_comm_view &comm, Stop stop, uint32_t first,
                                        uint32_t count, uint32_t i, Source source, Flag flag,
                                        Name name, Accepts accepts, uint64_t (&payload)[POLLED],
                                        uint32_t except = 0xffffffffu) {
  WaitLimit limit;
  uint32_t missing = (1u << min(count - first, POLLED)) - 1;
  if (except - first < POLLED) missing &= ~(1u << (except - first));
  while (missing != 0) {
    uint4 packet[POLLED];
#pragma unroll
    for (uint32_t j = 0; j < POLLED; ++j) {
      if (missing >> j & 1) packet[j] = load_packet(source(first + j) + 16 * (uint64_t)i);
    }
#pragma unroll
    for (uint32_t j = 0; j < POLLED; ++j) {
      if (missing >> j & 1) {
        const uint32_t wanted = flag(first + j);
        if (packet[j].y == wanted && packet[j].w == wanted) {
          payload[j] = packet[j].x | (uint64_t)packet[j].z << 32;
          if (accepts(first + j, payload[j])) missing &= ~(1u << j);
        }
      }
    }
    if (missing == 0) break;
    bool timeout;
    if (limit.is_over(comm, stop, timeout)) {
      if (timeout) stop.missing(name(first + __ffs(missing) - 1));
      stop.set();
      return false;
    }
  }
  return true;
}

// Moves elements without a codec in protocol ll, for the schedule interpreter. A tile is one packet
// for each lane of a warp.
template <class E, bool REDUCES>
class RawLL : public FlaggedMover<E, PacketElements<E>, REDUCES> {
  using Base = FlaggedMover<E, PacketElements<E>, REDUCES>;
  using typename Base::Acc;
  using Base::add;
  using Base::comm_;
  using Base::stop_;
  using Base::work_;

 public:
  static constexpr int protocol = CINCH_LL;
  using Base::element_bytes;

  __device__ __forceinline__ RawLL(const cinch_work &work, const cinch_comm_view &comm, Stop stop)
      : Base(work, comm, stop) {}

  __device__ __forceinline__ uint32_t tile_elements() const { return 8 * WARP / element_bytes(); }

  __device__ __forceinline__ void tiles(const Job &job, uint32_t first, uint32_t last) const {
#pragma unroll 1
    for (uint32_t t = first; t < last; ++t) tile(job, t);
  }

 private:
  __device__ __forceinline__ void tile(const Job &job, uint32_t tile) const {
    const uint32_t i = tile * WARP + lane_id();
    const uint32_t bytes = job.elements * element_bytes();
    if (8 * i >= bytes) return fill(job, i);
    step(job, i, bytes);
  }

  // Sends an empty packet behind the payload, if the message rewrites its whole slot.
  __device__ __forceinline__ void fill(const Job &job, uint32_t i) const {
    if (!job.refresh() || 8 * i >= comm_.fifo.slot_bytes) return;
    for (uint32_t t = 0; t < job.nsend; ++t) store_ll(job.target(t), i, 0, job.target_flag(t));
  }

  __device__ __forceinline__ void step(const Job &job, uint32_t i, uint32_t bytes) const {
    const bool aligned = job.aligned;
    const uint32_t size = element_bytes();
    const Arithmetic does(work_, job, REDUCES);
    const bool reads = job.reads();
    // The lane of packet 0 also polls the headers, together with the packets: a wait for them
    // afterwards would take another load.
    const uint32_t nrecv = job.nrecv, sources = i == 0 ? 2 * nrecv : nrecv;
    const auto sender = [&](uint32_t r) { return r < nrecv ? r : r - nrecv; };
    const auto source = [&](uint32_t r) { return job.source(sender(r)) - (r < nrecv ? 0 : 16); };
    const auto flag = [&](uint32_t r) { return job.source_flag(sender(r)); };
    const auto name = [&](uint32_t r) { return (uint32_t)job.sender(sender(r)); };
    const auto accepts = [&](uint32_t r, uint64_t payload) {
      return r < nrecv || payload == work_.signature_hash;
    };
    uint64_t own = 0;
    if (reads) own = load_word(job.input, i, bytes, size, aligned);
    uint64_t result = own;
    Acc sum[Base::ROOM];
    bool started = false;
    if (does.computes && reads && (job.nrecv == 0 || job.own_after == 0)) {
      add(sum, started, own, does.own);
    }
    for (uint32_t first = 0; first < sources; first += POLLED) {
      uint64_t payload[POLLED];
      if (!load_ll(comm_, stop_, first, sources, i, source, flag, name, accepts, payload)) return;
#pragma unroll
      for (uint32_t j = 0; j < POLLED; ++j) {
        if (first + j >= nrecv) break;
        if (!does.computes) {
          result = payload[j];
          continue;
        }
        add(sum, started, payload[j], CINCH_OWN_ABSENT);
        if (reads && job.own_after == first + j + 1) add(sum, started, own, does.own);
      }
    }
    if (does.computes) {
      if (job.op == CINCH_REDUCE) {
        add(sum, started, load_word(job.output, i, bytes, size, aligned), CINCH_OWN_ABSENT);
      }
      result = this->finish(sum, does.divides);
    }
    for (uint32_t t = 0; t < job.nsend; ++t) {
      store_ll(job.target(t), i, result, job.target_flag(t));
      if (i == 0) store_ll(job.target(t) - 16, 0, work_.signature_hash, job.target_flag(t));
    }
    if (job.writes()) store_word(job.output, i, bytes, size, aligned, result);
  }
};

}  // namespace cinch
