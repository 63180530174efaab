/* cinch: collective communication that compresses inside every pipeline chunk.
 *
 * Every function returns a code; cinch_last_error() has the sentence that belongs to it. A call
 * with an argument that it does not take returns CINCH_ERROR_INVALID_ARGUMENT before anything
 * moves. Nothing exits, raises signals, or throws.
 *
 * A communicator works on host memory, or on one GPU for each rank (cinch_config_t.device).
 *
 * On host memory, buffers have any alignment, collectives return when their buffers may be used
 * again, and `stream` is NULL.
 *
 * On a GPU, buffers are memory of that GPU, aligned to their elements, and `stream` is a
 * cudaStream_t or CUstream of it; NULL is the default stream. Collectives are queued there and
 * return at once; what goes wrong later is the communicator's cinch_comm_async_error. Calls of one
 * communicator run in the order in which they are made, whatever their streams. A stream that is
 * being captured records them: the graph may then be launched any number of times while the
 * communicators live. Each launch takes its place among their calls, in an order that is the same on
 * all ranks (CINCH_GRAPH_MIXING=0 leaves it to the program's own streams and events).
 *
 * Input and output are disjoint, or in place where the function says so.
 *
 * Threads: every function may be called from any thread. Calls on one communicator run one after
 * the other, and all its ranks must make them in the same order, small sums in the same groups (see
 * cinch_group_start). Groups and cinch_last_error() belong to the thread. No function may be called from a signal handler, nor, on a communicator
 * that its parent made, in a forked child.
 *
 * Generated from src/capi by cbindgen; do not edit.
 */


#ifndef CINCH_H
#define CINCH_H

#include <stddef.h>
#include <stdint.h>

/** Initialises a cinch_config_t with nothing set. */
#define cinch_config_default(config) \
    cinch_config_init((config), sizeof *(config), CINCH_API_VERSION)

/** Initialises a cinch_call_t with nothing set. */
#define cinch_call_default(call) cinch_call_init((call), sizeof *(call), CINCH_API_VERSION)

/** Initialises a cinch_report_t. */
#define cinch_report_default(report) \
    cinch_report_init((report), sizeof *(report), CINCH_API_VERSION)

/** Initialises a cinch_comm_stats_t. */
#define cinch_comm_stats_default(stats) \
    cinch_comm_stats_init((stats), sizeof *(stats), CINCH_API_VERSION)

/** Initialises a cinch_awp_t. */
#define cinch_awp_default(awp) cinch_awp_init((awp), sizeof *(awp), CINCH_API_VERSION)

/** Initialises a cinch_loss_scaler_t with its defaults. */
#define cinch_loss_scaler_default(scaler) \
    cinch_loss_scaler_init((scaler), sizeof *(scaler), CINCH_API_VERSION)

/**
 * Version of the meaning of the structs' fields; the `cinch_*_default` macros pass it.
 */
#define CINCH_API_VERSION 1

/**
 * The colour of a rank that joins none of the communicators of a split.
 */
#define CINCH_SPLIT_NO_COLOR -1

/**
 * In `cinch_report_t.valid`: `saturated`, `non_finite`, `abs_max` and `l2_norm` were taken. They
 * are while this rank's input is encoded on the host, so not with codec raw, nor on a rank without
 * input, nor in calls on GPUs: there they are 0, and say nothing.
 */
#define CINCH_REPORT_INPUT 1

/**
 * Reasons in `cinch_comm_stats_t.exact_calls`; new ones are only ever added at the end, up to 16.
 */
#define CINCH_EXACT_REASONS 16

/**
 * Index: nobody asked for a codec, or for one inside hosts only and the algorithm has one level.
 */
#define CINCH_EXACT_NOT_ASKED 0

/**
 * Index: compression is off for good, by process or communicator.
 */
#define CINCH_EXACT_OFF 1

/**
 * Index: the call asked for it.
 */
#define CINCH_EXACT_BY_CALL 2

/**
 * Index: the codec is not for this collective unless it is named.
 */
#define CINCH_EXACT_COLLECTIVE 3

/**
 * Index: codecs carry f32, f16 and bf16.
 */
#define CINCH_EXACT_DTYPE 4

/**
 * Index: codecs carry sums and averages.
 */
#define CINCH_EXACT_OPERATION 5

/**
 * Index: below the smallest size.
 */
#define CINCH_EXACT_SMALL 6

/**
 * Index: the codec keeps scales for tensors, and the call names none.
 */
#define CINCH_EXACT_NO_TENSOR 7

/**
 * Index: a sample was beyond the bound.
 */
#define CINCH_EXACT_SWITCHED_OFF 8

/**
 * Index: the model of costs said that the codec does not pay.
 */
#define CINCH_EXACT_COSTS 9

/**
 * What every function returns. Numbers are never reused; those up to 7 are NCCL's.
 */
enum cinch_result_t
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * All is well.
     */
    CINCH_SUCCESS = 0,
    /**
     * The operating system refused something.
     */
    CINCH_ERROR_SYSTEM = 2,
    /**
     * A defect of the library.
     */
    CINCH_ERROR_INTERNAL = 3,
    /**
     * An argument is outside its documented range. Nothing happened.
     */
    CINCH_ERROR_INVALID_ARGUMENT = 4,
    /**
     * The call is legal somewhere, but not in this state or with this combination.
     */
    CINCH_ERROR_INVALID_USAGE = 5,
    /**
     * A peer died, left, or could not be reached. The communicator has failed.
     */
    CINCH_ERROR_REMOTE = 6,
    /**
     * Reserved for non-blocking communicators; no function returns it yet.
     */
    CINCH_IN_PROGRESS = 7,
    /**
     * Ranks disagree about a call or about their settings. The communicator has failed.
     */
    CINCH_ERROR_MISMATCH = 8,
    /**
     * A deadline passed. The communicator has failed.
     */
    CINCH_ERROR_TIMEOUT = 9,
    /**
     * The communicator was aborted.
     */
    CINCH_ERROR_ABORTED = 10,
    /**
     * This build or this machine lacks what the call needs.
     */
    CINCH_ERROR_UNSUPPORTED = 11,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum cinch_result_t cinch_result_t;
#else
typedef uint32_t cinch_result_t;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * The type of one element. Numbers are those of `ncclDataType_t`.
 */
enum cinch_dtype_t
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * Signed 8-bit integer.
     */
    CINCH_I8 = 0,
    /**
     * Unsigned 8-bit integer.
     */
    CINCH_U8 = 1,
    /**
     * Signed 32-bit integer.
     */
    CINCH_I32 = 2,
    /**
     * Unsigned 32-bit integer.
     */
    CINCH_U32 = 3,
    /**
     * Signed 64-bit integer.
     */
    CINCH_I64 = 4,
    /**
     * Unsigned 64-bit integer.
     */
    CINCH_U64 = 5,
    /**
     * IEEE binary16.
     */
    CINCH_F16 = 6,
    /**
     * IEEE binary32.
     */
    CINCH_F32 = 7,
    /**
     * IEEE binary64.
     */
    CINCH_F64 = 8,
    /**
     * The upper half of a binary32.
     */
    CINCH_BF16 = 9,
    /**
     * OCP 8-bit float, 4 exponent and 3 mantissa bits, no infinity.
     */
    CINCH_F8E4M3 = 10,
    /**
     * OCP 8-bit float, 5 exponent and 2 mantissa bits.
     */
    CINCH_F8E5M2 = 11,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum cinch_dtype_t cinch_dtype_t;
#else
typedef uint32_t cinch_dtype_t;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * How contributions are combined. The first five numbers are those of `ncclRedOp_t`; numbers
 * from `CINCH_OP_FIRST_CREATED` are made by `cinch_op_create_premulsum`.
 */
enum cinch_op_t
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * Sum; integers wrap.
     */
    CINCH_SUM = 0,
    /**
     * Product; integers wrap.
     */
    CINCH_PROD = 1,
    /**
     * Largest; NaN if any contribution is NaN.
     */
    CINCH_MAX = 2,
    /**
     * Smallest; NaN if any contribution is NaN.
     */
    CINCH_MIN = 3,
    /**
     * Sum divided once by the number of ranks; integers truncate.
     */
    CINCH_AVG = 4,
    /**
     * No operator; created ones have this number or a higher one.
     */
    CINCH_OP_FIRST_CREATED = 16,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum cinch_op_t cinch_op_t;
#else
typedef uint32_t cinch_op_t;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * What a `cinch_call` does.
 */
enum cinch_collective_t
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * As `cinch_all_reduce`.
     */
    CINCH_ALL_REDUCE = 0,
    /**
     * As `cinch_all_gather`.
     */
    CINCH_ALL_GATHER = 1,
    /**
     * As `cinch_reduce_scatter`.
     */
    CINCH_REDUCE_SCATTER = 2,
    /**
     * As `cinch_broadcast`.
     */
    CINCH_BROADCAST = 3,
    /**
     * As `cinch_reduce`.
     */
    CINCH_REDUCE = 4,
    /**
     * As `cinch_gather`.
     */
    CINCH_GATHER = 5,
    /**
     * As `cinch_scatter`.
     */
    CINCH_SCATTER = 6,
    /**
     * As `cinch_all_to_all`.
     */
    CINCH_ALL_TO_ALL = 7,
    /**
     * As `cinch_send`.
     */
    CINCH_SEND = 8,
    /**
     * As `cinch_recv`.
     */
    CINCH_RECV = 9,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum cinch_collective_t cinch_collective_t;
#else
typedef uint32_t cinch_collective_t;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * A family of schedules.
 */
enum cinch_algorithm_t
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * Nothing is asked for: a call takes the communicator's, a communicator the environment's.
     */
    CINCH_ALGORITHM_UNSET = 0,
    /**
     * The cheapest, whatever the environment says. In configs only.
     */
    CINCH_ALGORITHM_AUTO = 1,
    /**
     * Neighbour to neighbour.
     */
    CINCH_ALGORITHM_RING = 2,
    /**
     * Two complementary binary trees.
     */
    CINCH_ALGORITHM_TREE = 3,
    /**
     * Everyone to everyone in one step.
     */
    CINCH_ALGORITHM_ONESHOT = 4,
    /**
     * Everyone to the owner of each chunk and back.
     */
    CINCH_ALGORITHM_DIRECT = 5,
    /**
     * Inside each host first, then between hosts, then inside again.
     */
    CINCH_ALGORITHM_HIERARCHICAL = 6,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum cinch_algorithm_t cinch_algorithm_t;
#else
typedef uint32_t cinch_algorithm_t;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * What carries data between two ranks.
 */
enum cinch_transport_t
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * In a config: nothing is asked for, the environment decides. In a report: no data moved.
     */
    CINCH_TRANSPORT_UNSET = 0,
    /**
     * The best that connects each pair, whatever the environment says. In configs only.
     */
    CINCH_TRANSPORT_AUTO = 1,
    /**
     * Threads of one process.
     */
    CINCH_TRANSPORT_LOOPBACK = 2,
    /**
     * Shared memory between processes of one host.
     */
    CINCH_TRANSPORT_SHM = 3,
    /**
     * TCP sockets.
     */
    CINCH_TRANSPORT_TCP = 4,
    /**
     * Memory of GPUs of one host.
     */
    CINCH_TRANSPORT_CUDA = 5,
    /**
     * RDMA over InfiniBand or RoCE.
     */
    CINCH_TRANSPORT_RDMA = 6,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum cinch_transport_t cinch_transport_t;
#else
typedef uint32_t cinch_transport_t;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * How an encoded array is laid out.
 */
enum cinch_layout_t
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * As a chunk of a collective: codes, zeros up to a multiple of 16 bytes, then the numbers
     * of the blocks, all little endian.
     */
    CINCH_LAYOUT_CHUNK = 0,
    /**
     * As the format's source published it: `minmax1/2/4/8` as CompLL's messages with a header
     * of 10 bytes, `trunc8/16/24` as ADT's packed bytes without any.
     */
    CINCH_LAYOUT_PUBLISHED = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum cinch_layout_t cinch_layout_t;
#else
typedef uint32_t cinch_layout_t;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * A communicator: a group of ranks that call collectives together.
 *
 * Only pointers to it exist; they are tickets, and must not be dereferenced.
 */
typedef struct cinch_comm_t cinch_comm_t;

/**
 * Where a job's ranks meet, and their secret: opaque bytes that one rank makes and the program
 * hands to all others. Who knows them can join.
 */
typedef struct {
    /**
     * Opaque; no text.
     */
    char bytes[128];
} cinch_unique_id_t;

/**
 * Settings of one communicator; what is unset (zero, NULL) is left to the environment and then
 * to the default. `cinch info` prints the environment's names and ranges.
 *
 * Initialise it with `cinch_config_default(&config)`. New fields are only ever added at the end.
 */
typedef struct {
    /**
     * Bytes of the struct in the program's header. Set by `cinch_config_default`.
     */
    size_t size;
    /**
     * Tells an initialised struct from garbage. Set by `cinch_config_default`.
     */
    uint32_t magic;
    /**
     * Meaning of the fields. Set by `cinch_config_default`.
     */
    uint32_t version;
    /**
     * Codec of calls that name none and admit it, as `CINCH_CODEC`: `linear8:block=128`, or
     * `auto:linear8` to have costs measured now and the codec where it pays, or by level
     * `intra=raw,inter=dynamic8`.
     */
    const char *codec;
    /**
     * Network interface for TCP, as `CINCH_SOCKET_IFNAME`.
     */
    const char *network_interface;
    /**
     * Transport between all ranks.
     */
    cinch_transport_t transport;
    /**
     * Algorithm where the collective has it.
     */
    cinch_algorithm_t algorithm;
    /**
     * Slots of one connection in host memory: a power of two from 2 to 64.
     */
    uint32_t slots;
    /**
     * Parallel channels through all ranks: 1 to 16.
     */
    uint32_t channels;
    /**
     * Sockets for each connected pair and channel: 1 to 16.
     */
    uint32_t tcp_sockets;
    /**
     * Beat of the control connections in milliseconds: 10 to 60,000.
     */
    uint32_t heartbeat_ms;
    /**
     * Bytes of one slot in host memory: 4 KiB to 16 MiB, a multiple of 64.
     */
    uint64_t slot_bytes;
    /**
     * Upper bound of slot memory per communicator and rank, in bytes: 64 KiB to 64 GiB.
     */
    uint64_t buffer_bytes;
    /**
     * Input bytes below which the default codec stays out; 1 lets it in at every size.
     */
    uint64_t codec_min_bytes;
    /**
     * How long a call may wait for a peer, in milliseconds: 10 to 10^9.
     */
    uint64_t timeout_ms;
    /**
     * How long joining may take, in milliseconds: 10 to 10^9.
     */
    uint64_t init_timeout_ms;
    /**
     * Memory that calls work on, as `CINCH_DEVICE`: `host`, `cuda` (the GPU of the thread's
     * current context, else 0) or `cuda:1`.
     */
    const char *device;
    /**
     * The communicator's name, by which the rules of `CINCH_CODEC_RULES` find it.
     */
    const char *name;
} cinch_config_t;

/**
 * What one call did on this rank.
 *
 * Initialise it with `cinch_report_default(&report)`. New fields are only ever added at the end.
 */
typedef struct {
    /**
     * Bytes of the struct in the program's header. Set by `cinch_report_default`.
     */
    size_t size;
    /**
     * Tells an initialised struct from garbage. Set by `cinch_report_default`.
     */
    uint32_t magic;
    /**
     * Meaning of the fields. Set by `cinch_report_default`.
     */
    uint32_t version;
    /**
     * Which of the fields about the input hold something: `CINCH_REPORT_INPUT` or 0.
     */
    uint32_t valid;
    /**
     * The algorithm that ran.
     */
    cinch_algorithm_t algorithm;
    /**
     * The slowest transport that carried data; `CINCH_TRANSPORT_UNSET` if none did.
     */
    cinch_transport_t transport;
    /**
     * Channels used.
     */
    uint32_t channels;
    /**
     * Payload bytes that this rank sent.
     */
    uint64_t wire_bytes;
    /**
     * Finite elements, of the input or of sums that this rank encoded, beyond the codec's largest
     * value, which saturated.
     */
    uint64_t saturated;
    /**
     * NaN and infinite input elements.
     */
    uint64_t non_finite;
    /**
     * Largest magnitude among the finite input elements.
     */
    double abs_max;
    /**
     * Root of the sum of squares of the finite input elements.
     */
    double l2_norm;
    /**
     * The codec that ran, with its parameters, as text: `linear8:block=256`; where hosts have one
     * of their own `intra=raw,inter=linear8:block=256`.
     */
    char codec[64];
    /**
     * Calls of a group that travelled as one with this one, itself included; 1 if it went alone.
     */
    uint64_t fused;
} cinch_report_t;

/**
 * Counts since the communicator was made, on this rank. A captured call counts once, when it is
 * recorded.
 *
 * Initialise it with `cinch_comm_stats_default(&stats)`. New fields are only ever added at the
 * end.
 */
typedef struct {
    /**
     * Bytes of the struct in the program's header. Set by `cinch_comm_stats_default`.
     */
    size_t size;
    /**
     * Tells an initialised struct from garbage. Set by `cinch_comm_stats_default`.
     */
    uint32_t magic;
    /**
     * Meaning of the fields. Set by `cinch_comm_stats_default`.
     */
    uint32_t version;
    /**
     * Calls that a codec carried, inside hosts or between them.
     */
    uint64_t coded_calls;
    /**
     * Bytes that this rank sent.
     */
    uint64_t wire_bytes;
    /**
     * Bytes that it would have sent with the same algorithms and no codec.
     */
    uint64_t raw_bytes;
    /**
     * Coded calls of which a slice was also run exactly, and compared.
     */
    uint64_t sampled;
    /**
     * The largest relative RMS error of those.
     */
    double worst_error;
    /**
     * 1 if such an error was beyond the bound, so that calls have been exact since; else 0.
     */
    uint64_t switched_off;
    /**
     * Calls that ran exactly, by reason: `CINCH_EXACT_SMALL` and so on.
     */
    uint64_t exact_calls[CINCH_EXACT_REASONS];
} cinch_comm_stats_t;

/**
 * One call. Fields that the collective does not use are ignored.
 *
 * Initialise it with `cinch_call_default(&call)`. New fields are only ever added at the end.
 */
typedef struct {
    /**
     * Bytes of the struct in the program's header. Set by `cinch_call_default`.
     */
    size_t size;
    /**
     * Tells an initialised struct from garbage. Set by `cinch_call_default`.
     */
    uint32_t magic;
    /**
     * Meaning of the fields. Set by `cinch_call_default`.
     */
    uint32_t version;
    /**
     * On whose ranks.
     */
    cinch_comm_t *comm;
    /**
     * Input, as the collective's own function takes it.
     */
    const void *sendbuf;
    /**
     * Output, as the collective's own function takes it.
     */
    void *recvbuf;
    /**
     * Elements, as the collective's own function takes them.
     */
    size_t count;
    /**
     * What is done.
     */
    cinch_collective_t collective;
    /**
     * Of which elements.
     */
    cinch_dtype_t dtype;
    /**
     * Combined how.
     */
    cinch_op_t op;
    /**
     * Root, where there is one.
     */
    int root;
    /**
     * The other rank of a send or receive.
     */
    int peer;
    /**
     * Algorithm; unset = the communicator's choice.
     */
    cinch_algorithm_t algorithm;
    /**
     * Codec, as `linear8:block=128`; as `auto:linear8`, only where the model of costs says that
     * it pays; NULL = the communicator's. A codec that does not fit the
     * call (a lossy one and integers, say) is an error.
     */
    const char *codec;
    /**
     * Names the tensor whose scales live from call to call, for codecs with `tensor=K`. 0 = none.
     */
    uint64_t tensor;
    /**
     * The stream on which a call on a GPU is queued; NULL on a communicator of host memory.
     */
    void *stream;
    /**
     * Turns error feedback on, and names the tensor whose residuals live from call to call: what a
     * lossy encode drops is added to the next call of the same id. For collectives that reduce. On
     * a GPU it takes 8 bytes of device memory an element of the input, and a call that is captured
     * must have been made once before. 0 = none.
     */
    uint64_t feedback;
} cinch_call_t;

/**
 * Adaptive weight precision of one group of tensors: few bits at first, more once the L2 norm of
 * the group has stopped growing.
 *
 * Initialise it with `cinch_awp_default(&awp)`, set `threshold` and `interval`, and perhaps the
 * others. The struct is its whole state. New fields are only ever added at the end.
 */
typedef struct {
    /**
     * Bytes of the struct in the program's header. Set by `cinch_awp_default`.
     */
    size_t size;
    /**
     * Tells an initialised struct from garbage. Set by `cinch_awp_default`.
     */
    uint32_t magic;
    /**
     * Meaning of the fields. Set by `cinch_awp_default`.
     */
    uint32_t version;
    /**
     * T: a relative growth of the norm above it counts as growth.
     */
    double threshold;
    /**
     * State: the norm before, if `has_previous`.
     */
    double previous;
    /**
     * Batches in a row without growth after which bits are added; about an epoch.
     */
    uint32_t interval;
    /**
     * N: bits added, 1 to 32; unset = 8.
     */
    uint32_t step_bits;
    /**
     * State: bits to keep, 1 to 32; unset = 8. What it is set to is where it starts.
     */
    uint32_t bits;
    /**
     * State: batches in a row without growth.
     */
    uint32_t count;
    /**
     * State: whether there is a norm before.
     */
    uint32_t has_previous;
    /**
     * Unset.
     */
    uint32_t reserved;
} cinch_awp_t;

/**
 * The scale of a loss whose gradients are summed in 16 bits: halved, and the step skipped, on any
 * value that is not finite; doubled after many clean steps.
 *
 * Initialise it with `cinch_loss_scaler_default(&scaler)`, which sets the defaults named below.
 * The struct is its whole state. New fields are only ever added at the end.
 */
typedef struct {
    /**
     * Bytes of the struct in the program's header. Set by `cinch_loss_scaler_default`.
     */
    size_t size;
    /**
     * Tells an initialised struct from garbage. Set by `cinch_loss_scaler_default`.
     */
    uint32_t magic;
    /**
     * Meaning of the fields. Set by `cinch_loss_scaler_default`.
     */
    uint32_t version;
    /**
     * State: what to multiply the loss by; 65536.
     */
    double scale;
    /**
     * Factor after `interval` clean steps; 2.
     */
    double growth;
    /**
     * Factor after a step with a value that is not finite; 0.5.
     */
    double backoff;
    /**
     * The scale does not fall below this; 2^-126.
     */
    double smallest;
    /**
     * The scale does not grow above this; 2^127.
     */
    double largest;
    /**
     * New over old scale of the last update: what to rescale residuals by.
     */
    double rescale;
    /**
     * State: steps skipped so far.
     */
    uint64_t skipped;
    /**
     * Clean steps in a row until growth; 2000.
     */
    uint32_t interval;
    /**
     * State: clean steps since the scale changed.
     */
    uint32_t clean;
} cinch_loss_scaler_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The library's version, as the build that runs says it; any of the pointers may be NULL.
 */
cinch_result_t cinch_version(int *major, int *minor, int *patch);

/**
 * The library's version as text, `major.minor.patch`. Static.
 */
const char *cinch_version_string(void);

/**
 * A code in words; never NULL, also for numbers that are no code. Static.
 */
const char *cinch_error_string(cinch_result_t code);

/**
 * What went wrong in this thread's last call that failed: function, ranks, hosts, numbers, and
 * the next step.
 *
 * Never NULL; empty if none has failed. A call that succeeds leaves it in place, but
 * `cinch_comm_async_error` puts the reason that it finds there. The text lives until the thread's
 * next call that fails, or until the thread ends.
 */
const char *cinch_last_error(void);

/**
 * Bytes of one element of `dtype`, to `*size`.
 */
cinch_result_t cinch_dtype_size(cinch_dtype_t dtype, size_t *size);

/**
 * Makes an id for one communicator, to be handed to all its ranks.
 *
 * The process that calls it is where they meet, so it must itself become one of them.
 * Settings are those of the environment (`CINCH_SOCKET_IFNAME` chooses the interface).
 */
cinch_result_t cinch_unique_id_create(cinch_unique_id_t *id);

/**
 * Sets nothing in `*config`. `size` and `version` are `sizeof(cinch_config_t)` and
 * `CINCH_API_VERSION` of the program's header: C programs use `cinch_config_default(&config)`.
 */
cinch_result_t cinch_config_init(cinch_config_t *config, size_t size, uint32_t version);

/**
 * Joins the communicator of `id` as `rank` of `nranks`, and returns when all ranks have joined.
 *
 * `config` may be NULL: the environment's settings. An id serves one communicator. `*comm` is
 * NULL unless the call succeeds.
 */
cinch_result_t cinch_comm_init(const cinch_unique_id_t *id,
                               int rank,
                               int nranks,
                               const cinch_config_t *config,
                               cinch_comm_t **comm);

/**
 * Joins the communicator that the launcher describes: `cinch run`, torchrun, mpirun, srun.
 *
 * `config` may be NULL: the environment's settings. `*comm` is NULL unless the call succeeds.
 */
cinch_result_t cinch_comm_init_from_env(const cinch_config_t *config, cinch_comm_t **comm);

/**
 * This process's rank in `comm`, to `*rank`.
 */
cinch_result_t cinch_comm_rank(const cinch_comm_t *comm, int *rank);

/**
 * Number of ranks of `comm`, to `*nranks`.
 */
cinch_result_t cinch_comm_size(const cinch_comm_t *comm, int *nranks);

/**
 * Splits into communicators of equal `color`, ranked by `key`, then by rank in `comm`.
 *
 * All ranks must call it. A colour is 0 or more, or `CINCH_SPLIT_NO_COLOR`: then `*newcomm` is
 * NULL and the call succeeds. The new communicators live on when `comm` is destroyed.
 */
cinch_result_t cinch_comm_split(cinch_comm_t *comm,
                                int color,
                                int64_t key,
                                cinch_comm_t **newcomm);

/**
 * Returns when every rank has called it. On a GPU it does not wait for calls that are queued.
 */
cinch_result_t cinch_barrier(cinch_comm_t *comm);

/**
 * Waits until every rank has finalized, so that no rank's data is lost by the destroy that
 * follows. Optional; a rank that destroys without it may fail others that still communicate. On a
 * GPU it waits for the calls that are queued, however long the work takes that is ahead of them, and
 * the communicator takes no more then. It is due where ranks are processes: they map each other's
 * memory, which must not be freed before all have given it up. Graphs that hold calls of the
 * communicator go first: they keep it mapped.
 */
cinch_result_t cinch_comm_finalize(cinch_comm_t *comm);

/**
 * Ends the handle and frees what it holds; waits for no other rank.
 *
 * Calls that other threads have under way end as they would have, and the last one frees. A
 * handle that was destroyed stays an error for ever; it is never mistaken for a newer one.
 */
cinch_result_t cinch_comm_destroy(cinch_comm_t *comm);

/**
 * Fails the communicator, on this rank at once and on the others by message.
 *
 * Calls that wait, on any thread, return `CINCH_ERROR_ABORTED`. Communicators split from this one
 * fail with it. The handle stays, to be destroyed. May be called inside a group and while other
 * threads are inside calls on `comm`.
 */
cinch_result_t cinch_comm_abort(cinch_comm_t *comm);

/**
 * Whether the communicator has failed, to `*code`: `CINCH_SUCCESS` while it has not.
 *
 * If it has, `cinch_last_error` gives the reason. Does not wait; may be called from any thread.
 */
cinch_result_t cinch_comm_async_error(const cinch_comm_t *comm, cinch_result_t *code);

/**
 * Every rank gets the reduction of all inputs: `count` elements in, `count` out.
 * In place where `sendbuf == recvbuf`.
 */
cinch_result_t cinch_all_reduce(const void *sendbuf,
                                void *recvbuf,
                                size_t count,
                                cinch_dtype_t dtype,
                                cinch_op_t op,
                                cinch_comm_t *comm,
                                void *stream);

/**
 * Every rank gets all inputs, in rank order: `count` elements in, `count` for each rank out.
 * In place where `sendbuf` is this rank's block of `recvbuf`.
 */
cinch_result_t cinch_all_gather(const void *sendbuf,
                                void *recvbuf,
                                size_t count,
                                cinch_dtype_t dtype,
                                cinch_comm_t *comm,
                                void *stream);

/**
 * Rank r gets block r of the reduction: `count` elements for each rank in, `count` out.
 * In place where `recvbuf` is this rank's block of `sendbuf`.
 */
cinch_result_t cinch_reduce_scatter(const void *sendbuf,
                                    void *recvbuf,
                                    size_t count,
                                    cinch_dtype_t dtype,
                                    cinch_op_t op,
                                    cinch_comm_t *comm,
                                    void *stream);

/**
 * Every rank gets the root's `count` elements. `sendbuf` is read on the root only, and may be
 * NULL elsewhere. In place where `sendbuf == recvbuf`.
 */
cinch_result_t cinch_broadcast(const void *sendbuf,
                               void *recvbuf,
                               size_t count,
                               cinch_dtype_t dtype,
                               int root,
                               cinch_comm_t *comm,
                               void *stream);

/**
 * The root gets the reduction of all inputs: `count` elements in, `count` out. `recvbuf` is
 * written on the root only, and may be NULL elsewhere. In place where `sendbuf == recvbuf`.
 */
cinch_result_t cinch_reduce(const void *sendbuf,
                            void *recvbuf,
                            size_t count,
                            cinch_dtype_t dtype,
                            cinch_op_t op,
                            int root,
                            cinch_comm_t *comm,
                            void *stream);

/**
 * The root gets all inputs, in rank order: `count` elements in, `count` for each rank out.
 * `recvbuf` is written on the root only, and may be NULL elsewhere. In place where `sendbuf` is
 * the root's block of `recvbuf`.
 */
cinch_result_t cinch_gather(const void *sendbuf,
                            void *recvbuf,
                            size_t count,
                            cinch_dtype_t dtype,
                            int root,
                            cinch_comm_t *comm,
                            void *stream);

/**
 * Rank r gets block r of the root's input: `count` elements for each rank in, `count` out.
 * `sendbuf` is read on the root only, and may be NULL elsewhere. In place where `recvbuf` is the
 * root's block of `sendbuf`.
 */
cinch_result_t cinch_scatter(const void *sendbuf,
                             void *recvbuf,
                             size_t count,
                             cinch_dtype_t dtype,
                             int root,
                             cinch_comm_t *comm,
                             void *stream);

/**
 * Rank r gets block r of every rank's input, in rank order: `count` elements for each rank in,
 * and as many out. In place where `sendbuf == recvbuf`.
 */
cinch_result_t cinch_all_to_all(const void *sendbuf,
                                void *recvbuf,
                                size_t count,
                                cinch_dtype_t dtype,
                                cinch_comm_t *comm,
                                void *stream);

/**
 * Sends `count` elements to `peer`, which receives as many. Sends and receives that depend on
 * each other belong in one group.
 */
cinch_result_t cinch_send(const void *sendbuf,
                          size_t count,
                          cinch_dtype_t dtype,
                          int peer,
                          cinch_comm_t *comm,
                          void *stream);

/**
 * Receives `count` elements from `peer`, which sends as many.
 */
cinch_result_t cinch_recv(void *recvbuf,
                          size_t count,
                          cinch_dtype_t dtype,
                          int peer,
                          cinch_comm_t *comm,
                          void *stream);

/**
 * Opens a group on this thread; groups nest.
 *
 * Small all_reduces that follow one another on a communicator of host memory, of one type,
 * operator, codec and algorithm, travel as one (`CINCH_FUSE_BYTES`): none may use what another
 * one writes. What keeps scales or residuals for a tensor goes alone; so do calls on GPUs, and
 * pre-multiplied sums, whose factors are each rank's own.
 *
 * So all ranks must group such calls alike, or be set to `CINCH_FUSE_BYTES=0`. A group of one call is
 * as that call without a group, but for `CINCH_CODEC_SAMPLE`: calls on host memory that are in groups
 * are not sampled, so that with it all ranks must make a coded sum in a group, or none.
 *
 * The collectives that follow return once they are recorded. Their buffers and reports must live,
 * and must not be touched, until the outermost `cinch_group_end` of this thread returns.
 */
cinch_result_t cinch_group_start(void);

/**
 * Closes this thread's innermost group; the outermost close runs what was recorded.
 *
 * Calls on GPUs are queued, those of all communicators without waiting for one another, in the order
 * in which the communicators were first named: let it be the same on all ranks where they share a
 * stream. Those of one communicator run on the stream of the first of them, behind what is on the
 * streams of all, which go on behind them. Then calls on host memory run. Calls of one communicator
 * start in order.
 * If any cinch function failed on this thread since the outermost start, that error is returned
 * again and nothing runs on this rank. Reports are filled on success.
 */
cinch_result_t cinch_group_end(void);

/**
 * Makes an operator that multiplies this rank's contributions by `*scalar`, and then sums.
 *
 * `scalar` is one element of `dtype` in host memory, read by this call. The operator is for calls
 * of `dtype` on `comm`. Its number is this rank's own; every rank passes one that it created.
 */
cinch_result_t cinch_op_create_premulsum(cinch_comm_t *comm,
                                         const void *scalar,
                                         cinch_dtype_t dtype,
                                         cinch_op_t *op);

/**
 * Ends an operator that `cinch_op_create_premulsum` made. Calls already made keep it.
 */
cinch_result_t cinch_op_destroy(cinch_comm_t *comm, cinch_op_t op);

/**
 * Empties `*report`. `size` and `version` are `sizeof(cinch_report_t)` and `CINCH_API_VERSION` of
 * the program's header: C programs use `cinch_report_default(&report)`.
 */
cinch_result_t cinch_report_init(cinch_report_t *report,
                                 size_t size,
                                 uint32_t version);

/**
 * Empties `*stats`. `size` and `version` are `sizeof(cinch_comm_stats_t)` and `CINCH_API_VERSION`
 * of the program's header: C programs use `cinch_comm_stats_default(&stats)`.
 */
cinch_result_t cinch_comm_stats_init(cinch_comm_stats_t *stats,
                                     size_t size,
                                     uint32_t version);

/**
 * What the calls of `comm` did so far on this rank, to `*stats`. Does not wait; may be called from
 * any thread.
 */
cinch_result_t cinch_comm_stats(const cinch_comm_t *comm,
                                cinch_comm_stats_t *stats);

/**
 * Sets nothing in `*call`: an all_reduce sum of no i8 elements. `size` and `version` are
 * `sizeof(cinch_call_t)` and `CINCH_API_VERSION` of the program's header: C programs use
 * `cinch_call_default(&call)`.
 */
cinch_result_t cinch_call_init(cinch_call_t *call, size_t size, uint32_t version);

/**
 * Runs one call, and says what it did in `*report`, which may be NULL and is written on success
 * only. Inside a group, the report is filled by the outermost `cinch_group_end`.
 */
cinch_result_t cinch_call(const cinch_call_t *call, cinch_report_t *report);

/**
 * Bytes of `count` elements encoded with `codec`, to `*bytes`. They do not depend on the type of
 * the elements.
 */
cinch_result_t cinch_wire_bytes(const char *codec,
                                cinch_layout_t layout,
                                size_t count,
                                size_t *bytes);

/**
 * HostElements of an encoded array in a published layout, which is all of the `wire_bytes` bytes at
 * `wire`, to `*count`. The layout of chunks does not say how many it holds.
 */
cinch_result_t cinch_wire_count(const char *codec,
                                cinch_layout_t layout,
                                const void *wire,
                                size_t wire_bytes,
                                size_t *count);

/**
 * Encodes `count` elements of type f32, f16 or bf16 at `src`, large arrays on `CINCH_THREADS`
 * threads, into `wire`, which has room for
 * `wire_bytes` bytes; `cinch_wire_bytes` says how many are written. The two do not overlap.
 *
 * `draw` matters to codecs that round at random (`minmax4:seed=1`): calls with the same seed and
 * the same `draw` draw the same numbers, so count it up from call to call.
 *
 * Both in host memory: `stream` is NULL. Both in memory of one GPU: the work is queued on `stream`, a
 * `cudaStream_t` or `CUstream` of that GPU (NULL is its default stream), gives the same bytes, and may be
 * captured; elements are aligned as their type is, chunks to 16 bytes. The first such call in a
 * process loads kernels. Scales of whole arrays (`tensor=K`) are for host memory.
 */
cinch_result_t cinch_encode(const char *codec,
                            cinch_layout_t layout,
                            const void *src,
                            size_t count,
                            cinch_dtype_t dtype,
                            uint64_t draw,
                            void *wire,
                            size_t wire_bytes,
                            void *stream);

/**
 * Decodes the first `count` elements of the `wire_bytes` bytes at `wire` into `dst`, as type f32,
 * f16 or bf16. A published layout must hold exactly so many. The two do not overlap; `dst` is
 * written on success only.
 *
 * In host memory or in that of one GPU, as `cinch_encode`. A message with a header that lies on a
 * GPU is not looked at by the call: if it is not one of so many elements, they become NaN.
 */
cinch_result_t cinch_decode(const char *codec,
                            cinch_layout_t layout,
                            const void *wire,
                            size_t wire_bytes,
                            void *dst,
                            size_t count,
                            cinch_dtype_t dtype,
                            void *stream);

/**
 * Copies `count` elements of type f32, f16 or bf16 from host memory to that of a GPU, or back, packed
 * by `codec` on the way: what arrives is what the codec makes of them. With `trunc16` half of the
 * bytes of f32 cross the bus. Exactly one of `src` and `dst` is memory of a GPU. The host's part is
 * done by up to 16 threads of their own; any host memory will do, pinned or not.
 *
 * Begins behind the work that `stream` has, a stream of that GPU, which goes on behind the copy. The
 * call returns when the host array may be used again: towards the GPU when it has been read, as a
 * `cudaMemcpyAsync` from memory that is not pinned does; towards the host when it is complete. So
 * it cannot be captured. `draw` is that of `cinch_encode`. After an error `dst` is undefined.
 */
cinch_result_t cinch_copy(const char *codec,
                          const void *src,
                          void *dst,
                          size_t count,
                          cinch_dtype_t dtype,
                          uint64_t draw,
                          void *stream);

/**
 * Copies this rank's residuals of error feedback (`cinch_call_t.feedback`) to `buffer`, to be
 * stored with a checkpoint. `*bytes` becomes their size; with `buffer` NULL that is all that
 * happens. A `capacity` below it is an error, and nothing is copied.
 */
cinch_result_t cinch_feedback_export(cinch_comm_t *comm,
                                     void *buffer,
                                     size_t capacity,
                                     size_t *bytes);

/**
 * Puts residuals that `cinch_feedback_export` gave in the place of all that this rank has. They
 * must be of the same rank of as many ranks. Those that the first call of their tensor has no use
 * for, as it has another count, cut, operator or type, are dropped then; the log says so.
 */
cinch_result_t cinch_feedback_import(cinch_comm_t *comm,
                                     const void *buffer,
                                     size_t bytes);

/**
 * Multiplies this rank's residuals by `factor`: new over old scale of the loss, where gradients
 * of a scaled loss are summed (`cinch_loss_scaler_t.rescale`).
 */
cinch_result_t cinch_feedback_rescale(cinch_comm_t *comm, double factor);

/**
 * Forgets this rank's residuals of the tensor `feedback`, or of all tensors if it is 0.
 */
cinch_result_t cinch_feedback_forget(cinch_comm_t *comm, uint64_t feedback);

/**
 * Sets nothing in `*awp`. `size` and `version` are `sizeof(cinch_awp_t)` and `CINCH_API_VERSION`
 * of the program's header: C programs use `cinch_awp_default(&awp)`.
 */
cinch_result_t cinch_awp_init(cinch_awp_t *awp,
                              size_t size,
                              uint32_t version);

/**
 * Takes the group's L2 norm after a batch, which must be the same on all ranks; sets the bits to
 * keep from now on in `awp->bits`, and in `*codec`, which may be NULL, the name of the codec that
 * keeps them: `trunc8`, `trunc16`, `trunc24` or `raw`, a string that lives for ever. A norm that
 * is not finite changes nothing.
 */
cinch_result_t cinch_awp_update(cinch_awp_t *awp,
                                double l2_norm,
                                const char **codec);

/**
 * Sets the defaults in `*scaler`. `size` and `version` are `sizeof(cinch_loss_scaler_t)` and
 * `CINCH_API_VERSION` of the program's header: C programs use
 * `cinch_loss_scaler_default(&scaler)`.
 */
cinch_result_t cinch_loss_scaler_init(cinch_loss_scaler_t *scaler,
                                      size_t size,
                                      uint32_t version);

/**
 * Takes whether any summed gradient of a step had a value that is not finite; sets `*apply` to 1
 * if the step is to be applied and to 0 if it is to be skipped, and the scale of the next step in
 * `scaler->scale`.
 *
 * Codecs carry such values to every rank, so that all ranks find the same in their output:
 * `cinch_count_non_finite` of it decides, not the report, which is about what this rank encoded.
 * With cast16, cast_bf16, static8, mantissa8, trunc8, threshold2 and `tensor=K` finite sums saturate
 * instead of overflowing: there the ranks must also sum up `saturated` of their reports, and skip
 * the step unless it is 0. Reports of calls on GPUs do not have it.
 */
cinch_result_t cinch_loss_scaler_update(cinch_loss_scaler_t *scaler,
                                        int non_finite,
                                        int *apply);

/**
 * Counts the NaN and infinite ones among `count` elements of `dtype` in host memory.
 */
cinch_result_t cinch_count_non_finite(const void *data,
                                      size_t count,
                                      cinch_dtype_t dtype,
                                      uint64_t *found);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* CINCH_H */
