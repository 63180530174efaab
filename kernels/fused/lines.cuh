// What oneshot.cuh does in packets, in lines of 128 bytes, 120 of payload and a flag of 8: more bytes
// for a wire, and for a multiprocessor's stores, where lines arrive whole (prims/ll128.cuh).
//
// Phases, per tile of 480 bytes, which a warp stores and loads with an instruction each: load the own
// contribution, or that to each peer's block or part; store it to every peer's area; poll the tiles of
// all peers; add all in the order of ranks, or keep each in its sender's block; store. Where all get the
// same sum, and where two ranks have a block for each other, a warp has sent its next tile before it waits
// for what the peers have of the last one: the sum of 2 MiB from each of 2 H200 takes 10.2 us so, and 14.3
// if all is sent first. Else the block sends all that it has to send, and waits then.
// Launch: any number of blocks that are resident at once, ONESHOT_THREADS threads; each block takes an
// equal share of the tiles. Bytes out: (N - 1) * 16 / 15 * S, of a message or block of S bytes; in two
// trips (N - 1) / N * 32 / 15 * S.
//
// A rank that has nothing for a peer sends it a tile of flags all the same: the halves of the area may be
// used in turn only if every call makes every rank wait for every other. A broadcast over 2 H200 takes
// 2.1 us so, and 3.5 by an interpreter, whose counters need no such greeting.
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
    const uint8_t *from = this->input + this->begin_of(peer) + at;
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

  // Loads each of `count` tiles that the warps of the block share, AHEAD of them before the first is used:
  // `use(i, load(i))`, to which all lanes come together.
  template <uint32_t AHEAD, class Load, class Use>
  static __device__ __forceinline__ void each(uint32_t count, Load &&load, Use &&use) {
#pragma unroll 1
    for (uint32_t first = warp(); first < count; first += AHEAD * FUSED_WARPS) {
      uint4 v[AHEAD];
#pragma unroll
      for (uint32_t j = 0; j < AHEAD; ++j) {
        const uint32_t i = first + j * FUSED_WARPS;
        if (i < count) v[j] = load(i);
      }
      __syncwarp();
#pragma unroll
      for (uint32_t j = 0; j < AHEAD; ++j) {
        const uint32_t i = first + j * FUSED_WARPS;
        if (i < count) use(i, v[j]);
      }
    }
  }

  // Sends the tiles of this block, changed, to the peer of each, or to the root alone.
  template <uint32_t AHEAD, class Changed>
  __device__ __forceinline__ void scatter(Changed &&changed) const {
    constexpr bool TO_ONE = SENDS == Sends::TO_ROOT;
    const auto peer = [&](uint32_t i) { return TO_ONE ? args.root : peer_of(i); };
    const auto tile = [&](uint32_t i) { return TO_ONE ? begin + i : tile_of(i); };
    each<AHEAD>(
        TO_ONE ? tiles : pairs(), [&](uint32_t i) { return changed(load(peer(i), tile(i))); },
        [&](uint32_t i, uint4 v) { send(peer(i), tile(i), v); });
  }

  // Waits for tile `tile(i)` of rank `from(i)`, for each of `count`, of which the warps of the block have
  // a share each, and hands it on: `take(i, v)`. Ends early if a wait does.
  template <class From, class Tile, class Take>
  __device__ __forceinline__ void receive_each(uint32_t count, uint32_t trip, From &&from,
                                               Tile &&tile, Take &&take) const {
#pragma unroll 1
    for (uint32_t first = warp(); first < count; first += SENT * FUSED_WARPS) {
      const auto number = [&](uint32_t j) { return first + j * FUSED_WARPS; };
      const auto name = [&](uint32_t j) { return from(number(j)); };
      const auto at = [&](uint32_t j) { return place(comm.inbox[name(j)], tile(number(j)), trip); };
      const auto wanted = [&](uint32_t) { return flag(); };
      uint32_t missing = 0;
#pragma unroll
      for (uint32_t j = 0; j < SENT; ++j) missing |= (uint32_t)(number(j) < count) << j;
      uint4 v[SENT];
      if (!load_lines(comm, stop, missing, at, wanted, name, v)) return;
#pragma unroll
      for (uint32_t j = 0; j < SENT; ++j) {
        if (number(j) < count) take(number(j), v[j]);
      }
    }
  }

  // Stores the tiles of this block that its peers send on a trip, each to the block or part of its
  // sender.
  __device__ __forceinline__ void gather_all(uint32_t trip) const {
    receive_each(
        pairs(), trip, [&](uint32_t i) { return peer_of(i); },
        [&](uint32_t i) { return tile_of(i); },
        [&](uint32_t i, uint4 v) { store(peer_of(i), tile_of(i), v); });
  }

  // Sends the peers but `but` a tile of flags, in place of the first of what it has not for them: by the
  // block that has the first tile.
  __device__ __forceinline__ void greet(uint32_t but) const {
    if (begin != 0) return;
    each<1>(
        others(), [](uint32_t) { return make_uint4(0, 0, 0, 0); },
        [&](uint32_t i, uint4 nothing) {
          if (peer_at(1 + i) != but) send(peer_at(1 + i), 0, nothing);
        });
  }

  // Waits for the first tile of every peer, by the same block.
  __device__ __forceinline__ void await_all() const {
    if (begin != 0) return;
    receive_each(
        others(), 0, [&](uint32_t i) { return peer_at(1 + i); }, [](uint32_t) { return 0u; },
        [](uint32_t, uint4) {});
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

// Sums: all ranks the same one, in one trip or two, or each that of its block, or the root all.
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
    const uint32_t own_rank = args.comm.rank, end = call.begin + call.tiles;
    const Contributions<E, Elements> terms(args);
    const auto receive = [&](uint32_t t) {
      return [&call, t](auto &&take) { return call.receive(t, take); };
    };
    if constexpr (SENDS == Sends::THE_SAME || (BLOCKS && PAIR)) {
      // What one peer gets, or all.
      const uint32_t other = BLOCKS ? call.peer_at(1) : own_rank;
      uint32_t t = call.begin + call.warp();
      uint4 next = t < end ? call.load(other, t) : make_uint4(0, 0, 0, 0);
      uint4 before = next;
#pragma unroll 1
      for (bool is_first = true; t < end + FUSED_WARPS; t += FUSED_WARPS, is_first = false) {
        const uint4 sent = terms.premultiplied(next);
        if (t + FUSED_WARPS < end) next = call.load(other, t + FUSED_WARPS);
        if (t < end) call.send_all(t, sent);
        const uint4 own = BLOCKS && t < end ? call.load(own_rank, t) : sent;
        if (!is_first) {
          // As the peers see it, rounded to the element type; or, where they do not, as it is.
          Acc mine[N];
          if (BLOCKS) {
            terms.unrounded(before, mine);
          } else {
            Elements::unpack_loosely(before, mine);
          }
          uint4 result;
          if (!terms.add(receive(t - FUSED_WARPS), mine, result)) return;
          call.store(0, t - FUSED_WARPS, result);
        }
        before = own;
      }
    } else {
      if (SENDS == Sends::TO_ROOT) call.greet(args.root);
      if (SENDS == Sends::TO_ROOT && own_rank == args.root) {
        // It has nothing to send.
      } else if (terms.premultiplies) {
        call.template scatter<1>([&](uint4 v) { return terms.premultiplied(v); });
      } else {
        call.template scatter<SENT>([](uint4 v) { return v; });
      }
      if (SENDS == Sends::TO_ROOT && own_rank != args.root) return call.await_all();
      // In place, what is about to be written has been read.
      if (SENDS != Sends::TO_ROOT) __syncthreads();
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

// Blocks as they are, each to the place of its sender; or what the root has.
template <Sends SENDS = Sends::THE_SAME>
struct LinesMove {
  static constexpr bool BLOCKS = SENDS != Sends::FROM_ROOT;

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
    const LinesCall<SENDS, BLOCKS, PAIR> call(args, args.element_bytes, epoch, stopped);
    const uint32_t own_rank = args.comm.rank;
    if constexpr (SENDS == Sends::A_BLOCK_EACH && PAIR) {
      const uint32_t other = call.peer_at(1), end = call.begin + call.tiles;
      uint32_t t = call.begin + call.warp();
      uint4 next = t < end ? call.load(other, t) : make_uint4(0, 0, 0, 0);
      uint4 before = next;
#pragma unroll 1
      for (bool is_first = true; t < end + FUSED_WARPS; t += FUSED_WARPS, is_first = false) {
        const uint4 sent = next;
        if (t + FUSED_WARPS < end) next = call.load(other, t + FUSED_WARPS);
        if (t < end) call.send_all(t, sent);
        const uint4 own = t < end ? call.load(own_rank, t) : sent;
        if (!is_first) {
          const uint32_t last = t - FUSED_WARPS;
          call.store(own_rank, last, before);
          if (!call.receive(last, [&](uint32_t, const auto &both) {
                call.store(other, last, both[0]);
              })) {
            return;
          }
        }
        before = own;
      }
    } else if constexpr (BLOCKS) {
      if (SENDS == Sends::A_BLOCK_EACH) call.template scatter<SENT>([](uint4 v) { return v; });
#pragma unroll 1
      for (uint32_t k = call.warp(); k < call.tiles; k += FUSED_WARPS) {
        const uint4 own = call.load(own_rank, call.begin + k);
        if (SENDS == Sends::THE_SAME) call.send_all(call.begin + k, own);
        call.store(own_rank, call.begin + k, own);
      }
      // In place, what is about to be written has been read.
      if (SENDS == Sends::A_BLOCK_EACH) __syncthreads();
      call.gather_all(0);
    } else if (own_rank == args.root) {
      const auto own = [&](uint32_t k) { return call.load(own_rank, call.begin + k); };
      call.template each<SENT>(call.tiles, own, [&](uint32_t k, uint4 v) {
        call.send_all(call.begin + k, v);
        call.store(0, call.begin + k, v);
      });
      call.await_all();
    } else {
      call.greet(own_rank);
      call.receive_each(
          call.tiles, 0, [&](uint32_t) { return (uint32_t)args.root; },
          [&](uint32_t k) { return call.begin + k; },
          [&](uint32_t k, uint4 v) { call.store(0, call.begin + k, v); });
      if (!PAIR) call.await_all();
    }
  }
};

}  // namespace cinch
