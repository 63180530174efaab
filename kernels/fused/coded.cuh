// Fused kernels through a codec over ll128 lines or ll packets, for small and middle messages: one
// kernel for all_reduce in one or two rounds, reduce_scatter and all_gather (args.phases selects
// one).
//
// An encoded tile is 512 elements in the wire layout of a chunk. It travels in lines of 128 bytes
// (fused/tile_lines.cuh), with 120 bytes of payload or, as packets, with 64. 8-bit codes with their
// scales fill 4.3 of 5 lines, or 8.1 of 9.
//
// Phases, for each tile, which a warp works on:
//   1. Encode this rank's contribution, or the part or block of each peer, and store it to the area
//      of every peer, or of that peer.
//   2. Poll the encoded tiles of all peers; decode and add them and this rank's contribution in the
//      order of ranks.
//   3. Store the sum; or (two-shot) encode it, send it to all peers and store its decoded values.
//   4. Two-shot: poll the peers' sums, decode and store them.
// An all_gather does 1, then 4 with the contributions. A block works in slices of one or a few
// tiles for each warp:
//
//   iteration     0         1         2         3
//   phase 1       slice 0   slice 1   slice 2   slice 3
//   phases 2, 3             slice 0   slice 1   slice 2     a slice late: sending overlaps waiting
//   phase 4                           slice 0   slice 1
//
// Launch: any number of blocks that are resident at once, MOVERS threads with a stage of dynamic
// shared memory for each warp. Each block takes an equal, contiguous share of the tiles.
// Bytes on the wire, out of each of N ranks, for a message or block whose encoded tiles take w
// bytes of lines: (N - 1) w; two-shot 2 (N - 1) w / N.
// Bits: those of the schedules of the same algorithm with one chunk for each part. Blocks of scale
// begin where a part begins, and sums have the same order.
// Synchronisation: fused/exchange.cuh. All ranks send all peers equally many tiles, also for
// shorter or empty parts, so no rank needs an empty message. In place, a warp overwrites elements
// of its own part, or of the whole message, that only it has read. What it stores to another rank's
// part is a sum that includes this rank's contribution, which was read before.
#pragma once

#include "channel/feedback.cuh"
#include "codec/codec.cuh"
#include "fused/exchange.cuh"
#include "fused/tile_lines.cuh"
#include "prims/held.cuh"
#include "prims/residuals.cuh"

namespace cinch {

template <class E, class C, class Lines>
class CodedExchange {
 public:
  static __device__ __forceinline__ void exchange(const cinch_oneshot_args &args, uint64_t epoch,
                                                 uint32_t *stopped) {
    const CodedExchange call(args, epoch, stopped);
    call.run();
    call.lines_of_tiles_.refresh(args, call.area_, call.used());
    if (args.residuals != nullptr) {
      __syncthreads();
      if (threadIdx.x == 0 && stopped[0] == 0) end_feedback(*args.residuals, gridDim.x);
    }
  }

 private:
  using Lane = Held<E>;
  using Codes = typename C::Codes;
  using Tiles = ElementTiles<Lane::SIZE>;

  // A tile that goes to a peer, or comes from a peer, which is the k-th rank after this rank.
  struct Message {
    uint32_t tile, k;
  };

  // An encoded tile is sent in groups of four lines. A warp polls for SOURCES tiles together.
  static constexpr uint32_t GROUP_BYTES = 4 * Lines::LINE_PAYLOAD;
  static constexpr uint32_t GROUPS = (EncodedTiles<C>::BYTES + GROUP_BYTES - 1) / GROUP_BYTES;
  static constexpr uint32_t SOURCES = Lines::SOURCES;
  static constexpr uint32_t TOGETHER = SOURCES * GROUPS;
  // Largest number of tiles of a slice that one warp works on.
  static constexpr uint32_t BATCH = SMALL_BLOCKS ? 1 : SOURCES;
  // The layout of a warp's stage: a tile of elements in flight, received tiles, and encoded tiles
  // to send. Encoded tiles of two slices have room, because a one-shot all_reduce adds them one
  // slice later.
  static constexpr uint32_t RECEIVED = Tiles::BYTES;
  static constexpr uint32_t BUILT = RECEIVED + TOGETHER * GROUP_BYTES;
  static constexpr uint32_t ENCODED_ROOM = (EncodedTiles<C>::BYTES + 127) / 128 * 128;
  static_assert(BUILT + 2 * BATCH * ENCODED_ROOM <= STAGE_BYTES, "the host launches STAGE_BYTES");
  // Number of bytes that reading a tile in lines touches: the payload of its lines, and the word at
  // the place of the last line's flag.
  static constexpr uint32_t READ =
      (EncodedTiles<C>::BYTES + Lines::LINE_PAYLOAD - 1) / Lines::LINE_PAYLOAD *
          Lines::LINE_PAYLOAD + 8;
  static_assert(BUILT + (2 * BATCH - 1) * ENCODED_ROOM + READ <= STAGE_BYTES,
                "no access to another warp's stage");
  static_assert(C::scaled, "sums of others would need canonical NaN before they are encoded");

  __device__ __forceinline__ CodedExchange(const cinch_oneshot_args &args, uint64_t epoch,
                                          uint32_t *stopped)
      : args_(args),
        comm_(args.comm),
        codec_(args.codec),
        stop_{stopped},
        lines_of_tiles_(args, epoch),
        area_(args.area + (epoch & 1) * args.half),
        factor_(args.flags & CINCH_FACTOR_AT ? E::factor_at(args.factor) : args.factor),
        encoded_bytes_(args.tile_lines * CINCH_LINE_BYTES),
        sends_parts_(args.phases & CINCH_SENDS_PARTS),
        sums_(args.phases & CINCH_SUMS),
        sends_sums_(args.phases & CINCH_SENDS_SUMS),
        step_{MOVER_WARPS / others(), MOVER_WARPS % others()},
        batch_(others() < BATCH ? BATCH / others() : 1) {
    CINCH_ASSUME(codec_.log2_block() != 0);
    const uint32_t all = (args.words + WARP_TILE - 1) / WARP_TILE;
    first_ = blockIdx.x * args.share;
    tiles_ = all > first_ ? min(args.share, all - first_) : 0;
    lines_ = 0;
#pragma unroll
    for (uint32_t j = 0; j < TOGETHER; ++j) lines_ |= (uint32_t)has_line(j % GROUPS) << j;
  }

  __device__ __forceinline__ void run() const {
    const uint32_t slices = (tiles_ + slice_tiles() - 1) / slice_tiles();
    const bool gathers = !sums_ || sends_sums_;
    const uint32_t behind = sends_sums_ ? 2 : 1;  // slices by which gather follows send
#pragma unroll 1
    for (uint32_t slice = 0; slice < slices + behind; ++slice) {
      if (slice < slices) send(slice);
      if (sums_ && slice - 1 < slices && !sum(slice - 1)) return;
      if (gathers && slice - behind < slices && !gather(slice - behind)) return;
    }
  }

  // Return the number of other ranks, and the k-th peer after this rank. Each rank starts with
  // another peer, so that no port receives all messages at once.
  __device__ __forceinline__ uint32_t others() const { return comm_.nranks - 1; }
  __device__ __forceinline__ uint32_t peer_at(uint32_t k) const {
    const uint32_t peer = comm_.rank + k;
    return peer >= comm_.nranks ? peer - comm_.nranks : peer;
  }

  // Return the largest number of tiles in a slice, the first tile of a slice, and its number of
  // tiles. Each warp has every MOVER_WARPS-th tile.
  __device__ __forceinline__ uint32_t slice_tiles() const { return MOVER_WARPS * batch_; }
  __device__ __forceinline__ uint32_t begin(uint32_t slice) const {
    return first_ + slice * slice_tiles();
  }
  __device__ __forceinline__ uint32_t count(uint32_t slice) const {
    return min(tiles_ - slice * slice_tiles(), slice_tiles());
  }

  // Messages of a slice are numbered tile by tile, so that neighbouring warps have different peers.
  // Each warp takes every MOVER_WARPS-th message.
  __device__ __forceinline__ Message message(uint32_t slice, uint32_t number) const {
    return {begin(slice) + number / others(), 1 + number % others()};
  }
  __device__ __forceinline__ Message next_of(Message at) const {
    at.tile += step_.tile, at.k += step_.k;
    if (at.k > others()) at.k -= others(), ++at.tile;
    return at;
  }

  // Return the number of elements in the part of `rank`, and the index of its first element in the
  // buffer. Without parts, a block or the whole message takes the place of the part.
  __device__ __forceinline__ uint32_t elements_of(uint32_t rank) const {
    const uint32_t all = (uint32_t)args_.count, begin = rank * args_.words;
    if (!sends_sums_) return all;
    return all > begin ? min(all - begin, args_.words) : 0;
  }
  __device__ __forceinline__ uint64_t start_of(uint32_t rank) const {
    return (uint64_t)rank * (sends_sums_ ? args_.words : (uint32_t)args_.count);
  }

  // A tile of this rank's contribution, which fetch() has requested. A whole, aligned tile is being
  // copied to the stage; any other is loaded later.
  struct Ahead {
    const uint8_t *from;
    uint32_t n, at;  // elements of the part or block; the tile's first element
    bool is_whole;
  };
  __device__ __forceinline__ Ahead fetch(uint32_t rank, uint32_t tile) const {
    Ahead ahead;
    ahead.from = (const uint8_t *)args_.input + (sends_parts_ ? start_of(rank) * Lane::SIZE : 0);
    ahead.n = elements_of(rank);
    ahead.at = tile * WARP_TILE;
    ahead.is_whole = (uintptr_t)ahead.from % 16 == 0 && ahead.at + WARP_TILE <= ahead.n;
    if (ahead.is_whole) {
      Tiles::fetch(this_stage(), ahead.from + (uint64_t)ahead.at * Lane::SIZE);
      commit_copies();
    }
    return ahead;
  }
  // Loads this lane's elements of a fetched tile; all lanes call it. Afterwards another tile may be
  // fetched. A NaN may become any NaN: codes keep none of its bits, and sums are canonicalized.
  __device__ __forceinline__ void take(const Ahead &ahead, float (&x)[HELD]) const {
    const uint32_t i = Lane::mine(ahead.at);
    uint4 v[Lane::PIECES];
    if (ahead.is_whole) {
      wait_copies<0>();
      __syncwarp();
      Tiles::take(this_stage(), v);
      Lane::template unpack<true>(v, x);
      __syncwarp();
    } else if (Lane::is_whole(ahead.from, ahead.n, i)) {
      Lane::load_pieces(ahead.from, i, v);
      Lane::template unpack<true>(v, x);
    } else {
      Lane::load_some(ahead.from, ahead.n, i, x);
    }
    if (args_.flags & CINCH_PREMULTIPLY) {
#pragma unroll
      for (uint32_t k = 0; k < HELD; ++k) x[k] = E::premultiply(x[k], factor_);
    }
  }

  // Stores a tile of the part or block of `rank`. All lanes call it, while no tile is being copied
  // to the stage.
  __device__ __forceinline__ void store(uint32_t rank, uint32_t tile, bool is_free_of_nan,
                                        const float (&x)[HELD]) const {
    const bool has_one_block = sums_ && !sends_sums_;
    uint8_t *to = (uint8_t *)args_.output + (has_one_block ? 0 : start_of(rank) * Lane::SIZE);
    const uint32_t n = elements_of(rank), at = tile * WARP_TILE;
    if ((uintptr_t)to % 16 == 0 && at + WARP_TILE <= n) {
      uint4 v[Lane::PIECES];
      Lane::pack(x, is_free_of_nan, v);
      __syncwarp();  // all lanes have finished their loads of the last tile
      Tiles::give(this_stage(), v, to + (uint64_t)at * Lane::SIZE);
      __syncwarp();  // the next tile may be in flight
    } else {
      Lane::store_some(to, n, Lane::mine(at), x);
    }
  }

  // Calls `does`, code that is large and runs rarely, on a copy of x. Because only the copy has an
  // address, x itself stays in registers.
  template <class Does>
  static __device__ __forceinline__ void out_of_line(float (&x)[HELD], Does &&does) {
    float y[HELD];
#pragma unroll
    for (uint32_t k = 0; k < HELD; ++k) y[k] = x[k];
    does(y);
#pragma unroll
    for (uint32_t k = 0; k < HELD; ++k) x[k] = y[k];
  }
  static __device__ __noinline__ void divide_all(Average<E> average, float (&x)[HELD]) {
#pragma unroll 1
    for (uint32_t k = 0; k < HELD; ++k) x[k] = average.of(x[k]);
  }

  // Encodes a tile of the part or block of `rank`, which has n elements. `which` is 0 for
  // contributions and 1 for sums.
  __device__ __forceinline__ void encode(uint32_t which, uint32_t rank, uint32_t n, uint32_t tile,
                                         float (&x)[HELD], uint8_t *to) const {
    const uint32_t i = Lane::mine(tile * WARP_TILE);
    const uint32_t first = sends_parts_ ? (uint32_t)start_of(rank) : 0;
    if (args_.residuals != nullptr) {
      out_of_line(x, [&](float (&y)[HELD]) { encode_fed(args_, which, first, n, i, y, to); });
    } else {
      Codes codes;
      codec_.encode(x, codec_.summary(x, Lane::valid(n, i)), n, i, codec_.random(which, first),
                    codes);
      __syncwarp();  // all lanes have read the last encoded tile
      codec_.store(to, WARP_TILE, Lane::mine(0), codes);
    }
  }
  // Encodes a tile with error feedback.
  static __device__ __noinline__ void encode_fed(const cinch_oneshot_args &args, uint32_t which,
                                                 uint32_t first, uint32_t n, uint32_t i,
                                                 float (&x)[HELD], uint8_t *to) {
    const C codec(args.codec);
    CINCH_ASSUME(codec.log2_block() != 0);
    const uint32_t there = Lane::valid(n, i);
    const Residuals residuals(args.residuals, args.span, first + i);
    residuals.add_to(x, there);
    Codes codes;
    codec.encode(x, codec.summary(x, there), n, i, codec.random(which, first), codes);
    codec.damp(codes);
    __syncwarp();
    codec.store(to, WARP_TILE, Lane::mine(0), codes);
    float seen[HELD];
    codec.decode(codes, seen);
    if (which == 1) Lane::round(seen);  // as all ranks round a finished sum
    residuals.keep(x, seen, there);
  }
  __device__ __forceinline__ void take(const uint8_t *encoded, Codes &codes) const {
    codec_.load(encoded, WARP_TILE, Lane::mine(0), codes);
  }

  // Decodes tile `index` into the part or block of `rank` in the output.
  __device__ __forceinline__ void keep(const uint8_t *encoded, uint32_t index,
                                       uint32_t rank) const {
    Codes codes;
    take(encoded, codes);
    float x[HELD];
    codec_.decode(codes, x);
    store(rank, index, C::is_free_of_nan(codes), x);
  }

  struct Source {
    uint32_t rank, tile;
  };

  // Return the places in the stage of the b-th tile that this warp encodes in a slice, and of
  // received tile s.
  static __device__ __forceinline__ uint8_t *built(uint32_t slice, uint32_t b) {
    return this_stage() + BUILT + (slice % 2 * BATCH + b) * ENCODED_ROOM;
  }
  static __device__ __forceinline__ uint8_t *received(uint32_t s) {
    return this_stage() + RECEIVED + s * GROUPS * GROUP_BYTES;
  }

  // Returns the address in a peer buffer of tile `index` of a round.
  __device__ __forceinline__ uint8_t *address_of(uint8_t *peer_buffer, uint32_t round,
                                                 uint32_t index) const {
    const uint64_t begin = area_ + (round == 0 ? 0 : args_.half / 2);
    return peer_buffer + begin + (uint64_t)index * encoded_bytes_;
  }
  // Returns whether group g of an encoded tile has a line for this lane.
  __device__ __forceinline__ bool has_line(uint32_t g) const {
    return 4 * g + lane_id() / LINE_LANES < args_.tile_lines;
  }
  // Returns the number of bytes of a round's area that the call writes.
  __device__ __forceinline__ uint32_t used() const {
    return (args_.words + WARP_TILE - 1) / WARP_TILE * encoded_bytes_;
  }

  // Sends an encoded tile to the peers peer_at(k) to peer_at(end - 1).
  __device__ __forceinline__ void send_tile(uint8_t *encoded, uint32_t round, uint32_t index,
                                             uint32_t k, uint32_t end) const {
    __syncwarp();  // all lanes have stored their codes
    typename Lines::Words v[GROUPS];
#pragma unroll
    for (uint32_t g = 0; g < GROUPS; ++g) {
      // These loads may go beyond the tile, but stay within the stage; the receiver ignores the
      // bytes.
      v[g] = {};
      if (has_line(g)) v[g] = Lines::take(encoded + g * GROUP_BYTES);
    }
    __syncwarp();
#pragma unroll 1
    for (; k < end; ++k) {
      uint8_t *to = address_of(comm_.outbox[peer_at(k)], round, index);
#pragma unroll
      for (uint32_t g = 0; g < GROUPS; ++g) {
        lines_of_tiles_.send(to + g * LINES_BYTES, v[g], has_line(g));
      }
    }
  }

  // Receives up to SOURCES encoded tiles and stores tile s to received(s). Bit s of `wanted`
  // selects tile s. `next()` returns the rank and index of one tile after the other; `from(s)`
  // returns the rank of tile s. Returns false if a wait failed.
  template <class Next, class From>
  __device__ __forceinline__ bool receive(uint32_t round, uint32_t wanted, Next &&next,
                                          From &&from) const {
    const uint8_t *lines[SOURCES];
    uint32_t missing = 0;
#pragma unroll
    for (uint32_t s = 0; s < SOURCES; ++s) {
      const Source source = next();
      if (wanted >> s & 1) {
        lines[s] = address_of(comm_.inbox[source.rank], round, source.tile);
        missing |= ((1u << GROUPS) - 1) << s * GROUPS;
      }
    }
    const uint32_t all = missing;
    const auto at = [&](uint32_t j) { return lines[j / GROUPS] + j % GROUPS * LINES_BYTES; };
    const auto is_there = [&](uint32_t, uint4 words) { return lines_of_tiles_.is_there(words); };
    const auto name = [&](uint32_t j) { return from(j / GROUPS); };
    uint4 v[TOGETHER];
    if (!load_lines(comm_, stop_, missing, at, is_there, name, v, lines_)) return false;
#pragma unroll
    for (uint32_t j = 0; j < TOGETHER; ++j) {
      if ((all & lines_) >> j & 1) {
        Lines::keep(received(0) + j * GROUP_BYTES, v[j]);
      }
    }
    __syncwarp();
    return true;
  }

  // Executes phase 1 for a slice: encodes this rank's tiles and sends them.
  __device__ __forceinline__ void send(uint32_t slice) const {
    const uint32_t all = sends_parts_ ? count(slice) * others() : count(slice);
    uint32_t number = mover_warp();
    if (number >= all) return;
    // Without parts all peers receive each tile, so k, which selects a peer's part, is 0.
    Message at = sends_parts_ ? message(slice, number) : Message{begin(slice) + number, 0};
    Ahead ahead = fetch(peer_at(at.k), at.tile);
#pragma unroll 1
    for (uint32_t b = 0;; ++b) {
      const Message own = at;
      const uint32_t n = ahead.n;
      float x[HELD];
      take(ahead, x);
      number += MOVER_WARPS;
      const bool is_last = number >= all;
      // Only a one-shot all_reduce reads its encoded tiles again.
      uint8_t *encoded = built(slice, sends_parts_ ? 0 : b);
      if (!is_last) {
        at = sends_parts_ ? next_of(at) : Message{at.tile + MOVER_WARPS, 0};
        if (sums_) ahead = fetch(peer_at(at.k), at.tile);
      }
      encode(0, peer_at(own.k), n, own.tile, x, encoded);
      if (sends_parts_) {
        send_tile(encoded, 0, own.tile, own.k, own.k + 1);
      } else {
        send_tile(encoded, 0, own.tile, 1, comm_.nranks);
        if (!sums_) {
          // Stores in the output the values that the peers decode, so that all ranks have identical
          // bits.
          keep(encoded, own.tile, comm_.rank);
          if (!is_last) ahead = fetch(comm_.rank, at.tile);
        }
      }
      if (is_last) return;
      __syncwarp();  // all lanes have read the tile
    }
  }

  // Executes phases 2 and 3 for a slice: receives the contributions, adds them, and stores or sends
  // the sum. Returns false if a wait failed.
  __device__ __forceinline__ bool sum(uint32_t slice) const {
    const uint32_t own = comm_.rank;
#pragma unroll 1
    for (uint32_t b = 0; b < batch_; ++b) {
      const uint32_t number = mover_warp() + b * MOVER_WARPS, index = begin(slice) + number;
      if (number >= count(slice)) break;
      uint8_t *encoded = built(slice, b);
      Ahead ahead;
      if (sends_parts_) ahead = fetch(own, index);  // before the wait
      float x[HELD];
#pragma unroll
      for (uint32_t k = 0; k < HELD; ++k) x[k] = -0.0f;
      // Adds the contributions in rank order. Peers are numbered without this rank: peer o is rank
      // o if o is below this rank, otherwise rank o + 1.
#pragma unroll 1
      for (uint32_t o = 0; o <= others(); ++o) {
        if (o == own) {
          if (sends_parts_) {
            float mine[HELD];
            take(ahead, mine);
#pragma unroll
            for (uint32_t k = 0; k < HELD; ++k) x[k] = add(x[k], mine[k]);
          } else {
            // This rank's contribution is decoded from its codes, as on all peers, so that all sums
            // are equal.
            Codes codes;
            take(encoded, codes);
            codec_.decode_reduce(codes, x);
          }
        }
        if (o == others()) break;
        // A wait receives either all tiles of this warp's slice from all peers, or one tile
        // from each of SOURCES peers.
        if (o % SOURCES == 0 && (b == 0 || batch_ == 1)) {
          const uint32_t left = (count(slice) - number + MOVER_WARPS - 1) / MOVER_WARPS;
          const uint32_t there =
              batch_ == 1 ? min(others() - o, SOURCES) : min(left, batch_) * others();
          Source coming = {o, index};
          const auto next = [&] {
            const Source source = {rank_of(coming.rank), coming.tile};
            if (++coming.rank == others()) coming = {0, coming.tile + MOVER_WARPS};
            return source;
          };
          const auto from = [&](uint32_t s) { return rank_of((o + s) % others()); };
          if (!receive(0, (1u << there) - 1, next, from)) return false;
        }
        Codes codes;
        take(received(batch_ == 1 ? o % SOURCES : b * others() + o), codes);
        codec_.decode_reduce(codes, x);
      }
      if (args_.flags & CINCH_AVERAGE) average(x);
      if (sends_sums_) {
        encode(1, own, ahead.n, index, x, encoded);
        send_tile(encoded, 1, index, 1, comm_.nranks);
        keep(encoded, index, own);
      } else {
#pragma unroll
        for (uint32_t k = 0; k < HELD; ++k) x[k] = canonical(x[k]);
        store(own, index, false, x);
      }
    }
    return true;
  }
  __device__ __forceinline__ uint32_t rank_of(uint32_t o) const {
    return o < comm_.rank ? o : o + 1;
  }

  __device__ __forceinline__ void average(float (&x)[HELD]) const {
    const uint32_t nranks = comm_.nranks;
    const Average<E> average(args_.flags, args_.factor, nranks);
    if ((nranks & (nranks - 1)) == 0) {
      // nranks is a power of two, so the product by the divisor's inverse is the quotient.
      const float share = 1.0f / average.divisor;
#pragma unroll
      for (uint32_t k = 0; k < HELD; ++k) x[k] = mul(average.limit(x[k]), share);
    } else {
      out_of_line(x, [&](float (&y)[HELD]) { divide_all(average, y); });
    }
  }

  // Receives the peers' tiles of a slice, which are contributions or sums, and stores them decoded.
  // Returns false if a wait failed.
  __device__ __forceinline__ bool gather(uint32_t slice) const {
    const uint32_t all = count(slice) * others();
    uint32_t number = mover_warp();
    if (number >= all) return true;
    Message at = message(slice, number);
#pragma unroll 1
    for (; number < all; number += SOURCES * MOVER_WARPS) {
      const uint32_t there = min(SOURCES, (all - number + MOVER_WARPS - 1) / MOVER_WARPS);
      Message coming = at;
      const auto next = [&] {
        const Source source = {peer_at(coming.k), coming.tile};
        coming = next_of(coming);
        return source;
      };
      const auto from = [&](uint32_t s) {
        return peer_at(message(slice, number + s * MOVER_WARPS).k);
      };
      if (!receive(sums_ ? 1 : 0, (1u << there) - 1, next, from)) return false;
#pragma unroll 1
      for (uint32_t s = 0; s < there; ++s, at = next_of(at)) {
        const uint32_t rank = peer_at(at.k);
        // A shorter part has fewer tiles; its peers have sent empty tiles in place of the missing
        // ones.
        if (at.tile * WARP_TILE < elements_of(rank)) keep(received(s), at.tile, rank);
      }
    }
    return true;
  }

  const cinch_oneshot_args &args_;
  const cinch_comm_view &comm_;
  const C codec_;
  Stop stop_;
  const Lines lines_of_tiles_;
  uint64_t area_, factor_;
  uint32_t encoded_bytes_;  // of an encoded tile in lines
  uint32_t lines_;          // bit j: group j of the tiles polled together has a line for this lane
  bool sends_parts_, sums_, sends_sums_;
  uint32_t first_, tiles_;  // of this block
  Message step_;    // from a message of a warp to its next message
  uint32_t batch_;  // tiles of a slice that a warp has
};

}  // namespace cinch
