// Small messages from everyone to everyone, no counters, no barrier between blocks: in one trip
// all-reduce (one-shot), and all-gather, reduce-scatter and all-to-all (direct); in two an all-reduce
// whose parts each have an owner (direct).
//
// Phases, per packet of 8 bytes: load the own contribution, or that to each peer's block; store it to
// every peer's area as an LL packet; poll the packets of all peers; add all in the order of ranks, or
// keep each in its sender's block; store. A thread does all of it; where peers get a block each, all
// threads of the block share the packets to all of them, and then each waits for its own ones.
// Launch: any number of blocks that are resident at once, ONESHOT_THREADS threads; each block takes an
// equal share of the packets, one behind the other. A multiprocessor stores no more than about 44 GB/s
// into peers' memory, so that a message should be spread over blocks long before their threads are short.
// Bytes out: (N - 1) * 2 * S, of a message or block of S bytes; in two trips (N - 1) / N * 4 * S.
//
// In place what a block of threads will write has been read by it before it writes any of it: packets
// of as many as it has threads at a time.
//
// What an all-reduce does not need is not in its kernel: at such sizes each line of instructions that
// has to be fetched is seen, and 8 B over 4 H200 took 3.4 us instead of 3.0 with all in one.
#pragma once

#include "abi.h"
#include "fused/exchange.cuh"
#include "prims/ll.cuh"

namespace cinch {

// What the packets of one call have in common: packet i carries word i.
template <Sends SENDS, bool BLOCKS>
struct OneshotCall : Exchange<SENDS, BLOCKS> {
  using Base = Exchange<SENDS, BLOCKS>;
  using Base::Base;
  using Base::area;
  using Base::args;
  using Base::comm;
  using Base::epoch;
  using Base::has;
  using Base::load;
  using Base::peer_at;
  using Base::place;
  using Base::stop;
  using Base::store;
  using Base::words;

  __device__ __forceinline__ uint32_t flag() const {
    return message_flag(epoch, (uint32_t)(args.mark >> 32));
  }

  // Packet i, the same to every peer, on trip 0 or 1.
  __device__ __forceinline__ void send(uint32_t i, uint64_t payload, uint32_t trip = 0) const {
    for (uint32_t k = 1; k < comm.nranks; ++k) {
      store_ll(comm.outbox[peer_at(k)] + place(trip), i, payload, flag());
    }
  }

  // Packets first to first + n - 1 of what each peer gets, by all threads: as many peers at once as there
  // are threads for. What is sent of word w is `changed(w)`, of which AHEAD are loaded at a time.
  template <uint32_t AHEAD, class Changed>
  __device__ __forceinline__ void scatter(uint32_t first, uint32_t n, Changed &&changed) const {
    const uint32_t rows = ONESHOT_THREADS / n, row = threadIdx.x / n;
    const uint32_t i = first + threadIdx.x - row * n;
    if (row >= rows) return;
#pragma unroll 1
    for (uint32_t k = 1 + row; k < comm.nranks; k += AHEAD * rows) {
      uint64_t payload[AHEAD];
#pragma unroll
      for (uint32_t j = 0; j < AHEAD; ++j) {
        payload[j] = 0;
        if (k + j * rows >= comm.nranks) break;
        const uint32_t peer = peer_at(k + j * rows);
        if (has(peer, i)) payload[j] = changed(load(peer, i));
      }
#pragma unroll
      for (uint32_t j = 0; j < AHEAD; ++j) {
        if (k + j * rows >= comm.nranks) break;
        store_ll(comm.outbox[peer_at(k + j * rows)] + place(0), i, payload[j], flag());
      }
    }
  }

  // Hands packet i of every rank on, in groups and in the order of ranks: `take(first, group)` gets those
  // of the ranks from `first` on. That of this one, which sends none to itself, means nothing. False if
  // the wait ended early.
  template <class Take>
  __device__ __forceinline__ bool receive(uint32_t i, Take &&take, uint32_t trip = 0) const {
    const auto wanted = [&](uint32_t) { return flag(); };
    const auto source = [&](uint32_t r) { return comm.inbox[r] + place(trip); };
    const auto name = [](uint32_t r) { return r; };
    for (uint32_t first = 0; first < comm.nranks; first += POLLED) {
      uint64_t payload[POLLED];
      if (!load_ll(comm, stop, first, comm.nranks, i, source, wanted, name, payload, comm.rank)) {
        return false;
      }
      take(first, payload);
    }
    return true;
  }

  // Stores packet i of every rank in its block or part, `own` in that of this one. False as above.
  __device__ __forceinline__ bool keep(uint32_t i, uint64_t own, uint32_t trip) const {
    return receive(i, [&](uint32_t first, const uint64_t (&group)[POLLED]) {
#pragma unroll
      for (uint32_t j = 0; j < POLLED; ++j) {
        const uint32_t r = first + j;
        if (r >= comm.nranks) break;
        if (has(r, i)) store(r, i, r == comm.rank ? own : group[j]);
      }
    }, trip);
  }

  // Calls packet(i, own) for this thread's packets, with the own word of each, until it says false.
  template <class Packet>
  __device__ __forceinline__ void each(Packet &&packet) const {
    uint32_t i = begin() + threadIdx.x;
    if (i >= end()) return;
    uint64_t next = load(comm.rank, i);
    for (bool goes_on = true; goes_on;) {
      const uint32_t later = i + ONESHOT_THREADS;
      const uint64_t own = next;
      if (later < end()) next = load(comm.rank, later);
      goes_on = packet(i, own) && later < end();
      i = later;
    }
  }

  // Sends what each peer gets, and hands packet i and the own word of it to packet(i, own) for this
  // thread's packets, until that says false.
  template <class Scatter, class Packet>
  __device__ __forceinline__ void each_after(Scatter &&scatter, Packet &&packet) const {
    bool goes_on = true;
    for (uint32_t first = begin(); first < end(); first += ONESHOT_THREADS) {
      const uint32_t n = min(end() - first, ONESHOT_THREADS), i = first + threadIdx.x;
      const bool is_one = threadIdx.x < n;
      const uint64_t own = is_one && has(comm.rank, i) ? load(comm.rank, i) : 0;
      scatter(first, n);
      // In place, what is about to be written has been read.
      __syncthreads();
      if (is_one && goes_on) goes_on = packet(i, own);
    }
  }

  // Every so many calls all packets that the areas have room for are sent anew, so that none keeps a flag
  // until flags come round.
  __device__ __forceinline__ void refresh() const {
    if (!refreshes(flag(), 2)) return;
    const uint32_t threads = gridDim.x * ONESHOT_THREADS;
#pragma unroll 1
    for (uint32_t i = words + blockIdx.x * ONESHOT_THREADS + threadIdx.x; i < area / 16; i += threads) {
      for (uint32_t trip = 0; trip <= (uint32_t)Base::PARTS; ++trip) send(i, 0, trip);
    }
  }

  // The packets of this block of threads: whole lines of the input and of the areas.
  __device__ __forceinline__ uint32_t begin() const { return blockIdx.x * args.share; }
  __device__ __forceinline__ uint32_t end() const { return min(begin() + args.share, words); }
};

// Sums: all ranks the same one, in one trip or two, or each that of its block.
template <class E, Sends SENDS = Sends::THE_SAME>
struct OneshotSum {
  static constexpr bool TWICE = SENDS == Sends::A_PART_EACH;
  using Packet = PacketElements<E>;
  using Acc = typename Packet::Acc;

  static __device__ __forceinline__ void exchange(const cinch_oneshot_args &args, uint64_t epoch,
                                                 uint32_t *stopped) {
    const OneshotCall<SENDS, SENDS == Sends::A_BLOCK_EACH> call(args, 8 / Packet::N, epoch, stopped);
    const Contributions<E, Packet> terms(args);
    const auto receive = [&](uint32_t i) {
      return [&call, i](auto &&take) { return call.receive(i, take); };
    };
    if constexpr (SENDS == Sends::THE_SAME) {
      call.each([&](uint32_t i, uint64_t word) {
        const uint64_t own = terms.premultiplied(word);
        call.send(i, own);
        // As the peers see it, rounded to the element type.
        Acc mine[Packet::ROOM];
        Packet::unpack_loosely(own, mine);
        uint64_t result;
        if (!terms.add(receive(i), mine, result)) return false;
        call.store(0, i, result);
        return true;
      });
    } else {
      const auto scatter = [&](uint32_t first, uint32_t n) {
        if (terms.premultiplies) {
          call.template scatter<1>(first, n, [&](uint64_t w) { return terms.premultiplied(w); });
        } else {
          call.template scatter<SENT>(first, n, [](uint64_t word) { return word; });
        }
      };
      call.each_after(scatter, [&](uint32_t i, uint64_t own) {
        Acc mine[Packet::ROOM];
        terms.unrounded(own, mine);
        uint64_t result;
        if (!terms.add(receive(i), mine, result)) return false;
        if (!TWICE) {
          call.store(0, i, result);
          return true;
        }
        call.send(i, result, 1);
        return call.keep(i, result, 1);
      });
    }
    call.refresh();
  }
};

// Blocks as they are, each to the place of its sender.
template <Sends SENDS = Sends::THE_SAME>
struct OneshotMove {
  static __device__ __forceinline__ void exchange(const cinch_oneshot_args &args, uint64_t epoch,
                                                 uint32_t *stopped) {
    const OneshotCall<SENDS, true> call(args, args.element_bytes, epoch, stopped);
    const auto keep = [&](uint32_t i, uint64_t own) { return call.keep(i, own, 0); };
    if constexpr (SENDS == Sends::A_BLOCK_EACH) {
      const auto scatter = [&](uint32_t first, uint32_t n) {
        call.template scatter<SENT>(first, n, [](uint64_t word) { return word; });
      };
      call.each_after(scatter, keep);
    } else {
      call.each([&](uint32_t i, uint64_t own) {
        call.send(i, own);
        return keep(i, own);
      });
    }
    call.refresh();
  }
};

}  // namespace cinch
