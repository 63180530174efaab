/* What the kernels of a codec are told: prepared by the host (kernel_params of src/codec), passed
 * by value. C and C++. */
#ifndef CINCH_CODEC_PARAMS_H
#define CINCH_CODEC_PARAMS_H

#include <stdint.h>

/* Fields that a codec does not read are 0. */
struct cinch_codec_params {
  /* linear8, dynamic8: elements that share a scale, 5 to 12; 0: the whole chunk shares one. */
  uint32_t log2_block;
  /* linear8, dynamic8 with log2_block 0: that scale, for encoding. Decoding reads the wire's. */
  float scale;
  /* static8, mantissa8: units of the upper and of the lower four decades, each a sum of two
   * numbers, as much too large as `shrink` is below 1, so that none of them is subnormal. */
  float upper[2];
  float lower[2];
  /* static8, mantissa8: a power of two. */
  float shrink;
  /* static8, mantissa8: 1 over the unit in which the largest decade is looked up, roughly. */
  float reciprocal;
};

/* The same words as codecs of a few bits read them: minmax, terngrad, onebit, trunc, threshold2. */
struct cinch_bits_params {
  uint32_t log2_block; /* minmax, terngrad, onebit: elements that share numbers, 5 to 12 */
  float threshold;     /* threshold2 */
  /* minmax and terngrad, two halves each: what contributions draw, and what sums draw. */
  uint32_t key[2][2];
  uint32_t bits;  /* minmax, trunc: of a code, where one kernel has several widths */
  uint32_t draws; /* minmax: whether codes are drawn */
};

/* What a stand-alone kernel gets. `wire` is aligned to 16 bytes and has the chunk's wire bytes;
 * `elements` has n elements of the kernel's type. An encoder under log2_block 0 needs the chunk's
 * scale word to be 0 before it starts. In a published layout `wire` has any alignment, and
 * params are cinch_bits_params. */
struct cinch_codec_args {
  void *wire;
  void *elements;
  uint64_t n;
  struct cinch_codec_params params;
  uint32_t first; /* place in a message of the first element, on which hangs what is drawn */
  uint32_t unused;
};

#ifdef __cplusplus
static_assert(sizeof(cinch_codec_params) == 32, "shared with the host");
static_assert(sizeof(cinch_bits_params) == 32, "shared with the host");
static_assert(sizeof(cinch_codec_args) == 64, "shared with the host");
#endif

#endif
