// The common base of the movers of ll and ll128. A mover executes the data movement of a step: here
// it moves raw elements in messages whose flags lie beside the payload.
#pragma once

#include "abi.h"
#include "channel/channel.cuh"
#include "dtype/average.cuh"
#include "dtype/element.cuh"
#include "fifo/wait.cuh"
#include "prims/user.cuh"

namespace cinch {

// The reduction operator and options of a step without a codec.
struct Arithmetic {
  bool computes;  // the step adds terms or premultiplies the input
  bool divides;
  uint32_t own;   // cinch_own of this rank's contribution, if the step reads it

  __device__ __forceinline__ Arithmetic(const cinch_work &work, const Job &job, bool reduces) {
    const bool premultiplies = (work.flags & CINCH_PREMULTIPLY) != 0;
    computes = reduces &&
               (job.sums() || job.op == CINCH_REDUCE || (premultiplies && job.nrecv == 0));
    divides = reduces && (work.flags & CINCH_AVERAGE) && job.is_final();
    own = job.sums() ? (uint32_t)job.own : (uint32_t)CINCH_OWN_EXACT;
  }
};

// The base of RawLL and RawLL128. `Piece` (PacketElements, LineElements) converts the payload that
// one lane holds. Without REDUCES the kernel moves bytes of any type, and word[0] of the codec's
// parameters is the size of an element in bytes.
template <class E, class Piece, bool REDUCES>
class FlaggedMover {
 public:
  static constexpr bool draws = false;
  static constexpr bool keeps_scales = false;
  static constexpr bool takes_verdict = false;

  static __device__ __forceinline__ void prepare(uint32_t) {}
  static __device__ __forceinline__ uint64_t factor_at(uint64_t address) {
    return E::factor_at(address);
  }

  __device__ __forceinline__ bool has_fast_path(const Job &) const { return false; }
  __device__ __forceinline__ uint32_t element_bytes() const {
    return REDUCES ? sizeof(typename E::Storage) : work_.codec.word[0];
  }

 protected:
  using Acc = typename Piece::Acc;
  static constexpr int N = Piece::N, ROOM = Piece::ROOM;

  __device__ __forceinline__ FlaggedMover(const cinch_work &work, const cinch_comm_view &comm,
                                          Stop stop)
      : work_(work), comm_(comm), stop_(stop) {}

  // Adds a term to the sum. `own` is the step's cinch_own if the term is this rank's contribution,
  // and CINCH_OWN_ABSENT if it was received.
  __device__ __forceinline__ void add(Acc (&sum)[ROOM], bool &started, typename Piece::Word word,
                                      uint32_t own) const {
    Acc term[ROOM];
    Piece::unpack(word, term);
    if (own != CINCH_OWN_ABSENT && (work_.flags & CINCH_PREMULTIPLY)) {
#pragma unroll
      for (int k = 0; k < N; ++k) term[k] = E::premultiply(term[k], work_.factor);
      // Rounds the product to the element type, as the peers receive it.
      if (own == CINCH_OWN_CODED) Piece::unpack(Piece::pack(term), term);
    }
#pragma unroll
    for (int k = 0; k < N; ++k) {
      sum[k] = started ? E::combine(sum[k], term[k], work_.combine) : term[k];
    }
    started = true;
  }

  // Divides the sum by the number of ranks if it is a complete average, and packs it.
  __device__ __forceinline__ typename Piece::Word finish(Acc (&sum)[ROOM], bool divides) const {
    if (work_.flags & CINCH_AVERAGE) {
      const Average<E> average(work_.flags, work_.factor, comm_.nranks);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        sum[k] = divides ? average.of(sum[k]) : average.partial(sum[k]);
      }
    }
    return Piece::pack(sum);
  }

  const cinch_work &work_;
  const cinch_comm_view &comm_;
  Stop stop_;
};

}  // namespace cinch
