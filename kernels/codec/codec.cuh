// The codecs as a kernel uses them: an object made from parameters, that knows the layout of a
// chunk. `i` is the chunk's element with which a lane starts, a multiple of 16; `n` the elements of
// the chunk. A lane beyond the end stores nothing but padding and loads zeros. Chunks are aligned to
// 16 bytes.
//
// Every codec: prepare(threads), then all else; see there for who calls it. It is empty but for the tabled
// ones, which are Dynamic8, Static8 and Mantissa8, to the bit, for a fifth of the instructions, and 35
// or 9 KiB of shared memory.
// Encode: a summary of the block (nothing, look at each of its tiles, conclude), encode, store.
// Decode: load, then decode or decode_reduce.
// Under a tensor scale (block() is 0) the scale is a parameter. Whoever fills the chunk sets its
// scale word to 0 before (clear_scale), and a barrier later all lanes' stores raise it to the scale,
// or to NaN if an element is not finite.
//
// A Format has
//   numbers, code_bits, draws   fp32 numbers of a block; bits of a code, at most; whether codes may
//                               be drawn
//   Params, Codes, Summary      what the host prepared, 32 bytes; 16 codes; what is learnt of a block
//   nothing(), look(x, valid, log2_block, summary), conclude(log2_block, summary)
//                               of no elements; and of these, `valid` from the first on; and of all
//                               lanes of the block
//   encode16(params, x, summary, count, random, codes, number)
//                               in a block of `count` elements, with `random` from these on
//   decode16, decode_reduce16(params, codes, number, x)
//   bits(params), load and store(params, wire, n, i, codes)
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

namespace cinch {

// Whether what a format prepares hangs on parameters.
template <class Format, class = void>
struct TakesParams : std::false_type {};
template <class Format>
struct TakesParams<Format, std::void_t<decltype(Format::prepare(
                               std::declval<const typename Format::Params &>(), 0u))>>
    : std::true_type {};

template <class FORMAT>
class WarpCodec {
 public:
  using Format = FORMAT;
  using Params = typename Format::Params;
  using Summary = typename Format::Summary;
  static constexpr uint32_t numbers = Format::numbers;
  static constexpr bool scaled = numbers > 0;
  static constexpr bool draws = Format::draws;
  static constexpr int code_bits = Format::code_bits;

  // Codes of 16 elements with the numbers of their block.
  struct Codes {
    typename Format::Codes code;
    float number[Format::numbers == 2 ? 2 : 1];
  };

  // Once in a kernel, by that many threads of each block, the first ones and whole warps; then a barrier
  // of theirs, then anything else.
  static CINCH_HD void prepare(uint32_t threads) { Format::prepare(threads); }

  // The same in a kernel that has these parameters only: formats whose tables hang on them have no
  // other.
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

  // From eight words with the bytes of the parameters.
  template <class Words, class = decltype(Words::word)>
  explicit CINCH_HD WarpCodec(const Words &words) {
    static_assert(sizeof(words.word) == sizeof(params_), "eight words");
    // Word by word: where they lie, a copy of bytes is one load for each of them.
    uint32_t word[8];
    CINCH_UNROLL
    for (int i = 0; i < 8; ++i) word[i] = words.word[i];
    memcpy(&params_, word, sizeof(params_));
  }

  // Of a code.
  CINCH_HD uint32_t bits() const { return Format::bits(params_); }

  // Log2 of the elements that share numbers; 0: all do.
  CINCH_HD uint32_t log2_block() const { return params_.log2_block; }

  // Elements that share numbers; 0: all.
  CINCH_HD uint32_t block() const { return params_.log2_block ? 1u << params_.log2_block : 0; }

  // What contributions (0) or sums (1) draw, in a chunk whose first element has this index in its
  // message.
  CINCH_HD Random random(uint32_t which, uint32_t first) const {
    if constexpr (draws) {
      return {{params_.key[which][0], params_.key[which][1]}, first};
    } else {
      return {};
    }
  }

#if defined(__CUDACC__)
  // Of the block that this lane's elements belong to, in one tile. All lanes of the warp call it.
  __device__ __forceinline__ Summary summary(const float (&x)[16], uint32_t valid) const {
    Summary summary = Format::nothing();
    look(x, valid, summary);
    conclude(summary);
    return summary;
  }

  // The same of 16 elements x that came as `vectors` of E, where pairs have their ends for less.
  template <class E, int P>
  __device__ __forceinline__ Summary summary_of(const uint4 (&vectors)[P],
                                                const float (&x)[16]) const {
    if constexpr (std::is_same<Summary, Ends>::value) {
      Summary summary = E::ends_of(vectors);
      conclude(summary);
      return summary;
    } else {
      return summary(x, 16);
    }
  }

  // Of blocks of several tiles: all lanes look at each of them, with nothing() before and conclude()
  // behind.
  static __device__ __forceinline__ Summary nothing() { return Format::nothing(); }
  __device__ __forceinline__ void look(const float (&x)[16], uint32_t valid,
                                       Summary &summary) const {
    Format::look(x, valid, params_.log2_block, summary);
  }
  __device__ __forceinline__ void conclude(Summary &summary) const {
    Format::conclude(params_.log2_block, summary);
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

  CINCH_HD void decode(const Codes &codes, float (&x)[16]) const {
    Format::decode16(params_, codes.code, codes.number, x);
  }

  CINCH_HD void decode_reduce(const Codes &codes, float (&acc)[16]) const {
    Format::decode_reduce16(params_, codes.code, codes.number, acc);
  }

  // Whether it is certain that no element of codes from an encoder is NaN: by finite numbers.
  static CINCH_HD bool is_free_of_nan(const Codes &codes) {
    if constexpr (numbers == 2) {
      return is_finite(codes.number[0]) && is_finite(codes.number[1]);
    } else {
      return scaled && is_finite(codes.number[0]);
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

  // Codes without their numbers.
  template <class Size>
  CINCH_HD void store_codes(uint8_t *wire, Size n, Size i, const Codes &codes) const {
    Format::store(params_, wire, n, i, codes.code);
  }

  template <class Size>
  CINCH_HD void store(uint8_t *wire, Size n, Size i, const Codes &codes) const {
    store_codes(wire, n, i, codes);
    if (!scaled || i >= n) return;
    float *at = const_cast<float *>(numbers_of(wire, n)) +
                Format::numbers * block_index(i, params_.log2_block);
    if (Format::numbers == 1 && params_.log2_block == 0) {
      raise(at, codes.number[0]);
    } else if ((i & (block() - 1)) == 0) {
      at[0] = codes.number[0];
      if constexpr (Format::numbers == 2) at[1] = codes.number[1];
    }
  }

  // Under a tensor scale, before the first store of a chunk.
  template <class Size>
  CINCH_HD void clear_scale(uint8_t *wire, Size n) const {
    if (scaled && params_.log2_block == 0 && n > 0) *const_cast<float *>(numbers_of(wire, n)) = 0;
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

  // Numbers that are not negative are ordered as their bits are, with NaN above all.
  static CINCH_HD void raise(float *scale, float to) {
#if defined(__CUDA_ARCH__)
    // Only what is not there yet costs an atomic operation.
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
using Dynamic8 = WarpCodec<Dynamic8Format>;
using Dynamic8Tabled = WarpCodec<Dynamic8TabledFormat>;
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
