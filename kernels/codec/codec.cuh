// Codecs for kernels: WarpCodec<Format> encodes and decodes a chunk, 16 elements for each lane of a
// warp.
//
// `n` is the number of elements of the chunk and `i` the index of a lane's first element, a
// multiple of 16. A lane at or beyond the end loads zeros and stores only padding. Chunks are
// aligned to 16 bytes.
//
//   once      prepare(threads), then a barrier
//   encode    summary (the values that encoding needs of a whole block), encode, store;
//             for a block of several tiles empty_summary, summarize each tile, combine_lanes
//   decode    load, then decode or decode_reduce
//
// The tabled formats Dynamic8Tabled, Static8Tabled and Mantissa8Tabled give the same bits as the
// arithmetic ones for about a fifth of the instructions. Their tables take 35 KiB (dynamic8) or 9
// KiB of shared memory; only they need prepare.
//
// Under a tensor scale, where block() is 0, the scale is a parameter. The kernel that fills a chunk
// first sets its scale word to 0 (clear_scale). After a barrier the stores of all lanes raise the
// word to the scale, or to NaN if an element is not finite. The schedule kernels, whose chunks lie in memory of
// others, store the codes (store_codes) and once the number of the chunk (store_number).
//
// A Format has
//   numbers            fp32 numbers of a block: 0; 1, a scale; or 2, such as minimum and maximum
//   code_bits          largest width of a code in bits
//   draws              whether encoding may round stochastically
//   damps              whether Params has a factor of the numbers with error feedback
//   Params             the 32 bytes that the host prepares
//   Codes              16 codes
//   Summary            the values, such as extremes, that encoding needs of all elements of a block
//   empty_summary()    the Summary of no elements
//   summarize(x, valid, log2_block, summary)
//                      adds 16 elements, of which the first `valid` exist
//   combine_lanes(log2_block, summary)
//                      combines the summaries of the block's lanes
//   encode16(params, x, summary, count, random, codes, number)
//                      encodes 16 elements of a block of `count`; `random` starts at the first
//   decode16<REDUCE>(params, codes, number, x)
//                      decodes 16 elements into x, or adds them to x
//   bits(params), load(params, wire, n, i, codes), store(params, wire, n, i, codes)
#pragma once

#include <type_traits>
#include <utility>

#include "codec/cast16.cuh"
#include "codec/cast_bf16.cuh"
#include "codec/decimal_tabled.cuh"
#include "codec/dynamic8.cuh"
#include "codec/dynamic8_tabled.cuh"
#include "codec/fp8.cuh"
#include "codec/linear8.cuh"
#include "codec/mantissa8.cuh"
#include "codec/minmax.cuh"
#include "codec/onebit.cuh"
#include "codec/static8.cuh"
#include "codec/terngrad.cuh"
#include "codec/threshold2.cuh"
#include "codec/trunc.cuh"
#include "codec/warp.cuh"
#include "dtype/element.cuh"

namespace cinch {

// True for formats whose lookup tables depend on the codec's parameters.
template <class Format, class = void>
struct TakesParams : std::false_type {};
template <class Format>
struct TakesParams<Format, std::void_t<decltype(Format::prepare(
                               std::declval<const typename Format::Params &>(), 0u))>>
    : std::true_type {};

// True for formats whose Summary has sums over the rows of a block. They define summarize_pairs.
template <class Format, class = void>
struct AddsRows : std::false_type {};
template <class Format>
struct AddsRows<Format, std::void_t<typename Format::AddsRows>> : std::true_type {};

// True for formats whose codes are the signs of the elements. They define encode_rows.
template <class Format, class = void>
struct CodesAreSigns : std::false_type {};
template <class Format>
struct CodesAreSigns<Format, std::void_t<typename Format::CodesAreSigns>> : std::true_type {};

template <class FORMAT>
class WarpCodec {
 public:
  using Format = FORMAT;
  using Params = typename Format::Params;
  using Summary = typename Format::Summary;
  static constexpr uint32_t numbers = Format::numbers;
  static constexpr bool scaled = numbers > 0;
  static constexpr bool draws = Format::draws;
  static constexpr bool adds_rows = AddsRows<Format>::value;
  static constexpr bool codes_are_signs = CodesAreSigns<Format>::value;
  static constexpr int code_bits = Format::code_bits;
  // Whether a chunk may have one scale, which a call takes from an earlier call.
  static constexpr bool keeps_scales = std::is_same<Params, cinch_scaled_params>::value;

  // 16 codes and the fp32 numbers of the block to which they belong.
  struct Codes {
    typename Format::Codes code;
    float number[Format::numbers == 2 ? 2 : 1];
  };

  // Fills the format's tables in shared memory. The first `threads` threads of a block, in whole
  // warps, call it once and then synchronise.
  static CINCH_HD void prepare(uint32_t threads) { Format::prepare(threads); }

  // Fills the format's tables, including tables that depend on the parameters. The kernel must use
  // the format with these parameters only.
  CINCH_HD void prepare_own(uint32_t threads) const {
    if constexpr (TakesParams<Format>::value) {
      Format::prepare(params_, threads);
    } else {
      Format::prepare(threads);
    }
  }

  explicit CINCH_HD WarpCodec(const cinch_codec_params &params) {
    static_assert(sizeof(params) == sizeof(params_), "eight words");
    memcpy(&params_, &params, sizeof(params_));
  }

  // Copies the parameters from the eight words of `words`.
  template <class Words, class = decltype(Words::word)>
  explicit CINCH_HD WarpCodec(const Words &words) {
    static_assert(sizeof(words.word) == sizeof(params_), "eight words");
    // Copies word by word: a memcpy from shared memory compiles to one load for each byte.
    uint32_t word[8];
    CINCH_UNROLL
    for (int i = 0; i < 8; ++i) word[i] = words.word[i];
    memcpy(&params_, word, sizeof(params_));
  }

  // Returns the width of a code in bits.
  CINCH_HD uint32_t bits() const { return Format::bits(params_); }

  // Returns log2 of the number of elements in a block; 0 if the whole chunk is one block.
  CINCH_HD uint32_t log2_block() const { return params_.log2_block; }

  // Returns the number of elements in a block; 0 if the whole chunk is one block.
  CINCH_HD uint32_t block() const { return params_.log2_block ? 1u << params_.log2_block : 0; }

  // Returns whether a chunk has one scale.
  CINCH_HD bool has_chunk_scale() const { return keeps_scales && params_.log2_block == 0; }

  // Returns whether each block has a scale, and encoding rounds to the nearest code. Only for codecs that may keep scales.
  CINCH_HD bool is_plain() const {
    static_assert(keeps_scales, "these codecs have a choice");
    return params_.log2_block != 0 && params_.draws == 0;
  }

  // Returns the random numbers for encoding a chunk of contributions (`which` 0) or of sums
  // (`which` 1). `first` is the index in the message of the chunk's first element.
  CINCH_HD Random random(uint32_t which, uint32_t first) const {
    if constexpr (draws) {
      return {{params_.key[which][0], params_.key[which][1]}, first};
    } else {
      return {};
    }
  }

#if defined(__CUDACC__)
  // Returns the Summary (such as the extremes) of the block that contains this lane's elements. The
  // block must lie within one tile. All lanes of the warp call this.
  __device__ __forceinline__ Summary summary(const float (&x)[16], uint32_t valid) const {
    Summary summary = Format::empty_summary();
    summarize(x, valid, summary);
    combine_lanes(summary);
    return summary;
  }

  // Returns the Summary of the block that contains the 16 elements x, which were unpacked from
  // `vectors`. If the Summary consists of the smallest and the largest element, E finds them in the
  // packed vectors, at lower cost.
  template <class E, int P>
  __device__ __forceinline__ Summary summary_of(const uint4 (&vectors)[P],
                                                const float (&x)[16]) const {
    if constexpr (std::is_same<Summary, Ends>::value) {
      Summary summary = E::ends_of(vectors);
      combine_lanes(summary);
      return summary;
    } else {
      return summary(x, 16);
    }
  }

  // The Summary of a tile of E in two steps, so that a caller can load its next vectors between them: begin_summary adds
  // what it can find in the vectors of a lane, end_summary adds the rest. The vectors hold the 16 elements x, of which
  // the first `valid` exist; the others are 0.
  template <class E, int P>
  __device__ __forceinline__ void begin_summary(const uint4 (&vectors)[P], const float (&x)[16],
                                                uint32_t valid, Summary &summary) const {
    if constexpr (std::is_same<Summary, Ends>::value) {
      if (valid == 16) {
        summary = join(summary, E::ends_of(vectors));
      } else {
        CINCH_ASSUME(valid < 16);
        summarize(x, valid, summary);
      }
    } else if constexpr (!AddsRows<Format>::value) {
      summarize(x, 16, summary);
    }
  }
  __device__ __forceinline__ void end_summary(const float (&x)[16], uint32_t valid, Summary &summary) const {
    if constexpr (CodesAreSigns<Format>::value) {
      Format::summarize_padded(x, valid, params_.log2_block, summary);
    } else if constexpr (AddsRows<Format>::value) {
      summarize(x, valid, summary);
    }
  }

  CINCH_HD bool has_default_blocks() const { return params_.log2_block == LOG2_DEFAULT_BLOCK; }

  // With adds_rows and blocks of the default size, begin_pairs and encode_pairs are a faster form of summary and encode
  // for tiles of a 16-bit type. Lanes behind the end of a chunk pass zeros.
  //
  // PairTile has the values that encode_pairs needs of this lane's vectors.
  struct PairTile {
    float x[CodesAreSigns<Format>::value ? 1 : 16];
    uint32_t below;
    Summary summary;
  };
  template <class E>
  __device__ __forceinline__ void begin_pairs(const uint4 (&vectors)[2], PairTile &tile) const {
    PairRows<E>::hand_over(vectors);
    tile.summary.most = E::largest_of(vectors);
    if constexpr (CodesAreSigns<Format>::value) {
      tile.below = E::below(vectors);
    } else {
      unpack_elements<E>(vectors, tile.x);
    }
  }
  // Encodes 16 elements from index i of a tile of which `there` elements exist. All lanes of the warp call this.
  template <class E>
  __device__ __forceinline__ void encode_pairs(PairTile &tile, uint32_t there, uint32_t i, const Random &random,
                                               Codes &codes) const {
    if constexpr (CodesAreSigns<Format>::value) {
      Format::template summarize_pairs<E>(tile.below, elements_from(there, i), tile.summary);
      Format::encode_signs(tile.below, tile.summary, codes.code, codes.number);
    } else {
      Format::template summarize_pairs<E>(tile.summary);
      encode(tile.x, tile.summary, there, i, random, codes);
    }
  }

  // Compute the Summary of a block of several tiles: start with empty_summary, call summarize for
  // each tile, then combine_lanes. All lanes of the warp call them.
  static __device__ __forceinline__ Summary empty_summary() { return Format::empty_summary(); }
  __device__ __forceinline__ void summarize(const float (&x)[16], uint32_t valid,
                                       Summary &summary) const {
    Format::summarize(x, valid, params_.log2_block, summary);
  }
  __device__ __forceinline__ void combine_lanes(Summary &summary) const {
    Format::combine_lanes(params_.log2_block, summary);
  }
#endif

  template <class Size>
  CINCH_HD void encode(const float (&x)[16], const Summary &summary, Size n, Size i,
                       const Random &random, Codes &codes) const {
    const Size begin = i & ~(Size)(block() - 1);
    const Size left = n - begin;
    const uint32_t count = left < block() ? (uint32_t)left : block();
    const Random own = {{random.key[0], random.key[1]}, random.first + (uint32_t)i};
    Format::encode16(params_, x, summary, count, own, codes.code, codes.number);
  }

  // Multiplies the numbers of the codes' block by the codec's damping, as each encode with error
  // feedback does. It is 1 where none is needed.
  CINCH_HD void damp(Codes &codes) const {
    if constexpr (Format::damps) {
      CINCH_UNROLL
      for (int k = 0; k < Format::numbers; ++k) {
        codes.number[k] = mul(codes.number[k], params_.damping);
      }
    }
  }

  CINCH_HD void decode(const Codes &codes, float (&x)[16]) const {
    Format::template decode16<false>(params_, codes.code, codes.number, x);
  }

  CINCH_HD void decode_reduce(const Codes &codes, float (&acc)[16]) const {
    Format::template decode16<true>(params_, codes.code, codes.number, acc);
  }

  // Returns whether no element that these codes decode to can be NaN, because the numbers of their
  // block are finite. The codes must come from an encoder.
  static CINCH_HD bool is_free_of_nan(const Codes &codes) {
    if constexpr (numbers == 2) {
      return is_finite(codes.number[0]) && is_finite(codes.number[1]);
    } else {
      return scaled && is_finite(codes.number[0]);
    }
  }

  // Returns whether the numbers of the codes' block are below `limit` in magnitude. The elements that codes from an encoder
  // decode to are then below 512 times the limit. Codecs without numbers return false.
  static CINCH_HD bool is_below(const Codes &codes, float limit) {
    if constexpr (numbers == 2) {
      return magnitude_of(codes.number[0]) < limit && magnitude_of(codes.number[1]) < limit;
    } else {
      return scaled && magnitude_of(codes.number[0]) < limit;
    }
  }

  template <class Size>
  CINCH_HD void load(const uint8_t *wire, Size n, Size i, Codes &codes) const {
    Format::load(params_, wire, n, i, codes.code);
    codes.number[0] = 0;
    if constexpr (Format::numbers == 1) {
      if (i < n) codes.number[0] = numbers_of(wire, n)[block_index(i, params_.log2_block)];
    } else if constexpr (Format::numbers == 2) {
      codes.number[1] = 0;
      if (i >= n) return;
      const float *at = numbers_of(wire, n) + 2 * block_index(i, params_.log2_block);
      const uint2 both = *reinterpret_cast<const uint2 *>(at);
      codes.number[0] = float_of(both.x), codes.number[1] = float_of(both.y);
    }
  }

  // Stores the codes, but not the numbers of their block.
  template <class Size>
  CINCH_HD void store_codes(uint8_t *wire, Size n, Size i, const Codes &codes) const {
    Format::store(params_, wire, n, i, codes.code);
  }

  template <class Size>
  CINCH_HD void store(uint8_t *wire, Size n, Size i, const Codes &codes) const {
    store_codes(wire, n, i, codes);
    if (scaled && i < n) {
      store_numbers(numbers_of(wire, n) + Format::numbers * block_index(i, params_.log2_block), i, codes);
    }
  }

  // Returns where a chunk of n elements has the numbers of its blocks.
  template <class Size>
  CINCH_HD float *numbers_of(uint8_t *wire, Size n) const {
    return const_cast<float *>(numbers_of(const_cast<const uint8_t *>(wire), n));
  }

  // Stores the numbers of the block of element i to `at`, if this is the block's first lane.
  template <class Size>
  CINCH_HD void store_numbers(float *at, Size i, const Codes &codes) const {
    if (Format::numbers == 1 && params_.log2_block == 0) {
      raise(at, codes.number[0]);
    } else if ((i & (block() - 1)) == 0) {
      at[0] = codes.number[0];
      if constexpr (Format::numbers == 2) at[1] = codes.number[1];
    }
  }

  // Sets the scale by which a chunk is encoded.
  CINCH_HD void set_scale(float scale) {
    if constexpr (keeps_scales) params_.scale = scale;
  }

  // Load and store the number of a chunk that has one scale.
  template <class Size>
  CINCH_HD float number(const uint8_t *wire, Size n) const {
    return *numbers_of(wire, n);
  }
  template <class Size>
  CINCH_HD void store_number(uint8_t *wire, Size n, float number) const {
    *numbers_of(wire, n) = number;
  }

  // Sets the scale word of a chunk under a tensor scale to 0, before any lane stores codes to the
  // chunk.
  template <class Size>
  CINCH_HD void clear_scale(uint8_t *wire, Size n) const {
    if (scaled && params_.log2_block == 0 && n > 0) *numbers_of(wire, n) = 0;
  }

  template <class Size>
  CINCH_HD Size wire_bytes(Size n) const {
    const Size blocks = scaled ? block_count(n, params_.log2_block) : 0;
    return padded_code_bytes(n, bits()) + 4 * Format::numbers * blocks;
  }

 private:
  template <class Size>
  CINCH_HD const float *numbers_of(const uint8_t *wire, Size n) const {
    return reinterpret_cast<const float *>(wire + padded_code_bytes(n, bits()));
  }

  // Raises the scale to at least `to`, atomically. Bits of numbers that are not negative compare as
  // the numbers do, and NaN is above all numbers.
  static CINCH_HD void raise(float *scale, float to) {
#if defined(__CUDA_ARCH__)
    // Skips the atomic where the scale is already large enough.
    if (*reinterpret_cast<volatile uint32_t *>(scale) < bits_of(to)) {
      atomicMax(reinterpret_cast<uint32_t *>(scale), bits_of(to) & 0x7fffffffu);
    }
#else
    if (bits_of(*scale) < bits_of(to)) *scale = to;
#endif
  }

  Params params_;
};

using Linear8 = WarpCodec<Linear8Format>;
using Linear8Nearest = WarpCodec<Linear8NearestFormat>;
using Dynamic8 = WarpCodec<Dynamic8Format>;
using Dynamic8Tabled = WarpCodec<Dynamic8TabledFormat>;
using Dynamic8Nearest = WarpCodec<Dynamic8NearestFormat>;
using Static8 = WarpCodec<Static8Format>;
using Static8Tabled = WarpCodec<Static8TabledFormat>;
using Mantissa8 = WarpCodec<Mantissa8Format>;
using Mantissa8Tabled = WarpCodec<Mantissa8TabledFormat>;
using CastBf16 = WarpCodec<CastBf16Format>;
using Cast16 = WarpCodec<Cast16Format>;
using MinMax4 = WarpCodec<MinMaxFormat<4>>;
using MinMax = WarpCodec<MinMaxFormat<0>>;
using Trunc = WarpCodec<TruncFormat>;
using Fp8E4M3 = WarpCodec<Fp8E4M3Format>;
using Fp8E5M2 = WarpCodec<Fp8E5M2Format>;
using TernGrad = WarpCodec<TernGradFormat>;
using OneBit = WarpCodec<OneBitFormat>;
using Threshold2 = WarpCodec<Threshold2Format>;

}  // namespace cinch
