// Reading and writing the user's buffers in pieces of 16 or 8 bytes, whatever their alignment.
//
// A chunk starts at a multiple of 64 bytes of its buffer, so that its alignment is the buffer's.
#pragma once

#include "ptx/memory.cuh"

namespace cinch {

// Piece `i` (of 16 bytes) of a buffer of `bytes`; zeros beyond its end. ALIGNED: the buffer starts
// at a multiple of 16. T: an unsigned integer as large as an element.
template <class T, bool ALIGNED>
__device__ __forceinline__ uint4 load_piece16(const uint8_t *buffer, uint32_t i, uint32_t bytes) {
  const uint8_t *at = buffer + 16 * i;
  if (ALIGNED && 16 * i + 16 <= bytes) return load_vector(at);
  union {
    uint4 v;
    T t[16 / sizeof(T)];
  } piece;
  piece.v = make_uint4(0, 0, 0, 0);
  const uint32_t left = bytes - 16 * i;
#pragma unroll
  for (uint32_t k = 0; k < 16 / sizeof(T); ++k) {
    if (k * sizeof(T) < left) piece.t[k] = ((const T *)at)[k];
  }
  return piece.v;
}

template <class T, bool ALIGNED>
__device__ __forceinline__ void store_piece16(uint8_t *buffer, uint32_t i, uint32_t bytes,
                                              uint4 value) {
  uint8_t *at = buffer + 16 * i;
  if (ALIGNED && 16 * i + 16 <= bytes) return store_vector(at, value);
  union {
    uint4 v;
    T t[16 / sizeof(T)];
  } piece;
  piece.v = value;
  const uint32_t left = bytes - 16 * i;
#pragma unroll
  for (uint32_t k = 0; k < 16 / sizeof(T); ++k) {
    if (k * sizeof(T) < left) ((T *)at)[k] = piece.t[k];
  }
}

// The same for pieces of 8 bytes. ALIGNED: the buffer starts at a multiple of 8.
template <class T, bool ALIGNED>
__device__ __forceinline__ uint64_t load_piece8(const uint8_t *buffer, uint32_t i,
                                                uint32_t bytes) {
  const uint8_t *at = buffer + 8 * i;
  if (ALIGNED && 8 * i + 8 <= bytes) return *(const uint64_t *)at;
  union {
    uint64_t v;
    T t[8 / sizeof(T)];
  } piece;
  piece.v = 0;
  const uint32_t left = bytes > 8 * i ? bytes - 8 * i : 0;
#pragma unroll
  for (uint32_t k = 0; k < 8 / sizeof(T); ++k) {
    if (k * sizeof(T) < left) piece.t[k] = ((const T *)at)[k];
  }
  return piece.v;
}

template <class T, bool ALIGNED>
__device__ __forceinline__ void store_piece8(uint8_t *buffer, uint32_t i, uint32_t bytes,
                                             uint64_t value) {
  uint8_t *at = buffer + 8 * i;
  if (ALIGNED && 8 * i + 8 <= bytes) {
    *(uint64_t *)at = value;
    return;
  }
  union {
    uint64_t v;
    T t[8 / sizeof(T)];
  } piece;
  piece.v = value;
  const uint32_t left = bytes > 8 * i ? bytes - 8 * i : 0;
#pragma unroll
  for (uint32_t k = 0; k < 8 / sizeof(T); ++k) {
    if (k * sizeof(T) < left) ((T *)at)[k] = piece.t[k];
  }
}

}  // namespace cinch
