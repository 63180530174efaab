/* What Rust and the kernels share: plain structs, little endian, no padding that is not named.
 *
 * Sizes and offsets are asserted here and in src/gpu/abi.rs. Offsets are in bytes.
 *
 * Memory of a communicator on one rank
 *   box      one for each ordered pair of ranks (from -> to): lives on `to`, or in pinned host
 *            memory where peer access is refused; written by `from` alone, polled by `to` alone.
 *            Holds, for each protocol and lane, the counters that `from` owns and the slots that
 *            it fills. `inbox[p]` is the box p -> me, `outbox[p]` the box me -> p.
 *   cursors  private to the rank, in its device memory: how many messages it has sent and received
 *            on each connection since the beginning. They live between launches, so that a CUDA
 *            graph may replay a launch any number of times.
 *   control  pinned host memory: the abort word, and the report of the first thing that went wrong.
 */
#ifndef CINCH_ABI_H
#define CINCH_ABI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
  CINCH_MAX_RANKS = 32,      /* ranks of a GPU communicator */
  CINCH_MAX_LANES = 128,     /* parallel connections of a pair */
  CINCH_ARGS_BYTES = 4096,   /* what a launch passes by value */
  CINCH_LINE_BYTES = 128,    /* header of a slot; distance of counters */
  CINCH_SIGNATURE_WORDS = 5,
  /* Of an interpreter, which drives one channel: threads of a block, and, for codecs, dynamic shared
   * memory of each warp that moves data. Code for sm_90 and above, and code that also runs on GPUs
   * with 99 KiB of shared memory. */
  CINCH_BLOCK_THREADS = 608,
  CINCH_STAGE_BYTES = 11520,
  CINCH_SMALL_BLOCK_THREADS = 352,
  CINCH_SMALL_STAGE_BYTES = 7168,
  CINCH_ONESHOT_THREADS = 512, /* of a fused kernel */
  CINCH_TILE_WORDS = 60,       /* words of 8 bytes in four lines, which a warp sends together */
  CINCH_GRANULE_BYTES = 64,    /* of raw elements: where chunks of them may be cut */
  CINCH_KEPT_STEPS = 96,       /* of a pass, that an interpreter keeps in shared memory */
  CINCH_MAX_BATCH = 32       /* steps of a batch */
};

/* How a message announces itself. */
enum cinch_protocol {
  CINCH_SIMPLE = 0, /* payload, then a counter */
  CINCH_LL = 1,     /* 8 payload bytes and 8 flag bytes a packet */
  CINCH_LL128 = 2,  /* 120 payload bytes and 8 flag bytes a line; needs lines that arrive whole */
  CINCH_PROTOCOLS = 3, /* those with FIFOs; fused kernels report 3 (packets) and 4 (lines) */
};

/* Numbers of schedule::Op, in order. */
enum cinch_op {
  CINCH_SEND = 0,
  CINCH_RECV = 1,
  CINCH_COPY = 2,
  CINCH_REDUCE = 3,
  CINCH_RECV_REDUCE_COPY = 4,
  CINCH_RECV_REDUCE_SEND = 5,
  CINCH_RECV_COPY_SEND = 6,
  CINCH_RECV_REDUCE_COPY_SEND = 7
};

/* schedule::Own. */
enum cinch_own { CINCH_OWN_ABSENT = 0, CINCH_OWN_EXACT = 1, CINCH_OWN_CODED = 2 };

/* How contributions are combined: ReduceOp, without what happens before and after. */
enum cinch_combine { CINCH_SUM = 0, CINCH_PROD = 1, CINCH_MAX = 2, CINCH_MIN = 3 };

/* Of flags. */
enum {
  CINCH_PREMULTIPLY = 1, /* own elements times `factor` */
  CINCH_AVERAGE = 2,     /* final sums divided by the number of ranks */
  CINCH_ALIGNED = 4,     /* input and output are multiples of 16; of the fused kernels only: the
                            interpreter looks at each chunk */
  CINCH_FACTOR_AT = 8,   /* `factor` is the address of an element of the call's type */
  CINCH_REDRAW = 16,     /* the launch may be replayed, and its codec draws: words 2 to 5 of the
                            codec's parameters, its keys, are mixed with a count of messages, so that
                            replays draw anew */
  CINCH_LETS_NEXT_BEGIN = 32, /* the next kernel of the stream may begin once no thread waits for
                                 another rank any more */
};

/* Counters of one lane of one protocol in a box, at lane * CINCH_LINE_BYTES. */
struct cinch_counters {
  uint64_t tail; /* messages that `from` has published on this lane (CINCH_SIMPLE only) */
  uint64_t unused0[7];
  uint64_t head; /* messages of the other direction that `from` has taken on this lane */
  uint64_t unused1[7];
};

/* The FIFOs of one protocol within a box. Slot s of lane l: payload at
 * slots + (l * depth + s) * stride; of CINCH_SIMPLE, the header lies CINCH_LINE_BYTES before it. */
struct cinch_fifo {
  uint64_t counters;   /* offset of lane 0's cinch_counters */
  uint64_t slots;      /* offset of slot 0's payload */
  uint32_t stride;     /* bytes from slot to slot */
  uint32_t slot_bytes; /* payload bytes of a slot, without flags */
  uint32_t depth;      /* slots of a lane */
  uint32_t lanes;
};

/* Where this rank stands on one connection: [protocol][lane][peer], always with
 * CINCH_MAX_LANES and CINCH_MAX_RANKS, so that the place does not depend on the geometry. */
struct cinch_cursor {
  uint64_t sent;
  uint64_t received;
};

/* What went wrong first. `state` goes 0 -> 1 (being written) -> 2. */
enum cinch_trouble_kind {
  CINCH_TROUBLE_NONE = 0,
  CINCH_TROUBLE_TIMEOUT = 1,  /* `peer` did not send (sends = 0) or take (sends = 1) in time */
  CINCH_TROUBLE_MISMATCH = 2  /* `peer` runs another call: `theirs` */
};
struct cinch_trouble {
  uint32_t state;
  uint32_t kind;
  uint32_t peer;
  uint32_t sends;
  uint32_t lane;
  uint32_t step;
  uint32_t pass;
  uint32_t protocol;
  uint64_t expected; /* counter that was waited for */
  uint64_t seen;     /* counter that was there */
  uint64_t mine[CINCH_SIGNATURE_WORDS];
  uint64_t theirs[CINCH_SIGNATURE_WORDS];
};

struct cinch_control {
  uint32_t abort; /* the host sets it to end every wait */
  uint32_t unused[31];
  struct cinch_trouble trouble;
};

/* A communicator as a kernel sees it. */
struct cinch_comm_view {
  uint8_t *inbox[CINCH_MAX_RANKS];
  uint8_t *outbox[CINCH_MAX_RANKS];
  struct cinch_cursor *cursors;
  struct cinch_control *control;
  uint64_t timeout_ns; /* of one wait */
  uint32_t rank;
  uint32_t nranks;
  struct cinch_fifo fifo; /* of the protocol that this launch uses */
  uint32_t protocol;
  uint32_t unused;
};

/* Parameters of a codec; see kernels/codec/params.h for what each codec reads. */
struct cinch_codec_words {
  uint32_t word[8];
};

/* One step of a schedule: schedule::Step with chains joined and places resolved. A chunk's first
 * element, in the input or the output, is block * count + range(pass, part).start; range is that
 * of plan::Geometry. */
struct cinch_step {
  uint8_t op;        /* cinch_op */
  uint8_t own;       /* cinch_own */
  uint8_t own_after; /* sources that are added before the own contribution */
  uint8_t batch;     /* steps, from this one on, whose waits are taken together; 0 inside one */
  uint16_t stage;
  uint16_t part;
  uint16_t in_block;
  uint16_t out_block;
  uint16_t peers; /* index of its first peer: receives, then sends */
  uint8_t nrecv;
  uint8_t nsend;
  /* In the first step of a batch: bit r is set if the batch receives from, sends to, rank r. A
   * batch has at most one message from, and one to, each rank. */
  uint32_t recv_mask;
  uint32_t send_mask;
};

/* What lossy encodes of one tensor dropped, in device memory: this, then arrays of
 * cinch_work.span fp32 at CINCH_RESIDUALS_BYTES: array `turn` is what the last call left and the
 * other one what this call leaves. No element is encoded as a contribution and as a finished sum too.
 * Residual i is that of the message's element i. See src/codec/feedback/residuals.rs. */
enum { CINCH_RESIDUALS_BYTES = 256 };
struct cinch_residuals {
  uint32_t turn;
  uint32_t arrived; /* blocks that are through with the call */
};

/* One call, or one message of a group. Block b of the launch works on channel b - first_block of
 * the work that it falls into, over lane first_lane + channel, on passes channel, channel +
 * channels, ... */
struct cinch_work {
  const void *input;
  void *output;
  uint64_t count; /* elements of the message, or of one rank's block */
  uint64_t chunk; /* elements */
  uint64_t factor; /* of a pre-multiplied sum, in the accumulator type, in the low bits; or where
                      it is (CINCH_FACTOR_AT) */
  uint64_t signature[CINCH_SIGNATURE_WORDS];
  struct cinch_residuals *residuals; /* of error feedback; 0 without */
  uint64_t span;                     /* elements of an array of them */
  uint32_t parts;
  uint32_t passes;
  uint16_t first_block;
  uint16_t channels;
  uint16_t first_lane;
  uint16_t stages;
  uint16_t steps; /* index of its first step */
  uint16_t nsteps;
  uint8_t combine; /* cinch_combine */
  uint8_t flags;
  uint16_t mark; /* of what the call is, for flags, of which packets have 12 bits */
  struct cinch_codec_words codec;
};

enum { CINCH_BLOB_BYTES = CINCH_ARGS_BYTES - 24 - 584 };

/* What the schedule interpreter is launched with. The blob holds nworks cinch_work, then
 * nsteps cinch_step, then the peers, one byte each; it lies here, or at `far` (mapped host memory
 * that lives as long as the launch may be replayed) if it does not fit. */
struct cinch_args {
  struct cinch_comm_view comm;
  const uint8_t *far;
  uint32_t nworks;
  uint32_t nsteps;
  uint32_t npeers;
  uint32_t unused;
  uint8_t blob[CINCH_BLOB_BYTES];
};

/* What a fused kernel of a codec does, of the flags `phases`: everyone sends all that it has to all
 * others, or a part or block to each; keeps what it gets, or its sum; and sends that on. */
enum { CINCH_SENDS_PARTS = 1, CINCH_SUMS = 2, CINCH_SENDS_SUMS = 4 };

/* What the fused exchange of small messages is launched with. Box of the pair: `area` holds two
 * halves of `half` bytes, used in turn, of which a call in two trips has a half for each; packets of 8
 * payload and 8 flag bytes. With a codec images of tiles travel, each in lines of its own. */
struct cinch_oneshot_args {
  struct cinch_comm_view comm;
  uint64_t area;   /* offset in a box */
  uint64_t half;   /* bytes */
  uint64_t *epoch; /* device memory: [0] calls so far, [1] blocks of this call that are done */
  const void *input;
  void *output;
  uint64_t count; /* elements of the message, or of a block */
  uint64_t factor;
  uint64_t mark; /* of what the call is, for flags: in the upper 16 bits, of which packets have 12 */
  uint64_t signature[CINCH_SIGNATURE_WORDS];
  uint32_t words; /* of 8 bytes, that go from a rank to another on a trip; with a codec elements */
  uint32_t share; /* of them, of a block of threads: packets, a multiple of 32, tiles of lines, or images */
  uint8_t combine;
  uint8_t flags;
  uint8_t element_bytes;
  uint8_t root; /* of a broadcast or reduce */
  uint8_t phases; /* of a codec, as are the next ones */
  uint8_t image_lines; /* lines that an image takes */
  uint8_t unused[2];
  struct cinch_codec_words codec;
  struct cinch_residuals *residuals; /* of error feedback; 0 without */
  uint64_t span;                     /* elements of an array of them */
};

#ifdef __cplusplus
}

static_assert(sizeof(cinch_counters) == CINCH_LINE_BYTES, "abi");
static_assert(sizeof(cinch_fifo) == 32, "abi");
static_assert(sizeof(cinch_trouble) == 128, "abi");
static_assert(sizeof(cinch_control) == 256, "abi");
static_assert(sizeof(cinch_comm_view) == 584, "abi");
static_assert(offsetof(cinch_comm_view, fifo) == 544, "abi");
static_assert(sizeof(cinch_step) == 24, "abi");
static_assert(sizeof(cinch_work) == 152, "abi");
static_assert(sizeof(cinch_residuals) == 8, "abi");
static_assert(offsetof(cinch_work, codec) == 120, "abi");
static_assert(sizeof(cinch_args) == CINCH_ARGS_BYTES, "abi");
static_assert(sizeof(cinch_oneshot_args) == 752, "abi");
static_assert(offsetof(cinch_oneshot_args, codec) == 704, "abi");
#endif

#endif
