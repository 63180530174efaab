/* The parameters of codecs, which the host prepares (src/codec/kernel_params.rs) and a launch passes
 * by value. C and C++. */
#ifndef CINCH_CODEC_PARAMS_H
#define CINCH_CODEC_PARAMS_H

#include <stdint.h>

/* The parameters of most codecs. Fields that a codec does not read are 0. */
struct cinch_codec_params {
  /* Codecs with blocks: log2 of the elements that share numbers, in all structs of parameters. */
  uint32_t log2_block;
  /* cast_bf16, mantissa8 for elements of f16: a magnitude from here up to 65,520 is encoded as this;
   * 0 for none. */
  float scale;
  /* static8, mantissa8: units of the upper and of the lower four decades, each the sum of two
   * numbers. They are divided by `shrink`, so that none of them is subnormal. */
  float upper[2];
  float lower[2];
  /* static8, mantissa8: a power of two. */
  float shrink;
  /* static8, mantissa8: about 1 over the unit in which encoding estimates a code. */
  float reciprocal;
};

/* The parameters of codecs with a scale: linear8, dynamic8, fp8. */
struct cinch_scaled_params {
  uint32_t log2_block; /* log2 of the elements that share a scale, 5 to 12; 0: the whole chunk */
  float scale;         /* with log2_block 0: the scale for encoding. Decoding reads the wire's. */
  /* linear8, dynamic8: keys of the random numbers for contributions and for sums. */
  uint32_t key[2][2];
  uint32_t refresh; /* with log2_block 0: calls for which schedule kernels keep a scale */
  uint32_t draws;   /* linear8, dynamic8: whether rounding is stochastic */
};

/* The parameters of codecs of few bits: minmax, terngrad, onebit, trunc, threshold2. */
struct cinch_bits_params {
  uint32_t log2_block; /* minmax, terngrad, onebit: log2 of the elements that share numbers, 5 to 12 */
  union {
    float threshold; /* threshold2 */
    float damping;   /* minmax, terngrad: factor of the numbers of a block, with error feedback */
  };
  /* minmax, terngrad: keys of the random numbers for contributions and for sums. */
  uint32_t key[2][2];
  uint32_t bits;  /* minmax, trunc: bits of a code, in kernels for several widths */
  uint32_t draws; /* minmax: whether rounding is stochastic */
};

/* The arguments of the kernels for whole arrays. `wire` has the chunk's wire bytes and is aligned to
 * 16 bytes; `elements` has n elements of the kernel's type. Before an encoder with log2_block 0
 * starts, the chunk's scale word must be 0. In a published layout `wire` has any alignment and
 * params are cinch_bits_params. */
struct cinch_codec_args {
  void *wire;
  void *elements;
  uint64_t n;
  struct cinch_codec_params params;
  uint32_t first; /* index in the message of the first element: random numbers depend on it */
  uint32_t unused;
};

#ifdef __cplusplus
static_assert(sizeof(cinch_codec_params) == 32, "shared with the host");
static_assert(sizeof(cinch_scaled_params) == 32, "shared with the host");
static_assert(sizeof(cinch_bits_params) == 32, "shared with the host");
static_assert(sizeof(cinch_codec_args) == 64, "shared with the host");
#endif

#endif
