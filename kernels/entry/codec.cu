// Codecs alone: encode or decode one chunk. What tests on a GPU compare with the scalar
// specification, and what benchmarks of codecs run.
//
// cinch_encode_CODEC_TYPE and cinch_decode_CODEC_TYPE, TYPE being f32, f16 or bf16. Any grid, blocks
// of whole warps: tiles of 512 elements (a block of scale if that is larger) go round the warps.
#include "codec/codec.cuh"
#include "dtype/element.cuh"

namespace cinch {

// This lane's 16 elements from element i on, zeros beyond n.
template <class E>
__device__ __forceinline__ void load_elements(const void *elements, uint64_t n, uint64_t i,
                                              float (&x)[16]) {
  using Bits = typename E::Bits;
  const Bits *from = static_cast<const Bits *>(elements) + i;
  if (i + 16 <= n) {
    CINCH_UNROLL
    for (int v = 0; v < 16 / E::N; ++v) {
      float part[E::N];
      E::unpack(reinterpret_cast<const uint4 *>(from)[v], part);
      CINCH_UNROLL
      for (int k = 0; k < E::N; ++k) x[v * E::N + k] = part[k];
    }
  } else {
    CINCH_UNROLL
    for (int k = 0; k < 16; ++k) x[k] = i + k < n ? E::widen(from[k]) : 0.0f;
  }
}

template <class E>
__device__ __forceinline__ void store_elements(void *elements, uint64_t n, uint64_t i,
                                               const float (&x)[16]) {
  using Bits = typename E::Bits;
  Bits *to = static_cast<Bits *>(elements) + i;
  if (i + 16 <= n) {
    CINCH_UNROLL
    for (int v = 0; v < 16 / E::N; ++v) {
      float part[E::N];
      CINCH_UNROLL
      for (int k = 0; k < E::N; ++k) part[k] = x[v * E::N + k];
      reinterpret_cast<uint4 *>(to)[v] = E::pack(part);
    }
  } else {
    CINCH_UNROLL
    for (int k = 0; k < 16; ++k) {
      if (i + k < n) to[k] = E::narrow(x[k]);
    }
  }
}

template <class C, class E>
__device__ __forceinline__ void encode_chunk(const cinch_codec_args &args) {
  C::prepare();
  const C codec(args.params);
  const Random random = codec.random(0, 0);
  uint8_t *wire = static_cast<uint8_t *>(args.wire);
  const uint64_t lane = threadIdx.x % 32;
  const uint64_t warps = (uint64_t)gridDim.x * (blockDim.x / 32);
  const uint64_t first = (uint64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const bool is_long = C::scaled && codec.block() > TILE;
  const uint64_t span = is_long ? codec.block() : TILE;
  const auto valid = [&](uint64_t i) {
    return i >= args.n ? 0 : args.n - i < 16 ? (uint32_t)(args.n - i) : 16;
  };
  for (uint64_t begin = first * span; begin < args.n; begin += warps * span) {
    typename C::Summary summary = C::nothing();
    if (is_long) {
      for (uint64_t i = begin + 16 * lane; i - 16 * lane < begin + span && i - 16 * lane < args.n;
           i += TILE) {
        float x[16];
        load_elements<E>(args.elements, args.n, i, x);
        codec.look(x, valid(i), summary);
      }
      codec.conclude(summary);
    }
    for (uint64_t at = begin; at < begin + span && at < args.n; at += TILE) {
      const uint64_t i = at + 16 * lane;
      float x[16];
      load_elements<E>(args.elements, args.n, i, x);
      if (C::scaled && !is_long) summary = codec.summary(x, valid(i));
      typename C::Codes codes;
      codec.encode(x, summary, args.n, i, random, codes);
      codec.store(wire, args.n, i, codes);
    }
  }
}

template <class C, class E>
__device__ __forceinline__ void decode_chunk(const cinch_codec_args &args) {
  C::prepare();
  const C codec(args.params);
  const uint8_t *wire = static_cast<const uint8_t *>(args.wire);
  const uint64_t threads = (uint64_t)gridDim.x * blockDim.x;
  const uint64_t first = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
  for (uint64_t i = 16 * first; i < args.n; i += 16 * threads) {
    typename C::Codes codes;
    codec.load(wire, args.n, i, codes);
    float x[16];
    codec.decode(codes, x);
    store_elements<E>(args.elements, args.n, i, x);
  }
}

}  // namespace cinch

#define CINCH_CODEC_KERNELS(codec, Codec, type, Type)                                          \
  extern "C" __global__ void __launch_bounds__(256)                                            \
      cinch_encode_##codec##_##type(const __grid_constant__ cinch_codec_args args) {           \
    cinch::encode_chunk<cinch::Codec, cinch::Type>(args);                                      \
  }                                                                                            \
  extern "C" __global__ void __launch_bounds__(256)                                            \
      cinch_decode_##codec##_##type(const __grid_constant__ cinch_codec_args args) {           \
    cinch::decode_chunk<cinch::Codec, cinch::Type>(args);                                      \
  }

#define CINCH_CODEC_TYPES(codec, Codec)          \
  CINCH_CODEC_KERNELS(codec, Codec, f32, F32)    \
  CINCH_CODEC_KERNELS(codec, Codec, f16, F16)    \
  CINCH_CODEC_KERNELS(codec, Codec, bf16, BF16)

CINCH_CODEC_TYPES(linear8, Linear8)
CINCH_CODEC_TYPES(dynamic8, Dynamic8)
CINCH_CODEC_TYPES(dynamic8_tabled, Dynamic8Tabled)
CINCH_CODEC_TYPES(static8, Static8)
CINCH_CODEC_TYPES(mantissa8, Mantissa8)
CINCH_CODEC_TYPES(cast_bf16, CastBf16)
CINCH_CODEC_TYPES(cast16, Cast16)
