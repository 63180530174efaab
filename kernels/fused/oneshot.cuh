// Small messages from everyone to everyone in one trip, no counters, no barrier between blocks:
// all-reduce (one-shot), and all-gather, reduce-scatter and all-to-all (direct).
//
// Phases, per packet of 8 bytes and thread: load the own contribution, or that to each peer's block;
// store it to every peer's area as an LL packet; poll the packets of all peers; add all in the order
// of ranks, or keep each in its sender's block; store.
// Launch: any number of blocks, ONESHOT_THREADS threads; a thread takes packets at the distance of
// the grid.
// Bytes out: (N - 1) * 2 * S, of a message or block of S bytes.
//
// Two halves of the area are used in turn. A peer writes half h again two calls later; it has
// finished the call in between by then, for which it needed this rank's packets of that call, and
// those were sent after this rank had finished reading h: every call makes every rank wait for
// every other. The number of the call lives in device memory, so that a graph may replay it.
//
// In place a thread reads the words of all blocks that it will write before it writes one.
//
// What an all-reduce does not need is not in its kernel: at such sizes each line of instructions that
// has to be fetched is seen, and 8 B over 4 H200 took 3.4 us instead of 3.0 with all in one.
#pragma once

#include "abi.h"
#include "prims/ll.cuh"

namespace cinch {

constexpr uint32_t ONESHOT_THREADS = CINCH_ONESHOT_THREADS;

// Who gets what of the input.
enum class Sends { THE_SAME, A_BLOCK_EACH };

// What the packets of one call have in common. BLOCKS: the input or the output has one for each rank.
template <Sends SENDS, bool BLOCKS>
struct OneshotCall {
  __device__ __forceinline__ OneshotCall(const cinch_oneshot_args &args, uint32_t element_bytes,
                                         uint64_t epoch, uint32_t *stopped)
      : comm(args.comm),
        input((const uint8_t *)args.input),
        output((uint8_t *)args.output),
        bytes((uint32_t)args.count * element_bytes),
        size(element_bytes),
        pieces((bytes + 7) / 8),
        half(args.area + (epoch & 1) * args.half),
        flag(message_flag(epoch)),
        cover(refreshes(flag, 2) ? (uint32_t)(args.half / 16) : pieces),
        // Blocks one behind the other are aligned as the first one is if they are whole words.
        aligned((args.flags & CINCH_ALIGNED) != 0 && (!BLOCKS || bytes % 8 == 0)),
        stop{stopped} {}

  // Word i of what goes to `peer`.
  __device__ __forceinline__ uint64_t load(uint32_t peer, uint32_t i) const {
    const uint64_t block = SENDS == Sends::A_BLOCK_EACH ? (uint64_t)peer * bytes : 0;
    return load_word(input + block, i, bytes, size, aligned);
  }

  // Word i of the output's block of `rank`, where it has blocks; else of 0.
  __device__ __forceinline__ void store(uint32_t rank, uint32_t i, uint64_t value) const {
    store_word(output + (uint64_t)rank * bytes, i, bytes, size, aligned, value);
  }

  // Each rank starts with another peer, so that no port gets all packets at once.
  __device__ __forceinline__ uint32_t peer_at(uint32_t k) const {
    const uint32_t peer = comm.rank + k;
    return peer >= comm.nranks ? peer - comm.nranks : peer;
  }

  // Packet i to every peer: `own`, or where each gets a block `word(peer)`; nothing of a packet behind
  // the message.
  template <class Word>
  __device__ __forceinline__ void send(uint32_t i, uint64_t own, Word &&word) const {
    if constexpr (SENDS == Sends::THE_SAME) {
      for (uint32_t k = 1; k < comm.nranks; ++k) {
        store_ll(comm.outbox[peer_at(k)] + half, i, own, flag);
      }
    } else {
#pragma unroll 1
      for (uint32_t first = 1; first < comm.nranks; first += POLLED) {
        uint64_t payload[POLLED];
#pragma unroll
        for (uint32_t j = 0; j < POLLED; ++j) {
          payload[j] = 0;
          if (first + j < comm.nranks && i < pieces) payload[j] = word(peer_at(first + j));
        }
#pragma unroll
        for (uint32_t j = 0; j < POLLED; ++j) {
          if (first + j >= comm.nranks) break;
          store_ll(comm.outbox[peer_at(first + j)] + half, i, payload[j], flag);
        }
      }
    }
  }

  // Hands packet i of every rank to `take(rank, payload)` in the order of ranks; that of this one, which
  // sends none to itself, means nothing. False if the wait ended early.
  template <class Take>
  __device__ __forceinline__ bool receive(uint32_t i, Take &&take) const {
    const auto wanted = [&](uint32_t) { return flag; };
    const auto source = [&](uint32_t r) { return comm.inbox[r] + half; };
    const auto name = [](uint32_t r) { return r; };
    for (uint32_t first = 0; first < comm.nranks; first += POLLED) {
      uint64_t payload[POLLED];
      if (!load_ll(comm, stop, first, comm.nranks, i, source, wanted, name, payload, comm.rank)) {
        return false;
      }
#pragma unroll
      for (uint32_t j = 0; j < POLLED; ++j) {
        if (first + j >= comm.nranks) break;
        take(first + j, payload[j]);
      }
    }
    return true;
  }

  // Calls packet(i) for this thread's packets.
  template <class Packet>
  __device__ __forceinline__ void each(Packet &&packet) const {
    for (uint32_t i = blockIdx.x * ONESHOT_THREADS + threadIdx.x; i < cover;
         i += gridDim.x * ONESHOT_THREADS) {
      if (!packet(i)) return;
    }
  }

  const cinch_comm_view &comm;
  const uint8_t *input;
  uint8_t *output;
  uint32_t bytes;   // of the message, or of a block
  uint32_t size;    // of an element
  uint32_t pieces;  // packets of the message
  uint64_t half;
  uint32_t flag;
  uint32_t cover;  // packets that are sent
  bool aligned;
  Stop stop;
};

// Sums: all ranks the same one, or each that of its block.
template <class E, Sends SENDS = Sends::THE_SAME>
struct OneshotSum {
  static constexpr bool SCATTERS = SENDS == Sends::A_BLOCK_EACH;
  using Packet = PacketElements<E>;
  using Acc = typename Packet::Acc;
  static constexpr int N = Packet::N;

  static __device__ __forceinline__ void packets(const cinch_oneshot_args &args, uint64_t epoch,
                                                 uint32_t *stopped) {
    const OneshotCall<SENDS, SCATTERS> call(args, 8 / N, epoch, stopped);
    const uint32_t own_rank = args.comm.rank;
    const bool premultiplies = (args.flags & CINCH_PREMULTIPLY) != 0;
    const uint64_t factor =
        args.flags & CINCH_FACTOR_AT ? E::factor_at(args.factor) : args.factor;
    const auto contribution = [&](uint64_t word, Acc (&x)[2 * N]) {
      Packet::unpack(word, x);
      if (!premultiplies) return word;
#pragma unroll
      for (int k = 0; k < N; ++k) x[k] = E::premultiply(x[k], factor);
      return Packet::pack(x);
    };
    call.each([&](uint32_t i) {
      uint64_t own = 0;
      Acc mine[2 * N];
      if (i < call.pieces) {
        own = contribution(call.load(own_rank, i), mine);
        // As the peers see it, rounded to the element type, where they have the same sum.
        if (premultiplies && !SCATTERS) Packet::unpack(own, mine);
      }
      call.send(i, own, [&](uint32_t peer) {
        Acc unused[2 * N];
        return contribution(call.load(peer, i), unused);
      });
      if (i >= call.pieces) return true;
      Acc sum[2 * N];
      const bool complete = call.receive(i, [&](uint32_t r, uint64_t payload) {
        Acc term[2 * N];
        if (r == own_rank) {
#pragma unroll
          for (int k = 0; k < N; ++k) term[k] = mine[k];
        } else {
          Packet::unpack(payload, term);
        }
#pragma unroll
        for (int k = 0; k < N; ++k) {
          sum[k] = r == 0 ? term[k] : E::combine(sum[k], term[k], args.combine);
        }
      });
      if (!complete) return false;
      if (args.flags & CINCH_AVERAGE) {
#pragma unroll
        for (int k = 0; k < N; ++k) sum[k] = E::divide(sum[k], args.comm.nranks);
      }
      call.store(0, i, Packet::pack(sum));
      return true;
    });
  }
};

// Blocks as they are, each to the place of its sender.
template <Sends SENDS = Sends::THE_SAME>
struct OneshotMove {
  static __device__ __forceinline__ void packets(const cinch_oneshot_args &args, uint64_t epoch,
                                                 uint32_t *stopped) {
    const OneshotCall<SENDS, true> call(args, args.element_bytes, epoch, stopped);
    const uint32_t own_rank = args.comm.rank;
    call.each([&](uint32_t i) {
      const uint64_t own = i < call.pieces ? call.load(own_rank, i) : 0;
      call.send(i, own, [&](uint32_t peer) { return call.load(peer, i); });
      return i >= call.pieces || call.receive(i, [&](uint32_t r, uint64_t payload) {
        call.store(r, i, r == own_rank ? own : payload);
      });
    });
  }
};

template <class Does>
__device__ __forceinline__ void oneshot(const cinch_oneshot_args &args) {
  __shared__ uint32_t stopped[2];
  if (threadIdx.x == 0) stopped[0] = stopped[1] = 0;
  const uint64_t epoch = args.epoch[0];
  __syncthreads();
  Does::packets(args, epoch, stopped);
  __syncthreads();
  // The last block moves on to the next call: all blocks have read the number by then.
  if (threadIdx.x == 0) {
    unsigned long long *done = (unsigned long long *)&args.epoch[1];
    if (atomicAdd(done, 1ull) == gridDim.x - 1) {
      args.epoch[1] = 0;
      args.epoch[0] = epoch + 1;
    }
    if (stopped[1] != 0) {
      const Waiting waiting = {stopped[1] - 1, 0, 0, 0, 0};
      report(args.comm, CINCH_TROUBLE_TIMEOUT, waiting, epoch + 1, epoch, args.signature, nullptr);
    }
  }
}

}  // namespace cinch
