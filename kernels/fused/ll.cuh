// Fused kernels over ll packets, for the smallest messages: no counters, and no barrier between
// blocks.
//
//   one round    all_reduce (one-shot), all_gather, reduce_scatter, all_to_all (direct)
//   two rounds   all_reduce (two-shot, direct): each rank owns the sum of one part
//
// Phases, for each packet of 8 bytes:
//   1. Load this rank's word, or the words of each peer's block or part.
//   2. Store it to the area of every peer, or of that peer, as an ll packet.
//   3. Poll the packets of all peers.
//   4. Add all in the order of ranks and store the sum; or store each to its sender's block.
//   5. Two-shot: send the sum to all peers, poll their sums, store each to its part.
// A single thread does this for a packet. Where each peer receives other words, all threads of a
// block share phase 2, synchronise, and each goes on with its own packets.
//
// Launch: any number of blocks that are resident at once, FUSED_THREADS threads. Each block takes
// an equal, contiguous share of the packets. A multiprocessor stores at a limited rate into peers'
// memory, so large messages need many blocks (benches/FIGURES.md, "Choices in the kernels").
// Bytes on the wire, out of each of N ranks, for S bytes of a message or block: 2 (N - 1) S;
// two-shot 4 (N - 1) S / N.
// Synchronisation: fused/exchange.cuh. A flag has 12 bits of the hash of the signature. The last
// packet of a half carries the whole hash: the last warp of block 0 sends it to each peer and waits
// for the peers' while other warps move the message. In place, a block of threads reads all words
// of a group of packets, synchronises, and then overwrites them.
//
// Each collective has a kernel of its own: at these sizes a call pays for every instruction cache
// line that it fetches (benches/FIGURES.md).
#pragma once

#include "abi.h"
#include "fifo/fifo.cuh"
#include "fused/exchange.cuh"
#include "prims/ll.cuh"

namespace cinch {

// The packets of one call; packet i carries word i.
template <Sends SENDS, bool BLOCKS>
struct PacketsCall : Exchange<SENDS, BLOCKS> {
  using Base = Exchange<SENDS, BLOCKS>;
  using Base::Base;
  using Base::area;
  using Base::args;
  using Base::comm;
  using Base::epoch;
  using Base::has;
  using Base::load;
  using Base::peer_at;
  using Base::offset_of;
  using Base::stop;
  using Base::store;
  using Base::words;

  __device__ __forceinline__ uint32_t flag() const {
    return message_flag(epoch, (uint32_t)(args.signature_hash >> 32));
  }

  // Returns the offset in a peer buffer of the packet with the hash of the signature.
  __device__ __forceinline__ uint64_t signature_at() const {
    return args.area + (epoch & 1) * args.half + args.half - 16;
  }
  // Returns the peer to which this thread sends the hash, and this rank if there is none.
  __device__ __forceinline__ uint32_t signed_peer() const {
    const uint32_t peer = threadIdx.x - (FUSED_THREADS - WARP);
    return blockIdx.x == 0 && peer < comm.nranks ? peer : comm.rank;
  }
  __device__ __forceinline__ void send_signature() const {
    const uint32_t peer = signed_peer();
    if (peer == comm.rank) return;
    store_ll(comm.outbox[peer] + signature_at(), 0, args.signature_hash, flag());
  }
  __device__ __forceinline__ void check_signature() const {
    const uint32_t peer = signed_peer();
    if (peer == comm.rank) return;
    load_signature(comm, stop, comm.inbox[peer] + signature_at(), flag(), args.signature_hash,
                   peer);
  }

  // Sends packet i to every peer.
  __device__ __forceinline__ void send(uint32_t i, uint64_t payload, uint32_t round = 0) const {
    for (uint32_t k = 1; k < comm.nranks; ++k) {
      store_ll(comm.outbox[peer_at(k)] + offset_of(round), i, payload, flag());
    }
  }

  // Sends packets `first` to `first` + n - 1 of every peer's block or part. All threads call it,
  // and send to as many peers at once as there are threads for. `changed(w)` returns the payload to
  // send for word w. Each thread loads AHEAD words at a time.
  template <uint32_t AHEAD, class Changed>
  __device__ __forceinline__ void scatter(uint32_t first, uint32_t n, Changed &&changed) const {
    const uint32_t rows = FUSED_THREADS / n, row = threadIdx.x / n;
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
        store_ll(comm.outbox[peer_at(k + j * rows)] + offset_of(0), i, payload[j], flag());
      }
    }
  }

  // Receives packet i of every rank, in groups and in the order of ranks. It calls `take(first,
  // group)` with the words of the ranks from `first` on; this rank's word in a group is undefined.
  // Returns false if a wait failed.
  template <class Take>
  __device__ __forceinline__ bool receive(uint32_t i, Take &&take, uint32_t round = 0) const {
    const auto wanted = [&](uint32_t) { return flag(); };
    const auto source = [&](uint32_t r) { return comm.inbox[r] + offset_of(round); };
    const auto name = [](uint32_t r) { return r; };
    const auto accepts = [](uint32_t, uint64_t) { return true; };
    for (uint32_t first = 0; first < comm.nranks; first += POLLED) {
      uint64_t payload[POLLED];
      if (!load_ll(comm, stop, first, comm.nranks, i, source, wanted, name, accepts, payload,
                   comm.rank)) {
        return false;
      }
      take(first, payload);
    }
    return true;
  }

  // Receives packet i of every rank and stores each in the block or part of its sender. Stores
  // `own` in this rank's block or part. Returns false if a wait failed.
  __device__ __forceinline__ bool keep(uint32_t i, uint64_t own, uint32_t round) const {
    return receive(i, [&](uint32_t first, const uint64_t (&group)[POLLED]) {
#pragma unroll
      for (uint32_t j = 0; j < POLLED; ++j) {
        const uint32_t r = first + j;
        if (r >= comm.nranks) break;
        if (has(r, i)) store(r, i, r == comm.rank ? own : group[j]);
      }
    }, round);
  }

  // Calls packet(i, word i of this rank) for each packet of this thread, until a call returns
  // false.
  template <class Packet>
  __device__ __forceinline__ void each(Packet &&packet) const {
    uint32_t i = begin() + threadIdx.x;
    if (i >= end()) return;
    uint64_t next = load(comm.rank, i);
    for (bool goes_on = true; goes_on;) {
      const uint32_t later = i + FUSED_THREADS;
      const uint64_t own = next;
      if (later < end()) next = load(comm.rank, later);
      goes_on = packet(i, own) && later < end();
      i = later;
    }
  }

  // Sends every peer's words, then calls packet(i, word i of this rank) for each packet of this
  // thread, until a call returns false.
  template <class Scatter, class Packet>
  __device__ __forceinline__ void each_after(Scatter &&scatter, Packet &&packet) const {
    bool goes_on = true;
    for (uint32_t first = begin(); first < end(); first += FUSED_THREADS) {
      const uint32_t n = min(end() - first, FUSED_THREADS), i = first + threadIdx.x;
      const bool is_one = threadIdx.x < n;
      const uint64_t own = is_one && has(comm.rank, i) ? load(comm.rank, i) : 0;
      scatter(first, n);
      // In place, `packet` below overwrites words that other threads had to load first.
      __syncthreads();
      if (is_one && goes_on) goes_on = packet(i, own);
    }
  }

  // Sends packets for the whole half once in REFRESH_PERIOD calls, but for its last line, of which
  // only the packet with the hash is used. Otherwise a packet that calls rarely use could keep its
  // flag until the sequence numbers wrap around. Calls of one round also use the last line of the
  // first of two rounds.
  __device__ __forceinline__ void refresh() const {
    if (!refreshes(flag(), 2)) return;
    const uint32_t threads = gridDim.x * FUSED_THREADS, packets = area / 16;
    constexpr uint32_t last_round = Base::PARTS;
#pragma unroll 1
    for (uint32_t i = words + blockIdx.x * FUSED_THREADS + threadIdx.x; i < packets; i += threads) {
      const bool is_last_line = i >= packets - CINCH_LINE_BYTES / 16;
      for (uint32_t round = 0; round <= last_round; ++round) {
        if (!(is_last_line && round == last_round)) send(i, 0, round);
      }
    }
  }

  // Return the bounds of this block's packets, which cover whole lines of the input and of the
  // areas.
  __device__ __forceinline__ uint32_t begin() const { return blockIdx.x * args.share; }
  __device__ __forceinline__ uint32_t end() const { return min(begin() + args.share, words); }
};

// The reductions: all_reduce in one or two rounds, and reduce_scatter.
template <class E, Sends SENDS = Sends::TO_ALL>
struct PacketsSum {
  static constexpr bool TWO_SHOT = SENDS == Sends::A_PART_EACH;
  using Packet = PacketElements<E>;
  using Acc = typename Packet::Acc;

  static __device__ __forceinline__ void exchange(const cinch_oneshot_args &args, uint64_t epoch,
                                                 uint32_t *stopped) {
    const PacketsCall<SENDS, SENDS == Sends::A_BLOCK_EACH> call(args, 8 / Packet::N, epoch, stopped);
    const Contributions<E, Packet> terms(args);
    call.send_signature();
    const auto receive = [&](uint32_t i) {
      return [&call, i](auto &&take) { return call.receive(i, take); };
    };
    if constexpr (SENDS == Sends::TO_ALL) {
      call.each([&](uint32_t i, uint64_t word) {
        const uint64_t own = terms.premultiplied(word);
        call.send(i, own);
        // This rank's term is rounded to the element type, as the peers receive it, so that all
        // ranks add equal terms.
        Acc mine[Packet::ROOM];
        Packet::unpack_any_nan(own, mine);
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
        if (!TWO_SHOT) {
          call.store(0, i, result);
          return true;
        }
        call.send(i, result, 1);
        return call.keep(i, result, 1);
      });
    }
    call.check_signature();
    call.refresh();
  }
};

// The exchanges without arithmetic: all_gather and all_to_all.
template <Sends SENDS = Sends::TO_ALL>
struct PacketsMove {
  static __device__ __forceinline__ void exchange(const cinch_oneshot_args &args, uint64_t epoch,
                                                 uint32_t *stopped) {
    const PacketsCall<SENDS, true> call(args, args.element_bytes, epoch, stopped);
    const auto keep = [&](uint32_t i, uint64_t own) { return call.keep(i, own, 0); };
    call.send_signature();
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
    call.check_signature();
    call.refresh();
  }
};

}  // namespace cinch
