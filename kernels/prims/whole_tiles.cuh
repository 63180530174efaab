// Loops over whole encoded tiles, in the usual cases: a warp fetches ahead into its stage and works on
// 16 elements a lane. What else there is goes by prims/coded.cuh.
#pragma once

#include "abi.h"
#include "codec/codec.cuh"
#include "dtype/element.cuh"
#include "exec/interpret.cuh"
#include "prims/held.cuh"
#include "prims/stage.cuh"

namespace cinch {

template <class E, class C>
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
  static_assert(SENT_TILE + Tiles::BYTES <= STAGE_ROOM, "what the host launches with");

  // Whether what is received has room in a stage.
  static constexpr bool HAS_ROOM = ROOM > 0;

  // What the encodes of a job draw: a step without sources has the rank's contribution, the others
  // that encode have a sum.
  static __device__ __forceinline__ Random random_of(const C &codec, const Job &job) {
    return codec.random(job.nrecv == 0 ? 0 : 1, job.first);
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
        // Codes of a block with a NaN are the same whatever it is like; others may keep its bits.
        if constexpr (!C::scaled) {
#pragma unroll
          for (uint32_t k = 0; k < HELD; ++k) x[k] = canonical(x[k]);
        }
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

 private:
  using Line = NumberLine<C>;

  // The codec of loops that go over whole tiles, with scales of blocks if it has any.
  static __device__ __forceinline__ C codec_of(const cinch_work &work) {
    const C codec(work.codec);
    CINCH_GRANTED(!C::scaled || codec.log2_block() != 0);
    return codec;
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
};

}  // namespace cinch
