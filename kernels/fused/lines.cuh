// What oneshot.cuh does in packets, in lines of 128 bytes, 120 of payload and a flag of 8: more bytes
// for a wire, and for a multiprocessor's stores, where lines arrive whole (prims/ll128.cuh).
//
// Phases, per tile of 480 bytes, which a warp stores and loads with an instruction each: load the own
// contribution, or that to each peer's block or part; store it to every peer's area; poll the tiles of
// all peers; add all in the order of ranks, or keep each in its sender's block; store. Where all get the
// same, a warp has sent its next tile before it waits for what the peers have of the last one. Else the
// block sends all that it has to send, and waits then.
// Launch: any number of blocks that are resident at once, ONESHOT_THREADS threads; each block takes an
// equal share of the tiles. Bytes out: (N - 1) * 16 / 15 * S, of a message or block of S bytes; in two
// trips (N - 1) / N * 32 / 15 * S.
//
// A flag has 48 bits of the number of the call, and 16 of what the call is: in this area nothing but
// flags is where flags are, and their number does not come round.
//
// In place what a warp writes has been read by it before, or by its block, which has met in between.
//
// Where two ranks meet, all code for several peers is left out: 8 B over 2 H200 take 2.25 us so, and
// 2.75 in packets, whose kernel skips most of its code then.
#pragma once

#include "fused/exchange.cuh"
#include "prims/ll128.cuh"

namespace cinch {

constexpr uint32_t FUSED_WARPS = ONESHOT_THREADS / WARP;

// The elements of a lane's 16 bytes.
template <class E>
struct LineElements {
  using Word = uint4;
  using Acc = typename E::Acc;
  static constexpr int N = 16 / sizeof(typename E::Storage);
  static constexpr int ROOM = N;

  static __device__ __forceinline__ void unpack_loosely(uint4 v, Acc (&into)[N]) {
    E::unpack_loosely(v, into);
  }
  static __device__ __forceinline__ uint4 pack(Acc (&from)[N]) { return E::pack(from); }
};

// What the tiles of one call have in common. PAIR: there are two ranks.
template <Sends SENDS, bool BLOCKS, bool PAIR>
struct LinesCall : Exchange<SENDS, BLOCKS> {
  using Base = Exchange<SENDS, BLOCKS>;
  using Base::aligned;
  using Base::args;
  using Base::bytes_of;
  using Base::comm;
  using Base::epoch;
  using Base::size;
  using Base::stop;
  using Base::stride;

  __device__ __forceinline__ LinesCall(const cinch_oneshot_args &args, uint32_t element_bytes,
                                       uint64_t epoch, uint32_t *stopped)
      : Base(args, element_bytes, epoch, stopped), begin(blockIdx.x * args.share) {
    const uint32_t all = (args.words + TILE_WORDS - 1) / TILE_WORDS;
    tiles = all > begin ? min(args.share, all - begin) : 0;
  }

  __device__ __forceinline__ uint64_t flag() const { return args.mark | (epoch + 1); }

  static __device__ __forceinline__ uint32_t warp() { return threadIdx.x / WARP; }

  // This lane's words of tile t of what goes to `peer`; zeros beyond its end.
  __device__ __forceinline__ uint4 load(uint32_t peer, uint32_t t) const {
    const uint32_t at = 8 * (t * TILE_WORDS + word_of_lane()), end = bytes_of(peer);
    const uint64_t block = SENDS != Sends::THE_SAME ? (uint64_t)peer * stride() : 0;
    const uint8_t *from = this->input + block + at;
    const uint32_t n = left(at, end);
    if (is_ragged(n)) return gather(from, size, n);
    const uint64_t a = n > 0 ? *(const uint64_t *)from : 0;
    const uint64_t b = n > 8 ? *(const uint64_t *)(from + 8) : 0;
    return make_uint4((uint32_t)a, (uint32_t)(a >> 32), (uint32_t)b, (uint32_t)(b >> 32));
  }

  // The same of the output's block or part of `rank`, where it has any; else of 0.
  __device__ __forceinline__ void store(uint32_t rank, uint32_t t, uint4 v) const {
    const uint32_t at = 8 * (t * TILE_WORDS + word_of_lane()), end = bytes_of(rank);
    uint8_t *to = this->output + (uint64_t)rank * stride() + at;
    const uint32_t n = left(at, end);
    if (is_ragged(n)) return cinch::scatter(to, size, n, v);
    if (n > 0) *(uint64_t *)to = v.x | (uint64_t)v.y << 32;
    if (n > 8) *(uint64_t *)(to + 8) = v.z | (uint64_t)v.w << 32;
  }

  __device__ __forceinline__ uint32_t peer_at(uint32_t k) const {
    return PAIR ? 1 - comm.rank : Base::peer_at(k);
  }

  // To one peer, after __syncwarp, and to all.
  __device__ __forceinline__ void send(uint32_t peer, uint32_t t, uint4 v, uint32_t trip = 0) const {
    store_lines(place(comm.outbox[peer], t, trip), v, flag());
  }
  __device__ __forceinline__ void send_all(uint32_t t, uint4 v, uint32_t trip = 0) const {
    __syncwarp();
    for (uint32_t k = 1; k <= others(); ++k) send(peer_at(k), t, v, trip);
  }

  // Sends the tiles of this block to the peer of each, changed. AHEAD are loaded at a time.
  template <uint32_t AHEAD, class Changed>
  __device__ __forceinline__ void scatter(Changed &&changed) const {
#pragma unroll 1
    for (uint32_t first = warp(); first < pairs(); first += AHEAD * FUSED_WARPS) {
      uint4 v[AHEAD];
#pragma unroll
      for (uint32_t j = 0; j < AHEAD; ++j) {
        const uint32_t pair = first + j * FUSED_WARPS;
        if (pair < pairs()) v[j] = changed(load(peer_of(pair), tile_of(pair)));
      }
      __syncwarp();
#pragma unroll
      for (uint32_t j = 0; j < AHEAD; ++j) {
        const uint32_t pair = first + j * FUSED_WARPS;
        if (pair < pairs()) send(peer_of(pair), tile_of(pair), v[j]);
      }
    }
  }

  // Stores the tiles of this block that its peers send on a trip, each to the block or part of its
  // sender.
  __device__ __forceinline__ void gather_all(uint32_t trip) const {
#pragma unroll 1
    for (uint32_t first = warp(); first < pairs(); first += SENT * FUSED_WARPS) {
      const auto pair = [&](uint32_t j) { return first + j * FUSED_WARPS; };
      const auto name = [&](uint32_t j) { return peer_of(pair(j)); };
      const auto at = [&](uint32_t j) { return place(comm.inbox[name(j)], tile_of(pair(j)), trip); };
      const auto wanted = [&](uint32_t) { return flag(); };
      uint32_t missing = 0;
#pragma unroll
      for (uint32_t j = 0; j < SENT; ++j) missing |= (uint32_t)(pair(j) < pairs()) << j;
      uint4 v[SENT];
      if (!load_lines(comm, stop, missing, at, wanted, name, v)) return;
#pragma unroll
      for (uint32_t j = 0; j < SENT; ++j) {
        if (pair(j) < pairs()) store(name(j), tile_of(pair(j)), v[j]);
      }
    }
  }

  // Hands tile t of every rank on, in groups and in the order of ranks: `take(first, group)` gets those of
  // the ranks from `first` on. That of this one, which sends none to itself, means nothing. False if the
  // wait ended early.
  template <class Take>
  __device__ __forceinline__ bool receive(uint32_t t, Take &&take) const {
    const auto wanted = [&](uint32_t) { return flag(); };
    if constexpr (PAIR) {
      const auto name = [&](uint32_t) { return peer_at(1); };
      const auto at = [&](uint32_t) { return place(comm.inbox[peer_at(1)], t, 0); };
      uint4 v[1];
      if (!load_lines(comm, stop, 1, at, wanted, name, v)) return false;
      drop_flag(v[0]);
      const uint4 both[2] = {v[0], v[0]};
      take(0, both);
    } else {
      for (uint32_t first = 0; first < comm.nranks; first += POLLED) {
        const auto name = [&](uint32_t j) { return first + j; };
        const auto at = [&](uint32_t j) { return place(comm.inbox[first + j], t, 0); };
        uint32_t missing = (1u << min(comm.nranks - first, POLLED)) - 1;
        if (comm.rank - first < POLLED) missing &= ~(1u << (comm.rank - first));
        uint4 v[POLLED];
        if (!load_lines(comm, stop, missing, at, wanted, name, v)) return false;
#pragma unroll
        for (uint32_t j = 0; j < POLLED; ++j) drop_flag(v[j]);
        take(first, v);
      }
    }
    return true;
  }

  // Tiles that the block exchanges with peers, the same ones with each of them; warps have neighbouring
  // pairs, and so different peers.
  __device__ __forceinline__ uint32_t others() const { return PAIR ? 1 : comm.nranks - 1; }
  __device__ __forceinline__ uint32_t pairs() const { return tiles * others(); }
  __device__ __forceinline__ uint32_t peer_of(uint32_t pair) const {
    return peer_at(1 + pair % others());
  }
  __device__ __forceinline__ uint32_t tile_of(uint32_t pair) const {
    return begin + pair / others();
  }

  uint32_t begin, tiles;  // the first one of this block, and how many it has

 private:
  // A flag is no number: what looks like NaN in it would take the slow way through conversions.
  static __device__ __forceinline__ void drop_flag(uint4 &v) {
    if (carries_flag()) v.z = v.w = 0;
  }

  // Whether the `n` bytes of a lane must be accessed element by element.
  __device__ __forceinline__ bool is_ragged(uint32_t n) const { return !aligned || n % 8 != 0; }
  // How much of this lane's share of a tile, from `at` on, there is.
  __device__ __forceinline__ uint32_t left(uint32_t at, uint32_t end) const {
    return at < end ? min(end - at, carries_flag() ? 8u : 16u) : 0;
  }

  __device__ __forceinline__ uint8_t *place(uint8_t *box, uint32_t t, uint32_t trip) const {
    return box + Base::place(trip) + (uint64_t)t * LINES_BYTES;
  }
};

// Sums: all ranks the same one, in one trip or two, or each that of its block.
template <class E, Sends SENDS = Sends::THE_SAME>
struct LinesSum {
  static constexpr bool TWICE = SENDS == Sends::A_PART_EACH;
  static constexpr bool BLOCKS = SENDS == Sends::A_BLOCK_EACH;
  using Elements = LineElements<E>;
  using Acc = typename E::Acc;
  static constexpr int N = Elements::N;

  static __device__ __forceinline__ void exchange(const cinch_oneshot_args &args, uint64_t epoch,
                                                 uint32_t *stopped) {
    // A second trip brings two ranks nothing: they have no code for it.
    if (!TWICE && args.comm.nranks == 2) {
      tiles<!TWICE>(args, epoch, stopped);
    } else {
      tiles<false>(args, epoch, stopped);
    }
  }

  template <bool PAIR>
  static __device__ __forceinline__ void tiles(const cinch_oneshot_args &args, uint64_t epoch,
                                               uint32_t *stopped) {
    const LinesCall<SENDS, BLOCKS, PAIR> call(args, 16 / N, epoch, stopped);
    const uint32_t own_rank = args.comm.rank;
    const Contributions<E, Elements> terms(args);
    const auto receive = [&](uint32_t t) {
      return [&call, t](auto &&take) { return call.receive(t, take); };
    };
    if constexpr (SENDS == Sends::THE_SAME) {
      const uint32_t end = call.begin + call.tiles;
      uint32_t t = call.begin + call.warp();
      uint4 next = t < end ? call.load(own_rank, t) : make_uint4(0, 0, 0, 0);
      uint4 before = next;
#pragma unroll 1
      for (bool is_first = true; t < end + FUSED_WARPS; t += FUSED_WARPS, is_first = false) {
        const uint4 own = terms.premultiplied(next);
        if (t + FUSED_WARPS < end) next = call.load(own_rank, t + FUSED_WARPS);
        if (t < end) call.send_all(t, own);
        if (!is_first) {
          // As the peers see it, rounded to the element type.
          Acc mine[N];
          Elements::unpack_loosely(before, mine);
          uint4 result;
          if (!terms.add(receive(t - FUSED_WARPS), mine, result)) return;
          call.store(0, t - FUSED_WARPS, result);
        }
        before = own;
      }
    } else {
      if (terms.premultiplies) {
        call.template scatter<1>([&](uint4 v) { return terms.premultiplied(v); });
      } else {
        call.template scatter<SENT>([](uint4 v) { return v; });
      }
      // In place, what is about to be written has been read.
      __syncthreads();
#pragma unroll 1
      for (uint32_t k = call.warp(); k < call.tiles; k += FUSED_WARPS) {
        const uint32_t t = call.begin + k;
        Acc mine[N];
        terms.unrounded(call.load(own_rank, t), mine);
        uint4 result;
        if (!terms.add(receive(t), mine, result)) return;
        call.store(TWICE ? own_rank : 0, t, result);
        if (TWICE) call.send_all(t, result, 1);
      }
      if (TWICE) call.gather_all(1);
    }
  }
};

// Blocks as they are, each to the place of its sender.
template <Sends SENDS = Sends::THE_SAME>
struct LinesMove {
  static __device__ __forceinline__ void exchange(const cinch_oneshot_args &args, uint64_t epoch,
                                                 uint32_t *stopped) {
    if (args.comm.nranks == 2) {
      tiles<true>(args, epoch, stopped);
    } else {
      tiles<false>(args, epoch, stopped);
    }
  }

  template <bool PAIR>
  static __device__ __forceinline__ void tiles(const cinch_oneshot_args &args, uint64_t epoch,
                                               uint32_t *stopped) {
    const LinesCall<SENDS, true, PAIR> call(args, args.element_bytes, epoch, stopped);
    const uint32_t own_rank = args.comm.rank;
    if constexpr (SENDS == Sends::A_BLOCK_EACH) {
      call.template scatter<SENT>([](uint4 v) { return v; });
    }
#pragma unroll 1
    for (uint32_t k = call.warp(); k < call.tiles; k += FUSED_WARPS) {
      const uint4 own = call.load(own_rank, call.begin + k);
      if constexpr (SENDS == Sends::THE_SAME) call.send_all(call.begin + k, own);
      call.store(own_rank, call.begin + k, own);
    }
    // In place, what is about to be written has been read.
    if (SENDS == Sends::A_BLOCK_EACH) __syncthreads();
    call.gather_all(0);
  }
};

}  // namespace cinch
