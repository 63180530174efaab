// One-shot all-reduce of small messages: one trip, no counters, no barrier between blocks.
//
// Phases, per packet of 8 bytes and thread: load the own contribution; store it to every peer's
// area as an LL packet; poll the packets of all peers; add all in the order of ranks; store.
// Launch: any number of blocks, ONESHOT_THREADS threads; a thread takes packets at the distance of
// the grid.
// Bytes out: (N - 1) * 2 * S.
//
// Two halves of the area are used in turn. A peer writes half h again two calls later; it has
// finished the call in between by then, for which it needed this rank's packets of that call, and
// those were sent after this rank had finished reading h: every call makes every rank wait for
// every other. The number of the call lives in device memory, so that a graph may replay it.
#pragma once

#include "abi.h"
#include "prims/ll.cuh"

namespace cinch {

constexpr uint32_t ONESHOT_THREADS = CINCH_ONESHOT_THREADS;

template <class E>
__device__ __forceinline__ void oneshot_packets(const cinch_oneshot_args &args, uint64_t epoch,
                                                uint32_t *stopped) {
  using Acc = typename E::Acc;
  constexpr uint32_t size = sizeof(typename E::Storage);
  constexpr int N = 8 / size;
  const bool aligned = (args.flags & CINCH_ALIGNED) != 0;
  const cinch_comm_view &comm = args.comm;
  const uint32_t nranks = comm.nranks;
  const uint32_t bytes = (uint32_t)args.count * size;
  const uint32_t pieces = (bytes + 7) / 8;
  const uint64_t half = args.area + (epoch & 1) * args.half;
  const uint32_t flag = message_flag(epoch);
  const uint8_t *input = (const uint8_t *)args.input;
  uint8_t *output = (uint8_t *)args.output;
  const uint64_t factor =
      args.flags & CINCH_FACTOR_AT ? E::factor_at(args.factor) : args.factor;
  const Stop stop = {stopped};
  const uint32_t cover = refreshes(flag, 2) ? (uint32_t)(args.half / 16) : pieces;

  for (uint32_t i = blockIdx.x * ONESHOT_THREADS + threadIdx.x; i < cover;
       i += gridDim.x * ONESHOT_THREADS) {
    uint64_t own = 0;
    Acc mine[2 * N];
    if (i < pieces) {
      own = load_word(input, i, bytes, size, aligned);
      E::unpack(make_uint4((uint32_t)own, (uint32_t)(own >> 32), 0, 0), mine);
      if (args.flags & CINCH_PREMULTIPLY) {
#pragma unroll
        for (int k = 0; k < N; ++k) mine[k] = E::premultiply(mine[k], factor);
#pragma unroll
        for (int k = N; k < 2 * N; ++k) mine[k] = mine[0];
        const uint4 v = E::pack(mine);
        own = v.x | (uint64_t)v.y << 32;
        // As the peers see it, rounded to the element type.
        E::unpack(make_uint4(v.x, v.y, 0, 0), mine);
      }
    }
    // Each rank starts with another peer, so that no port gets all packets at once.
    for (uint32_t k = 1; k < nranks; ++k) {
      uint32_t peer = comm.rank + k;
      if (peer >= nranks) peer -= nranks;
      store_ll(comm.outbox[peer] + half, i, own, flag);
    }
    if (i >= pieces) continue;
    Acc sum[2 * N];
    for (uint32_t first = 0; first < nranks; first += POLLED) {
      uint64_t payload[POLLED];
      const auto wanted = [&](uint32_t) { return flag; };
      const auto source = [&](uint32_t r) { return comm.inbox[r] + half; };
      const auto name = [](uint32_t r) { return r; };
      if (!load_ll(comm, stop, first, nranks, i, source, wanted, name, payload, comm.rank)) return;
#pragma unroll
      for (uint32_t j = 0; j < POLLED; ++j) {
        const uint32_t r = first + j;
        if (r >= nranks) break;
        Acc term[2 * N];
        if (r == comm.rank) {
#pragma unroll
          for (int k = 0; k < N; ++k) term[k] = mine[k];
        } else {
          E::unpack(make_uint4((uint32_t)payload[j], (uint32_t)(payload[j] >> 32), 0, 0), term);
        }
#pragma unroll
        for (int k = 0; k < N; ++k) {
          sum[k] = r == 0 ? term[k] : E::combine(sum[k], term[k], args.combine);
        }
      }
    }
    if (args.flags & CINCH_AVERAGE) {
#pragma unroll
      for (int k = 0; k < N; ++k) sum[k] = E::divide(sum[k], nranks);
    }
#pragma unroll
    for (int k = N; k < 2 * N; ++k) sum[k] = sum[0];
    const uint4 v = E::pack(sum);
    store_word(output, i, bytes, size, aligned, v.x | (uint64_t)v.y << 32);
  }
}

template <class E>
__device__ __forceinline__ void oneshot(const cinch_oneshot_args &args) {
  __shared__ uint32_t stopped[2];
  if (threadIdx.x == 0) stopped[0] = stopped[1] = 0;
  const uint64_t epoch = args.epoch[0];
  __syncthreads();
  oneshot_packets<E>(args, epoch, stopped);
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
