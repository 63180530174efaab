/* cinch: collective communication that compresses inside every pipeline chunk.
 *
 * Every function returns a code; cinch_last_error() returns the sentence that explains it. A call
 * with an invalid argument returns CINCH_ERROR_INVALID_ARGUMENT before it has any effect. The
 * library does not exit the process, raise signals, or throw.
 *
 * A communicator works on host memory, or on one GPU per rank (cinch_config_t.device).
 *
 * On host memory, buffers may have any alignment and `stream` is NULL. A collective returns when its
 * buffers may be reused.
 *
 * On a GPU, buffers are memory of that GPU, aligned to their elements. `stream` is a cudaStream_t or
 * CUstream of the GPU; NULL is its default stream. A collective is queued there and returns at once;
 * cinch_comm_async_error returns later failures. Calls of one communicator run in the order in which
 * they are made, whatever their streams. A capturing stream records them, and the graph may be
 * launched any number of times until its communicators are destroyed. Each launch is ordered with
 * their other calls in the same way on all ranks; with CINCH_GRAPH_MIXING=0 the program's own streams
 * and events must order them.
 *
 * Input and output must not overlap, except in place where the function allows it.
 *
 * Threads: any thread may call any function. Calls on one communicator run one after the other. All
 * its ranks must make them in the same order, and must group small collectives alike, because a group
 * fuses these calls (see cinch_group_start). Groups and cinch_last_error() are per thread. Signal
 * handlers must not call any function. A forked child must not use a communicator of its parent: it
 * gets CINCH_ERROR_INVALID_USAGE.
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

/** Initialises a cinch_report_t with zeros. */
#define cinch_report_default(report) \
    cinch_report_init((report), sizeof *(report), CINCH_API_VERSION)

/** Initialises a cinch_comm_stats_t with zeros. */
#define cinch_comm_stats_default(stats) \
    cinch_comm_stats_init((stats), sizeof *(stats), CINCH_API_VERSION)

/** Initialises a cinch_awp_t with nothing set. */
#define cinch_awp_default(awp) cinch_awp_init((awp), sizeof *(awp), CINCH_API_VERSION)

/** Initialises a cinch_loss_scaler_t with the defaults. */
#define cinch_loss_scaler_default(scaler) \
    cinch_loss_scaler_init((scaler), sizeof *(scaler), CINCH_API_VERSION)

/**
 * Version of the structs' fields, which the `cinch_*_default` macros pass to the library.
 */
#define CINCH_API_VERSION 1

/**
 * Major version of this header; `cinch_version` returns that of the loaded library.
 */
#define CINCH_VERSION_MAJOR 0

/**
 * Minor version of this header. Before version 1.0 a new minor version may change the ABI, and with it the
 * soname.
 */
#define CINCH_VERSION_MINOR 1

/**
 * Patch version of this header.
 */
#define CINCH_VERSION_PATCH 0

/**
 * Color of a rank that joins none of the communicators of a split.
 */
#define CINCH_SPLIT_NO_COLOR -1

/**
 * Bit of `cinch_report_t.valid`: `saturated`, `non_finite`, `abs_max` and `l2_norm` were measured.
 *
 * They are measured when a codec encodes this rank's input on the host. Otherwise they are 0 and mean
 * nothing: for codec raw, for a rank without input, and for calls on GPUs, unless
 * `cinch_report_add_statistics` has set them.
 */
#define CINCH_REPORT_INPUT 1

/**
 * Bit of `cinch_report_t.valid`: `residual_l2_norm` was measured, in a call with error feedback on host
 * memory.
 */
#define CINCH_REPORT_RESIDUAL 2

/**
 * Bit of `cinch_statistics_t.verdict`: at least one element of this rank's output is NaN or infinite.
 */
#define CINCH_VERDICT_NON_FINITE 1

/**
 * Length of `cinch_comm_stats_t.exact_calls`, which counts calls without compression by reason.
 */
#define CINCH_EXACT_REASONS 16

/**
 * Index: no codec was set, or only one inside hosts while the algorithm treats all ranks alike.
 */
#define CINCH_EXACT_NOT_ASKED 0

/**
 * Index: compression is off for the process or the communicator.
 */
#define CINCH_EXACT_OFF 1

/**
 * Index: the call itself set codec raw.
 */
#define CINCH_EXACT_BY_CALL 2

/**
 * Index: the default codec does not apply to this collective; a call can name it.
 */
#define CINCH_EXACT_COLLECTIVE 3

/**
 * Index: the element type is not f32, f16 or bf16.
 */
#define CINCH_EXACT_DTYPE 4

/**
 * Index: the operator is neither a sum nor an average.
 */
#define CINCH_EXACT_OPERATION 5

/**
 * Index: the input is smaller than `CINCH_CODEC_MIN_BYTES`.
 */
#define CINCH_EXACT_SMALL 6

/**
 * Index: the codec keeps scales per tensor and the call names no tensor.
 */
#define CINCH_EXACT_NO_TENSOR 7

/**
 * Index: a sampled error exceeded its bound, so compression was switched off.
 */
#define CINCH_EXACT_SWITCHED_OFF 8

/**
 * Index: the cost model predicted no gain from the codec.
 */
#define CINCH_EXACT_COSTS 9

/**
 * Index: the input is larger than a rule codes (`max=`).
 */
#define CINCH_EXACT_LARGE 10

/**
 * Result of every function. Numbers are never reused; 0 to 7 equal those of `ncclResult_t`.
 */
enum cinch_result_t
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * Success.
     */
    CINCH_SUCCESS = 0,
    /**
     * A call of the operating system or the CUDA driver failed.
     */
    CINCH_ERROR_SYSTEM = 2,
    /**
     * Internal error: a defect of the library.
     */
    CINCH_ERROR_INTERNAL = 3,
    /**
     * An argument is outside its documented range. The call had no effect.
     */
    CINCH_ERROR_INVALID_ARGUMENT = 4,
    /**
     * The call is not allowed in this state, or with this combination of arguments.
     */
    CINCH_ERROR_INVALID_USAGE = 5,
    /**
     * A peer exited, died or is unreachable. The communicator has failed.
     */
    CINCH_ERROR_REMOTE = 6,
    /**
     * Reserved; no function returns it.
     */
    CINCH_IN_PROGRESS = 7,
    /**
     * Ranks disagree about a call or a setting. The communicator has failed.
     */
    CINCH_ERROR_MISMATCH = 8,
    /**
     * A timeout expired. The communicator has failed.
     */
    CINCH_ERROR_TIMEOUT = 9,
    /**
     * The communicator was aborted.
     */
    CINCH_ERROR_ABORTED = 10,
    /**
     * This build or this machine lacks a feature that the call needs.
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
 * Type of one element. The numbers equal those of `ncclDataType_t`.
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
     * 16-bit float, IEEE binary16.
     */
    CINCH_F16 = 6,
    /**
     * 32-bit float, IEEE binary32.
     */
    CINCH_F32 = 7,
    /**
     * 64-bit float, IEEE binary64.
     */
    CINCH_F64 = 8,
    /**
     * 16-bit float, bfloat16: the upper half of a binary32.
     */
    CINCH_BF16 = 9,
    /**
     * 8-bit float of OCP with 4 exponent and 3 mantissa bits, without infinity.
     */
    CINCH_F8E4M3 = 10,
    /**
     * 8-bit float of OCP with 5 exponent and 2 mantissa bits.
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
 * Reduction operator. The first five numbers equal those of `ncclRedOp_t`;
 * `cinch_op_create_premulsum` returns numbers from `CINCH_OP_FIRST_CREATED`.
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
     * Maximum; NaN if any contribution is NaN.
     */
    CINCH_MAX = 2,
    /**
     * Minimum; NaN if any contribution is NaN.
     */
    CINCH_MIN = 3,
    /**
     * Average of floats: the sum divided once by the number of ranks. It does not overflow for elements of 16
     * and 8 bits. Integers are an error, because their sum may wrap before the division.
     */
    CINCH_AVG = 4,
    /**
     * First number of created operators; not itself an operator.
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
 * Collective of a `cinch_call`.
 */
enum cinch_collective_t
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * See `cinch_all_reduce`.
     */
    CINCH_ALL_REDUCE = 0,
    /**
     * See `cinch_all_gather`.
     */
    CINCH_ALL_GATHER = 1,
    /**
     * See `cinch_reduce_scatter`.
     */
    CINCH_REDUCE_SCATTER = 2,
    /**
     * See `cinch_broadcast`.
     */
    CINCH_BROADCAST = 3,
    /**
     * See `cinch_reduce`.
     */
    CINCH_REDUCE = 4,
    /**
     * See `cinch_gather`.
     */
    CINCH_GATHER = 5,
    /**
     * See `cinch_scatter`.
     */
    CINCH_SCATTER = 6,
    /**
     * See `cinch_all_to_all`.
     */
    CINCH_ALL_TO_ALL = 7,
    /**
     * See `cinch_send`.
     */
    CINCH_SEND = 8,
    /**
     * See `cinch_recv`.
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
 * Algorithm of a collective.
 */
enum cinch_algorithm_t
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * Unset: a call uses the communicator's setting, a communicator that of the environment.
     */
    CINCH_ALGORITHM_UNSET = 0,
    /**
     * The cheapest by the cost model, and overrides the environment. For configs only.
     */
    CINCH_ALGORITHM_AUTO = 1,
    /**
     * Each rank sends to its neighbour, N-1 hops each way.
     */
    CINCH_ALGORITHM_RING = 2,
    /**
     * Two complementary binary trees.
     */
    CINCH_ALGORITHM_TREE = 3,
    /**
     * Every rank sends to every other rank in one step: least latency, but N-1 times the
     * bytes.
     */
    CINCH_ALGORITHM_ONESHOT = 4,
    /**
     * Two-shot: every rank sends each chunk to the rank that reduces it, which sends the
     * result back. Takes two steps and sends as many bytes as the ring.
     */
    CINCH_ALGORITHM_DIRECT = 5,
    /**
     * Runs inside each host first, then between hosts on each rail, then inside each host
     * again.
     */
    CINCH_ALGORITHM_HIERARCHICAL = 6,
    /**
     * All contributions go to rank 0, which sends the sum to every other rank: the fewest messages, but
     * N-1 times the bytes for that rank.
     */
    CINCH_ALGORITHM_FLAT_TREE = 7,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum cinch_algorithm_t cinch_algorithm_t;
#else
typedef uint32_t cinch_algorithm_t;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * Transport between two ranks.
 */
enum cinch_transport_t
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * In a config: unset, the environment decides. In a report: no data moved.
     */
    CINCH_TRANSPORT_UNSET = 0,
    /**
     * The fastest that connects each pair, and overrides the environment. For configs only.
     */
    CINCH_TRANSPORT_AUTO = 1,
    /**
     * Memory shared by threads of one process.
     */
    CINCH_TRANSPORT_LOOPBACK = 2,
    /**
     * Sealed shared memory between processes of one host.
     */
    CINCH_TRANSPORT_SHM = 3,
    /**
     * TCP sockets.
     */
    CINCH_TRANSPORT_TCP = 4,
    /**
     * GPU memory of one host, written by peers. GPUs without peer access use pinned host
     * memory.
     */
    CINCH_TRANSPORT_CUDA = 5,
    /**
     * Writes into memory of peers over InfiniBand or RoCE.
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
 * Layout of an encoded array.
 */
enum cinch_layout_t
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * Layout of a chunk in a collective: codes, zeros up to a multiple of 16 bytes, then the scales of
     * the blocks, all little endian.
     */
    CINCH_LAYOUT_CHUNK = 0,
    /**
     * Layout that the format's authors published: `minmax1/2/4/8` as CompLL's messages with a header
     * of 10 bytes, `trunc8/16/24` as ADT's packed bytes without a header. ADT cuts all numbers alike:
     * `trunc8` decodes infinity and NaN to 2^127, `trunc16/24` may decode a NaN to infinity.
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
 * Programs hold pointers to it as opaque handles; they must not be dereferenced.
 */
typedef struct cinch_comm_t cinch_comm_t;

/**
 * A started call that may still run.
 *
 * Programs hold pointers to it as opaque handles; they must not be dereferenced.
 */
typedef struct cinch_request_t cinch_request_t;

/**
 * Address of a communicator's rendezvous and a secret: opaque bytes that one rank creates and the
 * program sends to all others. Whoever has the bytes can join.
 */
typedef struct {
    /**
     * Opaque bytes, not text.
     */
    char bytes[128];
} cinch_unique_id_t;

/**
 * Settings of one communicator. An unset field (zero, NULL) has the value of the environment, else its
 * default. `cinch info` prints names and ranges of the environment's settings.
 *
 * Initialise it with `cinch_config_default(&config)`. New fields are only ever added at the end.
 */
typedef struct {
    /**
     * Bytes of the struct in the program's header. Set by `cinch_config_default`.
     */
    size_t size;
    /**
     * Constant by which the library detects an uninitialised struct. Set by `cinch_config_default`.
     */
    uint32_t magic;
    /**
     * Version of the program's header. Set by `cinch_config_default`.
     */
    uint32_t version;
    /**
     * Codec of calls that name no codec and that this codec can carry, as in `CINCH_CODEC`:
     * `linear8:block=128`, or `intra=raw,inter=dynamic8` for codecs inside and between hosts.
     * `auto:linear8` measures costs when the communicator is created, and uses the codec where the
     * cost model predicts a gain.
     */
    const char *codec;
    /**
     * Network interface for TCP, as in `CINCH_SOCKET_IFNAME`.
     */
    const char *network_interface;
    /**
     * Transport between all pairs of ranks.
     */
    cinch_transport_t transport;
    /**
     * Algorithm of collectives that have it.
     */
    cinch_algorithm_t algorithm;
    /**
     * Slots per connection in host memory: a power of two from 2 to 64.
     */
    uint32_t slots;
    /**
     * Channels: 1 to 16.
     */
    uint32_t channels;
    /**
     * TCP sockets per pair of ranks and channel: 1 to 16.
     */
    uint32_t tcp_sockets;
    /**
     * Heartbeat interval of the control plane in milliseconds: 10 to 60,000.
     */
    uint32_t heartbeat_ms;
    /**
     * Bytes of one slot in host memory: 4 KiB to 16 MiB, a multiple of 64.
     */
    uint64_t slot_bytes;
    /**
     * Limit of slot memory per communicator and rank in bytes: 64 KiB to 64 GiB.
     */
    uint64_t buffer_bytes;
    /**
     * Input bytes below which the default codec is not used; 1 uses it at every size.
     */
    uint64_t codec_min_bytes;
    /**
     * Timeout of a call that waits for a peer, in milliseconds: 10 to 10^9.
     */
    uint64_t timeout_ms;
    /**
     * Timeout of creating the communicator, in milliseconds: 10 to 10^9.
     */
    uint64_t init_timeout_ms;
    /**
     * Memory that calls work on, as in `CINCH_DEVICE`: `host`, `cuda:1` for GPU 1, or `cuda` for the GPU
     * of the thread's current context, else GPU 0.
     */
    const char *device;
    /**
     * Name of the communicator, which the patterns of `CINCH_CODEC_RULES` match.
     */
    const char *name;
} cinch_config_t;

/**
 * Report of one call on this rank.
 *
 * Initialise it with `cinch_report_default(&report)`. New fields are only ever added at the end.
 */
typedef struct {
    /**
     * Bytes of the struct in the program's header. Set by `cinch_report_default`.
     */
    size_t size;
    /**
     * Constant by which the library detects an uninitialised struct. Set by `cinch_report_default`.
     */
    uint32_t magic;
    /**
     * Version of the program's header. Set by `cinch_report_default`.
     */
    uint32_t version;
    /**
     * Bits of the fields that were measured: `CINCH_REPORT_INPUT`, `CINCH_REPORT_RESIDUAL`.
     */
    uint32_t valid;
    /**
     * Algorithm that ran.
     */
    cinch_algorithm_t algorithm;
    /**
     * Slowest transport that carried data; `CINCH_TRANSPORT_UNSET` if no data moved.
     */
    cinch_transport_t transport;
    /**
     * Number of channels that were used.
     */
    uint32_t channels;
    /**
     * Payload bytes that this rank sent, after encoding.
     */
    uint64_t wire_bytes;
    /**
     * Finite elements beyond the codec's largest value, which saturated: elements of the input, or, on host memory, of
     * partial sums that this rank encoded.
     */
    uint64_t saturated;
    /**
     * Number of NaN and infinite elements of the input.
     */
    uint64_t non_finite;
    /**
     * Largest magnitude of the finite elements of the input.
     */
    double abs_max;
    /**
     * L2 norm of the finite elements of the input.
     */
    double l2_norm;
    /**
     * Codec that ran, with its parameters, as text: `linear8:block=256`; with another codec inside
     * hosts: `intra=raw,inter=linear8:block=256`.
     */
    char codec[64];
    /**
     * Number of calls in the fused message of this call; 1 if it was not fused.
     */
    uint64_t fused;
    /**
     * L2 norm of this rank's residuals of the tensor `feedback` after the call.
     */
    double residual_l2_norm;
} cinch_report_t;

/**
 * Statistics of one call: of this rank's contribution, and of this rank's output. The contribution is the
 * input, or for a created operator its products.
 *
 * A call writes the whole struct (`cinch_call_t.statistics`). Zeros mean that no call has; other contents of memory
 * that no call has written are not detected. The size of the struct never changes: new fields take the place of
 * reserved ones.
 */
typedef struct {
    /**
     * Number of finite elements of the contribution beyond the codec's largest number, which saturate. In an
     * average the codec encodes the contribution times a power of two.
     */
    uint64_t saturated;
    /**
     * Number of NaN and infinite elements of the contribution.
     */
    uint64_t non_finite;
    /**
     * Sum of squares of the finite elements of the contribution, the square of their L2 norm. About six
     * digits are right; infinite, or 0 beside a larger `abs_max`, where squares of f64 leave the range of f64.
     */
    double sum_squares;
    /**
     * Largest magnitude of the finite elements of the contribution.
     */
    double abs_max;
    /**
     * Verdict of the output: `CINCH_VERDICT_NON_FINITE`, or 0. An all_reduce gives all ranks the same
     * verdict, since it gives them the same output.
     */
    uint32_t verdict;
    /**
     * Bits of `verdict` that were taken.
     */
    uint32_t known;
    /**
     * 1 if the four fields of the contribution were taken; 0 if they are 0 because the call took the verdict alone.
     */
    uint32_t has_input;
    /**
     * Reserved; a call sets them to 0.
     */
    uint32_t reserved[5];
} cinch_statistics_t;

/**
 * Counts since the communicator was created, on this rank. A captured call counts once, when the
 * stream records it.
 *
 * Initialise it with `cinch_comm_stats_default(&stats)`. New fields are only ever added at the end.
 */
typedef struct {
    /**
     * Bytes of the struct in the program's header. Set by `cinch_comm_stats_default`.
     */
    size_t size;
    /**
     * Constant by which the library detects an uninitialised struct. Set by `cinch_comm_stats_default`.
     */
    uint32_t magic;
    /**
     * Version of the program's header. Set by `cinch_comm_stats_default`.
     */
    uint32_t version;
    /**
     * Calls that a codec compressed, inside hosts or between them.
     */
    uint64_t coded_calls;
    /**
     * Bytes that this rank sent.
     */
    uint64_t wire_bytes;
    /**
     * Bytes that this rank would have sent with the same algorithms and without codecs.
     */
    uint64_t raw_bytes;
    /**
     * Compressed calls of which a sample was also reduced exactly and compared.
     */
    uint64_t sampled;
    /**
     * Largest relative RMS error of these samples.
     */
    double worst_error;
    /**
     * 1 if such an error exceeded its bound and compression was switched off; else 0.
     */
    uint64_t switched_off;
    /**
     * Calls without compression by reason; `CINCH_EXACT_SMALL` and so on are the indices.
     */
    uint64_t exact_calls[CINCH_EXACT_REASONS];
} cinch_comm_stats_t;

/**
 * Call of a collective. The library ignores fields that the collective does not use.
 *
 * Initialise it with `cinch_call_default(&call)`. New fields are only ever added at the end.
 */
typedef struct {
    /**
     * Bytes of the struct in the program's header. Set by `cinch_call_default`.
     */
    size_t size;
    /**
     * Constant by which the library detects an uninitialised struct. Set by `cinch_call_default`.
     */
    uint32_t magic;
    /**
     * Version of the program's header. Set by `cinch_call_default`.
     */
    uint32_t version;
    /**
     * Communicator on which the call runs.
     */
    cinch_comm_t *comm;
    /**
     * Input; see the collective's own function.
     */
    const void *sendbuf;
    /**
     * Output; see the collective's own function.
     */
    void *recvbuf;
    /**
     * Number of elements; see the collective's own function.
     */
    size_t count;
    /**
     * Collective that the call runs, such as `CINCH_ALL_REDUCE`.
     */
    cinch_collective_t collective;
    /**
     * Element type.
     */
    cinch_dtype_t dtype;
    /**
     * Reduction operator.
     */
    cinch_op_t op;
    /**
     * Root of a broadcast, reduce, gather or scatter.
     */
    int root;
    /**
     * Other rank of a send or receive.
     */
    int peer;
    /**
     * Algorithm; unset = the communicator's choice.
     */
    cinch_algorithm_t algorithm;
    /**
     * Codec and its parameters, such as `linear8:block=128`; NULL = the communicator's codec.
     * `auto:linear8` uses the codec only if the cost model predicts that the call gets faster. On a GPU it runs only on
     * a communicator whose own codec is `auto:` too, because that one has timed calls.
     * A codec that cannot carry the call, such as a lossy one for integers, is an error.
     */
    const char *codec;
    /**
     * Id of the tensor whose scales a codec with `tensor=K` keeps between calls; 0 = none. On a GPU
     * a captured call must have run once before with the same id.
     */
    uint64_t tensor;
    /**
     * Stream on which a call on a GPU is queued; NULL on a communicator of host memory.
     */
    void *stream;
    /**
     * Id of the tensor whose residuals are kept between calls, which turns error feedback on;
     * 0 = none. What a lossy codec loses is added to the next call with the same id. For collectives
     * that reduce. `minmax1` with a seed is an error, since its residuals would grow without bound.
     * On a GPU the residuals take 8 bytes of device memory per input element; a captured call must
     * have run once before with the same id.
     */
    uint64_t feedback;
    /**
     * Statistics that a collective on a GPU writes; NULL = none. For types of floats, with and without a codec. They
     * are in memory of the GPU or in pinned host memory, aligned to 8 bytes, apart from the call's buffers, and are
     * complete when the call has ended in its stream; a graph writes them again at each launch.
     * `cinch_statistics_read` reads them. On host memory `cinch_report_t` has those of calls with a codec.
     */
    cinch_statistics_t *statistics;
    /**
     * 1: `statistics` get the verdict of the output alone, and 0 in the fields of the contribution. The kernels of large
     * calls that reduce or encode take it from what they store; for others another kernel reads the output. The
     * contribution's fields cost another kernel that reads the input.
     */
    int verdict_only;
} cinch_call_t;

/**
 * Adaptive weight precision (AWP) of one group of tensors: few bits at first, more once the L2 norm of
 * the group has stopped growing.
 *
 * Initialise it with `cinch_awp_default(&awp)`, then set `threshold` and `interval`. The struct holds
 * the whole state. New fields are only ever added at the end.
 */
typedef struct {
    /**
     * Bytes of the struct in the program's header. Set by `cinch_awp_default`.
     */
    size_t size;
    /**
     * Constant by which the library detects an uninitialised struct. Set by `cinch_awp_default`.
     */
    uint32_t magic;
    /**
     * Version of the program's header. Set by `cinch_awp_default`.
     */
    uint32_t version;
    /**
     * Relative growth of the norm above which a batch counts as growth (T of the paper).
     */
    double threshold;
    /**
     * State: norm of the previous batch, valid if `has_previous`.
     */
    double previous;
    /**
     * Consecutive batches without growth after which bits are added; about one epoch.
     */
    uint32_t interval;
    /**
     * Bits to add, 1 to 32; unset = 8 (N of the paper).
     */
    uint32_t step_bits;
    /**
     * State: bits to keep, 1 to 32; unset = 8. Its first value is the starting point.
     */
    uint32_t bits;
    /**
     * State: consecutive batches without growth.
     */
    uint32_t count;
    /**
     * State: 1 if `previous` is valid.
     */
    uint32_t has_previous;
    /**
     * Largest number of bits, 1 to 32; unset = 32. 16 moves at most half of the bytes of fp32.
     */
    uint32_t most_bits;
} cinch_awp_t;

/**
 * Scale of a loss whose gradients are summed in 16 bits. A non-finite gradient halves the scale and
 * skips the step; many clean steps double the scale.
 *
 * Initialise it with `cinch_loss_scaler_default(&scaler)`, which sets the defaults given below. The
 * struct holds the whole state. New fields are only ever added at the end.
 */
typedef struct {
    /**
     * Bytes of the struct in the program's header. Set by `cinch_loss_scaler_default`.
     */
    size_t size;
    /**
     * Constant by which the library detects an uninitialised struct. Set by `cinch_loss_scaler_default`.
     */
    uint32_t magic;
    /**
     * Version of the program's header. Set by `cinch_loss_scaler_default`.
     */
    uint32_t version;
    /**
     * State: factor of the loss; default 65536.
     */
    double scale;
    /**
     * Factor of the scale after `interval` clean steps; default 2.
     */
    double growth;
    /**
     * Factor of the scale after a step with a non-finite value; default 0.5.
     */
    double backoff;
    /**
     * Lower limit of the scale; default 2^-126.
     */
    double smallest;
    /**
     * Upper limit of the scale; default 2^127.
     */
    double largest;
    /**
     * New scale divided by the old one at the last update: the factor of `cinch_feedback_rescale`.
     */
    double rescale;
    /**
     * State: number of skipped steps.
     */
    uint64_t skipped;
    /**
     * Consecutive clean steps until the scale grows; default 2000.
     */
    uint32_t interval;
    /**
     * State: clean steps since the last change of the scale.
     */
    uint32_t clean;
} cinch_loss_scaler_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Stores the version of the loaded library; any of the pointers may be NULL.
 */
cinch_result_t cinch_version(int *major, int *minor, int *patch);

/**
 * Returns the version of the loaded library as static text, `major.minor.patch`.
 */
const char *cinch_version_string(void);

/**
 * Returns a code in words as static text; never NULL, not even for unknown codes.
 */
const char *cinch_error_string(cinch_result_t code);

/**
 * Returns a sentence about this thread's last failed call: function, ranks, hosts, numbers, and the
 * next step.
 *
 * Never NULL; empty if no call has failed. Successful calls keep the text, except that
 * `cinch_comm_async_error` stores the reason that it finds. The text stays valid until this thread's
 * next failed call, or until the thread ends.
 */
const char *cinch_last_error(void);

/**
 * Stores the bytes of one element of `dtype` in `*size`.
 */
cinch_result_t cinch_dtype_size(cinch_dtype_t dtype, size_t *size);

/**
 * Creates the id of one communicator, for the program to send to all its ranks.
 *
 * The calling process serves the rendezvous, so it must become one of the ranks. Settings are those
 * of the environment; `CINCH_SOCKET_IFNAME` chooses the network interface.
 */
cinch_result_t cinch_unique_id_create(cinch_unique_id_t *id);

/**
 * Initialises `*config` with nothing set.
 *
 * C programs use `cinch_config_default(&config)`, which passes `sizeof(cinch_config_t)` and
 * `CINCH_API_VERSION` of the program's header as `size` and `version`.
 */
cinch_result_t cinch_config_init(cinch_config_t *config, size_t size, uint32_t version);

/**
 * Creates the communicator of `id` as `rank` of `nranks`; returns when all ranks have called it.
 *
 * `config` may be NULL: then all settings are those of the environment. An id serves one
 * communicator. With an id of `cinch_comm_grow_id` this is a new rank of a communicator that grows.
 * `*comm` is NULL unless the call succeeds.
 */
cinch_result_t cinch_comm_init(const cinch_unique_id_t *id,
                               int rank,
                               int nranks,
                               const cinch_config_t *config,
                               cinch_comm_t **comm);

/**
 * Creates the communicator that the launcher's environment describes: `cinch run`, torchrun, mpirun or
 * srun.
 *
 * `config` may be NULL: then all settings are those of the environment. `*comm` is NULL unless the
 * call succeeds.
 */
cinch_result_t cinch_comm_init_from_env(const cinch_config_t *config,
                                        cinch_comm_t **comm);

/**
 * Stores this process's rank in `comm` in `*rank`.
 */
cinch_result_t cinch_comm_rank(const cinch_comm_t *comm, int *rank);

/**
 * Stores the number of ranks of `comm` in `*nranks`.
 */
cinch_result_t cinch_comm_size(const cinch_comm_t *comm, int *nranks);

/**
 * Splits `comm` into communicators of ranks with equal `color`, ordered by `key`, then by rank in
 * `comm`.
 *
 * All ranks must call it. A color is 0 or more, or `CINCH_SPLIT_NO_COLOR`: then the call succeeds
 * with `*newcomm` NULL. The new communicators stay valid when `comm` is destroyed.
 */
cinch_result_t cinch_comm_split(cinch_comm_t *comm,
                                int color,
                                int64_t key,
                                cinch_comm_t **newcomm);

/**
 * Prepares for `cinch_comm_shrink`. All ranks must call it, while all of them exist.
 *
 * Every rank then keeps a listening socket as long as `comm` exists.
 */
cinch_result_t cinch_comm_prepare_to_shrink(cinch_comm_t *comm);

/**
 * Creates a communicator of the ranks of `comm` that are not among the `count` ranks in `exclude`, in
 * order. `comm` may have failed, and excluded ranks may have ended.
 *
 * With a count of 0, `exclude` may be NULL: then the ranks are excluded that have ended or destroyed
 * `comm`. All ranks of the new communicator must call it with the same list. A rank that dies
 * meanwhile is `CINCH_ERROR_REMOTE` on all others, which can call it again without that rank.
 *
 * Needs an earlier `cinch_comm_prepare_to_shrink`; the new communicator needs none. `config` may be
 * NULL: then the settings are those of `comm`. `*newcomm` is NULL unless the call succeeds. `comm`
 * stays valid for `cinch_comm_destroy`.
 */
cinch_result_t cinch_comm_shrink(cinch_comm_t *comm,
                                 const int *exclude,
                                 int count,
                                 const cinch_config_t *config,
                                 cinch_comm_t **newcomm);

/**
 * Creates the id by which new ranks join `comm` in its next `cinch_comm_grow`. One rank of `comm` calls it,
 * any one, and the program sends the id to the new ranks, which call `cinch_comm_init` with it.
 *
 * The calling process serves the rendezvous until the timeout of creating a communicator. An id serves one
 * grow. An earlier id of this rank that was not used ends.
 */
cinch_result_t cinch_comm_grow_id(cinch_comm_t *comm,
                                  cinch_unique_id_t *id);

/**
 * Creates a communicator of `nranks` ranks: the ranks of `comm`, which keep their numbers, and new ranks
 * after them. Returns when all of them have joined.
 *
 * All ranks of `comm` must call it, after one of them has called `cinch_comm_grow_id`. A new rank calls
 * `cinch_comm_init` with that id, its number and `nranks`. To replace a rank that has died, shrink, and grow
 * the smaller communicator.
 *
 * `config` may be NULL: then the settings are those of `comm`, which the new ranks must share. `*newcomm` is
 * NULL unless the call succeeds. It needs no `cinch_comm_prepare_to_shrink`, and does not fail with `comm`,
 * which stays usable.
 *
 * A rank that dies meanwhile is `CINCH_ERROR_REMOTE` on all others. A new rank that does not come is
 * `CINCH_ERROR_TIMEOUT`: then the ranks of `comm` can try again with a new id.
 */
cinch_result_t cinch_comm_grow(cinch_comm_t *comm,
                               int nranks,
                               const cinch_config_t *config,
                               cinch_comm_t **newcomm);

/**
 * Returns when every rank has called it. Does not wait for calls that are queued on a GPU.
 */
cinch_result_t cinch_barrier(cinch_comm_t *comm);

/**
 * Waits until every rank has called it, so that the following `cinch_comm_destroy` loses no rank's
 * data.
 *
 * It is optional on host memory, but a rank that destroys without it may fail ranks that still
 * communicate. On GPUs, ranks in different processes must call it: they map each other's memory, which
 * must stay until all ranks have unmapped it. There it also waits for the queued calls, however long
 * earlier work on their streams takes, and the communicator takes no more calls. Destroy CUDA graphs
 * with calls of the communicator first: a graph keeps the mappings.
 */
cinch_result_t cinch_comm_finalize(cinch_comm_t *comm);

/**
 * Destroys the handle and frees the communicator's resources. Does not wait for other ranks.
 *
 * Calls that run on other threads continue, and the last of them frees the resources. A destroyed
 * handle stays invalid: no later communicator has the same handle.
 */
cinch_result_t cinch_comm_destroy(cinch_comm_t *comm);

/**
 * Aborts the communicator: it fails on this rank at once, and on the others by a message.
 *
 * Waiting calls on any thread return `CINCH_ERROR_ABORTED`. Communicators that were split from this
 * one fail, too. The handle stays valid for `cinch_comm_destroy`. It may be called inside a group, and
 * while other threads are in calls on `comm`.
 */
cinch_result_t cinch_comm_abort(cinch_comm_t *comm);

/**
 * Stores the error that failed the communicator in `*code`, `CINCH_SUCCESS` if none did.
 *
 * After an error, `cinch_last_error` returns its sentence. Does not wait; any thread may call it.
 */
cinch_result_t cinch_comm_async_error(const cinch_comm_t *comm,
                                      cinch_result_t *code);

/**
 * Reduces all ranks' inputs and returns the result on every rank: `count` elements in, `count` out.
 * In place if `sendbuf == recvbuf`.
 */
cinch_result_t cinch_all_reduce(const void *sendbuf,
                                void *recvbuf,
                                size_t count,
                                cinch_dtype_t dtype,
                                cinch_op_t op,
                                cinch_comm_t *comm,
                                void *stream);

/**
 * Gathers all ranks' inputs on every rank, in rank order: `count` elements in, `count` per rank out.
 * In place if `sendbuf` is this rank's block of `recvbuf`.
 */
cinch_result_t cinch_all_gather(const void *sendbuf,
                                void *recvbuf,
                                size_t count,
                                cinch_dtype_t dtype,
                                cinch_comm_t *comm,
                                void *stream);

/**
 * Reduces all ranks' inputs and returns block r of the result on rank r: `count` elements per rank in,
 * `count` out. In place if `recvbuf` is this rank's block of `sendbuf`.
 */
cinch_result_t cinch_reduce_scatter(const void *sendbuf,
                                    void *recvbuf,
                                    size_t count,
                                    cinch_dtype_t dtype,
                                    cinch_op_t op,
                                    cinch_comm_t *comm,
                                    void *stream);

/**
 * Copies the root's `count` elements to every rank. Only the root's `sendbuf` is read; it may be NULL
 * on other ranks. In place if `sendbuf == recvbuf`.
 */
cinch_result_t cinch_broadcast(const void *sendbuf,
                               void *recvbuf,
                               size_t count,
                               cinch_dtype_t dtype,
                               int root,
                               cinch_comm_t *comm,
                               void *stream);

/**
 * Reduces all ranks' inputs and returns the result on the root: `count` elements in, `count` out.
 * Only the root's `recvbuf` is written; it may be NULL on other ranks. In place if
 * `sendbuf == recvbuf`.
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
 * Gathers all ranks' inputs on the root, in rank order: `count` elements in, `count` per rank out.
 * Only the root's `recvbuf` is written; it may be NULL on other ranks. In place if `sendbuf` is the
 * root's block of `recvbuf`.
 */
cinch_result_t cinch_gather(const void *sendbuf,
                            void *recvbuf,
                            size_t count,
                            cinch_dtype_t dtype,
                            int root,
                            cinch_comm_t *comm,
                            void *stream);

/**
 * Sends block r of the root's input to rank r: `count` elements per rank in, `count` out. Only the
 * root's `sendbuf` is read; it may be NULL on other ranks. In place if `recvbuf` is the root's block
 * of `sendbuf`.
 */
cinch_result_t cinch_scatter(const void *sendbuf,
                             void *recvbuf,
                             size_t count,
                             cinch_dtype_t dtype,
                             int root,
                             cinch_comm_t *comm,
                             void *stream);

/**
 * Sends block r of every rank's input to rank r, which receives the blocks in rank order: `count`
 * elements per rank in, `count` per rank out. In place if `sendbuf == recvbuf`.
 */
cinch_result_t cinch_all_to_all(const void *sendbuf,
                                void *recvbuf,
                                size_t count,
                                cinch_dtype_t dtype,
                                cinch_comm_t *comm,
                                void *stream);

/**
 * Sends `count` elements to `peer`, which must receive as many. Sends and receives that wait for each
 * other belong in one group.
 */
cinch_result_t cinch_send(const void *sendbuf,
                          size_t count,
                          cinch_dtype_t dtype,
                          int peer,
                          cinch_comm_t *comm,
                          void *stream);

/**
 * Receives `count` elements from `peer`, which must send as many.
 */
cinch_result_t cinch_recv(void *recvbuf,
                          size_t count,
                          cinch_dtype_t dtype,
                          int peer,
                          cinch_comm_t *comm,
                          void *stream);

/**
 * Opens a group on this thread. Groups nest: the outermost `cinch_group_end` runs the calls.
 *
 * Collectives inside a group return once they are recorded. Their buffers and reports must stay
 * valid and untouched until the outermost `cinch_group_end` of this thread returns.
 *
 * Consecutive small all_reduces on a communicator of host memory are fused into one message if they
 * have the same type, operator, codec and algorithm (`CINCH_FUSE_BYTES` is the size limit). No such
 * call may use memory that another one writes. Calls are not fused if they keep scales or
 * residuals for a tensor, or use a created operator. On a GPU up to 16 small collectives that one kernel can
 * run share a launch.
 *
 * So all ranks must group such calls alike, or set `CINCH_FUSE_BYTES=0`. A group of one call equals
 * that call without a group, with one exception: `CINCH_CODEC_SAMPLE` does not sample calls on host
 * memory in groups. With that setting all ranks must make a compressed sum in a group, or none.
 */
cinch_result_t cinch_group_start(void);

/**
 * Closes this thread's innermost group; closing the outermost group runs its calls.
 *
 * Calls on GPUs are queued first, for all communicators without waiting in between, in the order in
 * which the group first named the communicators. That order must be the same on all ranks whose
 * communicators share a stream. All calls of one communicator run on the stream of its first call:
 * after the work on the streams of all its calls, and before later work on these streams. Then calls
 * on host memory run to their end. Calls of one communicator start in the order in which they were
 * made.
 *
 * If a cinch function failed on this thread since the outermost `cinch_group_start`, nothing runs on
 * this rank and the first such error is returned. Reports are written on success.
 */
cinch_result_t cinch_group_end(void);

/**
 * Creates an operator that multiplies this rank's contribution by `*scalar` before the sum.
 *
 * The call reads `scalar`, one element of `dtype` in host memory, before it returns. The operator
 * serves calls of `dtype` on `comm`. Its number is valid on this rank only: every rank passes an
 * operator that it created itself.
 */
cinch_result_t cinch_op_create_premulsum(cinch_comm_t *comm,
                                         const void *scalar,
                                         cinch_dtype_t dtype,
                                         cinch_op_t *op);

/**
 * Destroys an operator that `cinch_op_create_premulsum` created. Calls that were made with it keep
 * it until they have run.
 */
cinch_result_t cinch_op_destroy(cinch_comm_t *comm,
                                cinch_op_t op);

/**
 * Initialises `*report` with zeros.
 *
 * C programs use `cinch_report_default(&report)`, which passes `sizeof(cinch_report_t)` and
 * `CINCH_API_VERSION` of the program's header as `size` and `version`.
 */
cinch_result_t cinch_report_init(cinch_report_t *report, size_t size, uint32_t version);

/**
 * Copies `count` statistics, which calls of `comm` have written in one array at `statistics`, to `copies` in host
 * memory. First waits until the work that is queued on `stream` has ended.
 *
 * `CINCH_ERROR_UNSUPPORTED` on a communicator of host memory; `CINCH_ERROR_INVALID_USAGE` while `stream` is captured.
 */
cinch_result_t cinch_statistics_read(cinch_comm_t *comm,
                                     const cinch_statistics_t *statistics,
                                     size_t count,
                                     void *stream,
                                     cinch_statistics_t *copies);

/**
 * Sets the fields `saturated`, `non_finite`, `abs_max` and `l2_norm` of a report, and the bit
 * `CINCH_REPORT_INPUT` of its field `valid`, to statistics in host memory. A call on a GPU cannot report
 * them itself, because it returns before it runs.
 *
 * `CINCH_ERROR_INVALID_ARGUMENT` if no call has written the statistics, or if the call took the verdict alone.
 */
cinch_result_t cinch_report_add_statistics(cinch_report_t *report,
                                           const cinch_statistics_t *statistics);

/**
 * Initialises `*stats` with zeros.
 *
 * C programs use `cinch_comm_stats_default(&stats)`, which passes `sizeof(cinch_comm_stats_t)` and
 * `CINCH_API_VERSION` of the program's header as `size` and `version`.
 */
cinch_result_t cinch_comm_stats_init(cinch_comm_stats_t *stats,
                                     size_t size,
                                     uint32_t version);

/**
 * Stores the counts of `comm` on this rank in `*stats`. Does not wait; any thread may call it.
 */
cinch_result_t cinch_comm_stats(const cinch_comm_t *comm, cinch_comm_stats_t *stats);

/**
 * Copies the counters of `comm` on this rank to `buffer` as text with a NUL behind it, and stores its size with the
 * NUL in `*bytes`. Does not wait; any thread may call it.
 *
 * The text is one JSON object. `calls` has, by `collective`, `codec` and `size_class` (bytes of the larger buffer, up
 * to a power of two), the number of `calls`, their `bytes`, the `wire_bytes` that this rank sent and the
 * `raw_bytes` that it would have sent without codecs, and `timed_calls`
 * with their `timed_seconds`: small calls on host memory are timed in turn, those on GPUs not at all. `peer_waits` has
 * the seconds that this rank has waited for other ranks, in waits of a millisecond and more.
 *
 * With `buffer` NULL only the size is stored. If `capacity` is smaller than the size, the call fails and copies
 * nothing; calls on other threads may have added classes meanwhile.
 */
cinch_result_t cinch_comm_metrics(const cinch_comm_t *comm,
                                  char *buffer,
                                  size_t capacity,
                                  size_t *bytes);

/**
 * Initialises `*call` with zeros: an all_reduce (sum) of 0 elements of `CINCH_I8`.
 *
 * C programs use `cinch_call_default(&call)`, which passes `sizeof(cinch_call_t)` and
 * `CINCH_API_VERSION` of the program's header as `size` and `version`.
 */
cinch_result_t cinch_call_init(cinch_call_t *call, size_t size, uint32_t version);

/**
 * Runs one call and describes it in `*report`, which may be NULL and is written on success only.
 * In a group, the outermost `cinch_group_end` writes the report.
 */
cinch_result_t cinch_call(const cinch_call_t *call,
                          cinch_report_t *report);

/**
 * Copies the name of `comm` to `buffer` with a NUL behind it, and stores its size with the NUL in `*bytes`. The
 * name is that of `cinch_config_t.name`; empty if it has none.
 *
 * With `buffer` NULL only the size is stored. If `capacity` is smaller than the size, the call fails and copies
 * nothing.
 */
cinch_result_t cinch_comm_name(const cinch_comm_t *comm,
                               char *buffer,
                               size_t capacity,
                               size_t *bytes);

/**
 * Copies a sentence to `buffer`, with a NUL behind it, that names the codecs of calls on `comm` that set none, the
 * calls that they are for, and the setting that decided it. Stores its size with the NUL in `*bytes`.
 *
 * With `buffer` NULL only the size is stored. If `capacity` is smaller than the size, the call fails and copies
 * nothing.
 */
cinch_result_t cinch_comm_codec_policy(const cinch_comm_t *comm,
                                       char *buffer,
                                       size_t capacity,
                                       size_t *bytes);

/**
 * Copies a table to `buffer`, with a NUL behind it, of the ways in which `call` could run, with the predicted time of
 * each and the one that is chosen. Stores its size with the NUL in `*bytes`. Runs nothing and moves nothing: the
 * call's buffers and stream are ignored.
 *
 * With `buffer` NULL only the size is stored. If `capacity` is smaller than the size, the call fails and copies
 * nothing.
 */
cinch_result_t cinch_call_explain(const cinch_call_t *call,
                                  char *buffer,
                                  size_t capacity,
                                  size_t *bytes);

/**
 * Starts a call on host memory and returns at once; a thread of the library runs it.
 *
 * Buffers must stay valid, and outputs unread, until `cinch_request_wait` has returned. It writes the report to
 * `*report`, which may be NULL. Arguments are checked before this function returns; if it fails, `*request` is
 * NULL and nothing was started.
 *
 * The started calls of a communicator run in the order in which they were started. Calls that do not return at
 * once wait for them first, so all ranks may mix both kinds if they make all calls in the same order. A group
 * cannot hold started calls. On a GPU calls return before they have ended by themselves, so there it is
 * `CINCH_ERROR_INVALID_USAGE`.
 */
cinch_result_t cinch_call_start(const cinch_call_t *call,
                                cinch_report_t *report,
                                cinch_request_t **request);

/**
 * Starts to create a communicator, as `cinch_comm_init` does, and returns at once.
 *
 * `cinch_request_wait` stores the communicator in `*comm`, which is NULL until then.
 */
cinch_result_t cinch_comm_init_start(const cinch_unique_id_t *id,
                                     int rank,
                                     int nranks,
                                     const cinch_config_t *config,
                                     cinch_comm_t **comm,
                                     cinch_request_t **request);

/**
 * Stores 1 in `*done` if the call has ended, else 0. Does not wait. The request stays valid.
 */
cinch_result_t cinch_request_test(const cinch_request_t *request, int *done);

/**
 * Waits until the call has ended, and returns its result. The request is destroyed.
 */
cinch_result_t cinch_request_wait(cinch_request_t *request);

/**
 * Waits until one of `count` calls has ended, and stores its index in `*index`; if several have, it is the first.
 *
 * The list may contain NULL, which is passed over, but must contain a request. All requests stay valid.
 */
cinch_result_t cinch_request_wait_any(cinch_request_t *const *requests,
                                      int count,
                                      int *index);

/**
 * Stores a descriptor in `*descriptor` that is readable once the call has ended, for `poll` and its like.
 *
 * The program must neither read nor close it; `cinch_request_wait` closes it.
 */
cinch_result_t cinch_request_descriptor(cinch_request_t *request,
                                        int *descriptor);

/**
 * Stores the bytes of `count` elements encoded with `codec` in `*bytes`. The size does not depend on
 * the element type.
 */
cinch_result_t cinch_wire_bytes(const char *codec,
                                cinch_layout_t layout,
                                size_t count,
                                size_t *bytes);

/**
 * Stores in `*count` the number of elements of an array that is encoded in `CINCH_LAYOUT_PUBLISHED`.
 *
 * The array is all of the `wire_bytes` bytes at `wire`, in host memory. The chunk layout does not
 * contain its number of elements, so it is an error.
 */
cinch_result_t cinch_wire_count(const char *codec,
                                cinch_layout_t layout,
                                const void *wire,
                                size_t wire_bytes,
                                size_t *count);

/**
 * Encodes `count` elements of type f32, f16 or bf16 at `src` into `wire`.
 *
 * `wire_bytes` is the size of `wire`; `cinch_wire_bytes` returns how many bytes are written. `src` and
 * `wire` must not overlap. Codecs with random rounding (`minmax4:seed=1`) draw the same numbers for
 * equal seed and `draw`: increment `draw` from call to call.
 *
 * Arrays in host memory: `stream` is NULL, and large arrays are encoded by `CINCH_THREADS` threads.
 *
 * Arrays in memory of one GPU: the work is queued on `stream`, a `cudaStream_t` or `CUstream` of that
 * GPU, which may be capturing; NULL is its default stream. The result is bit-identical. Elements must
 * be aligned to their size, chunks to 16 bytes. The first such call of a process loads the kernels.
 * Codecs with a scale per tensor (`tensor=K`) work on host memory only.
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
 * Decodes the first `count` elements of the `wire_bytes` bytes at `wire` into `dst`, as type f32, f16
 * or bf16.
 *
 * Data in `CINCH_LAYOUT_PUBLISHED` must hold exactly `count` elements, and `wire_bytes` must be their
 * size: bytes behind them are an error. `wire` and `dst` must not
 * overlap. Both are in host memory or in memory of one GPU; see `cinch_encode`. `dst` is written on
 * success only. In GPU memory, a CompLL header with another number of elements is no error: all
 * decoded elements are then NaN.
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
 * Copies `count` elements of type f32, f16 or bf16 between host memory and a GPU, encoded by `codec` on
 * the way.
 *
 * The destination receives decoded elements. With `trunc16`, half of the bytes of f32 cross the bus.
 * Exactly one of `src` and `dst` must be GPU memory; host memory may be pinned or pageable. Up to 16
 * threads of the library encode or decode on the host. See `cinch_encode` for `draw`.
 *
 * The copy starts after earlier work of `stream`, a stream of that GPU, and before later work. The
 * call returns when the host array may be reused. To the GPU, that is when the array has been read, as
 * with `cudaMemcpyAsync` from pageable memory. To the host, that is when the copy is complete.
 * After an error the contents of `dst` are undefined.
 *
 * In a capture nothing is copied yet. Each replay of the graph copies the elements that `src` has then, with the same
 * `draw`; both arrays must stay as long as there are replays. The graph keeps pinned memory for two pieces of 512 Ki
 * elements a thread, and as much on the GPU; the driver may allocate it only when running kernels have ended. Replays of one
 * captured copy must not run at the same time. An internal error in a replay ends the process, since nothing could report it.
 */
cinch_result_t cinch_copy(const char *codec,
                          const void *src,
                          void *dst,
                          size_t count,
                          cinch_dtype_t dtype,
                          uint64_t draw,
                          void *stream);

/**
 * Copies `count` elements of type f32, f16 or bf16 at `src` in host memory to `ndsts` arrays in the memory of
 * one or several GPUs, encoded by `codec` on the way.
 *
 * The elements are encoded once, and their encoding crosses the bus once for each GPU, however many arrays are
 * on it. `dsts` and `streams` have `ndsts` entries: `dsts[i]` is GPU memory, which no other array overlaps, and
 * `streams[i]` is a stream of its GPU. Otherwise the call is as `cinch_copy`: it returns when `src` has been
 * read, and each array is complete in the order of its stream. With several GPUs it returns when all have read
 * the encoding, so the slowest of the streams delays the others. In a capture all `streams` are one stream.
 */
cinch_result_t cinch_copy_to_gpus(const char *codec,
                                  const void *src,
                                  void *const *dsts,
                                  void *const *streams,
                                  size_t ndsts,
                                  size_t count,
                                  cinch_dtype_t dtype,
                                  uint64_t draw);

/**
 * Copies this rank's residuals of error feedback (`cinch_call_t.feedback`) to `buffer`, for a
 * checkpoint, and stores their size in `*bytes`.
 *
 * With `buffer` NULL only the size is stored. If `capacity` is smaller than the size, the call fails
 * and copies nothing.
 */
cinch_result_t cinch_feedback_export(cinch_comm_t *comm,
                                     void *buffer,
                                     size_t capacity,
                                     size_t *bytes);

/**
 * Replaces all residuals of this rank by those that `cinch_feedback_export` returned on the same rank
 * of a communicator with as many ranks.
 *
 * The first call of a tensor drops residuals that do not fit its count, chunks, operator, type, codec or
 * algorithm; the log reports them.
 */
cinch_result_t cinch_feedback_import(cinch_comm_t *comm,
                                     const void *buffer,
                                     size_t bytes);

/**
 * Multiplies this rank's residuals by `factor`.
 *
 * Call it when the scale of a scaled loss changes; `factor` is the new scale divided by the old one
 * (`cinch_loss_scaler_t.rescale`).
 */
cinch_result_t cinch_feedback_rescale(cinch_comm_t *comm,
                                      double factor);

/**
 * Forgets this rank's residuals of the tensor with the id `feedback`, or of all tensors if it is 0.
 */
cinch_result_t cinch_feedback_forget(cinch_comm_t *comm,
                                     uint64_t feedback);

/**
 * Initialises `*awp` with nothing set.
 *
 * C programs use `cinch_awp_default(&awp)`, which passes `sizeof(cinch_awp_t)` and
 * `CINCH_API_VERSION` of the program's header as `size` and `version`.
 */
cinch_result_t cinch_awp_init(cinch_awp_t *awp, size_t size, uint32_t version);

/**
 * Updates `*awp` with the group's L2 norm after a batch, which must be the same on all ranks.
 *
 * Stores the bits to keep from now on in `awp->bits`. Stores the name of the codec that keeps them in
 * `*codec`, which may be NULL: static text `trunc8`, `trunc16`, `trunc24` or `raw`. A non-finite norm
 * changes nothing.
 */
cinch_result_t cinch_awp_update(cinch_awp_t *awp,
                                double l2_norm,
                                const char **codec);

/**
 * Initialises `*scaler` with the defaults.
 *
 * C programs use `cinch_loss_scaler_default(&scaler)`, which passes `sizeof(cinch_loss_scaler_t)` and
 * `CINCH_API_VERSION` of the program's header as `size` and `version`.
 */
cinch_result_t cinch_loss_scaler_init(cinch_loss_scaler_t *scaler,
                                      size_t size,
                                      uint32_t version);

/**
 * Updates `*scaler` after a step; `non_finite` is nonzero if a summed gradient was not finite.
 *
 * Stores 1 in `*apply` if the step is to be applied and 0 if it is to be skipped. Stores the scale of
 * the next step in `scaler->scale`.
 *
 * Codecs carry non-finite values to every rank, so all ranks find the same in their output. Pass the
 * result of `cinch_count_non_finite` for the output; the report describes this rank's input only. On GPUs
 * `cinch_loss_scaler_step` takes the verdicts of the calls.
 *
 * Finite sums saturate instead of overflowing with cast16, cast_bf16, static8, mantissa8, trunc8,
 * threshold2 and `tensor=K`. With these codecs the ranks must also sum `saturated` of their reports,
 * and skip the step unless it is 0. Calls on GPUs count elements of the input that saturate, and no
 * sums: use other codecs there.
 */
cinch_result_t cinch_loss_scaler_update(cinch_loss_scaler_t *scaler,
                                        int non_finite,
                                        int *apply);

/**
 * Updates `*scaler` after a step as `cinch_loss_scaler_update` does, by the verdicts of the step's calls: it is
 * to be skipped if any of `count` statistics has `CINCH_VERDICT_NON_FINITE`. They are in host memory; see
 * `cinch_statistics_read`. All ranks decide alike if the calls are all_reduces.
 *
 * Codecs by which finite sums saturate (see `cinch_loss_scaler_update`) hide sums that overflow: use others with this
 * function.
 *
 * `CINCH_ERROR_INVALID_ARGUMENT` if `count` is 0, or if no call has written one of the statistics.
 */
cinch_result_t cinch_loss_scaler_step(cinch_loss_scaler_t *scaler,
                                      const cinch_statistics_t *statistics,
                                      size_t count,
                                      int *apply);

/**
 * Stores the number of NaN and infinite values among `count` elements of `dtype` in host memory in
 * `*found`. On GPUs the call that writes the elements takes the verdict (`cinch_call_t.statistics`, with
 * `verdict_only` where nothing else is of interest).
 */
cinch_result_t cinch_count_non_finite(const void *data,
                                      size_t count,
                                      cinch_dtype_t dtype,
                                      uint64_t *found);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* CINCH_H */
