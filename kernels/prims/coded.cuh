// Steps through a codec, in protocol simple. The sender encodes; the receiver decodes and sums in
// registers, and encodes the sum again if the step sends it on.
//
// A lane of a warp holds 16 consecutive elements, so that their codes are one access of 16 bytes
// and a block of scale is a few neighbouring lanes. A tile is 512 elements, or a block if that is
// larger. A warp then reads the tile twice: once for the scale and once for the codes.
//
// Messages inside groups may be raw, cast to 16 bits, or in linear8, while all others have the call's codec. A step then
// adds those of its group before the others, and sends in one form.
//
// A rank that sends a sum stores the values that its codes decode to, as the receivers do, so that
// all ranks end with identical bits.
//
// prims/whole_tiles.cuh has the fast path of whole tiles, this file all other cases.
#pragma once

#include "abi.h"
#include "channel/channel.cuh"
#include "channel/scales.cuh"
#include "codec/codec.cuh"
#include "dtype/average.cuh"
#include "dtype/element.cuh"
#include "fifo/wait.cuh"
#include "prims/residuals.cuh"
#include "prims/verdict.cuh"
#include "prims/whole_tiles.cuh"

namespace cinch {

// Returns the codec of messages inside groups that are in linear8. A block lies within a tile.
__device__ __forceinline__ Linear8Nearest linear8_of(const Job &job) {
  cinch_codec_params params = {};
  params.log2_block = job.intra - CINCH_INTRA_LINEAR8;
  return Linear8Nearest(params);
}

// Adds this lane's elements of source r, from index i on, which are in linear8, to x. These functions are out of line, so
// that element types share them.
static __device__ __noinline__ void add_linear8(const Job &job, uint32_t r, uint32_t i, float (&x)[HELD]) {
  const Linear8Nearest codec = linear8_of(job);
  Linear8Nearest::Codes codes;
  codec.load(job.source(r), job.elements, i, codes);
  codec.decode_reduce(codes, x);
}

// Sends x, this lane's elements of a contribution from index i on, to all targets in linear8.
static __device__ __noinline__ void send_linear8(const cinch_work &work, const Job &job, uint32_t i,
                                                 const float (&x)[HELD]) {
  const Linear8Nearest codec = linear8_of(job);
  const uint32_t n = job.elements, there = n > i ? min(n - i, HELD) : 0;
  Linear8Nearest::Codes codes;
  codec.encode(x, codec.summary(x, there), n, i, Random{}, codes);
  for (uint32_t t = 0; t < job.nsend; ++t) codec.store(job.target(t), n, i, codes);
  if (work.residuals == nullptr) return;
  float seen[HELD];
  codec.decode(codes, seen);
  Residuals(work.residuals, work.span, job.first + i).keep(x, seen, there);
}

template <class E, class C>
class CodedSimple {
 public:
  static constexpr int protocol = CINCH_SIMPLE;
  static constexpr bool draws = C::draws;
  static constexpr bool keeps_scales = C::keeps_scales;
  static constexpr bool takes_verdict = true;

  static __device__ __forceinline__ void prepare(uint32_t threads) { C::prepare(threads); }
  static __device__ __forceinline__ uint64_t factor_at(uint64_t address) {
    return E::factor_at(address);
  }

  __device__ __forceinline__ CodedSimple(const cinch_work &work, const cinch_comm_view &comm, Stop)
      : CodedSimple(work, comm.nranks) {}

  __device__ __forceinline__ uint32_t element_bytes() const { return SIZE; }
  __device__ __forceinline__ uint32_t tile_elements() const {
    return max(WARP_TILE, codec_.block());
  }

  // Returns whether whole tiles of the chunk may take the loops of WholeTiles. These loops need
  // encoded messages, aligned buffers, blocks within a tile, and no error feedback. This rank's contribution must
  // need neither encoding nor a factor but that of an average of bf16. An average must be over a
  // power of two of ranks.
  __device__ __forceinline__ bool has_fast_path(const Job &job) const {
    const bool averages = job.is_final() && (work_.flags & CINCH_AVERAGE);
    const bool known = job.op == CINCH_SEND || job.op == CINCH_RECV ||
                       job.op == CINCH_RECV_COPY_SEND ||
                       (job.sums() && job.own != CINCH_OWN_CODED);
    return known && job.intra_recv == 0 && !job.intra_send &&
           (job.nrecv == 0 || Whole::HAS_ROOM) && job.aligned &&
           tile_elements() == WARP_TILE && (!C::scaled || keeps_scales || codec_.block() != 0) &&
           (!(work_.flags & CINCH_PREMULTIPLY) || (Whole::SCALES && work_.flags & CINCH_AVERAGE)) &&
           work_.residuals == nullptr &&
           !(averages && (job.nrecv == 0 || (nranks_ & (nranks_ - 1)) != 0));
  }

  __device__ __forceinline__ void tiles(const Job &job, uint32_t first, uint32_t last) const {
    const uint32_t whole = job.fast_path ? max(first, min(last, job.elements / WARP_TILE)) : first;
    if (first < whole) {
      if constexpr (keeps_scales) {
        if (codec_.is_plain()) {
          whole_tiles<WholeTiles<E, C, true>>(job, first, whole);
        } else {
          whole_tiles<Whole>(job, first, whole);
        }
      } else {
        whole_tiles<Whole>(job, first, whole);
      }
    }
    if (whole < last) any_tiles(work_, nranks_, job, whole, last, false);
    if constexpr (keeps_scales) {
      if (work_.scales != nullptr && job.sends_codes()) {
        const uint32_t there = (job.elements + WARP_TILE - 1) / WARP_TILE;
        const uint32_t moved = min(last, there) - min(first, there);
        if (moved > 0) finish_scale(work_, nranks_, job, moved, there);
      }
    }
  }

  // Finds the largest magnitude that tiles `first` to `last` - 1 of the chunk will encode, if the chunk needs a new scale.
  __device__ __forceinline__ void scan(const Job &job, uint32_t first, uint32_t last) const {
    if (!job.sends_codes() || job.forwards() || !job.scale().is_new()) return;
    const uint32_t there = (job.elements + WARP_TILE - 1) / WARP_TILE;
    if (first < there) any_tiles(work_, nranks_, job, first, min(last, there), true);
  }

 private:
  using Whole = WholeTiles<E, C>;
  using Lane = Held<E>;
  using Codes = typename Whole::Codes;
  using Summary = typename Whole::Summary;
  static constexpr uint32_t SIZE = Lane::SIZE;
  // Number of sources whose codes a warp loads before it decodes the first of them.
  static constexpr uint32_t AHEAD = C::code_bits <= 8 ? 4 : 2;

  __device__ __forceinline__ CodedSimple(const cinch_work &work, uint32_t nranks)
      : work_(work), codec_(work.codec), nranks_(nranks) {}

  template <class Loops>
  __device__ __forceinline__ void whole_tiles(const Job &job, uint32_t first, uint32_t last) const {
    if (job.nrecv == 0) {
      Loops::send_tiles(work_, job, first, last);
    } else if (!job.sums()) {
      Whole::recv_tiles(work_, job, first, last);
    } else {
      Loops::sum_tiles(work_, job, nranks_, first, last);
    }
  }

  // Moves tiles `first` to `last` - 1 of a step of any kind, or scans them for the largest magnitude. The function
  // constructs another CodedSimple, so that callers on the fast path need not construct a codec.
  static __device__ __noinline__ void any_tiles(const cinch_work &work, uint32_t nranks,
                                                const Job &job, uint32_t first, uint32_t last,
                                                bool scans) {
    CodedSimple mover(work, nranks);
    if (mover.has_chunk_scale()) mover.codec_.set_scale(job.scale().of_chunk());
#pragma unroll 1
    for (uint32_t t = first; t < last; ++t) mover.tile(job, t, scans);
  }

  // Counts `moved` tiles, of all `there` tiles of a chunk, as encoded or forwarded. The warp that has the last of them
  // stores the number of the chunk, and keeps its scale if it is new.
  static __device__ __noinline__ void finish_scale(const cinch_work &work, uint32_t nranks,
                                                   const Job &job, uint32_t moved,
                                                   uint32_t there) {
    ChunkScale &scale = job.scale();
    bool is_last = false;
    __syncwarp();
    if (lane_id() == 0) {
      __threadfence_block();  // SYNC POINT chunk scale: this warp's elements and its part of `largest`
      is_last = atomicAdd(&scale.moved, moved) + moved == there;
      __threadfence_block();  // SYNC POINT chunk scale: those of all warps
    }
    if (!__any_sync(~0u, is_last)) return;
    const C codec(work.codec);
    const uint32_t n = job.elements;
    const bool is_poisoned = !is_finite(float_of(*(volatile uint32_t *)&scale.largest));
    float number = scale.of_chunk();
    if (job.forwards()) {
      number = codec.number(job.source(0), n);
    } else if (is_poisoned) {
      number = float_of(QUIET_NAN);
    }
    for (uint32_t t = lane_id(); t < job.nsend; t += WARP) {
      codec.store_number(job.target(t), n, number);
    }
    if (job.forwards()) return;
    if (!scale.is_new()) {
      if (is_poisoned) poison(work, nranks, job, there);
    } else if (lane_id() == 0) {
      *kept_scale(work, job) = is_poisoned ? 0 : number;
    }
  }

  // Gives a chunk the output and the residuals that it has because of an element that is not finite, which a warp has
  // found after others had stored theirs.
  static __device__ __noinline__ void poison(const cinch_work &work, uint32_t nranks,
                                             const Job &job, uint32_t tiles) {
    const CodedSimple mover(work, nranks);
#pragma unroll 1
    for (uint32_t t = 0; t < tiles; ++t) {
      const uint32_t at = t * WARP_TILE;
      float x[HELD];
#pragma unroll
      for (uint32_t k = 0; k < HELD; ++k) x[k] = float_of(QUIET_NAN);
      if (job.writes()) mover.store_user(job, at, x);
      if (work.residuals != nullptr) mover.residuals(job, at).keep_old(valid(job, at));
    }
  }

  __device__ __forceinline__ bool has_chunk_scale() const { return codec_.has_chunk_scale(); }

  // Moves one tile of a step of any kind. With `scans` it only raises the largest magnitude of the chunk.
  __device__ __forceinline__ void tile(const Job &job, uint32_t tile, bool scans) const {
    const uint32_t begin = tile * tile_elements();
    const uint32_t n = job.elements;
    if (begin >= n) return;
    const uint32_t end = min(begin + tile_elements(), n);
    const bool forwards = job.forwards();
    if (forwards) forward(job, begin, end);
    const bool sends = job.op == CINCH_SEND || (job.nsend > 0 && !forwards);
    const bool encodes = sends && !job.intra_send;
    const bool rounds = encodes || (sends && job.intra != CINCH_INTRA_RAW);
    const bool twice = C::scaled && encodes && (scans || tile_elements() > WARP_TILE);
    Summary summary = C::empty_summary();
    // Summarizes this rank's contribution before an in-place step overwrites any element of the
    // block.
    Summary own_summary = C::empty_summary();
    if (C::scaled && job.sums() && job.own == CINCH_OWN_CODED && tile_elements() > WARP_TILE) {
      own_summary = summary_of_own(job, begin, end);
    }
    // A single loop body serves both rounds, which halves compile time and the use of the
    // instruction cache.
#pragma unroll 1
    for (uint32_t round = twice ? 0 : 1; round < 2; ++round) {
#pragma unroll 1
      for (uint32_t at = begin; at < end; at += WARP_TILE) {
        float x[HELD];
        if (job.op == CINCH_RECV || forwards) {
          // Decodes without adding to 0, because an addition would change the bits of a NaN.
          Codes codes;
          codec_.load(job.source(0), job.elements, Lane::mine(at), codes);
          codec_.decode(codes, x);
        } else {
          total(job, at, own_summary, x);
          if (rounds && work_.residuals != nullptr) add_residuals(job, at, x);
        }
        if (C::scaled && encodes && (round == 0 || !twice)) {
          codec_.summarize(x, valid(job, at), summary);
        }
        if (round == 0) continue;
        if (C::scaled && encodes && !twice) codec_.combine_lanes(summary);
        if (encodes) {
          send(job, at, x, summary);
        } else if (job.sums()) {
#pragma unroll
          for (uint32_t k = 0; k < HELD; ++k) x[k] = canonical(x[k]);
        }
        if (rounds && !encodes) {
          if (job.intra < CINCH_INTRA_LINEAR8) {
            send_cast(job, at, x);
          } else {
            send_linear8(work_, job, Lane::mine(at), x);
          }
        } else if (sends && !encodes) {
          send_raw(job, at, x);
        }
        if (job.writes()) store_user(job, at, x);
      }
      if (round == 0) codec_.combine_lanes(summary);
      if constexpr (keeps_scales) {
        if (scans) return raise(job, summary);
      }
    }
  }

  // Raises the largest magnitude of the chunk to that of any lane.
  static __device__ __forceinline__ void raise(const Job &job, float largest) {
#pragma unroll
    for (uint32_t lanes = 1; lanes < WARP; lanes *= 2) {
      largest = larger_magnitude(largest, from_lane(largest, lanes));
    }
    if (lane_id() == 0) atomicMax(&job.scale().largest, bits_of(magnitude_of(largest)));
  }

  // Returns how many of this lane's elements are in the chunk.
  static __device__ __forceinline__ uint32_t valid(const Job &job, uint32_t at) {
    return Lane::valid(job.elements, Lane::mine(at));
  }

  // Returns whether the chunk has all of this lane's elements, in whole 16-byte pieces of aligned
  // buffers.
  static __device__ __forceinline__ bool is_whole(const Job &job, uint32_t at) {
    return job.aligned && Lane::mine(at) + HELD <= job.elements;
  }

  // Loads this lane's elements of the input, with zeros beyond the end of the chunk.
  __device__ __forceinline__ void load_own(const Job &job, uint32_t at, float (&x)[HELD]) const {
    if (is_whole(job, at)) {
      uint4 v[Lane::PIECES];
      Lane::load_pieces(job.input, Lane::mine(at), v);
      Lane::unpack(v, x);
    } else {
      Lane::load_some(job.input, job.elements, Lane::mine(at), x);
    }
    if (work_.flags & CINCH_PREMULTIPLY) {
#pragma unroll
      for (uint32_t k = 0; k < HELD; ++k) x[k] = E::premultiply(x[k], work_.factor);
    }
  }

  __device__ __forceinline__ void store_user(const Job &job, uint32_t at,
                                             const float (&x)[HELD]) const {
    if (inspects()) inspect_rounded(x, valid(job, at));
    if (is_whole(job, at)) {
      store_whole(job.output, Lane::mine(at), x);
    } else {
      Lane::store_some(job.output, job.elements, Lane::mine(at), x);
    }
  }

  static __device__ __forceinline__ void store_whole(uint8_t *to, uint32_t i, const float (&x)[HELD]) {
    uint4 v[Lane::PIECES];
    Lane::pack(x, false, v);
    Lane::store_pieces(to + (uint64_t)i * SIZE, v);
  }

  // Inspects the first `there` elements as the element type will have them.
  static __device__ __noinline__ void inspect_rounded(const float (&x)[HELD], uint32_t there) {
#pragma unroll 1
    for (uint32_t k = 0; k < there; ++k) {
      if (!is_finite(E::widen(E::narrow(x[k])))) record_non_finite();
    }
  }

  // Computes the step's result for this lane's elements: a sum, or the input. The sum starts at -0,
  // because x + -0 is x for every x, even for -0.
  __device__ __forceinline__ void total(const Job &job, uint32_t at, const Summary &own_summary,
                                        float (&x)[HELD]) const {
    const bool reads = job.reads() || job.nrecv == 0;
    const uint32_t after = reads ? job.own_after : job.nrecv;
#pragma unroll
    for (uint32_t k = 0; k < HELD; ++k) x[k] = -0.0f;
#pragma unroll 1
    for (uint32_t part = 0; part < 2; ++part) {
      if (part == 1 && reads) {
        if (job.sums() && job.own == CINCH_OWN_CODED) {
          Codes codes;
          own_codes(job, at, own_summary, codes);
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
      const Average<E> average(work_.flags, work_.factor, nranks_);
#pragma unroll
      for (uint32_t k = 0; k < HELD; ++k) x[k] = average.of(x[k]);
    }
  }

  __device__ __forceinline__ void add_sources(const Job &job, uint32_t at, uint32_t begin,
                                              uint32_t end, float (&x)[HELD]) const {
#pragma unroll 1
    for (; begin < min(end, (uint32_t)job.intra_recv); ++begin) {
      if (job.intra >= CINCH_INTRA_LINEAR8) {
        add_linear8(job, begin, Lane::mine(at), x);
        continue;
      }
      float term[HELD];
      if (job.intra == CINCH_INTRA_RAW) {
        load_raw(job.source(begin), job.elements, Lane::mine(at), term);
      } else {
        load_cast(job, begin, at, term);
      }
#pragma unroll
      for (uint32_t k = 0; k < HELD; ++k) x[k] = E::combine(x[k], term[k], Combine::sum);
    }
#pragma unroll 1
    for (uint32_t r = begin; r < end; r += AHEAD) {
      Codes codes[AHEAD];
#pragma unroll
      for (uint32_t j = 0; j < AHEAD; ++j) {
        if (r + j < end) codec_.load(job.source(r + j), job.elements, Lane::mine(at), codes[j]);
      }
#pragma unroll
      for (uint32_t j = 0; j < AHEAD; ++j) {
        if (r + j < end) codec_.decode_reduce(codes[j], x);
      }
    }
  }

  // Loads this lane's elements, from index i on, of a raw message of n elements.
  static __device__ __forceinline__ void load_raw(const uint8_t *slot, uint32_t n, uint32_t i,
                                                  float (&x)[HELD]) {
    if (i + HELD <= n) {
      uint4 v[Lane::PIECES];
      Lane::load_pieces(slot, i, v);
      Lane::unpack(v, x);
    } else {
      Lane::load_some(slot, n, i, x);
    }
  }

  // Stores x to all targets as it is.
  __device__ __forceinline__ void send_raw(const Job &job, uint32_t at,
                                           const float (&x)[HELD]) const {
    const uint32_t i = Lane::mine(at);
    for (uint32_t t = 0; t < job.nsend; ++t) {
      uint8_t *slot = job.target(t);
      if (i + HELD <= job.elements) {
        store_whole(slot, i, x);
      } else {
        Lane::store_some(slot, job.elements, i, x);
      }
    }
  }

  // Loads this lane's elements of source r, which are cast to 16 bits, with zeros beyond the end of the chunk. Casts take
  // one element at a time, because every kernel with a codec has this code.
  static __device__ __noinline__ void load_cast(const Job &job, uint32_t r, uint32_t at, float (&x)[HELD]) {
    const uint16_t *codes = reinterpret_cast<const uint16_t *>(job.source(r)) + Lane::mine(at);
    const uint32_t there = valid(job, at);
#pragma unroll 1
    for (uint32_t k = 0; k < HELD; ++k) x[k] = k < there ? from_cast(job, codes[k]) : 0.0f;
  }

  // Sends x, a contribution, to all targets, cast to 16 bits.
  __device__ __noinline__ void send_cast(const Job &job, uint32_t at, const float (&x)[HELD]) const {
    const uint32_t there = valid(job, at);
    float seen[HELD];
#pragma unroll 1
    for (uint32_t k = 0; k < HELD; ++k) {
      const uint32_t code = job.intra == CINCH_INTRA_CAST16 ? F16Meaning::encode(x[k]) : bf16_code(x[k]);
      seen[k] = from_cast(job, code);
      for (uint32_t t = 0; k < there && t < job.nsend; ++t) {
        reinterpret_cast<uint16_t *>(job.target(t))[Lane::mine(at) + k] = (uint16_t)code;
      }
    }
    if (work_.residuals != nullptr) residuals(job, at).keep(x, seen, there);
  }

  static __device__ __forceinline__ uint32_t bf16_code(float x) {
    // The largest bfloat16 that is a finite f16.
    constexpr float LARGEST = 65280.0f;
    return Bf16Meaning::encode(std::is_same<E, F16>::value ? limited_f16(x, LARGEST) : x);
  }

  static __device__ __forceinline__ float from_cast(const Job &job, uint32_t code) {
    return job.intra == CINCH_INTRA_CAST16 ? F16Meaning::decode(code) : Bf16Meaning::decode(code);
  }

  // Encodes this rank's contribution as the peers receive it. Only one-shot schedules need it, so
  // it is out of line. A tile holds several blocks, or is one block.
  __device__ __noinline__ void own_codes(const Job &job, uint32_t at, Summary own_summary,
                                         Codes &codes) const {
    float x[HELD];
    load_own(job, at, x);
    // Another step of this call sends the chunk and keeps the new residuals; this adds the old
    // residuals as that step does.
    if (work_.residuals != nullptr) add_residuals(job, at, x);
    if (C::scaled && tile_elements() == WARP_TILE) own_summary = codec_.summary(x, valid(job, at));
    // The step that sends this chunk draws equal random numbers, so the codes are equal.
    const Random random = codec_.random(0, job.first);
    codec_.encode(x, own_summary, job.elements, Lane::mine(at), random, codes);
    if (work_.residuals != nullptr) codec_.damp(codes);
  }

  __device__ __noinline__ Summary summary_of_own(const Job &job, uint32_t begin,
                                                 uint32_t end) const {
    Summary summary = C::empty_summary();
#pragma unroll 1
    for (uint32_t at = begin; at < end; at += WARP_TILE) {
      float x[HELD];
      load_own(job, at, x);
      if (work_.residuals != nullptr) add_residuals(job, at, x);
      codec_.summarize(x, valid(job, at), summary);
    }
    codec_.combine_lanes(summary);
    return summary;
  }

  // Encodes x, stores the codes to all targets, and replaces `x` by the values that the codes
  // decode to.
  __device__ __forceinline__ void send(const Job &job, uint32_t at, float (&x)[HELD],
                                       const Summary &summary) const {
    Codes codes;
    codec_.encode(x, summary, job.elements, Lane::mine(at), Whole::random_of(codec_, job), codes);
    if (work_.residuals != nullptr) codec_.damp(codes);
    if (has_chunk_scale() && !is_finite(codes.number[0])) job.scale().poison();
    for (uint32_t t = 0; t < job.nsend; ++t) store(job.target(t), job, at, codes);
    if (work_.residuals != nullptr) {
      keep_residuals(job, at, codes, x);
    } else if (job.writes()) {
      codec_.decode(codes, x);
    }
  }

  __device__ __forceinline__ Residuals residuals(const Job &job, uint32_t at) const {
    return Residuals(work_.residuals, work_.span, job.first + Lane::mine(at));
  }

  __device__ __noinline__ void add_residuals(const Job &job, uint32_t at,
                                             float (&x)[HELD]) const {
    residuals(job, at).add_to(x, valid(job, at));
  }

  // Keeps the residuals of x, and replaces `x` by the values that the codes decode to.
  __device__ __noinline__ void keep_residuals(const Job &job, uint32_t at,
                                              const Codes &codes, float (&x)[HELD]) const {
    float seen[HELD];
    codec_.decode(codes, seen);
    // All ranks round a finished sum to the element type, so the residual includes that error.
    if (job.writes()) Lane::round(seen);
    residuals(job, at).keep(x, seen, valid(job, at));
#pragma unroll
    for (uint32_t k = 0; k < HELD; ++k) x[k] = seen[k];
  }

  __device__ __forceinline__ void forward(const Job &job, uint32_t begin, uint32_t end) const {
    for (uint32_t at = begin; at < end; at += WARP_TILE) {
      Codes codes;
      codec_.load(job.source(0), job.elements, Lane::mine(at), codes);
      for (uint32_t t = 0; t < job.nsend; ++t) store(job.target(t), job, at, codes);
    }
  }

  // Stores this lane's codes to a slot, and the numbers of its block if the chunk has several blocks.
  __device__ __forceinline__ void store(uint8_t *slot, const Job &job, uint32_t at,
                                        const Codes &codes) const {
    if (has_chunk_scale()) {
      codec_.store_codes(slot, job.elements, Lane::mine(at), codes);
    } else {
      codec_.store(slot, job.elements, Lane::mine(at), codes);
    }
  }

  const cinch_work &work_;
  C codec_;
  uint32_t nranks_;
};

}  // namespace cinch
