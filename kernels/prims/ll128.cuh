// Steps in protocol ll128: lines of 128 bytes, which hold 120 bytes of payload and an 8-byte flag
// at the end.
//
//   lane         0        1       ...  6        7 (last of the line)
//   bytes 0..    | 16     | 16    |    | 16     | 8 payload, 8 flag |
//
// A warp stores four lines (a tile) by one instruction, 16 bytes a lane, and loads them by one. A
// line is complete when its flag matches. This is right only where 128 bytes that one instruction
// stored arrive whole and in order: over NVLink between GPUs, never over PCIe or in host memory.
// The planner takes ll128 on such paths alone.
#pragma once

#include "abi.h"
#include "prims/flagged.cuh"

namespace cinch {

constexpr uint32_t LINE_LANES = 8;         // lanes of a line
constexpr uint32_t TILE_WORDS = CINCH_TILE_WORDS;
constexpr uint32_t LINES_BYTES = 4 * 128;  // wire bytes of a tile

static_assert(TILE_WORDS == WARP / LINE_LANES * (2 * LINE_LANES - 1), "all words but the flags");

// Returns whether this lane's 16 bytes of a line are 8 bytes of payload and the flag.
__device__ __forceinline__ bool carries_flag() {
  return lane_id() % LINE_LANES == LINE_LANES - 1;
}

// Returns the index in a tile of this lane's first word.
__device__ __forceinline__ uint32_t word_of_lane() {
  return lane_id() / LINE_LANES * 15 + lane_id() % LINE_LANES * 2;
}

// The elements in the 16 bytes of a line that one lane holds.
template <class E>
struct LineElements {
  using Word = uint4;
  using Acc = typename E::Acc;
  static constexpr int N = 16 / sizeof(typename E::Storage);
  static constexpr int ROOM = N;

  static __device__ __forceinline__ void unpack(uint4 v, Acc (&into)[N]) { E::unpack(v, into); }
  static __device__ __forceinline__ void unpack_any_nan(uint4 v, Acc (&into)[N]) {
    E::unpack_any_nan(v, into);
  }
  static __device__ __forceinline__ uint4 pack(Acc (&from)[N]) { return E::pack(from); }
};

// Stores a tile; all lanes of a warp call it, converged by __syncwarp. The last lane of each line
// replaces its second word by the flag. In a tile of fewer than four lines, lanes without a line
// pass has_line = false.
__device__ __forceinline__ void store_lines(uint8_t *tile, uint4 v, uint64_t flag,
                                            bool has_line = true) {
  if (carries_flag()) {
    v.z = (uint32_t)flag;
    v.w = (uint32_t)(flag >> 32);
  }
  store_line(has_line, tile + 16 * lane_id(), v);
}

// Returns whether this lane's 16 bytes of a line carry `flag`, or are payload alone.
__device__ __forceinline__ bool line_has(uint4 v, uint64_t flag) {
  return !carries_flag() || (v.z | (uint64_t)v.w << 32) == flag;
}

// Polls for up to TILES tiles of four lines until all are complete; all lanes of a warp call it.
// Bit j of `missing` selects the tile at `tile(j)`, which is sent by rank `name(j)`, and is complete
// when `is_there(j, v[j])` is true in all lanes. Bit j of `lines` is set if tile j has a line for
// this lane. `v` receives the words with their flags. Returns false if the wait failed.
template <uint32_t TILES, class Tile, class IsThere, class Name>
__device__ __forceinline__ bool load_lines(const cinch_comm_view &comm, Stop stop,
                                           uint32_t missing, Tile tile, IsThere is_there,
                                           Name name, uint4 (&v)[TILES], uint32_t lines = ~0u) {
  WaitLimit limit;
  while (missing != 0) {
    // All lanes load by one instruction: the lane that loads the flag must not load earlier than
    // the lanes that load the payload.
    __syncwarp();
#pragma unroll
    for (uint32_t j = 0; j < TILES; ++j) {
      if (missing >> j & 1) v[j] = load_line(lines >> j & 1, tile(j) + 16 * lane_id());
    }
#pragma unroll
    for (uint32_t j = 0; j < TILES; ++j) {
      if (missing >> j & 1) {
        const bool there = !(lines >> j & 1) || is_there(j, v[j]);
        if (__all_sync(0xffffffffu, there)) missing &= ~(1u << j);
      }
    }
    if (missing == 0) break;
    bool timeout;
    const bool is_over = limit.is_over(comm, stop, timeout);
    if (__any_sync(0xffffffffu, is_over)) {
      if (timeout) stop.missing(name(__ffs(missing) - 1));
      stop.set();
      return false;
    }
  }
  return true;
}

// Moves elements without a codec in protocol ll128, for the schedule interpreter.
template <class E, bool REDUCES>
class RawLL128 : public FlaggedMover<E, LineElements<E>, REDUCES> {
  using Base = FlaggedMover<E, LineElements<E>, REDUCES>;
  using typename Base::Acc;
  using Base::add;
  using Base::comm_;
  using Base::stop_;
  using Base::work_;

 public:
  static constexpr int protocol = CINCH_LL128;
  using Base::element_bytes;

  __device__ __forceinline__ RawLL128(const cinch_work &work, const cinch_comm_view &comm,
                                      Stop stop)
      : Base(work, comm, stop) {}

  __device__ __forceinline__ uint32_t tile_elements() const {
    return 8 * TILE_WORDS / element_bytes();
  }

  __device__ __forceinline__ void tiles(const Job &job, uint32_t first, uint32_t last) const {
#pragma unroll 1
    for (uint32_t t = first; t < last; ++t) tile(job, t);
  }

 private:
  // Returns the 64-bit flag of a line, with 44 bits of the hash of the signature.
  __device__ __forceinline__ uint64_t line_flag(uint32_t flag) const {
    return flag | work_.signature_hash << 32;
  }

  __device__ __forceinline__ uint4 load_words(const Job &job, const uint8_t *from, uint32_t word,
                                              bool flagged, uint32_t bytes) const {
    const bool aligned = job.aligned;
    const uint32_t size = element_bytes();
    const uint64_t a = load_word(from, word, bytes, size, aligned);
    const uint64_t b = flagged ? 0 : load_word(from, word + 1, bytes, size, aligned);
    return make_uint4((uint32_t)a, (uint32_t)(a >> 32), (uint32_t)b, (uint32_t)(b >> 32));
  }

  __device__ __forceinline__ void tile(const Job &job, uint32_t tile) const {
    const bool aligned = job.aligned;
    const uint32_t size = element_bytes();
    const uint32_t bytes = job.elements * size;
    const uint32_t words = (bytes + 7) / 8;
    if (tile * TILE_WORDS >= words && !fills(job, tile)) return;
    const bool flagged = carries_flag();
    const uint32_t word = tile * TILE_WORDS + word_of_lane();
    const Arithmetic does(work_, job, REDUCES);
    const bool reads = job.reads();
    uint4 own = make_uint4(0, 0, 0, 0);
    if (reads) own = load_words(job, job.input, word, flagged, bytes);
    uint4 result = own;
    if (tile * TILE_WORDS < words) {
      Acc sum[Base::ROOM];
      bool started = false;
      if (does.computes && reads && (job.nrecv == 0 || job.own_after == 0)) {
        add(sum, started, own, does.own);
      }
      for (uint32_t r = 0; r < job.nrecv; ++r) {
        const auto at = [&](uint32_t) { return job.source(r) + (uint64_t)tile * LINES_BYTES; };
        const auto is_there = [&](uint32_t, uint4 line) {
          return line_has(line, line_flag(job.source_flag(r)));
        };
        const auto name = [&](uint32_t) { return (uint32_t)job.sender(r); };
        uint4 v[1];
        if (!load_lines(comm_, stop_, 1, at, is_there, name, v)) return;
        if (flagged) v[0].z = v[0].w = 0;
        if (!does.computes) {
          result = v[0];
          continue;
        }
        add(sum, started, v[0], CINCH_OWN_ABSENT);
        if (reads && job.own_after == r + 1) add(sum, started, own, does.own);
      }
      if (does.computes) {
        if (job.op == CINCH_REDUCE) {
          add(sum, started, load_words(job, job.output, word, flagged, bytes), CINCH_OWN_ABSENT);
        }
        result = this->finish(sum, does.divides);
      }
    }
    __syncwarp();
    for (uint32_t t = 0; t < job.nsend; ++t) {
      store_lines(job.target(t) + (uint64_t)tile * LINES_BYTES, result,
                  line_flag(job.target_flag(t)));
    }
    if (!job.writes() || 8 * word >= bytes) return;
    store_word(job.output, word, bytes, size, aligned, result.x | (uint64_t)result.y << 32);
    if (flagged || 8 * word + 8 >= bytes) return;
    store_word(job.output, word + 1, bytes, size, aligned, result.z | (uint64_t)result.w << 32);
  }

  // Returns whether `tile`, which lies behind the payload, is sent: only messages that rewrite
  // their whole slots send such tiles.
  __device__ __forceinline__ bool fills(const Job &job, uint32_t tile) const {
    return job.refresh() && job.nsend > 0 && 8 * TILE_WORDS * tile < comm_.fifo.slot_bytes;
  }
};

}  // namespace cinch
