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

  static __device__ __forceinline__ void prepare() { C::prepare(); }

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
    const bool twice = C::scaled && encodes && tile_elements() > WARP_TILE;
    float abs_max = 0;
    // One copy of the code for both rounds: the compiler's time and the instruction cache.
#pragma unroll 1
    for (uint32_t round = twice ? 0 : 1; round < 2; ++round) {
#pragma unroll 1
      for (uint32_t at = begin; at < end; at += WARP_TILE) {
        float x[HELD];
        total(job, at, x);
        if (C::scaled && encodes && (round == 0 || !twice)) {
          abs_max = codec_.larger(twice ? abs_max : 0, codec_.abs_max(x));
        }
        if (round == 0) continue;
        if (encodes) send(job, at, x, abs_max);
        if (job.writes()) store_user(job, at, x);
      }
    }
  }

 private:
  using Bits = typename E::Bits;
  static constexpr uint32_t SIZE = sizeof(Bits);
  static constexpr uint32_t PIECES = HELD * SIZE / 16;
  static constexpr uint32_t N = 16 / SIZE;
  // Sources whose codes are in flight together.
  static constexpr uint32_t AHEAD = C::code_bytes == 1 ? 4 : 2;

  static __device__ __forceinline__ uint32_t mine(uint32_t at) {
    return at + lane_id() * HELD;
  }

  // Whether this lane's elements are whole pieces of aligned buffers.
  __device__ __forceinline__ bool is_whole(const Job &job, uint32_t at) const {
    return job.aligned && mine(at) + HELD <= job.elements;
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
      const Bits *from = (const Bits *)job.input + mine(at);
#pragma unroll
      for (uint32_t k = 0; k < HELD; ++k) x[k] = mine(at) + k < job.elements ? E::widen(from[k]) : 0;
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
      Bits *to = (Bits *)job.output + mine(at);
#pragma unroll
      for (uint32_t k = 0; k < HELD; ++k) {
        if (mine(at) + k < job.elements) to[k] = E::narrow(x[k]);
      }
    }
  }

  // What a step computes from this lane's elements: a sum, a received chunk, or the input. The
  // sum starts with -0, to which every number adds as it is.
  __device__ __forceinline__ void total(const Job &job, uint32_t at, float (&x)[HELD]) const {
    const bool reads = job.reads() || job.nrecv == 0;
    const uint32_t after = reads ? job.own_after : job.nrecv;
#pragma unroll
    for (uint32_t k = 0; k < HELD; ++k) x[k] = -0.0f;
#pragma unroll 1
    for (uint32_t part = 0; part < 2; ++part) {
      if (part == 1 && reads) {
        if (job.sums() && job.own == CINCH_OWN_CODED) {
          typename C::Codes codes;
          own_codes(job, at, codes);
          codec_.decode_reduce(codes, x);
        } else {
          float own[HELD];
          load_own(job, at, own);
          const bool alone = after == 0;
#pragma unroll
          for (uint32_t k = 0; k < HELD; ++k) {
            x[k] = alone ? own[k] : E::combine(x[k], own[k], Combine::sum);
          }
        }
      }
      add_sources(job, at, part == 0 ? 0 : after, part == 0 ? after : job.nrecv, x);
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

  // What the peers see of the own contribution. Only one-shot schedules ask for it, so it is kept
  // out of the way.
  __device__ __noinline__ void own_codes(const Job &job, uint32_t at,
                                         typename C::Codes &codes) const {
    float abs_max = 0;
    if (C::scaled) {
      // Of the whole block, as it was encoded.
      const uint32_t begin = at / tile_elements() * tile_elements();
      const uint32_t end = min(begin + tile_elements(), job.elements);
#pragma unroll 1
      for (uint32_t other = begin; other < end; other += WARP_TILE) {
        float y[HELD];
        load_own(job, other, y);
        abs_max = codec_.larger(abs_max, codec_.abs_max(y));
      }
    }
    float x[HELD];
    load_own(job, at, x);
    codec_.encode(x, abs_max, codes);
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
