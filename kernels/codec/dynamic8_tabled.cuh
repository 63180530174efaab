// dynamic8 by tables in shared memory: the codes and values of dynamic8.cuh, to the bit, for about
// a sixth of the instructions. A kernel that uses it calls prepare(threads) once.
//
// Encoding: the numbers are cut at fp32 bit patterns into 32 buckets an octave, so that a bucket
// has at most one threshold. The sum of the pattern and the bucket's word has the rank of the
// nearest magnitude from bit 18 up: above the threshold the low parts carry, below it they do not.
// An element costs one load and one addition. Lanes have a bank conflict where their elements
// differ in octave and agree in the leading bits of the mantissa.
// Decoding: a table of the values of the 256 codes, with a copy for each lane (32 KiB) so that no
// two lanes share a bank.
#pragma once

#include "codec/dynamic8.cuh"

namespace cinch {

struct DynamicTables {
  static constexpr int SHIFT = 18;
  static constexpr uint32_t REST = (1u << SHIFT) - 1;
  // FIRST is the bucket of the smallest threshold, which is half of the smallest magnitude above 0.
  // LAST is the bucket of the number 1.
  static constexpr uint32_t FIRST = 0x35b88ca4u >> SHIFT;
  static constexpr uint32_t LAST = 0x3f800000u >> SHIFT;
#if defined(__CUDACC__)
  static constexpr uint32_t COPIES = 32;
#else
  static constexpr uint32_t COPIES = 1;
#endif

  alignas(16) float values[256 * COPIES];
  uint32_t buckets[LAST - FIRST + 1];

  // Returns the largest number whose nearest magnitude has this rank: the midpoint between that
  // magnitude and the next larger one, rounded down.
  static CINCH_HD float threshold(uint32_t rank) {
    const float low = DynamicMeaning::magnitude(rank), high = DynamicMeaning::magnitude(rank + 1);
    return mul(add_down(low, high), 0.5f);
  }

  // Each of the first LONG ranks has dozens of buckets, which PARTS threads fill together; each of
  // the other ranks has a few.
  static constexpr uint32_t LONG = 16, PARTS = 8;
  static constexpr uint32_t FILLERS = LONG * PARTS + 127 - LONG;

  // Fills the buckets of thread `number` of FILLERS.
  CINCH_HD void fill_buckets(uint32_t number) {
    const bool is_long = number < LONG * PARTS;
    const uint32_t part = is_long ? number % PARTS : 0, parts = is_long ? PARTS : 1;
    fill(is_long ? 1 + number / PARTS : 1 + LONG + number - LONG * PARTS, part, parts);
  }

 private:
  // Fills a part of the buckets from the bucket of this rank's threshold up to, but not including,
  // the bucket of the next rank's threshold.
  CINCH_HD void fill(uint32_t rank, uint32_t part, uint32_t parts) {
    const uint32_t pattern = bits_of(threshold(rank));
    const uint32_t bucket = pattern >> SHIFT;
    const uint32_t next = rank < 127 ? bits_of(threshold(rank + 1)) >> SHIFT : LAST + 1;
    if (part == 0) {
      buckets[bucket - FIRST] = ((rank - bucket) << SHIFT) + (REST - (pattern & REST));
    }
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
    for (uint32_t other = bucket + 1 + part; other < next; other += parts) {
      buckets[other - FIRST] = (rank + 1 - other) << SHIFT;
    }
  }
};

struct TabledMeaning : DynamicMeaning {
#if defined(__CUDA_ARCH__)
  static __device__ __forceinline__ DynamicTables &tables() {
    __shared__ DynamicTables tables;
    return tables;
  }

  // Fills the tables. The first `threads` threads of the block call it once, then synchronise.
  // Values and buckets take equally long, so different warps fill them where there are enough.
  static __device__ __forceinline__ void prepare(uint32_t threads) {
    DynamicTables &tables = TabledMeaning::tables();
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t base = threadIdx.x - lane; base < 256; base += threads) {
      const float own = value(base + lane);
      // A warp stores the copies of four values at a time, four copies a lane.
#pragma unroll
      for (uint32_t first = 0; first < 32; first += 4) {
        const uint32_t other = first + lane / 8;
        const float copy = __shfl_sync(~0u, own, other);
        float4 *const row = (float4 *)&tables.values[(base + other) * 32];
        row[lane % 8] = make_float4(copy, copy, copy, copy);
      }
    }
    constexpr uint32_t FILLERS = DynamicTables::FILLERS;
    const uint32_t apart = threads >= 256 + FILLERS ? 256 : 0;
    for (uint32_t at = threadIdx.x; at < apart + FILLERS; at += threads) {
      if (at >= apart) tables.fill_buckets(at - apart);
    }
  }
#else
  static CINCH_HD const DynamicTables &tables() {
    static const DynamicTables TABLES = [] {
      DynamicTables tables;
      for (uint32_t code = 0; code < 256; ++code) tables.values[code] = value(code);
      for (uint32_t at = 0; at < DynamicTables::FILLERS; ++at) tables.fill_buckets(at);
      return tables;
    }();
    return TABLES;
  }

  static CINCH_HD void prepare(uint32_t) {}
#endif

  // Returns the rank of the magnitude nearest to |y|, from 1 to 128, in the upper byte.
  static CINCH_HD uint32_t raised_rank(const DynamicTables &tables, float y) {
    const float smallest = float_of(DynamicTables::FIRST << DynamicTables::SHIFT);
    const float size = magnitude_of(y);
    const uint32_t pattern = bits_of(size > smallest ? size : smallest);
    const uint32_t bucket = (pattern >> DynamicTables::SHIFT) - DynamicTables::FIRST;
    return (pattern + tables.buckets[bucket]) << (24 - DynamicTables::SHIFT);
  }

  static CINCH_HD uint32_t nearest(float y, float factor) {
    return raised_rank(TabledMeaning::tables(), mul(y, factor)) >> 24;
  }

  static CINCH_HD uint32_t encode4(const float *x, float factor) {
    const DynamicTables &tables = TabledMeaning::tables();
    uint32_t rank[4];
    CINCH_UNROLL
    for (int i = 0; i < 4; ++i) rank[i] = raised_rank(tables, mul(x[i], factor));
    const uint32_t ranks = byte_permute(byte_permute(rank[0], rank[1], 0x0073),
                                        byte_permute(rank[2], rank[3], 0x0073), 0x5410);
    return codes_of(ranks, x);
  }

  static CINCH_HD void values4(uint32_t codes, float *value) {
#if defined(__CUDA_ARCH__)
    const uint32_t lane = threadIdx.x % 32;
    const char *values = reinterpret_cast<const char *>(TabledMeaning::tables().values);
    CINCH_UNROLL
    for (int i = 0; i < 4; ++i) {
      // Each code has a row of 128 bytes in the table: one copy of its value for each lane.
      const uint32_t row = i == 0 ? codes << 7 : codes >> (8 * i - 7);
      const uint32_t place = (row & 0x7f80u) | lane * 4;
      value[i] = *reinterpret_cast<const float *>(values + place);
    }
#else
    CINCH_UNROLL
    for (int i = 0; i < 4; ++i) value[i] = TabledMeaning::tables().values[codes >> (8 * i) & 0xff];
#endif
  }
};

using Dynamic8TabledFormat = Scaled<TabledMeaning, true>;
using Dynamic8NearestFormat = Scaled<TabledMeaning>;

}  // namespace cinch
