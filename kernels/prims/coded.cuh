// Steps through a codec, over SIMPLE slots: encoded by the sender, decoded and summed in registers
// by the receiver, encoded again where the sum goes on.
//
// A lane of a warp holds 16 consecutive elements, so that their codes are one access of 16 bytes
// and a block of scale is a few neighbouring lanes. A tile is 512 elements, or a block if that is
// larger: then the warp goes over it twice, once for the scale and once for the codes.
//
// Whoever sends a sum on keeps what the others will see of it: it decodes its own codes.
#pragma once

#include "abi.h"
#include "codec/codec.cuh"
#include "dtype/element.cuh"
#include "exec/interpret.cuh"
#include "prims/user.cuh"

namespace cinch {

constexpr uint32_t HELD = 16;             // elements of a lane
constexpr uint32_t WARP_TILE = HELD * WARP;

template <class E, class C>
class CodedSimple {
 public:
  static constexpr int protocol = CINCH_SIMPLE;

  __device__ __forceinline__ CodedSimple(const cinch_work &work, const cinch_comm_view &comm, Stop)
      : work_(work), codec_(work.codec), nranks_(comm.nranks) {}

  __device__ __forceinline__ uint32_t element_bytes() const { return SIZE; }
  __device__ __forceinline__ uint32_t tile_elements() const {
    return max(WARP_TILE, codec_.block());
  }

  __device__ __forceinline__ void tile(const Job &job, uint32_t tile) const {
    const uint32_t begin = tile * tile_elements();
    const uint32_t n = job.elements;
    if (begin >= n) return;
    const uint32_t end = min(begin + tile_elements(), n);
    if (job.op == CINCH_RECV_COPY_SEND) forward(job, begin, end);
    const bool encodes = job.op == CINCH_SEND || (job.nsend > 0 && job.op != CINCH_RECV_COPY_SEND);
    float abs_max = 0;
    if (C::scaled && encodes && tile_elements() > WARP_TILE) {
      for (uint32_t at = begin; at < end; at += WARP_TILE) {
        float x[HELD];
        total(job, at, x);
        abs_max = codec_.larger(abs_max, codec_.abs_max(x));
      }
    }
    for (uint32_t at = begin; at < end; at += WARP_TILE) {
      float x[HELD];
      total(job, at, x);
      if (encodes) {
        if (C::scaled && tile_elements() == WARP_TILE) abs_max = codec_.abs_max(x);
        send(job, at, x, abs_max);
      }
      if (job.writes()) store_user(job, at, x);
    }
  }

 private:
  using Storage = typename E::Storage;
  static constexpr uint32_t SIZE = sizeof(Storage);
  static constexpr uint32_t PIECES = HELD * SIZE / 16;
  static constexpr uint32_t N = 16 / SIZE;
  static constexpr uint32_t MAX_SOURCES = 0xff;
  // Sources whose codes are in flight together.
  static constexpr uint32_t AHEAD = C::code_bytes == 1 ? 4 : 2;

  static __device__ __forceinline__ uint32_t mine(uint32_t at) {
    return at + lane_id() * HELD;
  }

  // Whether this lane's elements are whole pieces of aligned buffers.
  __device__ __forceinline__ bool is_whole(const Job &job, uint32_t at) const {
    return (work_.flags & CINCH_ALIGNED) && mine(at) + HELD <= job.elements;
  }

  // This lane's elements of the input, zeros beyond its end.
  __device__ __forceinline__ void load_own(const Job &job, uint32_t at, float (&x)[HELD]) const {
    if (is_whole(job, at)) {
      uint4 v[PIECES];
#pragma unroll
      for (uint32_t p = 0; p < PIECES; ++p) {
        v[p] = load_piece<true>(job.input, mine(at) / N + p, 0, SIZE);
      }
#pragma unroll
      for (uint32_t p = 0; p < PIECES; ++p) {
        float part[N];
        E::unpack(v[p], part);
#pragma unroll
        for (uint32_t k = 0; k < N; ++k) x[p * N + k] = part[k];
      }
    } else {
      const Storage *from = (const Storage *)job.input + mine(at);
#pragma unroll
      for (uint32_t k = 0; k < HELD; ++k) x[k] = mine(at) + k < job.elements ? E::load(from + k) : 0;
    }
    if (work_.flags & CINCH_PREMULTIPLY) {
#pragma unroll
      for (uint32_t k = 0; k < HELD; ++k) x[k] = E::premultiply(x[k], work_.factor);
    }
  }

  __device__ __forceinline__ void store_user(const Job &job, uint32_t at,
                                             const float (&x)[HELD]) const {
    if (is_whole(job, at)) {
#pragma unroll
      for (uint32_t p = 0; p < PIECES; ++p) {
        float part[N];
#pragma unroll
        for (uint32_t k = 0; k < N; ++k) part[k] = x[p * N + k];
        store_piece<true>(job.output, mine(at) / N + p, 0, SIZE, E::pack(part));
      }
    } else {
      Storage *to = (Storage *)job.output + mine(at);
#pragma unroll
      for (uint32_t k = 0; k < HELD; ++k) {
        if (mine(at) + k < job.elements) E::store(to + k, x[k]);
      }
    }
  }

  // What a step computes from this lane's elements: a sum, a received chunk, or the input.
  __device__ __forceinline__ void total(const Job &job, uint32_t at, float (&x)[HELD]) const {
    const uint32_t after = job.reads() ? job.own_after : MAX_SOURCES;
    if (job.nrecv == 0 || after == 0) {
      load_term(job, at, x);
      add_sources(job, at, 0, job.nrecv, x);
    } else {
      typename C::Codes codes;
      codec_.load(job.source(0), job.elements, mine(at), codes);
      codec_.decode(codes, x);
      add_sources(job, at, 1, min(after, (uint32_t)job.nrecv), x);
      if (after <= job.nrecv) {
        add_own(job, at, x);
        add_sources(job, at, after, job.nrecv, x);
      }
    }
    if (job.is_final() && (work_.flags & CINCH_AVERAGE)) {
#pragma unroll
      for (uint32_t k = 0; k < HELD; ++k) x[k] = E::divide(x[k], nranks_);
    }
  }

  __device__ __forceinline__ void add_sources(const Job &job, uint32_t at, uint32_t begin,
                                              uint32_t end, float (&x)[HELD]) const {
#pragma unroll 1
    for (uint32_t r = begin; r < end; r += AHEAD) {
      typename C::Codes codes[AHEAD];
#pragma unroll
      for (uint32_t j = 0; j < AHEAD; ++j) {
        if (r + j < end) codec_.load(job.source(r + j), job.elements, mine(at), codes[j]);
      }
#pragma unroll
      for (uint32_t j = 0; j < AHEAD; ++j) {
        if (r + j < end) codec_.decode_reduce(codes[j], x);
      }
    }
  }

  // The own contribution as it enters the sum: exact, or as the peers see it.
  __device__ __forceinline__ void load_term(const Job &job, uint32_t at, float (&x)[HELD]) const {
    load_own(job, at, x);
    if (!job.sums() || job.own != CINCH_OWN_CODED) return;
    float abs_max = 0;
    if (C::scaled) abs_max = own_abs_max(job, at, x);
    typename C::Codes codes;
    codec_.encode(x, abs_max, codes);
    codec_.decode(codes, x);
  }

  // Of the block that this lane's elements are in.
  __device__ __forceinline__ float own_abs_max(const Job &job, uint32_t at,
                                               const float (&x)[HELD]) const {
    if (tile_elements() == WARP_TILE) return codec_.abs_max(x);
    const uint32_t begin = at / tile_elements() * tile_elements();
    const uint32_t end = min(begin + tile_elements(), job.elements);
    float abs_max = 0;
    for (uint32_t other = begin; other < end; other += WARP_TILE) {
      float y[HELD];
      load_own(job, other, y);
      abs_max = codec_.larger(abs_max, codec_.abs_max(y));
    }
    return abs_max;
  }

  __device__ __forceinline__ void add_own(const Job &job, uint32_t at, float (&x)[HELD]) const {
    float own[HELD];
    load_term(job, at, own);
#pragma unroll
    for (uint32_t k = 0; k < HELD; ++k) x[k] = __fadd_rn(x[k], own[k]);
  }

  // Encodes, sends to all targets, and leaves in `x` what they will decode.
  __device__ __forceinline__ void send(const Job &job, uint32_t at, float (&x)[HELD],
                                       float abs_max) const {
    typename C::Codes codes;
    codec_.encode(x, abs_max, codes);
    for (uint32_t t = 0; t < job.nsend; ++t) {
      codec_.store(job.target(t), job.elements, mine(at), codes);
    }
    if (job.writes()) codec_.decode(codes, x);
  }

  __device__ __forceinline__ void forward(const Job &job, uint32_t begin, uint32_t end) const {
    for (uint32_t at = begin; at < end; at += WARP_TILE) {
      typename C::Codes codes;
      codec_.load(job.source(0), job.elements, mine(at), codes);
      for (uint32_t t = 0; t < job.nsend; ++t) {
        codec_.store(job.target(t), job.elements, mine(at), codes);
      }
    }
  }

  const cinch_work &work_;
  const C codec_;
  uint32_t nranks_;
};

}  // namespace cinch
