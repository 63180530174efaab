// The codecs as a kernel uses them: an object made from parameters, that knows the layout of a
// chunk. `i` is the chunk's element with which a lane starts, a multiple of 16; `n` the elements of
// the chunk. A lane beyond the end stores nothing and loads zeros. Chunks are aligned to 16 bytes.
//
// Every codec: prepare(), then all else; see there for who calls it. It is empty but for
// Dynamic8Tabled, which is Dynamic8, to the bit, for a fifth of the instructions and 35 KiB of shared
// memory.
// Encode: s = abs_max(x) (several tiles of a block: the `larger` of theirs), encode, store.
// Decode: load, then decode or decode_reduce.
// Under a tensor scale (block() is 0) the scale is a parameter. Whoever fills the chunk sets its
// scale word to 0 before (clear_scale), and a barrier later all lanes' stores raise it to the scale,
// or to NaN if an element is not finite.
#pragma once

#include "codec/cast16.cuh"
#include "codec/cast_bf16.cuh"
#include "codec/dynamic8.cuh"
#include "codec/dynamic8_tabled.cuh"
#include "codec/linear8.cuh"
#include "codec/mantissa8.cuh"
#include "codec/static8.cuh"
#include "codec/warp.cuh"

namespace cinch {

template <class FORMAT>
class WarpCodec {
 public:
  using Format = FORMAT;
  static constexpr bool scaled = Format::scaled;
  static constexpr int code_bytes = Format::code_bytes;

  // Codes of 16 elements with their scale.
  struct Codes {
    typename Format::Codes code;
    float scale;
  };

  // Once in a kernel, by all threads of each block, before anything else.
  static CINCH_HD void prepare() { Format::prepare(); }

  explicit CINCH_HD WarpCodec(const cinch_codec_params &params) : params_(params) {}

  // From eight words with the bytes of cinch_codec_params.
  template <class Words, class = decltype(Words::word)>
  explicit CINCH_HD WarpCodec(const Words &words) {
    static_assert(sizeof(words.word) == sizeof(params_), "eight words");
    memcpy(&params_, words.word, sizeof(params_));
  }

  // Elements that share a scale; 0: all.
  CINCH_HD uint32_t block() const { return params_.log2_block ? 1u << params_.log2_block : 0; }

  CINCH_HD float larger(float a, float b) const { return larger_magnitude(a, b); }

#if defined(__CUDACC__)
  // Largest magnitude of the block that this lane's elements belong to, as far as the tile goes;
  // not finite if an element is not. All lanes of the warp call it.
  __device__ __forceinline__ float abs_max(const float (&x)[16]) const {
    return params_.log2_block == 0 ? largest_of(x) : block_abs_max(x, params_.log2_block);
  }
#endif

  CINCH_HD void encode(const float (&x)[16], float abs_max, Codes &codes) const {
    const bool tensor = scaled && params_.log2_block == 0;
    codes.scale = tensor ? params_.scale : scale_of(abs_max);
    Format::encode16(x, Format::factor(params_, codes.scale, abs_max), codes.code);
    if (tensor && !(is_finite(abs_max) && is_finite(codes.scale) && codes.scale >= 0)) {
      codes.scale = float_of(QUIET_NAN);
    }
  }

  CINCH_HD void decode(const Codes &codes, float (&x)[16]) const {
    Format::decode16(codes.code, Format::unit(params_, codes.scale), x);
  }

  CINCH_HD void decode_reduce(const Codes &codes, float (&acc)[16]) const {
    Format::decode_reduce16(codes.code, Format::unit(params_, codes.scale), acc);
  }

  template <class Size>
  CINCH_HD void load(const uint8_t *wire, Size n, Size i, Codes &codes) const {
    load_codes(wire, n, i, codes.code);
    codes.scale = 0;
    if (scaled && i < n) codes.scale = scales(wire, n)[scale_index(i, params_.log2_block)];
  }

  template <class Size>
  CINCH_HD void store(uint8_t *wire, Size n, Size i, const Codes &codes) const {
    store_codes(wire, n, i, codes.code);
    if (!scaled || i >= n) return;
    float *scale = const_cast<float *>(scales(wire, n)) + scale_index(i, params_.log2_block);
    if (params_.log2_block == 0) {
      raise(scale, codes.scale);
    } else if ((i & (block() - 1)) == 0) {
      *scale = codes.scale;
    }
  }

  // Under a tensor scale, before the first store of a chunk.
  template <class Size>
  CINCH_HD void clear_scale(uint8_t *wire, Size n) const {
    if (scaled && params_.log2_block == 0 && n > 0) *const_cast<float *>(scales(wire, n)) = 0;
  }

  template <class Size>
  CINCH_HD Size wire_bytes(Size n) const {
    return cinch::wire_bytes(n, code_bytes, scaled, params_.log2_block);
  }

 private:
  template <class Size>
  static CINCH_HD const float *scales(const uint8_t *wire, Size n) {
    return reinterpret_cast<const float *>(wire + padded_code_bytes(n, code_bytes));
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

  cinch_codec_params params_;
};

using Linear8 = WarpCodec<Linear8Format>;
using Dynamic8 = WarpCodec<Dynamic8Format>;
using Dynamic8Tabled = WarpCodec<Dynamic8TabledFormat>;
using Static8 = WarpCodec<Static8Format>;
using Mantissa8 = WarpCodec<Mantissa8Format>;
using CastBf16 = WarpCodec<CastBf16Format>;
using Cast16 = WarpCodec<Cast16Format>;

}  // namespace cinch
