// Fused kernels over ll128 lines, for small and middle messages between GPUs with NVLink
// (prims/ll128.cuh: where lines arrive whole). Against ll packets they send 16/15 instead of 2
// bytes for each byte of payload.
//
//   one round    all_reduce (one-shot), all_gather, reduce_scatter, all_to_all, broadcast, reduce
//   two rounds   all_reduce (two-shot): each rank owns the sum of one part
//
// Phases, for each tile of 480 bytes of payload, which a warp loads and stores by one instruction
// each:
//   1. Load this rank's tile, or the tiles of each peer's block or part.
//   2. Store it to the area of every peer, or of that peer.
//   3. Poll the tiles of all peers.
//   4. Add all in the order of ranks and store the sum; or store each to its sender's block.
//   5. Two-shot: send the sum to all peers, poll their sums, store each to its part.
// In an all_reduce of one round, and where two ranks exchange blocks, a warp sends its next tile
// before it polls for the last one, so that sending and waiting overlap. In the other cases a block
// sends everything first and then polls. A rank that has nothing for a peer sends it an empty tile,
// as the contract of fused/exchange.cuh asks. benches/FIGURES.md, "Choices in the kernels", has
// what both are worth.
//
// Launch: any number of blocks that are resident at once, FUSED_THREADS threads. Each block takes
// an equal, contiguous share of the tiles.
// Bytes on the wire, out of each of N ranks, for S bytes of a message or block: 16/15 (N - 1) S;
// two-shot 32/15 (N - 1) S / N.
// Synchronisation: fused/exchange.cuh. A flag has 40 bits of the call's sequence number and 24 bits
// of the hash of its signature. In this area only flags lie where flags are. In place, a warp
// overwrites only what it has read itself, or what its block read before a __syncthreads.
//
// PAIR kernels, for two ranks, leave out the loops over peers.
#pragma once

#include "fused/exchange.cuh"
#include "prims/ll128.cuh"

namespace cinch {

constexpr uint32_t FUSED_WARPS = FUSED_THREADS / WARP;


// The tiles of one call. With PAIR the communicator has two ranks.
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

  __device__ __forceinline__ uint64_t flag() const { return call_flag(epoch, args.signature_hash); }

  static __device__ __forceinline__ uint32_t warp() { return threadIdx.x / WARP; }

  // Loads this lane's words of tile t of the data that `peer` receives; zeros beyond the end of
  // that data.
  __device__ __forceinline__ uint4 load(uint32_t peer, uint32_t t) const {
    const uint32_t at = 8 * (t * TILE_WORDS + word_of_lane()), end = bytes_of(peer);
    const uint8_t *from = this->input + this->begin_of(peer) + at;
    const uint32_t n = left(at, end);
    if (is_ragged(n)) return gather(from, size, n);
    const uint64_t a = n > 0 ? *(const uint64_t *)from : 0;
    const uint64_t b = n > 8 ? *(const uint64_t *)(from + 8) : 0;
    return make_uint4((uint32_t)a, (uint32_t)(a >> 32), (uint32_t)b, (uint32_t)(b >> 32));
  }

  // Stores this lane's words of tile t of the block or part of `rank`. For an output without
  // blocks, `rank` is 0.
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

  // Send tile t to one peer, or to all peers. The caller of `send` has called __syncwarp before.
  __device__ __forceinline__ void send(uint32_t peer, uint32_t t, uint4 v,
                                       uint32_t round = 0) const {
    store_lines(address_of(comm.outbox[peer], t, round), v, flag());
  }
  __device__ __forceinline__ void send_all(uint32_t t, uint4 v, uint32_t round = 0) const {
    __syncwarp();
    for (uint32_t k = 1; k <= others(); ++k) send(peer_at(k), t, v, round);
  }

  // Calls use(i, load(i)) for each of `count` tiles, which the warps of the block share. A warp
  // loads AHEAD tiles before it uses the first; all its lanes call `use` together.
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

  // Sends this block's tiles, each replaced by the result of `changed`. Each peer receives its own
  // tiles, or the root receives all tiles.
  template <uint32_t AHEAD, class Changed>
  __device__ __forceinline__ void scatter(Changed &&changed) const {
    constexpr bool TO_ONE = SENDS == Sends::TO_ROOT;
    const auto peer = [&](uint32_t i) { return TO_ONE ? args.root : peer_of(i); };
    const auto tile = [&](uint32_t i) { return TO_ONE ? begin + i : tile_of(i); };
    each<AHEAD>(
        TO_ONE ? tiles : pairs(), [&](uint32_t i) { return changed(load(peer(i), tile(i))); },
        [&](uint32_t i, uint4 v) { send(peer(i), tile(i), v); });
  }

  // Receives `count` tiles, which the warps of the block share. For each i it waits for tile
  // `tile(i)` of rank `from(i)`, then calls take(i, v). Returns early if a wait failed.
  template <class From, class Tile, class Take>
  __device__ __forceinline__ void receive_each(uint32_t count, uint32_t round, From &&from,
                                               Tile &&tile, Take &&take) const {
#pragma unroll 1
    for (uint32_t first = warp(); first < count; first += SENT * FUSED_WARPS) {
      const auto number = [&](uint32_t j) { return first + j * FUSED_WARPS; };
      const auto name = [&](uint32_t j) { return from(number(j)); };
      const auto at = [&](uint32_t j) {
        return address_of(comm.inbox[name(j)], tile(number(j)), round);
      };
      const auto is_there = [&](uint32_t, uint4 line) { return line_has(line, flag()); };
      uint32_t missing = 0;
#pragma unroll
      for (uint32_t j = 0; j < SENT; ++j) missing |= (uint32_t)(number(j) < count) << j;
      uint4 v[SENT];
      if (!load_lines(comm, stop, missing, at, is_there, name, v)) return;
#pragma unroll
      for (uint32_t j = 0; j < SENT; ++j) {
        if (number(j) < count) take(number(j), v[j]);
      }
    }
  }

  // Receives the peers' tiles of a round with this block's indices, and stores each in the block or
  // part of its sender.
  __device__ __forceinline__ void gather_all(uint32_t round) const {
    receive_each(
        pairs(), round, [&](uint32_t i) { return peer_of(i); },
        [&](uint32_t i) { return tile_of(i); },
        [&](uint32_t i, uint4 v) { store(peer_of(i), tile_of(i), v); });
  }

  // Sends an empty tile in place of tile 0 to every peer except `but`. Only the block that works on
  // tile 0 sends it.
  __device__ __forceinline__ void send_empty(uint32_t but) const {
    if (begin != 0) return;
    each<1>(
        others(), [](uint32_t) { return make_uint4(0, 0, 0, 0); },
        [&](uint32_t i, uint4 nothing) {
          if (peer_at(1 + i) != but) send(peer_at(1 + i), 0, nothing);
        });
  }

  // Waits for tile 0 of every peer. Only the block that works on tile 0 waits.
  __device__ __forceinline__ void wait_all() const {
    if (begin != 0) return;
    receive_each(
        others(), 0, [&](uint32_t i) { return peer_at(1 + i); }, [](uint32_t) { return 0u; },
        [](uint32_t, uint4) {});
  }

  // Receives tile t of every rank, in groups and in the order of ranks. It calls `take(first,
  // group)` with the words of the ranks from `first` on; this rank's words in a group are
  // undefined. Returns false if a wait failed.
  template <class Take>
  __device__ __forceinline__ bool receive(uint32_t t, Take &&take) const {
    const auto is_there = [&](uint32_t, uint4 line) { return line_has(line, flag()); };
    if constexpr (PAIR) {
      const auto name = [&](uint32_t) { return peer_at(1); };
      const auto at = [&](uint32_t) { return address_of(comm.inbox[peer_at(1)], t, 0); };
      uint4 v[1];
      if (!load_lines(comm, stop, 1, at, is_there, name, v)) return false;
      drop_flag(v[0]);
      const uint4 both[2] = {v[0], v[0]};
      take(0, both);
    } else {
      for (uint32_t first = 0; first < comm.nranks; first += POLLED) {
        const auto name = [&](uint32_t j) { return first + j; };
        const auto at = [&](uint32_t j) { return address_of(comm.inbox[first + j], t, 0); };
        uint32_t missing = (1u << min(comm.nranks - first, POLLED)) - 1;
        if (comm.rank - first < POLLED) missing &= ~(1u << (comm.rank - first));
        uint4 v[POLLED];
        if (!load_lines(comm, stop, missing, at, is_there, name, v)) return false;
#pragma unroll
        for (uint32_t j = 0; j < POLLED; ++j) drop_flag(v[j]);
        take(first, v);
      }
    }
    return true;
  }

  // The next functions number the block's pairs of a tile and a peer. Neighbouring warps have
  // neighbouring pairs, and so different peers.
  __device__ __forceinline__ uint32_t others() const { return PAIR ? 1 : comm.nranks - 1; }
  __device__ __forceinline__ uint32_t pairs() const { return tiles * others(); }
  __device__ __forceinline__ uint32_t peer_of(uint32_t pair) const {
    return peer_at(1 + pair % others());
  }
  __device__ __forceinline__ uint32_t tile_of(uint32_t pair) const {
    return begin + pair / others();
  }

  uint32_t begin, tiles;  // this block's first tile, and its count of tiles

 private:
  // Clears the flag in this lane's words: its bits might look like a NaN and slow down conversions.
  static __device__ __forceinline__ void drop_flag(uint4 &v) {
    if (carries_flag()) v.z = v.w = 0;
  }

  // Returns whether a lane must access its `n` bytes element by element.
  __device__ __forceinline__ bool is_ragged(uint32_t n) const { return !aligned || n % 8 != 0; }
  // Returns how many bytes of this lane's words lie before `end`, if the words begin at `at`.
  __device__ __forceinline__ uint32_t left(uint32_t at, uint32_t end) const {
    return at < end ? min(end - at, carries_flag() ? 8u : 16u) : 0;
  }

  __device__ __forceinline__ uint8_t *address_of(uint8_t *peer_buffer, uint32_t t,
                                                 uint32_t round) const {
    return peer_buffer + Base::offset_of(round) + (uint64_t)t * LINES_BYTES;
  }
};

// The reductions: all_reduce in one or two rounds, reduce_scatter, and reduce to a root.
template <class E, Sends SENDS = Sends::TO_ALL>
struct LinesSum {
  static constexpr bool TWO_SHOT = SENDS == Sends::A_PART_EACH;
  static constexpr bool BLOCKS = SENDS == Sends::A_BLOCK_EACH;
  using Elements = LineElements<E>;
  using Acc = typename E::Acc;
  static constexpr int N = Elements::N;

  static __device__ __forceinline__ void exchange(const cinch_oneshot_args &args, uint64_t epoch,
                                                 uint32_t *stopped) {
    // Two ranks gain nothing by two rounds, so two-shot kernels have no PAIR code.
    if (!TWO_SHOT && args.comm.nranks == 2) {
      tiles<!TWO_SHOT>(args, epoch, stopped);
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
    if constexpr (SENDS == Sends::TO_ALL || (BLOCKS && PAIR)) {
      // With blocks, the kernel sends the block of the only peer. Otherwise it sends the message,
      // which every peer receives.
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
          // In an all_reduce this rank's term is rounded to the element type, as the peers receive
          // it. In a reduce_scatter no peer adds it, so it is not rounded.
          Acc mine[N];
          if (BLOCKS) {
            terms.unrounded(before, mine);
          } else {
            Elements::unpack_any_nan(before, mine);
          }
          uint4 result;
          if (!terms.add(receive(t - FUSED_WARPS), mine, result)) return;
          call.store(0, t - FUSED_WARPS, result);
        }
        before = own;
      }
    } else {
      if (SENDS == Sends::TO_ROOT) call.send_empty(args.root);
      if (SENDS == Sends::TO_ROOT && own_rank == args.root) {
        // The root of a reduce has nothing to send.
      } else if (terms.premultiplies) {
        call.template scatter<1>([&](uint4 v) { return terms.premultiplied(v); });
      } else {
        call.template scatter<SENT>([](uint4 v) { return v; });
      }
      if (SENDS == Sends::TO_ROOT && own_rank != args.root) return call.wait_all();
      // In place, the loop below overwrites elements that other warps had to load first.
      if (SENDS != Sends::TO_ROOT) __syncthreads();
#pragma unroll 1
      for (uint32_t k = call.warp(); k < call.tiles; k += FUSED_WARPS) {
        const uint32_t t = call.begin + k;
        Acc mine[N];
        terms.unrounded(call.load(own_rank, t), mine);
        uint4 result;
        if (!terms.add(receive(t), mine, result)) return;
        call.store(TWO_SHOT ? own_rank : 0, t, result);
        if (TWO_SHOT) call.send_all(t, result, 1);
      }
      if (TWO_SHOT) call.gather_all(1);
    }
  }
};

// The exchanges without arithmetic: all_gather, all_to_all and broadcast.
template <Sends SENDS = Sends::TO_ALL>
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
        if (SENDS == Sends::TO_ALL) call.send_all(call.begin + k, own);
        call.store(own_rank, call.begin + k, own);
      }
      // In place, gather_all overwrites elements that other warps had to load first.
      if (SENDS == Sends::A_BLOCK_EACH) __syncthreads();
      call.gather_all(0);
    } else if (own_rank == args.root) {
      const auto own = [&](uint32_t k) { return call.load(own_rank, call.begin + k); };
      call.template each<SENT>(call.tiles, own, [&](uint32_t k, uint4 v) {
        call.send_all(call.begin + k, v);
        call.store(0, call.begin + k, v);
      });
      call.wait_all();
    } else {
      call.send_empty(own_rank);
      call.receive_each(
          call.tiles, 0, [&](uint32_t) { return (uint32_t)args.root; },
          [&](uint32_t k) { return call.begin + k; },
          [&](uint32_t k, uint4 v) { call.store(0, call.begin + k, v); });
      if (!PAIR) call.wait_all();
    }
  }
};

}  // namespace cinch
