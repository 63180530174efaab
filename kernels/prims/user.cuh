// Loads and stores of the user's buffers in pieces of 16 or 8 bytes, at any alignment.
//
// A whole piece of an aligned buffer is one access. Any other piece is assembled from elements, out
// of line.
#pragma once

#include "ptx/memory.cuh"

namespace cinch {

// Load and store up to 16 bytes at `at` in elements of `size` bytes; `left` bytes are in the
// buffer.
static __device__ __noinline__ uint4 gather(const uint8_t *at, uint32_t size, uint32_t left) {
  uint64_t half[2] = {0, 0};
#pragma unroll 1
  for (uint32_t k = 0; k < 16 && k < left; k += size) {
    uint64_t element;
    if (size == 1) {
      element = at[k];
    } else if (size == 2) {
      element = *(const uint16_t *)(at + k);
    } else if (size == 4) {
      element = *(const uint32_t *)(at + k);
    } else {
      element = *(const uint64_t *)(at + k);
    }
    const uint64_t placed = element << (k % 8 * 8);
    (k < 8 ? half[0] : half[1]) |= placed;
  }
  return make_uint4((uint32_t)half[0], (uint32_t)(half[0] >> 32), (uint32_t)half[1],
                    (uint32_t)(half[1] >> 32));
}

static __device__ __noinline__ void scatter(uint8_t *at, uint32_t size, uint32_t left, uint4 v) {
  const uint64_t low = v.x | (uint64_t)v.y << 32, high = v.z | (uint64_t)v.w << 32;
#pragma unroll 1
  for (uint32_t k = 0; k < 16 && k < left; k += size) {
    const uint64_t element = (k < 8 ? low : high) >> (k % 8 * 8);
    if (size == 1) {
      at[k] = (uint8_t)element;
    } else if (size == 2) {
      *(uint16_t *)(at + k) = (uint16_t)element;
    } else if (size == 4) {
      *(uint32_t *)(at + k) = (uint32_t)element;
    } else {
      *(uint64_t *)(at + k) = element;
    }
  }
}

// The caller's guarantee about the 16-byte pieces of a step's buffers.
enum class Pieces {
  WHOLE,   // each piece is one access
  INSIDE,  // each piece that begins before the end is one access: the end is a multiple of 16, or
           // memory goes on behind it
  ANY,     // nothing
};

// Load and store 16-byte piece `i` of a buffer of `bytes` bytes, whose elements have `size` bytes.
// Loads give zeros beyond the end of the buffer.
template <Pieces P>
__device__ __forceinline__ uint4 load_piece(const uint8_t *buffer, uint32_t i, uint32_t bytes,
                                            uint32_t size) {
  const uint8_t *at = buffer + 16 * (uint64_t)i;
  if (P == Pieces::WHOLE) return load_vector(at);
  if (P == Pieces::INSIDE) return 16 * i < bytes ? load_vector(at) : make_uint4(0, 0, 0, 0);
  return gather(at, size, bytes > 16 * i ? bytes - 16 * i : 0);
}

template <Pieces P>
__device__ __forceinline__ void store_piece(uint8_t *buffer, uint32_t i, uint32_t bytes,
                                            uint32_t size, uint4 value) {
  uint8_t *at = buffer + 16 * (uint64_t)i;
  if (P == Pieces::WHOLE) return store_vector(at, value);
  if (P == Pieces::INSIDE) {
    if (16 * i < bytes) store_vector(at, value);
    return;
  }
  scatter(at, size, bytes > 16 * i ? bytes - 16 * i : 0, value);
}

// Load and store word `i` of 8 bytes, as load_piece and store_piece do for pieces.
__device__ __forceinline__ uint64_t load_word(const uint8_t *buffer, uint32_t i, uint32_t bytes,
                                              uint32_t size, bool aligned) {
  const uint8_t *at = buffer + 8 * (uint64_t)i;
  if (aligned && 8 * i + 8 <= bytes) return *(const uint64_t *)at;
  const uint32_t left = bytes > 8 * i ? min(bytes - 8 * i, 8u) : 0;
  const uint4 v = gather(at, size, left);
  return v.x | (uint64_t)v.y << 32;
}

__device__ __forceinline__ void store_word(uint8_t *buffer, uint32_t i, uint32_t bytes,
                                           uint32_t size, bool aligned, uint64_t value) {
  uint8_t *at = buffer + 8 * (uint64_t)i;
  if (aligned && 8 * i + 8 <= bytes) {
    *(uint64_t *)at = value;
    return;
  }
  const uint32_t left = bytes > 8 * i ? min(bytes - 8 * i, 8u) : 0;
  scatter(at, size, left, make_uint4((uint32_t)value, (uint32_t)(value >> 32), 0, 0));
}

}  // namespace cinch
