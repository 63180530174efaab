// Ring all-reduce with its steps written out, for comparison with the interpreter: raw sums of
// one type, SIMPLE slots, aligned buffers.
#pragma once

#include "dtype/element.cuh"
#include "exec/interpret.cuh"

namespace cinch {

template <class E, int UNROLL>
__device__ __forceinline__ void ring_step(const uint8_t *own, const uint8_t *source,
                                          uint8_t *target, uint8_t *output, uint32_t pieces) {
  constexpr int N = 16 / sizeof(typename E::Storage);
  for (uint32_t base = threadIdx.x; base < pieces; base += UNROLL * THREADS) {
    uint4 a[UNROLL], b[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const uint32_t i = base + u * THREADS;
      if (i < pieces && own) a[u] = load_vector(own + 16 * (uint64_t)i);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const uint32_t i = base + u * THREADS;
      if (i < pieces && source) b[u] = load_vector(source + 16 * (uint64_t)i);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const uint32_t i = base + u * THREADS;
      if (i >= pieces) break;
      uint4 v = own ? a[u] : b[u];
      if (own && source) {
        typename E::Acc x[N], y[N];
        E::unpack(a[u], x);
        E::unpack(b[u], y);
#pragma unroll
        for (int k = 0; k < N; ++k) x[k] = E::combine(y[k], x[k], CINCH_SUM);
        v = E::pack(x);
      }
      if (target) store_vector(target + 16 * (uint64_t)i, v);
      if (output) store_vector(output + 16 * (uint64_t)i, v);
    }
  }
}

template <class E>
__device__ __forceinline__ void ring(const cinch_args &args) {
  __shared__ uint8_t *places[2];
  __shared__ uint32_t stopped[2];
  const cinch_comm_view &comm = args.comm;
  const cinch_work &work = *(const cinch_work *)args.blob;
  const uint32_t n = comm.nranks, rank = comm.rank;
  const uint32_t next = (rank + 1) % n, prev = (rank + n - 1) % n;
  const uint32_t lane = blockIdx.x;
  const bool receives = threadIdx.x == 0, sends = threadIdx.x == WARP;
  const uint32_t peer = receives ? prev : next;
  if (threadIdx.x < 2) stopped[threadIdx.x] = 0;
  uint64_t count = 0, credit = 0;
  cinch_cursor *cursor =
      comm.cursors + ((uint64_t)CINCH_SIMPLE * CINCH_MAX_LANES + lane) * CINCH_MAX_RANKS + peer;
  const cinch_counters *counters = (const cinch_counters *)(comm.inbox[peer] + comm.fifo.counters) + lane;
  cinch_counters *remote = (cinch_counters *)(comm.outbox[peer] + comm.fifo.counters) + lane;
  uint8_t *slots = (receives ? comm.inbox[peer] : comm.outbox[peer]) + comm.fifo.slots +
                   (uint64_t)lane * comm.fifo.depth * comm.fifo.stride;
  if (receives) count = cursor->received;
  if (sends) count = cursor->sent;
  __syncthreads();
  for (uint32_t pass = lane; pass < work.passes; pass += gridDim.x) {
    // Chunk rank - s is sent at step s; after n - 1 steps chunk rank + 1 is complete here.
    for (uint32_t s = 0; s < 2 * n - 1; ++s) {
      const uint32_t part = (rank + 3 * n - s - (s >= n ? 0 : 0)) % n;
      const bool takes = s > 0, gives = s < 2 * n - 2;
      if (receives && takes) {
        while ((int64_t)(credit - (count + 1)) < 0) credit = load_relaxed(&counters->tail);
        load_acquire(&counters->tail);
        places[0] = slots + (count % comm.fifo.depth) * (uint64_t)comm.fifo.stride;
      }
      if (sends && gives) {
        while ((int64_t)(credit - (count + 1 - comm.fifo.depth)) < 0) credit = load_relaxed(&counters->head);
        places[1] = slots + (count % comm.fifo.depth) * (uint64_t)comm.fifo.stride;
      }
      __syncthreads();
      const Range range = range_of(work, pass, part);
      const uint64_t at = range.start * sizeof(typename E::Storage);
      const uint32_t pieces = (uint32_t)(range.elements * sizeof(typename E::Storage) / 16);
      ring_step<E, 4>(s < n ? (const uint8_t *)work.input + at : nullptr,
                      takes ? places[0] : nullptr, gives ? places[1] : nullptr,
                      s >= n - 1 ? (uint8_t *)work.output + at : nullptr, pieces);
      __syncthreads();
      if (receives && takes) store_relaxed(&remote->head, ++count);
      if (sends && gives) store_release(&remote->tail, ++count);
    }
  }
  if (receives) cursor->received = count;
  if (sends) cursor->sent = count;
}

}  // namespace cinch
