// Steps over LL128 slots: lines of 128 bytes, 120 of payload and an 8-byte flag at the end.
//
// A warp stores four lines with one instruction, 16 bytes a lane, and reads them with one; the
// last lane of each line carries the flag. This is right only where the 128 bytes of a line,
// stored by one instruction, arrive whole and in order: NVLink between GPUs, as other libraries
// rely on too; never PCIe or host memory. The planner sees to that.
#pragma once

#include "abi.h"
#include "dtype/element.cuh"
#include "exec/interpret.cuh"
#include "prims/user.cuh"

namespace cinch {

constexpr uint32_t LINE_LANES = 8;            // lanes of a line
constexpr uint32_t TILE_WORDS = CINCH_TILE_WORDS;
constexpr uint32_t LINES_BYTES = 4 * 128;     // memory of them

static_assert(TILE_WORDS == WARP / LINE_LANES * (2 * LINE_LANES - 1), "all but the flags");

// Whether this lane's 16 bytes of a line are 8 of payload and the flag.
__device__ __forceinline__ bool carries_flag() {
  return lane_id() % LINE_LANES == LINE_LANES - 1;
}

// The first of this lane's words of a tile.
__device__ __forceinline__ uint32_t word_of_lane() {
  return lane_id() / LINE_LANES * 15 + lane_id() % LINE_LANES * 2;
}

// A tile by all lanes of a warp, the flag in place of what the last lane of each line has behind
// its payload. They come here together: after __syncwarp, wherever they have been since the last one.
// Where a tile has fewer than four lines, lanes without one say so.
__device__ __forceinline__ void store_lines(uint8_t *tile, uint4 v, uint64_t flag,
                                            bool has_line = true) {
  if (carries_flag()) {
    v.z = (uint32_t)flag;
    v.w = (uint32_t)(flag >> 32);
  }
  store_line(has_line, tile + 16 * lane_id(), v);
}

// Tiles by all lanes of a warp, as soon as all lines of each are there: those of which `missing`
// has bits, which lie at `tile(j)`, carry `wanted(j)` and come from rank `name(j)`. Their flags are
// in `v`, too. False if the wait ended early. `lines` has bits for tiles of which this lane's line is one.
template <uint32_t TILES, class Tile, class Wanted, class Name>
__device__ __forceinline__ bool load_lines(const cinch_comm_view &comm, Stop stop,
                                           uint32_t missing, Tile tile, Wanted wanted, Name name,
                                           uint4 (&v)[TILES], uint32_t lines = ~0u) {
  const bool flagged = carries_flag();
  Patience patience;
  while (missing != 0) {
    // A lane that comes later with the flag must not come later with its payload.
    __syncwarp();
#pragma unroll
    for (uint32_t j = 0; j < TILES; ++j) {
      if (missing >> j & 1) v[j] = load_line(lines >> j & 1, tile(j) + 16 * lane_id());
    }
#pragma unroll
    for (uint32_t j = 0; j < TILES; ++j) {
      if (missing >> j & 1) {
        const bool there = !flagged || !(lines >> j & 1) ||
                           (v[j].z | (uint64_t)v[j].w << 32) == wanted(j);
        if (__all_sync(0xffffffffu, there)) missing &= ~(1u << j);
      }
    }
    if (missing == 0) break;
    bool timeout;
    const bool gone = patience.gone(comm, stop, timeout);
    if (__any_sync(0xffffffffu, gone)) {
      if (timeout) stop.missing(name(__ffs(missing) - 1));
      stop.set();
      return false;
    }
  }
  return true;
}

template <class E, bool REDUCES>
class RawLL128 {
 public:
  static constexpr int protocol = CINCH_LL128;
  static constexpr bool draws = false;

  static __device__ __forceinline__ void prepare(uint32_t) {}
  static __device__ __forceinline__ uint64_t factor_at(uint64_t address) {
    return E::factor_at(address);
  }

  __device__ __forceinline__ RawLL128(const cinch_work &work, const cinch_comm_view &comm,
                                      Stop stop)
      : work_(work), comm_(comm), stop_(stop) {}

  __device__ __forceinline__ bool usual(const Job &) const { return false; }
  __device__ __forceinline__ uint32_t element_bytes() const {
    return REDUCES ? sizeof(typename E::Storage) : work_.codec.word[0];
  }

  __device__ __forceinline__ uint32_t tile_elements() const {
    return 8 * TILE_WORDS / element_bytes();
  }

  __device__ __forceinline__ void tiles(const Job &job, uint32_t first, uint32_t last) const {
#pragma unroll 1
    for (uint32_t t = first; t < last; ++t) tile(job, t);
  }

 private:
  using Acc = typename E::Acc;
  static constexpr int N = 16 / sizeof(typename E::Storage);

  __device__ __forceinline__ uint64_t wide(uint32_t flag) const {
    return flag | (uint64_t)work_.mark << 48;
  }

  // `own`: cinch_own of an own contribution; absent for what was received.
  __device__ __forceinline__ void add(Acc (&sum)[N], bool &started, uint4 v, uint32_t own) const {
    Acc term[N];
    E::unpack(v, term);
    if (own != CINCH_OWN_ABSENT && (work_.flags & CINCH_PREMULTIPLY)) {
#pragma unroll
      for (int k = 0; k < N; ++k) term[k] = E::premultiply(term[k], work_.factor);
      // What the peers see of it is rounded to the element type.
      if (own == CINCH_OWN_CODED) E::unpack(E::pack(term), term);
    }
#pragma unroll
    for (int k = 0; k < N; ++k) {
      sum[k] = started ? E::combine(sum[k], term[k], work_.combine) : term[k];
    }
    started = true;
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
      Acc sum[N];
      bool started = false;
      if (does.computes && reads && (job.nrecv == 0 || job.own_after == 0)) {
        add(sum, started, own, does.own);
      }
      for (uint32_t r = 0; r < job.nrecv; ++r) {
        const auto at = [&](uint32_t) { return job.source(r) + (uint64_t)tile * LINES_BYTES; };
        const auto wanted = [&](uint32_t) { return wide(job.source_flag(r)); };
        const auto name = [&](uint32_t) { return (uint32_t)job.sender(r); };
        uint4 v[1];
        if (!load_lines(comm_, stop_, 1, at, wanted, name, v)) return;
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
#pragma unroll
        for (int k = 0; k < N; ++k) {
          if (does.divides) sum[k] = E::divide(sum[k], comm_.nranks);
        }
        result = E::pack(sum);
      }
    }
    __syncwarp();
    for (uint32_t t = 0; t < job.nsend; ++t) {
      store_lines(job.target(t) + (uint64_t)tile * LINES_BYTES, result, wide(job.target_flag(t)));
    }
    if (!job.writes() || 8 * word >= bytes) return;
    store_word(job.output, word, bytes, size, aligned, result.x | (uint64_t)result.y << 32);
    if (flagged || 8 * word + 8 >= bytes) return;
    store_word(job.output, word + 1, bytes, size, aligned, result.z | (uint64_t)result.w << 32);
  }

  // Whether a tile beyond the payload is sent: only in messages that fill their slots.
  __device__ __forceinline__ bool fills(const Job &job, uint32_t tile) const {
    return job.refresh() && job.nsend > 0 && 8 * TILE_WORDS * tile < comm_.fifo.slot_bytes;
  }

  const cinch_work &work_;
  const cinch_comm_view &comm_;
  Stop stop_;
};

}  // namespace cinch
