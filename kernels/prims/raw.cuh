// Steps that reduce raw elements, in protocol simple. The payload is the elements as they lie in
// memory, in pieces of 16 bytes.
//
// Terms are added in the order of the schedule and in the accumulator type, as the host engine adds
// them: the bits are the same.
#pragma once

#include "abi.h"
#include "channel/channel.cuh"
#include "dtype/average.cuh"
#include "dtype/element.cuh"
#include "fifo/wait.cuh"
#include "prims/move.cuh"

namespace cinch {

template <class E>
class RawSimple {
 public:
  static constexpr int protocol = CINCH_SIMPLE;
  static constexpr bool draws = false;
  static constexpr bool keeps_scales = false;
  static constexpr bool takes_verdict = std::is_floating_point<typename E::Acc>::value;

  static __device__ __forceinline__ void prepare(uint32_t) {}
  static __device__ __forceinline__ uint64_t factor_at(uint64_t address) {
    return E::factor_at(address);
  }

  __device__ __forceinline__ RawSimple(const cinch_work &work, const cinch_comm_view &comm, Stop)
      : work_(work), nranks_(comm.nranks) {}

  __device__ __forceinline__ uint32_t element_bytes() const { return SIZE; }
  __device__ __forceinline__ uint32_t tile_elements() const { return TILE_BYTES / SIZE; }
  // Returns whether a job may take the fast path, which neither multiplies this rank's contribution
  // nor adds to the output.
  __device__ __forceinline__ bool has_fast_path(const Job &job) const {
    return !(work_.flags & CINCH_PREMULTIPLY) && job.op != CINCH_REDUCE;
  }

  __device__ __forceinline__ void tiles(const Job &job, uint32_t first, uint32_t last) const {
    const bool as_is = !(work_.flags & CINCH_PREMULTIPLY);
    const bool moves = job.op == CINCH_RECV || job.op == CINCH_RECV_COPY_SEND ||
                       ((job.op == CINCH_SEND || job.op == CINCH_COPY) && as_is);
    const uint32_t bytes = job.elements * SIZE;
    if (moves) return move_tiles<MaybeInspected>(job, first, last, bytes, SIZE);
    const uint32_t whole = min(last, whole_tiles(job, bytes));
#pragma unroll 1
    for (uint32_t tile = first; tile < whole; ++tile) {
      if (job.fast_path) {
        sum_whole_tile(job, tile);
      } else {
        sum_tile<Pieces::WHOLE>(job, tile, bytes);
      }
    }
    if (whole < last) sum_ragged_tiles(work_, nranks_, job, max(first, whole), last);
  }

 private:
  __device__ __forceinline__ RawSimple(const cinch_work &work, uint32_t nranks)
      : work_(work), nranks_(nranks) {}

  using Acc = typename E::Acc;
  using MaybeInspected = typename std::conditional<takes_verdict, Inspected<E>, Uninspected>::type;
  static constexpr uint32_t SIZE = sizeof(typename E::Storage);
  static constexpr uint32_t N = 16 / SIZE;
  static constexpr uint32_t NO_OWN = 0xff;
  // Number of 16-byte pieces that a lane accumulates at once. Their accumulators take 16 registers.
  static constexpr uint32_t TOGETHER = SIZE >= 4 ? 4 : SIZE == 2 ? 2 : 1;
  // Number of terms whose loads are in flight together.
  static constexpr uint32_t AHEAD = SMALL_BLOCKS || SIZE == 8 || SIZE == 1 ? 2 : 3;

  struct Terms {
    Acc at[TOGETHER][N];
  };

  __device__ __forceinline__ void add(Terms &sum, const Terms &term) const {
    const uint32_t combine = work_.combine;
#pragma unroll
    for (uint32_t u = 0; u < TOGETHER; ++u) {
#pragma unroll
      for (uint32_t k = 0; k < N; ++k) {
        sum.at[u][k] = E::combine(sum.at[u][k], term.at[u][k], combine);
      }
    }
  }

  template <Pieces P>
  __device__ __forceinline__ void load(const uint8_t *from, uint32_t first, uint32_t bytes,
                                       Terms &into) const {
    uint4 v[TOGETHER];
#pragma unroll
    for (uint32_t u = 0; u < TOGETHER; ++u) {
      v[u] = load_piece<P>(from, first + u * WARP, bytes, SIZE);
    }
#pragma unroll
    for (uint32_t u = 0; u < TOGETHER; ++u) E::unpack(v[u], into.at[u]);
  }

  // Loads from a slot. A slot has whole 16-byte pieces, but its last tile may be partial.
  template <Pieces P>
  __device__ __forceinline__ void load_source(const uint8_t *from, uint32_t first, uint32_t bytes,
                                              Terms &into) const {
    load<P == Pieces::WHOLE ? P : Pieces::INSIDE>(from, first, bytes, into);
  }

  // Loads this rank's contribution, and multiplies it by the factor of a pre-multiplied sum.
  template <Pieces P>
  __device__ __forceinline__ void load_own(const Job &job, uint32_t first, uint32_t bytes,
                                           Terms &into) const {
    load<P>(job.input, first, bytes, into);
    if (!(work_.flags & CINCH_PREMULTIPLY)) return;
#pragma unroll
    for (uint32_t u = 0; u < TOGETHER; ++u) {
#pragma unroll
      for (uint32_t k = 0; k < N; ++k) {
        into.at[u][k] = E::premultiply(into.at[u][k], work_.factor);
      }
      // Rounds the product to the element type, as the peers receive it.
      if (job.own == CINCH_OWN_CODED) E::unpack(E::pack(into.at[u]), into.at[u]);
    }
  }

  template <Pieces P>
  __device__ __forceinline__ void add_sources(const Job &job, uint32_t first, uint32_t bytes,
                                              uint32_t begin, uint32_t end, Terms &sum) const {
#pragma unroll 1
    for (uint32_t r = begin; r < end; ++r) {
      Terms term;
      load_source<P>(job.source(r), first, bytes, term);
      add(sum, term);
    }
  }

  // Sums a whole tile on the fast path, which treats this rank's contribution like the received
  // terms.
  __device__ __forceinline__ void sum_whole_tile(const Job &job, uint32_t tile) const {
    const uint32_t after = job.reads() ? job.own_after : NO_OWN;
    const uint32_t terms = job.nrecv + (after <= job.nrecv ? 1 : 0);
#pragma unroll 1
    for (uint32_t part = 0; part < UNROLL; part += TOGETHER) {
      const uint64_t at = 16 * (uint64_t)(tile * TILE_PIECES + part * WARP + lane_id());
      Terms sum;
#pragma unroll 1
      for (uint32_t begin = 0; begin < terms; begin += AHEAD) {
        uint4 v[AHEAD][TOGETHER];
#pragma unroll
        for (uint32_t j = 0; j < AHEAD; ++j) {
          const uint32_t t = min(begin + j, terms - 1);
          const uint8_t *from = t == after ? job.input : job.source(t - (t > after ? 1 : 0));
#pragma unroll
          for (uint32_t u = 0; u < TOGETHER; ++u) v[j][u] = load_vector(from + at + 16 * WARP * u);
        }
#pragma unroll
        for (uint32_t j = 0; j < AHEAD; ++j) {
          Terms term;
#pragma unroll
          for (uint32_t u = 0; u < TOGETHER; ++u) E::unpack(v[j][u], term.at[u]);
          if (begin + j == 0) {
            sum = term;
          } else if (begin + j < terms) {
            add(sum, term);
          }
        }
      }
      finish<Pieces::WHOLE>(job, sum, (uint32_t)(at / 16), 0);
    }
  }

  template <Pieces P>
  __device__ __forceinline__ void sum_tile(const Job &job, uint32_t tile, uint32_t bytes) const {
#pragma unroll 1
    for (uint32_t part = 0; part < UNROLL; part += TOGETHER) {
      const uint32_t first = tile * TILE_PIECES + part * WARP + lane_id();
      if (P != Pieces::WHOLE && 16 * first >= bytes) return;
      sum_pieces<P>(job, first, bytes);
    }
  }

  // Sums partial and unaligned tiles. The function is out of line, so that the loop over whole
  // tiles need not keep its registers.
  static __device__ __noinline__ void sum_ragged_tiles(const cinch_work &work, uint32_t nranks,
                                                       const Job &job, uint32_t first,
                                                       uint32_t last) {
    const RawSimple mover(work, nranks);
    const uint32_t bytes = job.elements * SIZE, pieces = bytes / 16;
    uint32_t tile = first;
    if (job.aligned) {
      // In the last tile of an aligned chunk all pieces but the very last are whole 16-byte
      // accesses.
      mover.template sum_tile<Pieces::INSIDE>(job, tile, 16 * pieces);
      if (bytes % 16 != 0 && pieces / TILE_PIECES == tile && lane_id() == 0) {
        mover.template sum_pieces<Pieces::ANY>(job, pieces, bytes);
      }
      ++tile;
    }
#pragma unroll 1
    for (; tile < last; ++tile) mover.template sum_tile<Pieces::ANY>(job, tile, bytes);
  }

  template <Pieces P>
  __device__ __forceinline__ void sum_pieces(const Job &job, uint32_t first,
                                             uint32_t bytes) const {
    Terms sum;
    const uint32_t after = job.reads() ? job.own_after : NO_OWN;
    if (job.nrecv == 0 || after == 0) {
      load_own<P>(job, first, bytes, sum);
      add_sources<P>(job, first, bytes, 0, job.nrecv, sum);
    } else {
      load_source<P>(job.source(0), first, bytes, sum);
      add_sources<P>(job, first, bytes, 1, min(after, (uint32_t)job.nrecv), sum);
      if (after <= job.nrecv) {
        Terms own;
        load_own<P>(job, first, bytes, own);
        add(sum, own);
        add_sources<P>(job, first, bytes, after, job.nrecv, sum);
      }
    }
    if (job.op == CINCH_REDUCE) {
      Terms term;
      load<P>(job.output, first, bytes, term);
      add(sum, term);
    }
    finish<P>(job, sum, first, bytes);
  }

  // Sends and stores the sum of this lane's pieces, which begin with piece `first`.
  template <Pieces P>
  __device__ __forceinline__ void finish(const Job &job, Terms &sum, uint32_t first,
                                         uint32_t bytes) const {
    if (work_.flags & CINCH_AVERAGE) {
      const Average<E> average(work_.flags, work_.factor, nranks_);
      const bool is_final = job.is_final();
#pragma unroll
      for (uint32_t u = 0; u < TOGETHER; ++u) {
#pragma unroll
        for (uint32_t k = 0; k < N; ++k) {
          Acc &x = sum.at[u][k];
          x = is_final ? average.of(x) : average.partial(x);
        }
      }
    }
    uint4 v[TOGETHER];
#pragma unroll
    for (uint32_t u = 0; u < TOGETHER; ++u) v[u] = E::pack(sum.at[u]);
#pragma unroll 1
    for (uint32_t t = 0; t < job.nsend; ++t) {
      uint8_t *target = job.target(t);
#pragma unroll
      for (uint32_t u = 0; u < TOGETHER; ++u) {
        const uint32_t i = first + u * WARP;
        if (P == Pieces::WHOLE || 16 * i < bytes) {
          store_piece<Pieces::WHOLE>(target, i, bytes, SIZE, v[u]);
        }
      }
    }
    if (!job.writes()) return;
    if (P == Pieces::WHOLE) MaybeInspected::inspect(v);
#pragma unroll
    for (uint32_t u = 0; u < TOGETHER; ++u) {
      const uint32_t i = first + u * WARP;
      if (P != Pieces::WHOLE) MaybeInspected::inspect_end(v[u], i, bytes);
      if (P == Pieces::WHOLE || 16 * i < bytes) store_piece<P>(job.output, i, bytes, SIZE, v[u]);
    }
  }

  const cinch_work &work_;
  uint32_t nranks_;
};

}  // namespace cinch
