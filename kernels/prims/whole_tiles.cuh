// The fast path of prims/coded.cuh: loops over whole encoded tiles. A warp fetches tiles ahead into
// its stage and works on 16 elements a lane.
//
// With PLAIN, the codec is_plain(). Loops that also serve scales of chunks (channel/scales.cuh) and stochastic rounding
// spill registers, and calls on two H200 then take 7 to 11 % longer.
#pragma once

#include "abi.h"
#include "channel/channel.cuh"
#include "codec/codec.cuh"
#include "dtype/average.cuh"
#include "dtype/element.cuh"
#include "prims/held.cuh"
#include "prims/stage.cuh"
#include "prims/verdict.cuh"

namespace cinch {

// Sends on the codes of tile t, one of the whole tiles `first` to `last` - 1 of a received chunk. The function is out of
// line, so that a receive alone keeps no registers for it, and element types share it.
template <class C>
__device__ __noinline__ void forward_tile(const cinch_work &work, const Job &job, uint32_t first, uint32_t last,
                                          uint32_t t, const typename C::Codes &codes) {
  const C codec(work.codec);
  const uint32_t n = job.elements, i = t * WARP_TILE + HELD * lane_id();
  CINCH_ASSUME(i < n && i + HELD <= n);
  using Line = NumberLine<C>;
  typename Line::Share share = {};
  if (!codec.has_chunk_scale()) share = Line(codec, n, first, last).take(t, codes);
#pragma unroll 1
  for (uint32_t peer = 0; peer < job.nsend; ++peer) {
    uint8_t *const target = job.target(peer);
    codec.store_codes(target, n, i, codes);
    if (share.is_there) *(typename Line::Numbers *)(target + share.offset) = share.numbers;
  }
}

template <class E, class C, bool PLAIN = false>
class WholeTiles : Held<E> {
  using Held<E>::mine;
  using Held<E>::pack;
  using Held<E>::store_pieces;
  using Held<E>::unpack;
  using Held<E>::PIECES;
  using Held<E>::SIZE;
  using Tiles = ElementTiles<SIZE>;

 public:
  using Codes = typename C::Codes;
  using Summary = typename C::Summary;

  // The layout of the stage. A send has SEND_TILES tiles in flight and one tile for its output. A
  // sum has two tiles of this rank's contribution, an output tile if there is room, and two bundles
  // of BUNDLE encoded tiles.
  // Encoded tiles begin at whole lines of 128 bytes: copies from host memory to codes half a line off are slower
  // (benches/FIGURES.md, "Choices in the kernels"). Small stages have no room for that.
  static constexpr uint32_t ENCODED_BYTES =
      SMALL_BLOCKS ? EncodedTiles<C>::BYTES : (EncodedTiles<C>::BYTES + 127) / 128 * 128;
  static constexpr uint32_t SEND_TILES = 2 * STAGE_DEPTH;
  static constexpr uint32_t SENT_TILE = SEND_TILES * Tiles::BYTES;
  static constexpr uint32_t OUT_TILE = 2 * Tiles::BYTES;
  static constexpr uint32_t BUNDLES = OUT_TILE + (SMALL_BLOCKS ? 0 : Tiles::BYTES);  // their offset
  static constexpr uint32_t ROOM = (STAGE_ROOM - BUNDLES) / (2 * ENCODED_BYTES);
  static constexpr uint32_t WANTED = C::code_bits <= 8 ? 2 * STAGE_DEPTH : STAGE_DEPTH;
  // Number of encoded tiles in a bundle, which are fetched together. In small stages the widest
  // codes have no room, and BUNDLE is not used.
  static constexpr uint32_t BUNDLE = ROOM == 0 ? 1 : WANTED < ROOM ? WANTED : ROOM;
  static_assert(SENT_TILE + Tiles::BYTES <= STAGE_ROOM, "what the host launches with");

  // True if these loops multiply contributions to an average by its factor. They are for bf16 only,
  // whose averages always have a factor.
  static constexpr bool SCALES = std::is_same<E, BF16>::value;

  // True if two bundles of received tiles fit in a stage.
  static constexpr bool HAS_ROOM = ROOM > 0;

  // Returns the random numbers for encoding in a job. A step without sources encodes this rank's
  // contribution; any other step that encodes, encodes a sum.
  static __device__ __forceinline__ Random random_of(const C &codec, const Job &job) {
    return codec.random(job.nrecv == 0 ? 0 : 1, job.first);
  }

  // Encodes the input to all targets. A rank that keeps the chunk stores the values that its codes
  // decode to. The function constructs its own codec, so that the codec's parameters stay in
  // registers during the loop.
  static __device__ __noinline__ void send_tiles(const cinch_work &work, const Job &job,
                                                 uint32_t first, uint32_t last) {
    const C codec = codec_of(work, job);
    const uint32_t n = job.elements, nsend = job.nsend;
    const PeerSlots targets = targets_of(job);
    const Line line(codec, n, first, last);
    const Random random = random_of(codec, job);
    uint8_t *stage = this_stage();
    const bool keeps = job.writes();
    const float scale = scale_of(work);
    uint8_t *output = job.output + (uint64_t)first * Tiles::BYTES;
    const uint8_t *next = job.input + (uint64_t)first * Tiles::BYTES;
    uint32_t left = last - first;  // tiles to fetch
    const auto fetch = [&](uint32_t slot) {
      if (left > 0) {
        Tiles::fetch(stage + slot * Tiles::BYTES, next);
        next += Tiles::BYTES;
        --left;
      }
      commit_copies();
    };
#pragma unroll 1
    for (uint32_t slot = 0; slot < SEND_TILES; ++slot) fetch(slot);
    uint32_t slot = 0;
#pragma unroll 1
    for (uint32_t t = first; t < last; ++t) {
      uint4 v[PIECES];
      wait_copies<SEND_TILES - 1>();
      __syncwarp();
      Tiles::take(stage + slot * Tiles::BYTES, v);
      __syncwarp();
      fetch(slot);
      slot = (slot + 1) % SEND_TILES;
      float x[HELD];
      unpack(v, x);
      Summary summary;
      if (SCALES && scale != 1.0f) {
#pragma unroll
        for (uint32_t k = 0; k < HELD; ++k) x[k] = mul(x[k], scale);
        summary = codec.summary(x, HELD);
      } else {
        summary = codec.template summary_of<E>(v, x);
      }
      Codes codes;
      emit(codec, job, n, nsend, targets, line, t, summary, random, x, codes);
      if (keeps) {
        codec.decode(codes, x);
        pack(x, C::is_free_of_nan(codes), v);
        inspect_decoded(codes, v);
        // All lanes have finished their loads of the previous tile.
        __syncwarp();
        Tiles::give(stage + SENT_TILE, v, output);
        output += Tiles::BYTES;
      }
    }
    wait_copies<0>();
  }

  // Decodes a received chunk, and sends its codes on if the step does. This serves chunks with one scale, too.
  static __device__ __noinline__ void recv_tiles(const cinch_work &work, const Job &job,
                                                 uint32_t first, uint32_t last) {
    const C codec(work.codec);
    const EncodedTiles<C> encoded_tiles(codec, job.elements);
    __syncwarp();  // all lanes have finished with the last contents of the stage
    const uint8_t *source = job.source(0);
    const bool forwards = job.nsend > 0;
    uint8_t *stage = this_stage();
    uint8_t *output = job.output;
    uint32_t next = first;
    const auto fetch = [&](uint8_t *bundle) {
#pragma unroll
      for (uint32_t j = 0; j < BUNDLE; ++j, ++next) {
        if (next < last) encoded_tiles.fetch(bundle + j * ENCODED_BYTES, source, next);
      }
      commit_copies();
    };
    uint8_t *bundle = stage + BUNDLES, *other = bundle + BUNDLE * ENCODED_BYTES;
    fetch(bundle);
    fetch(other);
#pragma unroll 1
    for (uint32_t t = first; t < last; t += BUNDLE) {
      wait_copies<1>();
      __syncwarp();
#pragma unroll 1
      for (uint32_t j = 0; j < BUNDLE && t + j < last; ++j) {
        Codes codes;
        EncodedTiles<C>::take(codec, bundle + j * ENCODED_BYTES, codes);
        if (forwards) {
          // Only the copy has an address, so that the codes themselves stay in registers.
          Codes copy = codes;
          forward_tile<C>(work, job, first, last, t + j, copy);
        }
        float x[HELD];
        codec.decode(codes, x);
        uint4 v[PIECES];
        pack(x, C::is_free_of_nan(codes), v);
        inspect_decoded(codes, v);
        Tiles::give(stage + j % 2 * Tiles::BYTES, v, output + (uint64_t)(t + j) * Tiles::BYTES);
      }
      __syncwarp();
      fetch(bundle);
      swap(bundle, other);
    }
    wait_copies<0>();
  }

  // Sums the sources and this rank's contribution in the order of the schedule. Sources are fetched
  // in bundles; the contribution is fetched with the first bundle of a tile.
  static __device__ __noinline__ void sum_tiles(const cinch_work &work, const Job &job,
                                                uint32_t nranks, uint32_t first, uint32_t last) {
    const C codec = codec_of(work, job);
    const EncodedTiles<C> encoded_tiles(codec, job.elements);
    const uint32_t n = job.elements, nsend = job.nsend, nrecv = job.nrecv;
    const uint32_t after = job.reads() ? job.own_after : (uint32_t)CINCH_MAX_PEERS;
    const bool averages = job.is_final() && (work.flags & CINCH_AVERAGE);
    const Average<E> average(work.flags, work.factor, nranks);
    // nranks is a power of two, so the product by the divisor's inverse is the quotient.
    const float share = 1.0f / average.divisor;
    const float scale = scale_of(work);
    uint8_t *output = job.writes() ? job.output : nullptr;
    const PeerSlots sources = sources_of(job), targets = targets_of(job);
    const Line line(codec, n, first, last);
    const Random random = random_of(codec, job);
    uint8_t *stage = this_stage();
    uint32_t next = first, next_source = 0;
    const auto fetch = [&](uint8_t *bundle) {
      if (next < last) {
        if (next_source == 0 && after <= nrecv) {
          Tiles::fetch(stage + next % 2 * Tiles::BYTES, job.input + (uint64_t)next * Tiles::BYTES);
        }
        // All loads of addresses precede the copies. Behind the last source the list has stale
        // addresses, which no copy uses.
        const uint8_t *source[BUNDLE];
#pragma unroll
        for (uint32_t j = 0; j < BUNDLE; ++j) source[j] = sources.at(next_source + j);
#pragma unroll
        for (uint32_t j = 0; j < BUNDLE; ++j) {
          if (next_source + j < nrecv) {
            encoded_tiles.fetch(bundle + j * ENCODED_BYTES, source[j], next);
          }
        }
        next_source += BUNDLE;
        if (next_source >= nrecv) {
          next_source = 0;
          ++next;
        }
      }
      commit_copies();
    };
    uint8_t *bundle = stage + BUNDLES, *other = bundle + BUNDLE * ENCODED_BYTES;
    fetch(bundle);
    fetch(other);
#pragma unroll 1
    for (uint32_t t = first; t < last; ++t) {
      float x[HELD];
#pragma unroll
      for (uint32_t k = 0; k < HELD; ++k) x[k] = -0.0f;
#pragma unroll 1
      for (uint32_t begin = 0; begin < nrecv; begin += BUNDLE) {
        wait_copies<1>();
        __syncwarp();
        const uint32_t end = min(nrecv, begin + BUNDLE);
        const uint8_t *encoded = bundle;
        uint32_t r = begin;
        // Part 0 adds the sources before this rank's contribution, then the contribution; part 1
        // adds the sources after it.
#pragma unroll 1
        for (uint32_t part = 0; part < 2; ++part) {
          const uint32_t to = part == 0 ? min(after, end) : end;
#pragma unroll 1
          for (; r < to; ++r, encoded += ENCODED_BYTES) {
            Codes codes;
            EncodedTiles<C>::take(codec, encoded, codes);
            codec.decode_reduce(codes, x);
          }
          if (part == 0 && r == after && (r < end || end == nrecv)) {
            add_tile(stage + t % 2 * Tiles::BYTES, scale, x);
          }
        }
        __syncwarp();
        fetch(bundle);
        swap(bundle, other);
      }
      if (averages) {
#pragma unroll
        for (uint32_t k = 0; k < HELD; ++k) x[k] = mul(average.limit(x[k]), share);
      }
      bool is_free_of_nan = false, is_surely_finite = false;
      if (nsend > 0) {
        // With a scale, all elements of a block with a NaN have the same codes, whatever the NaN's
        // bits. Codecs without scales keep these bits, so a NaN is made canonical first.
        if constexpr (!C::scaled) {
#pragma unroll
          for (uint32_t k = 0; k < HELD; ++k) x[k] = canonical(x[k]);
        }
        Codes codes;
        emit(codec, job, n, nsend, targets, line, t, codec.summary(x, HELD), random, x, codes);
        if (output != nullptr) {
          codec.decode(codes, x);
          is_free_of_nan = C::is_free_of_nan(codes);
          is_surely_finite = C::is_below(codes, SURELY_FINITE);
        }
      } else {
#pragma unroll
        for (uint32_t k = 0; k < HELD; ++k) x[k] = canonical(x[k]);
      }
      if (output != nullptr) {
        uint4 v[PIECES];
        pack(x, is_free_of_nan, v);
        if (!is_surely_finite) Inspected<E>::inspect(v);
        if (SMALL_BLOCKS) {
          store_pieces(output + (uint64_t)mine(t * WARP_TILE) * SIZE, v);
        } else {
          // All lanes have finished their loads of the previous tile.
          __syncwarp();
          Tiles::give(stage + OUT_TILE, v, output + (uint64_t)t * Tiles::BYTES);
        }
      }
    }
    wait_copies<0>();
  }

 private:
  using Line = NumberLine<C>;

  // Elements that decode from blocks with smaller numbers are finite in any element type.
  static constexpr float SURELY_FINITE = std::is_same<E, F16>::value ? 0x1p6f : 0x1p118f;

  // Inspects elements of the output, which the codes decode to.
  static __device__ __forceinline__ void inspect_decoded(const Codes &codes, const uint4 (&v)[PIECES]) {
    if (!C::is_below(codes, SURELY_FINITE)) Inspected<E>::inspect(v);
  }

  // Returns the codec for a loop over whole tiles of a job.
  static __device__ __forceinline__ C codec_of(const cinch_work &work, const Job &job) {
    C codec(work.codec);
    if constexpr (PLAIN) {
      CINCH_ASSUME(codec.is_plain());
    } else if (codec.has_chunk_scale()) {
      codec.set_scale(job.scale().of_chunk());
    } else {
      CINCH_ASSUME(!C::scaled || codec.log2_block() != 0);
    }
    return codec;
  }

  // Return the lists of the slots of a job's sources and targets; each lane contributes one slot.
  static __device__ __forceinline__ PeerSlots sources_of(const Job &job) {
    return PeerSlots(SOURCES_AT, lane_id() < job.nrecv ? job.source(lane_id()) : nullptr);
  }
  static __device__ __forceinline__ PeerSlots targets_of(const Job &job) {
    return PeerSlots(TARGETS_AT, lane_id() < job.nsend ? job.target(lane_id()) : nullptr);
  }

  // Encodes the whole tile t of a chunk of n elements and stores it to all targets.
  static __device__ __forceinline__ void emit(const C &codec, const Job &job, uint32_t n,
                                              uint32_t nsend,
                                              const PeerSlots &targets, const Line &line,
                                              uint32_t t, const Summary &summary,
                                              const Random &random, const float (&x)[HELD],
                                              Codes &codes) {
    const uint32_t i = mine(t * WARP_TILE);
    CINCH_ASSUME(i < n && i + HELD <= n);
    codec.encode(x, summary, n, i, random, codes);
    typename Line::Share share = {};
    if (codec.has_chunk_scale()) {
      if (!is_finite(codes.number[0])) job.scale().poison();
    } else {
      share = line.take(t, codes);
    }
#pragma unroll 4
    for (uint32_t peer = 0; peer < nsend; ++peer) {
      uint8_t *const target = targets.at(peer);
      // Targets are in global memory (of a GPU, or mapped from the host), so stores to them cannot
      // change the list, which is in shared memory.
      CINCH_ASSUME(__isGlobal(target));
      codec.store_codes(target, n, i, codes);
      if (share.is_there) *(typename Line::Numbers *)(target + share.offset) = share.numbers;
    }
  }

  // Returns the factor of contributions to an average; 1 without a factor.
  static __device__ __forceinline__ float scale_of(const cinch_work &work) {
    return SCALES && work.flags & CINCH_PREMULTIPLY ? float_of((uint32_t)work.factor) : 1.0f;
  }

  // Adds the elements of a tile times `scale`, a power of two by which each product is exact.
  static __device__ __forceinline__ void add_tile(const uint8_t *tile, float scale,
                                                  float (&x)[HELD]) {
    uint4 v[PIECES];
    Tiles::take(tile, v);
    float term[HELD];
    unpack(v, term);
#pragma unroll
    for (uint32_t k = 0; k < HELD; ++k) {
      x[k] = SCALES ? fused(term[k], scale, x[k]) : add(x[k], term[k]);
    }
  }

  static __device__ __forceinline__ void swap(uint8_t *&a, uint8_t *&b) {
    uint8_t *const was = a;
    a = b;
    b = was;
  }
};

}  // namespace cinch
