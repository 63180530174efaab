// Codecs without communication: encode or decode one chunk of any size.
//
// The kernels are cinch_encode_CODEC_TYPE and cinch_decode_CODEC_TYPE; TYPE is f32, f16 or bf16.
// Launch: any grid, blocks of 256 threads. Each warp takes tiles of 512 elements, or whole scaling
// blocks of the codec if these are larger. Arrays need the alignment of their element type; arrays
// aligned to 16 bytes move in vectors.
#include "codec/codec.cuh"
#include "entry/elements.cuh"

namespace cinch {

// Stores the codes of a whole tile, three 16-byte vectors for each lane. Direct stores would touch
// half of each memory sector at a time. So the vectors go through shared memory, where groups of
// three have no bank conflicts.
__device__ __forceinline__ void store_threes(uint8_t *to, const CodeVectors<3> &codes) {
  __shared__ uint4 rooms[THREADS / 32][96];
  uint4 *room = rooms[threadIdx.x / 32];
  const uint32_t lane = threadIdx.x % 32;
  __syncwarp();  // The last reads of the warp are done.
#pragma unroll
  for (uint32_t v = 0; v < 3; ++v) room[3 * lane + v] = codes.vector[v];
  __syncwarp();
#pragma unroll
  for (uint32_t v = 0; v < 3; ++v) reinterpret_cast<uint4 *>(to)[32 * v + lane] = room[32 * v + lane];
}

template <class C, class E>
__device__ __forceinline__ void encode_chunk(const cinch_codec_args &args) {
  const C codec(args.params);
  codec.prepare_own(blockDim.x);
  __syncthreads();
  const Random random = codec.random(0, args.first);
  uint8_t *wire = static_cast<uint8_t *>(args.wire);
  const uint64_t lane = threadIdx.x % 32;
  const uint64_t warps = (uint64_t)gridDim.x * (blockDim.x / 32);
  const uint64_t first = (uint64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const bool is_long = C::scaled && codec.block() > TILE;
  const uint64_t span = is_long ? codec.block() : TILE;
  const bool aligned = is_aligned(args.elements);
  for (uint64_t begin = first * span; begin < args.n; begin += warps * span) {
    typename C::Summary summary = C::empty_summary();
    if (is_long) {
      for (uint64_t i = begin + 16 * lane; i - 16 * lane < begin + span && i - 16 * lane < args.n;
           i += TILE) {
        float x[16];
        load_elements<E>(args.elements, aligned, args.n, i, x);
        codec.summarize(x, elements_from(args.n, i), summary);
      }
      codec.combine_lanes(summary);
    }
    for (uint64_t at = begin; at < begin + span && at < args.n; at += TILE) {
      const uint64_t i = at + 16 * lane;
      float x[16];
      load_elements<E>(args.elements, aligned, args.n, i, x);
      if (C::scaled && !is_long) summary = codec.summary(x, elements_from(args.n, i));
      typename C::Codes codes;
      codec.encode(x, summary, args.n, i, random, codes);
      if constexpr (C::code_bits == 24) {
        if (codec.bits() == 24 && at + TILE <= args.n) {
          store_threes(wire + 3 * at, codes.code);
          continue;
        }
      }
      codec.store(wire, args.n, i, codes);
    }
  }
}

template <class C, class E>
__device__ __forceinline__ void decode_chunk(const cinch_codec_args &args) {
  const C codec(args.params);
  codec.prepare_own(blockDim.x);
  __syncthreads();
  const uint8_t *wire = static_cast<const uint8_t *>(args.wire);
  const bool aligned = is_aligned(args.elements);
  each_tile(args.n, [&](uint64_t begin) {
    typename C::Codes codes;
    codec.load(wire, args.n, begin + 16 * (threadIdx.x % 32), codes);
    float x[16];
    codec.decode(codes, x);
    store_tile<E>(args.elements, aligned, args.n, begin, x);
  });
}

}  // namespace cinch

#define CINCH_CODEC_KERNELS(codec, Codec, type, Type)                                \
  extern "C" __global__ void __launch_bounds__(256)                                  \
      cinch_encode_##codec##_##type(const __grid_constant__ cinch_codec_args args) { \
    cinch::encode_chunk<cinch::Codec, cinch::Type>(args);                            \
  }                                                                                  \
  extern "C" __global__ void __launch_bounds__(256)                                  \
      cinch_decode_##codec##_##type(const __grid_constant__ cinch_codec_args args) { \
    cinch::decode_chunk<cinch::Codec, cinch::Type>(args);                            \
  }

#define CINCH_CODEC_TYPES(codec, Codec) CINCH_CODED_ELEMENTS(CINCH_CODEC_KERNELS, codec, Codec)

CINCH_CODEC_TYPES(linear8, Linear8)
CINCH_CODEC_TYPES(dynamic8, Dynamic8)
CINCH_CODEC_TYPES(dynamic8_tabled, Dynamic8Tabled)
CINCH_CODEC_TYPES(static8, Static8)
CINCH_CODEC_TYPES(static8_tabled, Static8Tabled)
CINCH_CODEC_TYPES(mantissa8, Mantissa8)
CINCH_CODEC_TYPES(mantissa8_tabled, Mantissa8Tabled)
CINCH_CODEC_TYPES(cast_bf16, CastBf16)
CINCH_CODEC_TYPES(cast16, Cast16)
CINCH_CODEC_TYPES(minmax4, MinMax4)
CINCH_CODEC_TYPES(minmax, MinMax)
CINCH_CODEC_TYPES(trunc, Trunc)
CINCH_CODEC_TYPES(fp8_e4m3, Fp8E4M3)
CINCH_CODEC_TYPES(fp8_e5m2, Fp8E5M2)
CINCH_CODEC_TYPES(terngrad, TernGrad)
CINCH_CODEC_TYPES(onebit, OneBit)
CINCH_CODEC_TYPES(threshold2, Threshold2)
