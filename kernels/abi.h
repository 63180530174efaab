/* The structs that Rust and the kernels share: plain, little endian, every padding named.
 *
 * Sizes and offsets are asserted here and in src/gpu/abi/. Offsets are in bytes.
 *
 * Memory of a communicator on one rank
 *   peer buffer  one for each ordered pair of ranks (from -> to). It lies on `to`, or in pinned host
 *                memory where peer access is refused. Only `from` writes it and only `to` polls it.
 *                It holds, for each protocol and channel, the counters that `from` advances and the
 *                slots that it fills.
 *   peers        the ranks with which a launch exchanges messages, numbered from 0. Steps, masks and
 *                arrays have these numbers: peer p is rank `ranks[p]`, `inbox[p]` its peer buffer to
 *                me, `outbox[p]` mine to it. In a communicator of at most CINCH_MAX_PEERS ranks peer p
 *                is rank p, me included.
 *   cursors      the rank's own device memory: the messages it has sent and received on each
 *                connection since its start. Launches keep their counts there and not in arguments,
 *                so that a CUDA graph may replay a launch any number of times.
 *   control      pinned host memory: the abort word, and the report of the first failure.
 */
#ifndef CINCH_ABI_H
#define CINCH_ABI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
  CINCH_MAX_RANKS = 256,     /* ranks of a GPU communicator */
  CINCH_MAX_PEERS = 32,      /* ranks with which a launch exchanges messages */
  CINCH_MAX_CHANNELS = 128,  /* channels of a pair of ranks */
  CINCH_ARGS_BYTES = 4096,   /* arguments that a launch passes by value */
  CINCH_LINE_BYTES = 128,    /* header of a slot; distance of counters */
  CINCH_SIGNATURE_WORDS = 5,
  /* Schedule kernels: threads of a block, which drives one channel, and, for codecs, dynamic shared
   * memory of each warp that moves data. The first two are those of code for sm_90 and above, the
   * SMALL ones of code that also runs on GPUs with 99 KiB of shared memory. */
  CINCH_BLOCK_THREADS = 608,
  CINCH_STAGE_BYTES = 11520,
  CINCH_SMALL_BLOCK_THREADS = 352,
  CINCH_SMALL_STAGE_BYTES = 7168,
  CINCH_FUSED_THREADS = 512, /* threads of a block of a fused kernel without a codec */
  CINCH_TILE_WORDS = 60,     /* words of 8 bytes in the four lines that a warp sends together */
  CINCH_GRANULE_BYTES = 64,  /* chunks of raw elements end at multiples of this */
  CINCH_KEPT_STEPS = 96,     /* steps of a pass that a block caches in shared memory */
  CINCH_MAX_BATCH = 32       /* steps of a batch */
};

/* How the bytes of a message and their arrival travel. */
enum cinch_protocol {
  CINCH_SIMPLE = 0, /* payload, then a counter */
  CINCH_LL = 1,     /* packets of 8 payload bytes and 8 flag bytes */
  CINCH_LL128 = 2,  /* lines of 120 payload bytes and 8 flag bytes, which must arrive whole */
  CINCH_PROTOCOLS = 3, /* protocols with FIFOs; fused kernels report 3 (ll) and 4 (ll128) */
};

/* schedule::Op. */
enum cinch_op {
  CINCH_SEND = 0,
  CINCH_RECV = 1,
  CINCH_COPY = 2,
  CINCH_REDUCE = 3,
  CINCH_RECV_REDUCE_COPY = 4,
  CINCH_RECV_REDUCE_SEND = 5,
  CINCH_RECV_COPY_SEND = 6,
  CINCH_RECV_REDUCE_COPY_SEND = 7,
  CINCH_RECV_REDUCE_FINISH_SEND = 8
};

/* schedule::Own. */
enum cinch_own { CINCH_OWN_ABSENT = 0, CINCH_OWN_EXACT = 1, CINCH_OWN_CODED = 2 };

/* The arithmetic of a ReduceOp, without premultiplication and division. */
enum cinch_combine { CINCH_SUM = 0, CINCH_PROD = 1, CINCH_MAX = 2, CINCH_MIN = 3 };

/* Bits of `flags`. */
enum {
  CINCH_PREMULTIPLY = 1, /* own elements are multiplied by `factor` */
  CINCH_AVERAGE = 2,     /* final sums are divided by the number of ranks */
  CINCH_ALIGNED = 4,     /* fused kernels: input and output are multiples of 16 (the interpreter tests
                            each chunk) */
  CINCH_FACTOR_AT = 8,   /* `factor` is the address of an element of the call's type */
  CINCH_REDRAW = 16,     /* the launch may be replayed and its codec rounds stochastically: the kernel
                            mixes a message count into words 2 to 5 of the codec's parameters, its
                            keys, so that each replay draws other numbers */
  CINCH_LAUNCH_DEPENDENTS = 32, /* the next kernel of the stream may launch once no thread waits for
                                   another rank any more */
  CINCH_HAS_INPUT = 64 /* a kernel before has taken the statistics of the input */
};

/* How messages for the level inside groups are encoded, where all others have the call's codec. */
enum cinch_intra {
  CINCH_INTRA_CODED = 0, /* by the call's codec */
  CINCH_INTRA_RAW = 1,
  CINCH_INTRA_CAST16 = 2,
  CINCH_INTRA_CAST_BF16 = 3,
  CINCH_INTRA_LINEAR8 = 16 /* plus log2 of the elements of a block, 5 to 9 */
};

/* Counters of one channel of one protocol in a peer buffer, at channel * CINCH_LINE_BYTES. */
struct cinch_counters {
  uint64_t tail; /* messages that `from` has published on this channel (CINCH_SIMPLE only) */
  uint64_t unused0[7];
  uint64_t head; /* messages of the other direction that `from` has received on this channel */
  uint64_t unused1[7];
};

/* The FIFOs of one protocol within a peer buffer. The payload of slot s of channel c is at
 * slots + (c * depth + s) * stride; slots of CINCH_SIMPLE and CINCH_LL have a header CINCH_LINE_BYTES
 * before. */
struct cinch_fifo {
  uint64_t counters;   /* offset of channel 0's cinch_counters */
  uint64_t slots;      /* offset of slot 0's payload */
  uint32_t stride;     /* bytes from slot to slot */
  uint32_t slot_bytes; /* payload bytes of a slot, without flags */
  uint32_t depth;      /* slots of a channel */
  uint32_t channels;
};

/* The message counts of one connection: element [protocol][channel][rank of the peer] of an array
 * with CINCH_MAX_CHANNELS and the communicator's number of ranks. */
struct cinch_cursor {
  uint64_t sent;
  uint64_t received;
};

/* The report of the first failure. `state` goes 0 -> 1 (being written) -> 2. */
enum cinch_trouble_kind {
  CINCH_TROUBLE_NONE = 0,
  CINCH_TROUBLE_TIMEOUT = 1,  /* `peer` did not send (sends = 0) or receive (sends = 1) in time */
  CINCH_TROUBLE_MISMATCH = 2  /* `peer` runs another call, with the signature `theirs` */
};
struct cinch_trouble {
  uint32_t state;
  uint32_t kind;
  uint32_t peer; /* its rank */
  uint32_t sends;
  uint32_t channel;
  uint32_t step;
  uint32_t pass;
  uint32_t protocol;
  uint64_t expected; /* value that the wait asked for */
  uint64_t seen;     /* value at the timeout */
  uint64_t mine[CINCH_SIGNATURE_WORDS];
  uint64_t theirs[CINCH_SIGNATURE_WORDS];
};

struct cinch_control {
  uint32_t abort; /* the host sets it to end all waits */
  uint32_t unused[31];
  struct cinch_trouble trouble;
};

/* The communicator, as a launch passes it to a kernel. */
struct cinch_comm_view {
  uint8_t *inbox[CINCH_MAX_PEERS];
  uint8_t *outbox[CINCH_MAX_PEERS];
  struct cinch_cursor *cursors;
  struct cinch_control *control;
  uint64_t timeout_ns; /* deadline of one wait */
  uint32_t rank;
  uint32_t nranks;
  struct cinch_fifo fifo; /* the FIFOs of this launch's protocol */
  uint32_t protocol;
  uint32_t npeers;
  uint8_t ranks[CINCH_MAX_PEERS]; /* of the peers */
};

/* Parameters of a codec; kernels/codec/params.h has the fields. */
struct cinch_codec_words {
  uint32_t word[8];
};

/* A step of a schedule: a schedule::Step with joined chains and resolved ranges. Its chunk begins
 * in the input or the output at element block * count + range(pass, part).start, where range is
 * plan::Geometry::range. */
struct cinch_step {
  uint8_t op;        /* cinch_op */
  uint8_t own;       /* cinch_own */
  uint8_t own_after; /* sources that are added before the own contribution */
  uint8_t batch;     /* steps of the batch that begins here; 0 inside a batch */
  uint16_t stage;
  uint16_t part;
  uint8_t in_block;
  uint8_t out_block;
  uint8_t intra_recv; /* leading receives that are for the level inside groups */
  uint8_t intra_send; /* 1: its sends are for the level inside groups */
  uint16_t peers; /* index of its first peer; receives come before sends */
  uint8_t nrecv;
  uint8_t nsend;
  /* In the first step of a batch: bit p is set if the batch receives from (sends to) peer p. A batch
   * has at most one message from, and one to, each peer. */
  uint32_t recv_mask;
  uint32_t send_mask;
};

struct cinch_statistics; /* channel/statistics.h */

/* The header of the residuals of one tensor in device memory: the part of its elements that lossy
 * encoding dropped. Two arrays of cinch_work.span fp32 numbers follow at CINCH_RESIDUALS_BYTES. A
 * call reads array `turn` and writes the other one. Residual i belongs to element i of the message;
 * no element is encoded both as a contribution and as a sum. See src/codec/feedback. */
enum { CINCH_RESIDUALS_BYTES = 256 };
struct cinch_residuals {
  uint32_t turn;
  uint32_t arrived; /* blocks that have finished the call */
};

/* The header of the scales of one tensor in device memory, which a codec with a scale for each chunk keeps from call
 * to call (tensor=K). One fp32 scale for each chunk that the rank may encode follows at CINCH_SCALES_BYTES; 0 stands
 * for none. The chunk whose first element has index i of block b of the input has scale
 * i / chunk + b. */
enum { CINCH_SCALES_BYTES = 256 };
struct cinch_scales {
  uint32_t calls;   /* since all scales were dropped; a call that finds 0 drops them */
  uint32_t arrived; /* blocks that have finished the call */
};

/* A call, or one message of a group. Block b of the launch drives channel c = b - first_block of
 * the work that b falls into. It uses the connections of channel first_channel + c of the
 * communicator and executes the passes c, c + channels, c + 2 * channels, ... */
struct cinch_work {
  const void *input;
  void *output;
  uint64_t count; /* elements of the message, or of one rank's block */
  uint64_t chunk; /* elements */
  uint64_t factor; /* of a pre-multiplied sum: a number of the accumulator type in the low bits, or
                      an address (CINCH_FACTOR_AT) */
  uint64_t signature[CINCH_SIGNATURE_WORDS];
  uint64_t signature_hash;           /* upper bits of flags, and payload of an ll header */
  struct cinch_residuals *residuals; /* of error feedback; 0 without it */
  uint64_t span;                     /* elements of an array of residuals */
  struct cinch_scales *scales;       /* of a codec with a scale for each chunk; else 0 */
  struct cinch_statistics *statistics; /* where the call writes its statistics, with the verdict of its
                                          output; 0: nowhere, or another kernel writes them */
  uint32_t parts;
  uint32_t passes;
  uint16_t first_block;
  uint16_t channels;
  uint16_t first_channel;
  uint16_t stages;
  uint16_t steps; /* index of the first step */
  uint16_t nsteps;
  uint8_t combine; /* cinch_combine */
  uint8_t flags;
  uint8_t ends; /* 1: the last launch of its call, which writes the call's statistics, and after which
                   kept scales are a call older */
  uint8_t intra; /* cinch_intra */
  struct cinch_codec_words codec;
};

enum { CINCH_WORK_BUFFER_BYTES = CINCH_ARGS_BYTES - 24 - 616 };

/* The arguments of a schedule kernel. The work buffer holds nworks cinch_work, then nsteps
 * cinch_step, then the peers, one byte each. It is `work_buffer`, or `overflow` if that is not 0:
 * mapped host memory that lives as long as the launch may be replayed. */
struct cinch_args {
  struct cinch_comm_view comm;
  const uint8_t *overflow;
  uint32_t nworks;
  uint32_t nsteps;
  uint32_t npeers;
  uint32_t unused;
  uint8_t work_buffer[CINCH_WORK_BUFFER_BYTES];
};

/* Bits of `phases`, for fused kernels of codecs. Every rank sends its whole input to all others, or
 * (SENDS_PARTS) a part or block to each; stores what it receives, or (SUMS) the sum; and (SENDS_SUMS)
 * sends its sum to all others. */
enum { CINCH_SENDS_PARTS = 1, CINCH_SUMS = 2, CINCH_SENDS_SUMS = 4 };

/* The arguments of a fused kernel. In each peer buffer `area` has two halves of `half` bytes, which
 * calls use alternately; two-shot calls use each half for two rounds (kernels/fused/exchange.cuh). */
struct cinch_oneshot_args {
  struct cinch_comm_view comm;
  uint64_t area;   /* offset in a peer buffer */
  uint64_t half;   /* bytes */
  uint64_t *epoch; /* device memory: [0] calls so far, [1] blocks that have finished this call */
  const void *input;
  void *output;
  uint64_t count; /* elements of the message, or of a block */
  uint64_t factor;
  uint64_t signature_hash; /* upper bits of flags, and payload of one ll packet per raw call */
  uint64_t signature[CINCH_SIGNATURE_WORDS];
  uint32_t words; /* 8-byte words from rank to rank in a round; with a codec elements */
  uint32_t share; /* of each block of threads: packets (a multiple of 32), or tiles */
  uint8_t combine;
  uint8_t flags;
  uint8_t element_bytes;
  uint8_t root; /* of a broadcast or reduce */
  uint8_t phases;     /* with a codec */
  uint8_t tile_lines; /* with a codec: lines of an encoded tile */
  uint8_t unused[2];
  struct cinch_codec_words codec;
  struct cinch_residuals *residuals; /* of error feedback; 0 without it */
  uint64_t span;                     /* elements of an array of residuals */
};

#ifdef __cplusplus
}

static_assert(sizeof(cinch_counters) == CINCH_LINE_BYTES, "abi");
static_assert(sizeof(cinch_fifo) == 32, "abi");
static_assert(sizeof(cinch_trouble) == 128, "abi");
static_assert(sizeof(cinch_control) == 256, "abi");
static_assert(sizeof(cinch_comm_view) == 616, "abi");
static_assert(offsetof(cinch_comm_view, fifo) == 544, "abi");
static_assert(offsetof(cinch_comm_view, ranks) == 584, "abi");
static_assert(sizeof(cinch_step) == 24, "abi");
static_assert(sizeof(cinch_work) == 176, "abi");
static_assert(sizeof(cinch_residuals) == 8, "abi");
static_assert(sizeof(cinch_scales) == 8, "abi");
static_assert(offsetof(cinch_work, codec) == 144, "abi");
static_assert(sizeof(cinch_args) == CINCH_ARGS_BYTES, "abi");
static_assert(sizeof(cinch_oneshot_args) == 784, "abi");
static_assert(offsetof(cinch_oneshot_args, codec) == 736, "abi");
#endif

#endif
