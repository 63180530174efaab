// Codecs without communication: encode or decode one chunk of any size.
//
// The kernels are cinch_encode_CODEC_TYPE and cinch_decode_CODEC_TYPE; TYPE is f32, f16 or bf16, and CODEC one of
// KernelInfo::array_family.
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

// Stores the codes of a lane whose first element is i, in a tile of `there` elements.
template <class C>
__device__ __forceinline__ void store_codes_of(const C &codec, uint8_t *to, uint32_t there, uint32_t i,
                                               const typename C::Codes &codes) {
  if constexpr (C::code_bits == 24) {
    if (codec.bits() == 24 && there == TILE) return store_threes(to, codes.code);
  }
  codec.store_codes(to, there, i, codes);
}

// Encodes an array whose tiles have whole blocks. With PAIRS, encode_pairs serves the blocks.
template <class C, class E, bool PAIRS>
__device__ __forceinline__ void encode_tiles(const C &codec, const cinch_codec_args &args) {
  // The next tile of 16-bit elements is loaded as soon as the last one is in shared memory or unpacked. Tiles of fp32
  // are twice as long, and would take too many registers. Codes as wide as the elements are stored no slower without.
  constexpr bool AHEAD = E::pairs && C::code_bits <= 8;
  const ArrayTiles tiles(args.n);
  const bool aligned = is_aligned(args.elements);
  const uint32_t step = gridDim.x * (THREADS / 32), i = 16 * (threadIdx.x % 32);
  const uint32_t log2_block = PAIRS ? LOG2_DEFAULT_BLOCK : codec.log2_block();
  const uint32_t tile_bytes = TILE / 8 * codec.bits();
  uint8_t *const wire = static_cast<uint8_t *>(args.wire);
  // Under a tensor scale all tiles share the number.
  const uint32_t tile_numbers = log2_block == 0 ? 0 : C::numbers * (TILE >> log2_block);
  float *const numbers =
      codec.numbers_of(wire, args.n) + (log2_block == 0 ? 0 : C::numbers * (i >> log2_block));
  uint4 vectors[16 / E::N];
  uint32_t tile = blockIdx.x * (THREADS / 32) + warp_index(), next = tile;
  if (tile >= tiles.count) return;
  // With AHEAD the first round only loads, so that there is one copy of the code that loads.
  CINCH_ROLL
  for (bool begun = !AHEAD;; begun = true) {
    if (!AHEAD) load_tile<E>(args.elements, aligned, tiles, tile, vectors);
    const uint32_t there = tiles.elements_of(tile);
    typename C::Summary summary = C::empty_summary();
    typename C::PairTile pairs;
    pairs.below = 0, pairs.summary = C::empty_summary();
    float x[16];
    if (begun) {
      if constexpr (PAIRS) {
        codec.template begin_pairs<E>(vectors, pairs);
      } else {
        unpack_elements<E>(vectors, x);
        if (C::scaled) codec.template begin_summary<E>(vectors, x, elements_from(there, i), summary);
      }
    }
    const bool more = AHEAD ? next < tiles.count : tile + step < tiles.count;
    if (AHEAD && more) load_tile<E>(args.elements, aligned, tiles, next, vectors);
    if (begun) {
      const Random random = codec.random(0, args.first + tile * TILE);
      typename C::Codes codes;
      if constexpr (PAIRS) {
        codec.template encode_pairs<E>(pairs, there, i, random, codes);
      } else {
        if (C::scaled) {
          codec.end_summary(x, elements_from(there, i), summary);
          codec.combine_lanes(summary);
        }
        codec.encode(x, summary, there, i, random, codes);
      }
      store_codes_of(codec, wire + (uint64_t)tile * tile_bytes, there, i, codes);
      if (C::scaled && i < there) codec.store_numbers(numbers + (uint64_t)tile * tile_numbers, i, codes);
    }
    if (!more) break;
    tile = AHEAD ? next : tile + step;
    next += step;
  }
}

// Encodes the whole tiles of an fp32 array with blocks of the default size, by a codec whose codes are signs. Loads of rows
// cover whole lines; with those of encode_blocks, 64 bytes a lane, the first-level cache is the limit.
template <class C>
__device__ __forceinline__ void encode_sign_rows(const C &codec, const cinch_codec_args &args) {
  const float *elements = static_cast<const float *>(args.elements);
  const uint32_t lane = threadIdx.x % 32, step = gridDim.x * (THREADS / 32);
  const ArrayTiles tiles(args.n);
  uint8_t *const wire = static_cast<uint8_t *>(args.wire);
  float *const numbers = codec.numbers_of(wire, args.n) + lane / 16 * 2;
  CINCH_ROLL
  for (uint32_t tile = blockIdx.x * (THREADS / 32) + warp_index(); tile < tiles.whole; tile += step) {
    float number[2];
    const uint32_t word = C::Format::encode_rows(elements + (uint64_t)tile * TILE, number);
    if (lane < 16) reinterpret_cast<uint32_t *>(wire)[(uint64_t)tile * 16 + lane] = word;
    if (lane % 16 == 0) {
      numbers[(uint64_t)tile * 4] = number[0];
      numbers[(uint64_t)tile * 4 + 1] = number[1];
    }
  }
}

// Encodes an array with blocks of any size, from tile `begin` on, which begins a block. A warp loads a block of several
// tiles twice: for its Summary, then for its codes.
template <class C, class E>
__device__ __forceinline__ void encode_blocks(const C &codec, const cinch_codec_args &args,
                                              uint32_t begin = 0) {
  const ArrayTiles tiles(args.n);
  const bool aligned = is_aligned(args.elements);
  const uint32_t log2_block = codec.log2_block();
  const uint32_t span = log2_block > LOG2_TILE ? 1u << (log2_block - LOG2_TILE) : 1;
  const uint32_t step = gridDim.x * (THREADS / 32) * span;
  uint8_t *const wire = static_cast<uint8_t *>(args.wire);
  float *const numbers = codec.numbers_of(wire, args.n);
  CINCH_ROLL
  for (uint32_t block = begin + (blockIdx.x * (THREADS / 32) + warp_index()) * span; block < tiles.count;
       block += step) {
    const uint32_t end = block + span < tiles.count ? block + span : tiles.count;
    // The block has `there` elements. Indices are relative to its first one.
    const uint32_t there = TILE * (end - 1 - block) + tiles.elements_of(end - 1);
    const uint64_t first = (uint64_t)block * TILE;
    typename C::Summary summary = C::empty_summary();
    // A single loop body serves both rounds, so that there is one copy of the code.
    CINCH_ROLL
    for (uint32_t round = span == 1 ? 1 : 0; round < 2; ++round) {
      CINCH_ROLL
      for (uint32_t tile = block; tile < end; ++tile) {
        uint4 vectors[16 / E::N];
        load_tile<E>(args.elements, aligned, tiles, tile, vectors);
        float x[16];
        unpack_elements<E>(vectors, x);
        const uint32_t i = TILE * (tile - block) + 16 * (threadIdx.x % 32);
        if (round == 0 || span == 1) {
          codec.template begin_summary<E>(vectors, x, elements_from(there, i), summary);
          codec.end_summary(x, elements_from(there, i), summary);
        }
        if (round == 0) continue;
        if (span == 1) codec.combine_lanes(summary);
        typename C::Codes codes;
        codec.encode(x, summary, there, i, codec.random(0, args.first + (uint32_t)first), codes);
        codec.store_codes(wire + first / 8 * codec.bits(), there, i, codes);
        if (i < there) {
          codec.store_numbers(numbers + C::numbers * block_index(first + i, log2_block), i, codes);
        }
      }
      if (round == 0) codec.combine_lanes(summary);
    }
  }
}

template <class C, class E>
__device__ __forceinline__ void encode_chunk(const cinch_codec_args &args) {
  const C codec(args.params);
  codec.prepare_own(blockDim.x);
  __syncthreads();
  if constexpr (!C::scaled) {
    encode_tiles<C, E, false>(codec, args);
  } else if constexpr (C::codes_are_signs && !E::pairs) {
    uint32_t begin = 0;
    if (codec.has_default_blocks()) {
      encode_sign_rows<C>(codec, args);
      begin = (uint32_t)(args.n / TILE);
    }
    encode_blocks<C, E>(codec, args, begin);
  } else if constexpr (C::adds_rows) {
    // Sums over rows take fewest instructions in blocks whose size is known.
    if (codec.has_default_blocks()) return encode_tiles<C, E, E::pairs>(codec, args);
    CINCH_ASSUME(!codec.has_default_blocks());
    encode_blocks<C, E>(codec, args);
  } else if constexpr (!E::pairs) {
    // Tiles of fp32 are loaded no earlier in encode_tiles, so encode_blocks serves them, too.
    encode_blocks<C, E>(codec, args);
  } else {
    if (codec.block() <= TILE) return encode_tiles<C, E, false>(codec, args);
    CINCH_ASSUME(codec.block() > TILE);
    encode_blocks<C, E>(codec, args);
  }
}

// Returns how many blocks of an encode kernel a multiprocessor has registers for. Kernels that load ahead, look up
// dynamic8's tables or add rows take more registers; other kernels keep more loads in flight by more blocks.
template <class C, class E>
constexpr int resident_blocks() {
  return E::pairs || std::is_same<C, Dynamic8Tabled>::value ? 4 : C::adds_rows ? 3 : 5;
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
  extern "C" __global__ void                                                         \
      __launch_bounds__(256, (cinch::resident_blocks<cinch::Codec, cinch::Type>()))    \
      cinch_encode_##codec##_##type(const __grid_constant__ cinch_codec_args args) { \
    cinch::encode_chunk<cinch::Codec, cinch::Type>(args);                            \
  }                                                                                  \
  extern "C" __global__ void __launch_bounds__(256)                                  \
      cinch_decode_##codec##_##type(const __grid_constant__ cinch_codec_args args) { \
    cinch::decode_chunk<cinch::Codec, cinch::Type>(args);                            \
  }

#define CINCH_CODEC_TYPES(codec, Codec) CINCH_CODED_ELEMENTS(CINCH_CODEC_KERNELS, codec, Codec)

CINCH_CODEC_TYPES(linear8, Linear8)
CINCH_CODEC_TYPES(dynamic8_tabled, Dynamic8Tabled)
CINCH_CODEC_TYPES(static8_tabled, Static8Tabled)
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
