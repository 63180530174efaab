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
#include "prims/stage.cuh"

namespace cinch {

template <class E, class C>
class CodedSimple {
 public:
  static constexpr int protocol = CINCH_SIMPLE;
  static constexpr bool draws = C::draws;

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

  // Whether whole tiles of the chunk may take the loops below, which know the usual cases only:
  // aligned buffers, blocks within a tile, contributions as they are, averages over a power of two.
  __device__ __forceinline__ bool usual(const Job &job) const {
    const bool averages = job.is_final() && (work_.flags & CINCH_AVERAGE);
    const bool known = job.op == CINCH_SEND || job.op == CINCH_RECV ||
                       (job.sums() && job.own != CINCH_OWN_CODED);
    return known && (job.nrecv == 0 || ROOM > 0) && job.aligned && tile_elements() == WARP_TILE &&
           (!C::scaled || codec_.block() != 0) && !(work_.flags & CINCH_PREMULTIPLY) &&
           work_.residuals == nullptr &&
           !(averages && (job.nrecv == 0 || (nranks_ & (nranks_ - 1)) != 0));
  }

  __device__ __forceinline__ void tiles(const Job &job, uint32_t first, uint32_t last) const {
    const uint32_t whole = job.usual ? max(first, min(last, job.elements / WARP_TILE)) : first;
    if (first < whole) {
      if (job.nrecv == 0) {
        send_tiles(work_, job, first, whole);
      } else if (job.op == CINCH_RECV) {
        recv_tiles(work_, job, first, whole);
      } else {
        sum_tiles(work_, job, nranks_, first, whole);
      }
    }
    if (whole < last) any_tiles(work_, nranks_, job, whole, last);
  }

 private:
  using Bits = typename E::Bits;
  using Codes = typename C::Codes;
  using Summary = typename C::Summary;
  using Line = NumberLine<C>;
  static constexpr uint32_t SIZE = sizeof(Bits);
  using Tiles = ElementTiles<SIZE>;
  static constexpr uint32_t PIECES = Tiles::PIECES;
  static constexpr uint32_t N = 16 / SIZE;
  // Sources whose codes are loaded together.
  static constexpr uint32_t AHEAD = C::code_bits <= 8 ? 4 : 2;

  // In a stage: of a send SEND_TILES tiles, and one by way of which what is kept is stored; else two
  // tiles, where there is room a third one, by way of which sums are stored, and two bundles of BUNDLE
  // images each.
  static constexpr uint32_t IMAGE_BYTES = Images<C>::BYTES;
  static constexpr uint32_t SEND_TILES = 2 * STAGE_DEPTH;
  static constexpr uint32_t SENT_TILE = SEND_TILES * Tiles::BYTES;
  static constexpr uint32_t OUT_TILE = 2 * Tiles::BYTES;
  static constexpr uint32_t BUNDLES = OUT_TILE + (SMALL_BLOCKS ? 0 : Tiles::BYTES);  // where they begin
  static constexpr uint32_t ROOM = (STAGE_ROOM - BUNDLES) / (2 * IMAGE_BYTES);
  static constexpr uint32_t WANTED = C::code_bits <= 8 ? 2 * STAGE_DEPTH : STAGE_DEPTH;
  // Where shared memory is short, the widest codes have no room, and are not fetched ahead.
  static constexpr uint32_t BUNDLE = ROOM == 0 ? 1 : WANTED < ROOM ? WANTED : ROOM;
  static_assert(SENT_TILE + Tiles::BYTES <= STAGE_ROOM,
                "what the host launches with");

  __device__ __forceinline__ CodedSimple(const cinch_work &work, uint32_t nranks)
      : work_(work), codec_(work.codec), nranks_(nranks) {}

  // The codec of loops that go over whole tiles, with scales of blocks if it has any.
  static __device__ __forceinline__ C codec_of(const cinch_work &work) {
    const C codec(work.codec);
    CINCH_GRANTED(!C::scaled || codec.log2_block() != 0);
    return codec;
  }

  static __device__ __forceinline__ void load_pieces(const uint8_t *from, uint4 (&v)[PIECES]) {
#pragma unroll
    for (uint32_t p = 0; p < PIECES; ++p) v[p] = load_vector(from + 16 * p);
  }

  static __device__ __forceinline__ void unpack(const uint4 (&v)[PIECES], float (&x)[HELD]) {
#pragma unroll
    for (uint32_t p = 0; p < PIECES; ++p) {
      float part[N];
      E::unpack(v[p], part);
#pragma unroll
      for (uint32_t k = 0; k < N; ++k) x[p * N + k] = part[k];
    }
  }

  // Cheaper where it is known that none of them is NaN.
  static __device__ __forceinline__ void pack(const float (&x)[HELD], bool is_free_of_nan,
                                              uint4 (&v)[PIECES]) {
    if (is_free_of_nan) {
      each_part(x, [&](uint32_t p, const float (&part)[N]) { v[p] = E::pack_numbers(part); });
    } else {
      each_part(x, [&](uint32_t p, const float (&part)[N]) { v[p] = E::pack(part); });
    }
  }

  // Calls take(p, part) for the elements of each piece.
  template <class Take>
  static __device__ __forceinline__ void each_part(const float (&x)[HELD], Take &&take) {
#pragma unroll
    for (uint32_t p = 0; p < PIECES; ++p) {
      float part[N];
#pragma unroll
      for (uint32_t k = 0; k < N; ++k) part[k] = x[p * N + k];
      take(p, part);
    }
  }

  static __device__ __forceinline__ void store_pieces(uint8_t *to, const float (&x)[HELD],
                                                      bool is_free_of_nan) {
    uint4 v[PIECES];
    pack(x, is_free_of_nan, v);
#pragma unroll
    for (uint32_t p = 0; p < PIECES; ++p) store_vector(to + 16 * p, v[p]);
  }

  // What the encodes of a job draw: a step without sources has the rank's contribution, the others
  // that encode have a sum.
  static __device__ __forceinline__ Random random_of(const C &codec, const Job &job) {
    return codec.random(job.nrecv == 0 ? 0 : 1, job.first);
  }

  // The slots of a job's messages, one a lane.
  static __device__ __forceinline__ PeerPlaces sources_of(const Job &job) {
    return PeerPlaces(SOURCES_AT, lane_id() < job.nrecv ? job.source(lane_id()) : nullptr);
  }
  static __device__ __forceinline__ PeerPlaces targets_of(const Job &job) {
    return PeerPlaces(TARGETS_AT, lane_id() < job.nsend ? job.target(lane_id()) : nullptr);
  }

  // Encodes tile t, a whole one of a chunk of n elements, for all targets.
  static __device__ __forceinline__ void emit(const C &codec, uint32_t n, uint32_t nsend,
                                              const PeerPlaces &targets, const Line &line,
                                              uint32_t t, const Summary &summary,
                                              const Random &random, const float (&x)[HELD],
                                              Codes &codes) {
    const uint32_t i = mine(t * WARP_TILE);
    CINCH_GRANTED(i < n && i + HELD <= n);
    codec.encode(x, summary, n, i, random, codes);
    const typename Line::Share share = line.take(t, codes);
#pragma unroll 4
    for (uint32_t peer = 0; peer < nsend; ++peer) {
      uint8_t *const target = targets.at(peer);
      // In a GPU's memory or mapped host memory: the list of places does not change by stores.
      CINCH_GRANTED(__isGlobal(target));
      codec.store_codes(target, n, i, codes);
      if (share.is_there) *(typename Line::Numbers *)(target + share.place) = share.numbers;
    }
  }

  // The input, encoded; and decoded again by whoever keeps what the others will see. What a loop
  // needs of the work and the job it keeps in registers, the codec's parameters too, so it makes a
  // codec of its own.
  static __device__ __noinline__ void send_tiles(const cinch_work &work, const Job &job,
                                                 uint32_t first, uint32_t last) {
    const C codec = codec_of(work);
    const uint32_t n = job.elements, nsend = job.nsend;
    const PeerPlaces targets = targets_of(job);
    const Line line(codec, n, first, last);
    const Random random = random_of(codec, job);
    uint8_t *stage = this_stage();
    const bool keeps = job.writes();
    uint8_t *output = job.output + (uint64_t)first * Tiles::BYTES;
    const uint8_t *next = job.input + (uint64_t)first * Tiles::BYTES;
    uint32_t left = last - first;  // tiles to fetch
    const auto fetch = [&](uint32_t slot) {
      if (left > 0) {
        Tiles::fetch(stage + slot * Tiles::BYTES, next);
        next += Tiles::BYTES;
        --left;
      }
      end_copies();
    };
#pragma unroll 1
    for (uint32_t slot = 0; slot < SEND_TILES; ++slot) fetch(slot);
    uint32_t slot = 0;
#pragma unroll 1
    for (uint32_t t = first; t < last; ++t) {
      uint4 v[PIECES];
      await_copies<SEND_TILES - 1>();
      __syncwarp();
      Tiles::take(stage + slot * Tiles::BYTES, v);
      __syncwarp();
      fetch(slot);
      slot = (slot + 1) % SEND_TILES;
      float x[HELD];
      unpack(v, x);
      Codes codes;
      emit(codec, n, nsend, targets, line, t, codec.template summary_of<E>(v, x), random, x, codes);
      if (keeps) {
        codec.decode(codes, x);
        pack(x, C::is_free_of_nan(codes), v);
        // All lanes have read what they stored last.
        __syncwarp();
        Tiles::give(stage + SENT_TILE, v, output);
        output += Tiles::BYTES;
      }
    }
    await_copies<0>();
  }

  // A received chunk, decoded.
  static __device__ __noinline__ void recv_tiles(const cinch_work &work, const Job &job,
                                                 uint32_t first, uint32_t last) {
    const C codec = codec_of(work);
    const Images<C> images(codec, job.elements);
    __syncwarp();  // nobody reads what an older loop has left in the stage
    const uint8_t *source = job.source(0);
    uint8_t *stage = this_stage();
    uint8_t *output = job.output;
    uint32_t next = first;
    const auto fetch = [&](uint8_t *bundle) {
#pragma unroll
      for (uint32_t j = 0; j < BUNDLE; ++j, ++next) {
        if (next < last) images.fetch(bundle + j * IMAGE_BYTES, source, next);
      }
      end_copies();
    };
    uint8_t *bundle = stage + BUNDLES, *other = bundle + BUNDLE * IMAGE_BYTES;
    fetch(bundle);
    fetch(other);
#pragma unroll 1
    for (uint32_t t = first; t < last; t += BUNDLE) {
      await_copies<1>();
      __syncwarp();
#pragma unroll 1
      for (uint32_t j = 0; j < BUNDLE && t + j < last; ++j) {
        Codes codes;
        Images<C>::take(codec, bundle + j * IMAGE_BYTES, codes);
        float x[HELD];
        codec.decode(codes, x);
        uint4 v[PIECES];
        pack(x, C::is_free_of_nan(codes), v);
        Tiles::give(stage + j % 2 * Tiles::BYTES, v, output + (uint64_t)(t + j) * Tiles::BYTES);
      }
      __syncwarp();
      fetch(bundle);
      swap(bundle, other);
    }
    await_copies<0>();
  }

  // The sum of the sources and the own contribution, in the schedule's order. Sources come in
  // bundles; the first of a tile's brings the own contribution.
  static __device__ __noinline__ void sum_tiles(const cinch_work &work, const Job &job,
                                                uint32_t nranks, uint32_t first, uint32_t last) {
    const C codec = codec_of(work);
    const Images<C> images(codec, job.elements);
    const uint32_t n = job.elements, nsend = job.nsend, nrecv = job.nrecv;
    const uint32_t after = job.reads() ? job.own_after : CINCH_MAX_RANKS;
    const bool averages = job.is_final() && (work.flags & CINCH_AVERAGE);
    // Of a power of two, so that a product by it is the quotient.
    const float share = averages ? 1.0f / (float)nranks : 1.0f;
    uint8_t *output = job.writes() ? job.output : nullptr;
    const PeerPlaces sources = sources_of(job), targets = targets_of(job);
    const Line line(codec, n, first, last);
    const Random random = random_of(codec, job);
    uint8_t *stage = this_stage();
    uint32_t next = first, next_source = 0;
    const auto fetch = [&](uint8_t *bundle) {
      if (next < last) {
        if (next_source == 0 && after <= nrecv) {
          Tiles::fetch(stage + next % 2 * Tiles::BYTES, job.input + (uint64_t)next * Tiles::BYTES);
        }
        // All loads before the copies. Behind the last source is what the stage has there, of no use.
        const uint8_t *source[BUNDLE];
#pragma unroll
        for (uint32_t j = 0; j < BUNDLE; ++j) source[j] = sources.at(next_source + j);
#pragma unroll
        for (uint32_t j = 0; j < BUNDLE; ++j) {
          if (next_source + j < nrecv) images.fetch(bundle + j * IMAGE_BYTES, source[j], next);
        }
        next_source += BUNDLE;
        if (next_source >= nrecv) {
          next_source = 0;
          ++next;
        }
      }
      end_copies();
    };
    uint8_t *bundle = stage + BUNDLES, *other = bundle + BUNDLE * IMAGE_BYTES;
    fetch(bundle);
    fetch(other);
#pragma unroll 1
    for (uint32_t t = first; t < last; ++t) {
      float x[HELD];
#pragma unroll
      for (uint32_t k = 0; k < HELD; ++k) x[k] = -0.0f;
#pragma unroll 1
      for (uint32_t begin = 0; begin < nrecv; begin += BUNDLE) {
        await_copies<1>();
        __syncwarp();
        const uint32_t end = min(nrecv, begin + BUNDLE);
        const uint8_t *image = bundle;
        uint32_t r = begin;
        // Up to where the own contribution comes, and from there on.
#pragma unroll 1
        for (uint32_t part = 0; part < 2; ++part) {
          const uint32_t to = part == 0 ? min(after, end) : end;
#pragma unroll 1
          for (; r < to; ++r, image += IMAGE_BYTES) {
            Codes codes;
            Images<C>::take(codec, image, codes);
            codec.decode_reduce(codes, x);
          }
          if (part == 0 && r == after && (r < end || end == nrecv)) {
            add_tile(stage + t % 2 * Tiles::BYTES, x);
          }
        }
        __syncwarp();
        fetch(bundle);
        swap(bundle, other);
      }
      if (averages) {
#pragma unroll
        for (uint32_t k = 0; k < HELD; ++k) x[k] = mul(x[k], share);
      }
      bool is_free_of_nan = false;
      if (nsend > 0) {
        Codes codes;
        emit(codec, n, nsend, targets, line, t, codec.summary(x, HELD), random, x, codes);
        if (output != nullptr) {
          codec.decode(codes, x);
          is_free_of_nan = C::is_free_of_nan(codes);
        }
      } else {
#pragma unroll
        for (uint32_t k = 0; k < HELD; ++k) x[k] = canonical(x[k]);
      }
      if (output != nullptr) {
        if (SMALL_BLOCKS) {
          store_pieces(output + (uint64_t)mine(t * WARP_TILE) * SIZE, x, is_free_of_nan);
        } else {
          // All lanes have read what they stored last.
          __syncwarp();
          uint4 v[PIECES];
          pack(x, is_free_of_nan, v);
          Tiles::give(stage + OUT_TILE, v, output + (uint64_t)t * Tiles::BYTES);
        }
      }
    }
    await_copies<0>();
  }

  static __device__ __forceinline__ void add_tile(const uint8_t *tile, float (&x)[HELD]) {
    uint4 v[PIECES];
    Tiles::take(tile, v);
    float term[HELD];
    unpack(v, term);
#pragma unroll
    for (uint32_t k = 0; k < HELD; ++k) x[k] = add(x[k], term[k]);
  }

  static __device__ __forceinline__ void swap(uint8_t *&a, uint8_t *&b) {
    uint8_t *const was = a;
    a = b;
    b = was;
  }

  // Tiles of any kind, by an object of their own, so that no codec is made where none of them is.
  static __device__ __noinline__ void any_tiles(const cinch_work &work, uint32_t nranks,
                                                const Job &job, uint32_t first, uint32_t last) {
    const CodedSimple mover(work, nranks);
#pragma unroll 1
    for (uint32_t t = first; t < last; ++t) mover.tile(job, t);
  }

  // A tile of any kind of step.
  __device__ __forceinline__ void tile(const Job &job, uint32_t tile) const {
    const uint32_t begin = tile * tile_elements();
    const uint32_t n = job.elements;
    if (begin >= n) return;
    const uint32_t end = min(begin + tile_elements(), n);
    const bool forwards = job.op == CINCH_RECV_COPY_SEND;
    if (forwards) forward(job, begin, end);
    const bool encodes = job.op == CINCH_SEND || (job.nsend > 0 && !forwards);
    const bool twice = C::scaled && encodes && tile_elements() > WARP_TILE;
    Summary summary = C::nothing();
    // Of the own contribution, before any of the block is overwritten in place.
    Summary own_summary = C::nothing();
    if (C::scaled && job.sums() && job.own == CINCH_OWN_CODED && tile_elements() > WARP_TILE) {
      own_summary = summary_of_own(job, begin, end);
    }
    // One copy of the code for both rounds: the compiler's time and the instruction cache.
#pragma unroll 1
    for (uint32_t round = twice ? 0 : 1; round < 2; ++round) {
#pragma unroll 1
      for (uint32_t at = begin; at < end; at += WARP_TILE) {
        float x[HELD];
        if (job.op == CINCH_RECV || forwards) {
          // As it came: a sum would make another NaN of a NaN.
          Codes codes;
          codec_.load(job.source(0), job.elements, mine(at), codes);
          codec_.decode(codes, x);
        } else {
          total(job, at, own_summary, x);
          if (encodes && work_.residuals != nullptr) add_residuals(job, at, x);
        }
        if (C::scaled && encodes && (round == 0 || !twice)) codec_.look(x, valid(job, at), summary);
        if (round == 0) continue;
        if (C::scaled && encodes && !twice) codec_.conclude(summary);
        if (encodes) {
          send(job, at, x, summary);
        } else if (job.sums()) {
#pragma unroll
          for (uint32_t k = 0; k < HELD; ++k) x[k] = canonical(x[k]);
        }
        if (job.writes()) store_user(job, at, x);
      }
      if (round == 0) codec_.conclude(summary);
    }
  }

  // This lane's first element of a tile.
  static __device__ __forceinline__ uint32_t mine(uint32_t at) { return at + lane_id() * HELD; }

  // How many of this lane's elements are in the chunk.
  static __device__ __forceinline__ uint32_t valid(const Job &job, uint32_t at) {
    return job.elements > mine(at) ? min(job.elements - mine(at), HELD) : 0;
  }

  // Whether this lane's elements are whole pieces of aligned buffers.
  __device__ __forceinline__ bool is_whole(const Job &job, uint32_t at) const {
    return job.aligned && mine(at) + HELD <= job.elements;
  }

  // This lane's elements of the input, zeros beyond its end.
  __device__ __forceinline__ void load_own(const Job &job, uint32_t at, float (&x)[HELD]) const {
    if (is_whole(job, at)) {
      uint4 v[PIECES];
      load_pieces(job.input + (uint64_t)mine(at) * SIZE, v);
      unpack(v, x);
    } else if (mine(at) < job.elements) {
      const Bits *from = (const Bits *)job.input + mine(at);
#pragma unroll
      for (uint32_t k = 0; k < HELD; ++k) x[k] = mine(at) + k < job.elements ? E::widen(from[k]) : 0;
    } else {
      // Not by one load after the other: small messages are tiles that end early.
#pragma unroll
      for (uint32_t k = 0; k < HELD; ++k) x[k] = 0;
    }
    if (work_.flags & CINCH_PREMULTIPLY) {
#pragma unroll
      for (uint32_t k = 0; k < HELD; ++k) x[k] = E::premultiply(x[k], work_.factor);
    }
  }

  __device__ __forceinline__ void store_user(const Job &job, uint32_t at,
                                             const float (&x)[HELD]) const {
    if (is_whole(job, at)) {
      store_pieces(job.output + (uint64_t)mine(at) * SIZE, x, false);
    } else if (mine(at) < job.elements) {
      Bits *to = (Bits *)job.output + mine(at);
#pragma unroll
      for (uint32_t k = 0; k < HELD; ++k) {
        if (mine(at) + k < job.elements) to[k] = E::narrow(x[k]);
      }
    }
  }

  // What a step computes from this lane's elements: a sum, a received chunk, or the input. The
  // sum starts with -0, to which every number adds as it is.
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
#pragma unroll
      for (uint32_t k = 0; k < HELD; ++k) x[k] = E::divide(x[k], nranks_);
    }
  }

  __device__ __forceinline__ void add_sources(const Job &job, uint32_t at, uint32_t begin,
                                              uint32_t end, float (&x)[HELD]) const {
#pragma unroll 1
    for (uint32_t r = begin; r < end; r += AHEAD) {
      Codes codes[AHEAD];
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
  // out of the way. A tile holds several blocks, or is one.
  __device__ __noinline__ void own_codes(const Job &job, uint32_t at, Summary own_summary,
                                         Codes &codes) const {
    float x[HELD];
    load_own(job, at, x);
    // The send of this chunk keeps what it drops; here are the same values again.
    if (work_.residuals != nullptr) add_residuals(job, at, x);
    if (C::scaled && tile_elements() == WARP_TILE) own_summary = codec_.summary(x, valid(job, at));
    // What the send of this chunk drew.
    const Random random = codec_.random(0, job.first);
    codec_.encode(x, own_summary, job.elements, mine(at), random, codes);
  }

  __device__ __noinline__ Summary summary_of_own(const Job &job, uint32_t begin,
                                                 uint32_t end) const {
    Summary summary = C::nothing();
#pragma unroll 1
    for (uint32_t at = begin; at < end; at += WARP_TILE) {
      float x[HELD];
      load_own(job, at, x);
      if (work_.residuals != nullptr) add_residuals(job, at, x);
      codec_.look(x, valid(job, at), summary);
    }
    codec_.conclude(summary);
    return summary;
  }

  // Encodes, sends to all targets, and leaves in `x` what they will decode.
  __device__ __forceinline__ void send(const Job &job, uint32_t at, float (&x)[HELD],
                                       const Summary &summary) const {
    Codes codes;
    codec_.encode(x, summary, job.elements, mine(at), random_of(codec_, job), codes);
    for (uint32_t t = 0; t < job.nsend; ++t) {
      codec_.store(job.target(t), job.elements, mine(at), codes);
    }
    if (work_.residuals != nullptr) {
      keep_residuals(job, at, codes, x);
    } else if (job.writes()) {
      codec_.decode(codes, x);
    }
  }

  // This lane's residuals: array 0 those of the last call, array 1 those that this one leaves.
  __device__ __forceinline__ float *residuals(const Job &job, uint32_t array, uint32_t at) const {
    float *const arrays = (float *)((uint8_t *)work_.residuals + CINCH_RESIDUALS_BYTES);
    return arrays + (array ^ work_.residuals->turn) * work_.span + job.first + mine(at);
  }

  // Adds what the last call dropped. A residual that would make a finite value infinite is dropped.
  __device__ __noinline__ void add_residuals(const Job &job, uint32_t at,
                                             float (&x)[HELD]) const {
    const float *now = residuals(job, 0, at);
    const uint32_t there = valid(job, at);
#pragma unroll
    for (uint32_t k = 0; k < HELD; ++k) {
      if (k < there) {
        const float sum = add(x[k], now[k]);
        if (is_finite(sum)) x[k] = sum;
      }
    }
  }

  // Keeps what `codes` dropped of x, and leaves in `x` what they decode to. Where the difference is
  // not finite the old residual stays, so that a block with a NaN neither poisons nor loses it.
  __device__ __noinline__ void keep_residuals(const Job &job, uint32_t at,
                                              const Codes &codes, float (&x)[HELD]) const {
    const float *now = residuals(job, 0, at);
    float *next = residuals(job, 1, at);
    const uint32_t there = valid(job, at);
    float decoded[HELD];
    codec_.decode(codes, decoded);
#pragma unroll
    for (uint32_t k = 0; k < HELD; ++k) {
      if (k < there) {
        const float dropped = add(x[k], -decoded[k]);
        next[k] = is_finite(dropped) ? dropped : now[k];
      }
      x[k] = decoded[k];
    }
  }

  __device__ __forceinline__ void forward(const Job &job, uint32_t begin, uint32_t end) const {
    for (uint32_t at = begin; at < end; at += WARP_TILE) {
      Codes codes;
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
