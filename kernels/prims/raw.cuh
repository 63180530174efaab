// Steps on raw elements over SIMPLE slots: payload as it lies in memory, in pieces of 16 bytes.
//
// Terms are added in the order of the schedule, in the accumulator type, as the host does it: the
// same bits.
#pragma once

#include "abi.h"
#include "dtype/element.cuh"
#include "exec/interpret.cuh"
#include "prims/move.cuh"

namespace cinch {

template <class E>
class RawSimple {
 public:
  static constexpr int protocol = CINCH_SIMPLE;

  __device__ __forceinline__ RawSimple(const cinch_work &work, const cinch_comm_view &comm, Stop)
      : work_(work), nranks_(comm.nranks) {}

  __device__ __forceinline__ uint32_t element_bytes() const { return SIZE; }
  __device__ __forceinline__ uint32_t tile_elements() const { return TILE_PIECES * N; }

  __device__ __forceinline__ void tile(const Job &job, uint32_t tile) {
    const bool as_is = !(work_.flags & CINCH_PREMULTIPLY);
    const bool moves = job.op == CINCH_RECV || job.op == CINCH_RECV_COPY_SEND ||
                       ((job.op == CINCH_SEND || job.op == CINCH_COPY) && as_is);
    const uint32_t bytes = job.elements * SIZE;
    if (work_.flags & CINCH_ALIGNED) {
      moves ? move_tile<Bits, true>(job, tile, bytes) : sum_tile<true>(job, tile, bytes);
    } else {
      moves ? move_tile<Bits, false>(job, tile, bytes) : sum_tile<false>(job, tile, bytes);
    }
  }

 private:
  using Acc = typename E::Acc;
  using Bits = typename E::Bits;
  static constexpr uint32_t SIZE = sizeof(typename E::Storage);
  static constexpr uint32_t N = 16 / SIZE;
  // Pieces whose accumulators a lane holds at once: 16 registers of 4 bytes and more are dear.
  static constexpr uint32_t TOGETHER = SIZE >= 4 ? 4 : SIZE == 2 ? 2 : 1;

  struct Terms {
    Acc at[TOGETHER][N];
  };

  __device__ __forceinline__ void add(Terms &sum, const Terms &term, bool &started) const {
    const uint32_t combine = work_.combine;
#pragma unroll
    for (uint32_t u = 0; u < TOGETHER; ++u) {
#pragma unroll
      for (uint32_t k = 0; k < N; ++k) {
        sum.at[u][k] = started ? E::combine(sum.at[u][k], term.at[u][k], combine) : term.at[u][k];
      }
    }
    started = true;
  }

  // The own contribution, multiplied if it is to be.
  template <bool ALIGNED>
  __device__ __forceinline__ void load_user(const uint8_t *from, uint32_t first, uint32_t pieces,
                                            uint32_t bytes, bool own, Terms &into) const {
    uint4 v[TOGETHER];
#pragma unroll
    for (uint32_t u = 0; u < TOGETHER; ++u) {
      const uint32_t i = first + u * WARP;
      v[u] = i < pieces ? load_piece16<Bits, ALIGNED>(from, i, bytes) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (uint32_t u = 0; u < TOGETHER; ++u) E::unpack(v[u], into.at[u]);
    if (!own || !(work_.flags & CINCH_PREMULTIPLY)) return;
#pragma unroll
    for (uint32_t u = 0; u < TOGETHER; ++u) {
#pragma unroll
      for (uint32_t k = 0; k < N; ++k) {
        into.at[u][k] = E::premultiply(into.at[u][k], work_.factor);
      }
    }
  }

  __device__ __forceinline__ void load_source(const uint8_t *from, uint32_t first, uint32_t pieces,
                                              Terms &into) const {
    uint4 v[TOGETHER];
#pragma unroll
    for (uint32_t u = 0; u < TOGETHER; ++u) {
      const uint32_t i = first + u * WARP;
      v[u] = i < pieces ? load_vector(from + 16 * (uint64_t)i) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (uint32_t u = 0; u < TOGETHER; ++u) E::unpack(v[u], into.at[u]);
  }

  template <bool ALIGNED>
  __device__ __forceinline__ void sum_tile(const Job &job, uint32_t tile, uint32_t bytes) const {
    const uint32_t pieces = (bytes + 15) / 16;
    const uint32_t begin = tile * TILE_PIECES + threadIdx.x % WARP;
#pragma unroll 1
    for (uint32_t part = 0; part < UNROLL; part += TOGETHER) {
      const uint32_t first = begin + part * WARP;
      if (first >= pieces) return;
      Terms sum;
      bool started = false;
      Terms own;
      const bool reads = job.reads();
      const uint32_t after = job.own_after;
      if (reads) load_user<ALIGNED>(job.input, first, pieces, bytes, true, own);
      if (reads && (after == 0 || job.nrecv == 0)) add(sum, own, started);
      for (uint32_t r = 0; r < job.nrecv; ++r) {
        Terms term;
        load_source(job.source(r), first, pieces, term);
        add(sum, term, started);
        if (reads && after == r + 1) add(sum, own, started);
      }
      if (job.op == CINCH_REDUCE) {
        Terms term;
        load_user<ALIGNED>(job.output, first, pieces, bytes, false, term);
        add(sum, term, started);
      }
      const bool divides = job.is_final() && (work_.flags & CINCH_AVERAGE);
#pragma unroll
      for (uint32_t u = 0; u < TOGETHER; ++u) {
        const uint32_t i = first + u * WARP;
        if (i >= pieces) return;
        if (divides) {
#pragma unroll
          for (uint32_t k = 0; k < N; ++k) sum.at[u][k] = E::divide(sum.at[u][k], nranks_);
        }
        const uint4 v = E::pack(sum.at[u]);
        for (uint32_t t = 0; t < job.nsend; ++t) store_vector(job.target(t) + 16 * (uint64_t)i, v);
        if (job.writes()) store_piece16<Bits, ALIGNED>(job.output, i, bytes, v);
      }
    }
  }

  const cinch_work &work_;
  uint32_t nranks_;
};

}  // namespace cinch
