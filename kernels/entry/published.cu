// Whole arrays in the layouts that the papers of the formats published, at any alignment;
// src/arrays/format is the specification. Blocks have 256 threads.
//
// cinch_pack_TYPE and cinch_unpack_TYPE: the upper bytes of each number (Bitpack of ADT).
//
// CompLL's message, whose single block is the whole array, takes three kernels in this order on a
// stream:
//   cinch_extent_TYPE    each block writes the smallest and the largest element of its share to the
//                        place of the codes, which must have room for two words for each block
//   cinch_header         one block combines these extremes and writes the header of ten bytes
//   cinch_message_TYPE   reads the extremes in the header and writes the codes
// cinch_unmessage_TYPE decodes a message. A header that does not fit the width and the element
// count gives NaN.
#include "codec/codec.cuh"
#include "entry/elements.cuh"

namespace cinch {

constexpr uint32_t HEADER_BYTES = 10;

// Store and load WORDS words at any byte address.
template <int WORDS>
__device__ __forceinline__ void store_bytes(uint8_t *to, const uint32_t (&word)[WORDS],
                                            uint32_t bytes) {
  const bool even = ((uintptr_t)to & 1) == 0;
  CINCH_UNROLL
  for (uint32_t at = 0; at < 4 * WORDS; at += 2) {
    const uint32_t both = word[at / 4] >> (8 * (at % 4));
    if (even && at + 2 <= bytes) {
      *reinterpret_cast<uint16_t *>(to + at) = (uint16_t)both;
    } else {
      if (at < bytes) to[at] = (uint8_t)both;
      if (at + 1 < bytes) to[at + 1] = (uint8_t)(both >> 8);
    }
  }
}

template <int WORDS>
__device__ __forceinline__ void load_bytes(const uint8_t *from, uint32_t (&word)[WORDS],
                                           uint32_t bytes) {
  const bool even = ((uintptr_t)from & 1) == 0;
  CINCH_UNROLL
  for (uint32_t w = 0; w < WORDS; ++w) word[w] = 0;
  CINCH_UNROLL
  for (uint32_t at = 0; at < 4 * WORDS; at += 2) {
    uint32_t both = 0;
    if (even && at + 2 <= bytes) {
      both = *reinterpret_cast<const uint16_t *>(from + at);
    } else {
      if (at < bytes) both = from[at];
      if (at + 1 < bytes) both |= (uint32_t)from[at + 1] << 8;
    }
    word[at / 4] |= both << (8 * (at % 4));
  }
}

__device__ __forceinline__ cinch_bits_params bits_params(const cinch_codec_args &args) {
  cinch_bits_params params;
  memcpy(&params, &args.params, sizeof(params));
  return params;
}

// Calls use(i) for each group of 16 elements of this thread; i is the index of the first.
template <class Use>
__device__ __forceinline__ void each_lane(uint64_t n, Use &&use) {
  const uint64_t threads = (uint64_t)gridDim.x * THREADS;
  const uint64_t first = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
  for (uint64_t i = 16 * first; i < n; i += 16 * threads) use(i);
}

__device__ __forceinline__ void words_of(const CodeVectors<3> &codes, uint32_t (&word)[12]) {
  CINCH_UNROLL
  for (int v = 0; v < 3; ++v) {
    const uint4 vector = codes.vector[v];
    word[4 * v] = vector.x, word[4 * v + 1] = vector.y;
    word[4 * v + 2] = vector.z, word[4 * v + 3] = vector.w;
  }
}

template <class E>
__device__ __forceinline__ void pack_array(const cinch_codec_args &args) {
  const uint32_t bits = bits_params(args).bits, size = bits / 8;
  const bool aligned = is_aligned(args.elements), vectors = is_aligned(args.wire);
  each_lane(args.n, [&](uint64_t i) {
    float x[16];
    load_elements<E>(args.elements, aligned, args.n, i, x);
    uint32_t word[16];
    CINCH_UNROLL
    for (int k = 0; k < 16; ++k) word[k] = bits_of(x[k]);
    CodeVectors<3> codes = {};
    TruncFormat::pack(bits, word, codes);
    uint8_t *to = static_cast<uint8_t *>(args.wire) + i * size;
    if (vectors && i + 16 <= args.n) {
      CINCH_UNROLL
      for (uint32_t v = 0; v < 3; ++v) {
        if (v < size) reinterpret_cast<uint4 *>(to)[v] = codes.vector[v];
      }
    } else {
      uint32_t packed[12];
      words_of(codes, packed);
      store_bytes(to, packed, elements_from(args.n, i) * size);
    }
  });
}

template <class E>
__device__ __forceinline__ void unpack_array(const cinch_codec_args &args) {
  const uint32_t bits = bits_params(args).bits, size = bits / 8;
  const bool aligned = is_aligned(args.elements), vectors = is_aligned(args.wire);
  each_tile(args.n, [&](uint64_t begin) {
    const uint64_t i = begin + 16 * (threadIdx.x % 32);
    const uint8_t *from = static_cast<const uint8_t *>(args.wire) + i * size;
    CodeVectors<3> codes = {};
    if (vectors && i + 16 <= args.n) {
      CINCH_UNROLL
      for (uint32_t v = 0; v < 3; ++v) {
        if (v < size) codes.vector[v] = reinterpret_cast<const uint4 *>(from)[v];
      }
    } else {
      uint32_t packed[12];
      load_bytes(from, packed, elements_from(args.n, i) * size);
      CINCH_UNROLL
      for (int v = 0; v < 3; ++v) {
        codes.vector[v] =
            make_uint4(packed[4 * v], packed[4 * v + 1], packed[4 * v + 2], packed[4 * v + 3]);
      }
    }
    uint32_t word[16];
    TruncFormat::unpack(bits, codes, word);
    float x[16];
    CINCH_UNROLL
    for (int k = 0; k < 16; ++k) x[k] = float_of(word[k]);
    store_tile<E>(args.elements, aligned, args.n, begin, x);
  });
}

using Message = MinMaxFormat<0>;

// Returns the array in which the blocks of cinch_extent leave the smallest and the largest element
// of their parts of the input. The array begins at the first multiple of 4 in the message.
__device__ __forceinline__ float *shares_of(const cinch_codec_args &args) {
  return reinterpret_cast<float *>(((uintptr_t)args.wire + 3) & ~(uintptr_t)3);
}

// Combines the smallest and largest elements that the block's threads have found; the first thread
// receives the result.
__device__ __forceinline__ Message::Summary join_block(Message::Summary own) {
  __shared__ Message::Summary warps[THREADS / 32];
  Message::combine_lanes(LOG2_TILE, own);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = own;
  __syncthreads();
  CINCH_UNROLL
  for (uint32_t warp = 0; warp < THREADS / 32; ++warp) {
    own.low = smaller_of(own.low, warps[warp].low);
    own.high = larger_of(own.high, warps[warp].high);
  }
  return own;
}

template <class E>
__device__ __forceinline__ void find_extent(const cinch_codec_args &args) {
  const bool aligned = is_aligned(args.elements);
  Message::Summary own = Message::empty_summary();
  each_lane(args.n, [&](uint64_t i) {
    float x[16];
    load_elements<E>(args.elements, aligned, args.n, i, x);
    Message::summarize(x, elements_from(args.n, i), 0, own);
  });
  own = join_block(own);
  if (threadIdx.x == 0) {
    shares_of(args)[2 * blockIdx.x] = own.low;
    shares_of(args)[2 * blockIdx.x + 1] = own.high;
  }
}

__device__ __forceinline__ uint64_t code_bytes(uint64_t n, uint32_t bits) {
  return (n * bits + 7) / 8;
}

// Returns how many more codes than n the last byte of the codes has room for.
__device__ __forceinline__ uint32_t lacking(uint64_t n, uint32_t bits) {
  return (uint32_t)(code_bytes(n, bits) * (8 / bits) - n);
}

// Reads the smallest and the largest element from the header.
__device__ __forceinline__ Message::Summary ends_of(const uint8_t *wire) {
  uint32_t word[2];
  load_bytes(wire + 2, word, 8);
  return {float_of(word[0]), float_of(word[1])};
}

template <class E>
__device__ __forceinline__ void write_message(const cinch_codec_args &args) {
  const cinch_bits_params params = bits_params(args);
  uint8_t *wire = static_cast<uint8_t *>(args.wire);
  const bool aligned = is_aligned(args.elements);
  const Message::Summary ends = ends_of(wire);
  each_lane(args.n, [&](uint64_t i) {
    float x[16], number[2];
    load_elements<E>(args.elements, aligned, args.n, i, x);
    Message::Codes codes;
    const Random random = {{params.key[0][0], params.key[0][1]}, args.first + (uint32_t)i};
    Message::encode16(params, x, ends, 0, random, codes, number);
    uint32_t word[4];
    Message::squeeze(params.bits, codes, word);
    const uint32_t there = elements_from(args.n, i) * params.bits;
    clear_bits_from(word, there);
    store_bytes(wire + HEADER_BYTES + i / 8 * params.bits, word, (there + 7) / 8);
  });
}

template <class E>
__device__ __forceinline__ void read_message(const cinch_codec_args &args) {
  const cinch_bits_params params = bits_params(args);
  const uint8_t *wire = static_cast<const uint8_t *>(args.wire);
  const bool aligned = is_aligned(args.elements);
  const Message::Summary ends = ends_of(wire);
  float number[2] = {ends.low, ends.high};
  // A wrong header sets the block's smallest element to NaN, which makes all elements NaN.
  if (wire[0] != params.bits || wire[1] != lacking(args.n, params.bits)) {
    number[0] = float_of(QUIET_NAN);
  }
  each_tile(args.n, [&](uint64_t begin) {
    const uint64_t i = begin + 16 * (threadIdx.x % 32);
    uint32_t word[4];
    const uint32_t there = elements_from(args.n, i) * params.bits;
    load_bytes(wire + HEADER_BYTES + i / 8 * params.bits, word, (there + 7) / 8);
    Message::Codes codes;
    Message::spread(params.bits, word, codes);
    float x[16];
    Message::decode16<false>(params, codes, number, x);
    store_tile<E>(args.elements, aligned, args.n, begin, x);
  });
}

}  // namespace cinch

// Writes the header of a message. args.n is the element count of the whole array.
extern "C" __global__ void __launch_bounds__(256)
    cinch_header(const __grid_constant__ cinch_codec_args args) {
  using namespace cinch;
  const cinch_bits_params params = bits_params(args);
  // The host passes the number of cinch_extent's blocks in the field log2_block.
  Message::Summary own = Message::empty_summary();
  for (uint32_t share = threadIdx.x; share < params.log2_block; share += THREADS) {
    own.low = smaller_of(own.low, shares_of(args)[2 * share]);
    own.high = larger_of(own.high, shares_of(args)[2 * share + 1]);
  }
  // The header overwrites the extremes that cinch_extent stored. No thread reads these extremes
  // after the barrier in join_block.
  own = join_block(own);
  if (threadIdx.x != 0) return;
  float low = add(own.low, 0.0f), high = add(own.high, 0.0f);
  if (params.log2_block == 0) {
    low = high = 0;
  } else if (!(is_finite(low) && is_finite(high))) {
    low = high = float_of(QUIET_NAN);
  }
  uint8_t *wire = static_cast<uint8_t *>(args.wire);
  wire[0] = (uint8_t)params.bits;
  wire[1] = (uint8_t)lacking(args.n, params.bits);
  const uint32_t word[2] = {bits_of(low), bits_of(high)};
  store_bytes(wire + 2, word, 8);
}

#define CINCH_PUBLISHED(type, Type)                                           \
  extern "C" __global__ void __launch_bounds__(256)                           \
      cinch_pack_##type(const __grid_constant__ cinch_codec_args args) {      \
    cinch::pack_array<cinch::Type>(args);                                     \
  }                                                                           \
  extern "C" __global__ void __launch_bounds__(256)                           \
      cinch_unpack_##type(const __grid_constant__ cinch_codec_args args) {    \
    cinch::unpack_array<cinch::Type>(args);                                   \
  }                                                                           \
  extern "C" __global__ void __launch_bounds__(256)                           \
      cinch_extent_##type(const __grid_constant__ cinch_codec_args args) {    \
    cinch::find_extent<cinch::Type>(args);                                    \
  }                                                                           \
  extern "C" __global__ void __launch_bounds__(256)                           \
      cinch_message_##type(const __grid_constant__ cinch_codec_args args) {   \
    cinch::write_message<cinch::Type>(args);                                  \
  }                                                                           \
  extern "C" __global__ void __launch_bounds__(256)                           \
      cinch_unmessage_##type(const __grid_constant__ cinch_codec_args args) { \
    cinch::read_message<cinch::Type>(args);                                   \
  }

CINCH_PUBLISHED(f32, F32)
CINCH_PUBLISHED(f16, F16)
CINCH_PUBLISHED(bf16, BF16)
