/*
 * The statistics of a call, and the interface between the host and the kernels that read its input and output for
 * them, as abi.h is for all others. src/gpu/abi has the same types in Rust, and its tests compile this header.
 */
#ifndef CINCH_STATISTICS_H
#define CINCH_STATISTICS_H

#include "abi.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  CINCH_STATISTICS_THREADS = 256, /* threads of a block */
  CINCH_SUMS_OFFSET = 64          /* bytes from the end of the cursors to a cinch_statistics_sums */
};

/* Bits of cinch_statistics.verdict. */
enum { CINCH_VERDICT_NON_FINITE = 1 /* an element of the output is not finite */ };

/* The statistics of a call on one rank, in memory of the program (cinch_statistics_t of cinch.h).
 * They describe this rank's contribution, and this rank's output. */
struct cinch_statistics {
  uint64_t saturated;  /* finite elements of the contribution beyond the codec's largest number */
  uint64_t non_finite; /* NaN and infinite elements of the contribution */
  double sum_squares;  /* of the finite elements */
  double abs_max;      /* of the finite elements */
  uint32_t verdict;    /* CINCH_VERDICT_NON_FINITE */
  uint32_t known;      /* the verdicts that were taken */
  uint32_t has_input;  /* 1: the fields of the contribution were taken; 0: they are 0 */
  uint32_t unused[5];
};

/* The partial sums of a call's blocks, CINCH_SUMS_OFFSET bytes behind the cursors. Zero between calls. */
struct cinch_statistics_sums {
  uint64_t saturated;
  uint64_t non_finite;
  double sum_squares;
  uint64_t abs_max; /* bits of an fp64 number that is not negative */
  uint32_t verdict;
  uint32_t arrived; /* blocks that have finished the output */
};

/* The arguments of a kernel. One launch before the call takes the statistics of the input, if they are wanted. Another
 * one behind it takes the verdict of the output and writes the result, unless the call's kernel does
 * (cinch_work.statistics). */
struct cinch_statistics_args {
  const void *elements;
  uint64_t count;
  struct cinch_statistics_sums *sums;
  struct cinch_statistics *result; /* 0 in the launch for the input */
  uint64_t factor;
  uint32_t flags; /* CINCH_PREMULTIPLY, CINCH_FACTOR_AT: of a pre-multiplied sum */
  float largest;  /* finite numbers beyond it saturate in the codec; infinite if none do */
  uint32_t has_input; /* of the result */
  uint32_t unused;
};

#ifdef __cplusplus
}

static_assert(sizeof(cinch_statistics) == 64, "abi");
static_assert(sizeof(cinch_statistics_sums) == 40, "abi");
static_assert(sizeof(cinch_statistics_args) == 56, "abi");
#endif

#endif
