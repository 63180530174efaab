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
// Two halves of the area are used in turn. A peer writes half h again two calls later; it has
// finished the call in between by then, for which it needed this rank's packets of that call, and
// those were sent after this rank had finished reading h: every call makes every rank wait for
// every other. The number of the call lives in device memory, so that a graph may replay it.
//
// In place what a block of threads will write has been read by it before it writes any of it: packets
// of as many as it has threads at a time.
//
// What an all-reduce does not need is not in its kernel: at such sizes each line of instructions that
// has to be fetched is seen, and 8 B over 4 H200 took 3.4 us instead of 3.0 with all in one.
#pragma once

#include "abi.h"
#include "prims/ll.cuh"
#include "ptx/grid.cuh"

namespace cinch {

constexpr uint32_t ONESHOT_THREADS = CINCH_ONESHOT_THREADS;

constexpr uint32_t GRANULE = CINCH_GRANULE_BYTES;

// Words that a thread loads before it sends the first of them.
constexpr uint32_t SENT = 4;

// Who gets what of the input: everyone all of it, each a block, or each a part of the message.
enum class Sends { THE_SAME, A_BLOCK_EACH, A_PART_EACH };

// What the packets of one call have in common. BLOCKS: the input or the output has one for each rank.
template <Sends SENDS, bool BLOCKS>
struct OneshotCall {
  static constexpr bool PARTS = SENDS == Sends::A_PART_EACH;

  __device__ __forceinline__ OneshotCall(const cinch_oneshot_args &args, uint32_t element_bytes,
                                         uint64_t epoch, uint32_t *stopped)
      : comm(args.comm),
        input((const uint8_t *)args.input),
        output((uint8_t *)args.output),
        bytes((uint32_t)args.count * element_bytes),
        size(element_bytes),
        // Parts are plan::cut's, of whole granules; the last ones may be shorter, or nothing.
        pieces(PARTS ? (bytes + GRANULE * args.comm.nranks - 1) / (GRANULE * args.comm.nranks) *
                           (GRANULE / 8)
                     : (bytes + 7) / 8),
        half(args.area + (epoch & 1) * args.half),
        area((uint32_t)args.half / (PARTS ? 2 : 1)),
        flag(message_flag(epoch)),
        cover(refreshes(flag, 2) ? area / 16 : pieces),
        // Blocks one behind the other are aligned as the first one is if they are whole words.
        aligned((args.flags & CINCH_ALIGNED) != 0 && (!BLOCKS || bytes % 8 == 0)),
        stop{stopped} {}

  // Bytes between what one rank and the next one get of the input, or give to the output, and how many
  // of them are those of `rank`.
  __device__ __forceinline__ uint32_t stride() const { return PARTS ? 8 * pieces : bytes; }
  __device__ __forceinline__ uint32_t bytes_of(uint32_t rank) const {
    if (!PARTS) return bytes;
    const uint32_t begin = rank * stride();
    return bytes > begin ? min(bytes - begin, stride()) : 0;
  }
  __device__ __forceinline__ bool has(uint32_t rank, uint32_t i) const {
    return PARTS ? 8 * i < bytes_of(rank) : i < pieces;
  }

  // Word i of what goes to `peer`.
  __device__ __forceinline__ uint64_t load(uint32_t peer, uint32_t i) const {
    const uint64_t begin = SENDS != Sends::THE_SAME ? (uint64_t)peer * stride() : 0;
    return load_word(input + begin, i, bytes_of(peer), size, aligned);
  }

  // Word i of the output's block or part of `rank`, where it has any; else of 0.
  __device__ __forceinline__ void store(uint32_t rank, uint32_t i, uint64_t value) const {
    store_word(output + (uint64_t)rank * stride(), i, bytes_of(rank), size, aligned, value);
  }

  // Each rank starts with another peer, so that no port gets all packets at once.
  __device__ __forceinline__ uint32_t peer_at(uint32_t k) const {
    const uint32_t peer = comm.rank + k;
    return peer >= comm.nranks ? peer - comm.nranks : peer;
  }

  // Packet i, the same to every peer, on trip 0 or 1.
  __device__ __forceinline__ void send(uint32_t i, uint64_t payload, uint32_t trip = 0) const {
    for (uint32_t k = 1; k < comm.nranks; ++k) {
      store_ll(comm.outbox[peer_at(k)] + half + trip * area, i, payload, flag);
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
        store_ll(comm.outbox[peer_at(k + j * rows)] + half, i, payload[j], flag);
      }
    }
  }

  // Hands packet i of every rank to `take(rank, payload)` in the order of ranks; that of this one, which
  // sends none to itself, means nothing. False if the wait ended early.
  template <class Take>
  __device__ __forceinline__ bool receive(uint32_t i, Take &&take, uint32_t trip = 0) const {
    const auto wanted = [&](uint32_t) { return flag; };
    const auto source = [&](uint32_t r) { return comm.inbox[r] + half + trip * area; };
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

  // Calls packet(i) for this thread's packets, until it says false.
  template <class Packet>
  __device__ __forceinline__ void each(Packet &&packet) const {
    const uint32_t end = min(begin() + share(), cover);
    for (uint32_t i = begin() + threadIdx.x; i < end; i += ONESHOT_THREADS) {
      if (!packet(i)) return;
    }
  }

  // Sends what each peer gets, and hands packet i and the own word of it to packet(i, own) for this
  // thread's packets, until that says false.
  template <class Scatter, class Packet>
  __device__ __forceinline__ void each_after(Scatter &&scatter, Packet &&packet) const {
    const uint32_t end = min(begin() + share(), cover);
    bool goes_on = true;
    for (uint32_t first = begin(); first < end; first += ONESHOT_THREADS) {
      const uint32_t n = min(end - first, ONESHOT_THREADS), i = first + threadIdx.x;
      const bool is_one = threadIdx.x < n;
      const uint64_t own = is_one && has(comm.rank, i) ? load(comm.rank, i) : 0;
      scatter(first, n);
      // In place, what is about to be written has been read.
      __syncthreads();
      if (is_one && goes_on) goes_on = packet(i, own);
    }
  }

  // Packets of a block of threads, and its first one: whole lines of the input and of the areas.
  __device__ __forceinline__ uint32_t share() const {
    return ((cover + gridDim.x - 1) / gridDim.x + WARP - 1) / WARP * WARP;
  }
  __device__ __forceinline__ uint32_t begin() const { return blockIdx.x * share(); }

  const cinch_comm_view &comm;
  const uint8_t *input;
  uint8_t *output;
  uint32_t bytes;   // of the message, or of a block
  uint32_t size;    // of an element
  uint32_t pieces;  // packets of what goes to a peer on one trip
  uint64_t half;
  uint32_t area;    // bytes of a half for one trip
  uint32_t flag;
  uint32_t cover;  // packets that are sent
  bool aligned;
  Stop stop;
};

// Sums: all ranks the same one, in one trip or two, or each that of its block.
template <class E, Sends SENDS = Sends::THE_SAME>
struct OneshotSum {
  static constexpr bool SAME = SENDS == Sends::THE_SAME;
  static constexpr bool TWICE = SENDS == Sends::A_PART_EACH;
  using Packet = PacketElements<E>;
  using Acc = typename Packet::Acc;
  static constexpr int N = Packet::N;

  static __device__ __forceinline__ void packets(const cinch_oneshot_args &args, uint64_t epoch,
                                                 uint32_t *stopped) {
    const OneshotCall<SENDS, SENDS == Sends::A_BLOCK_EACH> call(args, 8 / N, epoch, stopped);
    const uint32_t own_rank = args.comm.rank;
    const bool premultiplies = (args.flags & CINCH_PREMULTIPLY) != 0;
    const uint64_t factor =
        args.flags & CINCH_FACTOR_AT ? E::factor_at(args.factor) : args.factor;
    const auto premultiply = [&](uint64_t word, Acc (&x)[2 * N]) {
      Packet::unpack(word, x);
      if (!premultiplies) return word;
#pragma unroll
      for (int k = 0; k < N; ++k) x[k] = E::premultiply(x[k], factor);
      return Packet::pack(x);
    };
    // The sum of packet i, to which this rank gives `mine`. False if the wait ended early.
    const auto add = [&](uint32_t i, const Acc (&mine)[2 * N], uint64_t &result) {
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
      result = Packet::pack(sum);
      return true;
    };
    if constexpr (SAME) {
      call.each([&](uint32_t i) {
        uint64_t own = 0, result;
        Acc mine[2 * N];
        if (i < call.pieces) {
          own = premultiply(call.load(own_rank, i), mine);
          // As the peers see it, rounded to the element type.
          if (premultiplies) Packet::unpack(own, mine);
        }
        call.send(i, own);
        if (i >= call.pieces) return true;
        if (!add(i, mine, result)) return false;
        call.store(0, i, result);
        return true;
      });
    } else {
      const auto scatter = [&](uint32_t first, uint32_t n) {
        if (premultiplies) {
          call.template scatter<1>(first, n, [&](uint64_t word) {
            Acc unused[2 * N];
            return premultiply(word, unused);
          });
        } else {
          call.template scatter<SENT>(first, n, [](uint64_t word) { return word; });
        }
      };
      call.each_after(scatter, [&](uint32_t i, uint64_t own) {
        uint64_t result = 0;
        if (i < call.pieces) {
          Acc mine[2 * N];
          premultiply(own, mine);
          if (!add(i, mine, result)) return false;
          const uint32_t rank = TWICE ? own_rank : 0;
          if (call.has(rank, i)) call.store(rank, i, result);
        }
        if (!TWICE) return true;
        call.send(i, result, 1);
        return i >= call.pieces || call.receive(i, [&](uint32_t r, uint64_t payload) {
          if (r != own_rank && call.has(r, i)) call.store(r, i, payload);
        }, 1);
      });
    }
  }
};

// Blocks as they are, each to the place of its sender.
template <Sends SENDS = Sends::THE_SAME>
struct OneshotMove {
  static __device__ __forceinline__ void packets(const cinch_oneshot_args &args, uint64_t epoch,
                                                 uint32_t *stopped) {
    const OneshotCall<SENDS, true> call(args, args.element_bytes, epoch, stopped);
    const uint32_t own_rank = args.comm.rank;
    const auto finish = [&](uint32_t i, uint64_t own) {
      return i >= call.pieces || call.receive(i, [&](uint32_t r, uint64_t payload) {
        call.store(r, i, r == own_rank ? own : payload);
      });
    };
    if constexpr (SENDS == Sends::A_BLOCK_EACH) {
      const auto scatter = [&](uint32_t first, uint32_t n) {
        call.template scatter<SENT>(first, n, [](uint64_t word) { return word; });
      };
      call.each_after(scatter, finish);
    } else {
      call.each([&](uint32_t i) {
        const uint64_t own = i < call.pieces ? call.load(own_rank, i) : 0;
        call.send(i, own);
        return finish(i, own);
      });
    }
  }
};

template <class Does>
__device__ __forceinline__ void oneshot(const cinch_oneshot_args &args) {
  __shared__ uint32_t stopped[2];
  if (threadIdx.x == 0) stopped[0] = stopped[1] = 0;
  await_what_is_before();
  const uint64_t epoch = args.epoch[0];
  __syncthreads();
  Does::packets(args, epoch, stopped);
  __syncthreads();
  if (args.flags & CINCH_LETS_NEXT_BEGIN) let_next_begin();
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
