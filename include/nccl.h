/* The interface of libnccl.so.2 on cinch: names, numbers and layouts are those of NCCL 2.32, so
 * that a program that was compiled with NCCL's header runs on this library and the other way round.
 *
 * Functions return a code; ncclGetLastError(NULL) has the sentence, with ranks, hosts, sizes and
 * the next step. Each function has a twin whose name begins with p, for interposers. Those that
 * cinch does not support are marked so: they return ncclInvalidUsage.
 */
#ifndef NCCL_H_
#define NCCL_H_

/* A stream is a pointer, whoever includes CUDA's headers. */
#if defined(__has_include)
#if __has_include(<cuda_runtime.h>)
#include <cuda_runtime.h>
#define CINCH_NCCL_HAS_CUDA 1
#endif
#endif
#ifndef CINCH_NCCL_HAS_CUDA
typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
#endif

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#define NCCL_MAJOR 2
#define NCCL_MINOR 32
#define NCCL_PATCH 3
#define NCCL_SUFFIX ""
#define NCCL_VERSION_CODE 23203
#define NCCL_VERSION(X, Y, Z)                                  \
  ((X) <= 2 && (Y) <= 8 ? (X) * 1000 + (Y) * 100 + (Z)         \
                        : (X) * 10000 + (Y) * 100 + (Z))

#ifdef __cplusplus
extern "C" {
#endif

/* Objects. */

typedef struct ncclComm *ncclComm_t;
typedef struct ncclWindow_vidmem *ncclWindow_t;
#define NCCL_COMM_NULL NULL

#define NCCL_UNIQUE_ID_BYTES 128
typedef struct {
  char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

/* Codes. */

typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
  ncclTimeout = 8,
  ncclNumResults = 9
} ncclResult_t;

/* Element types. */
typedef enum {
  ncclInt8 = 0,
  ncclChar = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclInt = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclHalf = 6,
  ncclFloat32 = 7,
  ncclFloat = 7,
  ncclFloat64 = 8,
  ncclDouble = 8,
  ncclBfloat16 = 9,
  ncclFloat8e4m3 = 10,
  ncclFloat8e5m2 = 11,
  ncclNumTypes = 12
} ncclDataType_t;

/* Operators; those from ncclNumOps on are created. */
typedef enum { ncclNumOps_dummy = 5 } ncclRedOp_dummy_t;
typedef enum {
  ncclSum = 0,
  ncclProd = 1,
  ncclMax = 2,
  ncclMin = 3,
  ncclAvg = 4,
  ncclNumOps = 5,
  ncclMaxRedOp = 0x7fffffff >> (32 - 8 * sizeof(ncclRedOp_dummy_t))
} ncclRedOp_t;

typedef enum { ncclScalarDevice = 0, ncclScalarHostImmediate = 1 } ncclScalarResidence_t;

/* What an unset field of a config holds. */
#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_UNDEF_PTR NULL
#define NCCL_UNDEF_FLOAT -1.0f
#define NCCL_API_MAGIC 0xcafebeef

#define NCCL_SPLIT_NOCOLOR -1

#define NCCL_WIN_DEFAULT 0x00
#define NCCL_WIN_COLL_SYMMETRIC 0x01
#define NCCL_WIN_STRICT_ORDERING 0x02
#define NCCL_WIN_GIN_ONLY 0x04
#define NCCL_WIN_CFT_COUNTED 0x08
#define NCCL_WIN_REQUIRED_ALIGNMENT 4096

#define NCCL_CTA_POLICY_DEFAULT 0x00
#define NCCL_CTA_POLICY_EFFICIENCY 0x01
#define NCCL_CTA_POLICY_ZERO 0x02

#define NCCL_SHRINK_DEFAULT 0x00
#define NCCL_SHRINK_ABORT 0x01
#define NCCL_REVOKE_DEFAULT 0x00
#define NCCL_SUSPEND_MEM 0x01

typedef enum {
  ncclHostCftDefault = NCCL_CONFIG_UNDEF_INT,
  ncclHostCftEnable = 1,
  ncclHostCftDisable = 2,
  ncclHostCftFallback = 3
} ncclHostCftMode_t;

typedef enum {
  ncclNvlsHostModeDefault = NCCL_CONFIG_UNDEF_INT,
  ncclNvlsHostModeEnable = 0,
  ncclNvlsHostModeDisableTransport = 1,
  ncclNvlsHostModeDisableSymmetricMultimem = 2,
  ncclNvlsHostModeDisable = INT_MAX
} ncclNvlsHostMode_t;

/* Configs. They grow at their end; `version` says which fields the caller has. Start from the
 * initializer. Those that cinch acts on have a comment; the others are checked and change nothing.
 */

typedef struct ncclConfig_v23100 {
  size_t size;
  unsigned int magic;
  unsigned int version;
  int blocking; /* 0: init, split and finalize go on in the background */
  int cgaClusterSize;
  int minCTAs;
  int maxCTAs; /* most blocks of a call, as CINCH_GPU_CHANNELS */
  const char *netName;
  int splitShare;
  int trafficClass;
  const char *commName; /* for logs and rules */
  int collnetEnable;
  int CTAPolicy;
  int shrinkShare;
  int nvlsCTAs;
  int nChannelsPerNetPeer;
  int nvlinkCentricSched;
  int graphUsageMode;
  int numRmaCtx;
  int maxP2pPeers;
  int graphStreamOrdering;
  int launchOrderImplicit;
  int numRmaSig;
  int rmaEagerInit;
  int hostCftMode;
  int nvlsHostMode;
} ncclConfig_t;

#define NCCL_CONFIG_INITIALIZER                                                             \
  {                                                                                         \
    sizeof(ncclConfig_t), NCCL_API_MAGIC, NCCL_VERSION_CODE,                                \
        NCCL_CONFIG_UNDEF_INT /* blocking */, NCCL_CONFIG_UNDEF_INT /* cgaClusterSize */,   \
        NCCL_CONFIG_UNDEF_INT /* minCTAs */, NCCL_CONFIG_UNDEF_INT /* maxCTAs */,           \
        NCCL_CONFIG_UNDEF_PTR /* netName */, NCCL_CONFIG_UNDEF_INT /* splitShare */,        \
        NCCL_CONFIG_UNDEF_INT /* trafficClass */, NCCL_CONFIG_UNDEF_PTR /* commName */,     \
        NCCL_CONFIG_UNDEF_INT /* collnetEnable */, NCCL_CONFIG_UNDEF_INT /* CTAPolicy */,   \
        NCCL_CONFIG_UNDEF_INT /* shrinkShare */, NCCL_CONFIG_UNDEF_INT /* nvlsCTAs */,      \
        NCCL_CONFIG_UNDEF_INT /* nChannelsPerNetPeer */,                                    \
        NCCL_CONFIG_UNDEF_INT /* nvlinkCentricSched */,                                     \
        NCCL_CONFIG_UNDEF_INT /* graphUsageMode */, NCCL_CONFIG_UNDEF_INT /* numRmaCtx */,  \
        NCCL_CONFIG_UNDEF_INT /* maxP2pPeers */,                                            \
        NCCL_CONFIG_UNDEF_INT /* graphStreamOrdering */,                                    \
        NCCL_CONFIG_UNDEF_INT /* launchOrderImplicit */,                                    \
        NCCL_CONFIG_UNDEF_INT /* numRmaSig */, NCCL_CONFIG_UNDEF_INT /* rmaEagerInit */,    \
        NCCL_CONFIG_UNDEF_INT /* hostCftMode */, NCCL_CONFIG_UNDEF_INT /* nvlsHostMode */   \
  }

/* An option of one call that only one vendor's library knows, in a list that ends with NULL.
 * NVIDIA's library ignores them all. Those of cinch have key.vendorId CINCH_NCCL_VENDOR_ID. */
typedef struct ncclConfigExt {
  struct ncclConfigExt *next;
  struct {
    int vendorId;
    int optionId;
  } key;
  union {
    int i;
    const char *s;
    void *raw;
  } val;
} ncclConfigExt_t;

#define CINCH_NCCL_VENDOR_ID 0xC14C48
#define CINCH_NCCL_OPTION_CODEC 1 /* val.s: a codec with parameters, as "linear8:block=128", or "off" */
#define CINCH_NCCL_OPTION_BLOCK 2 /* val.i: elements that share a scale */
#define CINCH_NCCL_OPTION_OFF 3   /* val.i: 1 keeps the call exact, whatever else is set */

typedef struct ncclCollConfig_v23200 {
  size_t size;
  unsigned int magic;
  unsigned int version;
  ncclConfigExt_t *ext;
  int minCTAs;
  int maxCTAs;
  int nvlsCTAs;
  int cgaClusterSize;
  const char *algSelection; /* "ring", "tree", "oneshot", "direct" or "flat_tree" */
  int forceAlgSelection;    /* whether a selection that cinch does not know is an error */
  int CTAPolicy;
  uint64_t userProfilerTag;
  cudaEvent_t launchCompletionEvent; /* not supported: NULL */
} ncclCollConfig_t;

#define NCCL_COLLCONFIG_INITIALIZER                                                         \
  {                                                                                         \
    sizeof(ncclCollConfig_t), NCCL_API_MAGIC, NCCL_VERSION_CODE,                            \
        NCCL_CONFIG_UNDEF_PTR /* ext */, NCCL_CONFIG_UNDEF_INT /* minCTAs */,               \
        NCCL_CONFIG_UNDEF_INT /* maxCTAs */, NCCL_CONFIG_UNDEF_INT /* nvlsCTAs */,          \
        NCCL_CONFIG_UNDEF_INT /* cgaClusterSize */,                                         \
        NCCL_CONFIG_UNDEF_PTR /* algSelection */, 1 /* forceAlgSelection */,                \
        NCCL_CONFIG_UNDEF_INT /* CTAPolicy */, 0 /* userProfilerTag */,                     \
        NCCL_CONFIG_UNDEF_PTR /* launchCompletionEvent */                                   \
  }

typedef struct ncclSimInfo_v22200 {
  size_t size;
  unsigned int magic;
  unsigned int version;
  float estimatedTime; /* microseconds */
} ncclSimInfo_t;

#define NCCL_SIM_INFO_INITIALIZER \
  { sizeof(ncclSimInfo_t), 0x74685283, NCCL_VERSION_CODE, NCCL_UNDEF_FLOAT }

typedef enum { NCCL_ENCRYPTION_MODE_NONE = 0, NCCL_ENCRYPTION_MODE_PSK = 1 } ncclEncryptionMode_t;

typedef struct ncclEncryptionConfig_v23200 {
  size_t size;
  unsigned int magic;
  unsigned int version;
  int mode;
  const char *psk;
} ncclEncryptionConfig_t;

#define NCCL_ENCRYPTION_CONFIG_INITIALIZER                                                      \
  {                                                                                             \
    sizeof(ncclEncryptionConfig_t), NCCL_API_MAGIC, NCCL_VERSION_CODE,                          \
        NCCL_ENCRYPTION_MODE_NONE, NCCL_CONFIG_UNDEF_PTR                                        \
  }

typedef enum {
  ncclStatGpuMemSuspend = 0,
  ncclStatGpuMemSuspended = 1,
  ncclStatGpuMemPersist = 2,
  ncclStatGpuMemTotal = 3
} ncclCommMemStat_t;

typedef struct {
  int opCnt;
  int peer;
  int sigIdx;
  int ctx;
} ncclWaitSignalDesc_t;

typedef struct ncclParamHandle *ncclParamHandle_t;

/* Declares a function and its twin. */
#define CINCH_NCCL(name, arguments) \
  ncclResult_t name arguments;      \
  ncclResult_t p##name arguments

/* Version and errors. */

CINCH_NCCL(ncclGetVersion, (int *version));
const char *ncclGetErrorString(ncclResult_t result);
const char *pncclGetErrorString(ncclResult_t result);
/* The sentence of this thread's last failure; of none, of why `comm`, which may be NULL, failed. */
const char *ncclGetLastError(ncclComm_t comm);
const char *pncclGetLastError(ncclComm_t comm);
/* Without effect. */
void ncclResetDebugInit(void);
void pncclResetDebugInit(void);

/* Joining. A rank's GPU is that of the thread's current context. With several ranks in one thread
 * the calls go into a group. */

CINCH_NCCL(ncclGetUniqueId, (ncclUniqueId *uniqueId));
CINCH_NCCL(ncclCommInitRank, (ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank));
CINCH_NCCL(ncclCommInitRankConfig, (ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank,
                                    ncclConfig_t *config));
CINCH_NCCL(ncclCommInitRankScalable, (ncclComm_t *newcomm, int nranks, int myrank, int nId,
                                      ncclUniqueId *commIds, ncclConfig_t *config));
CINCH_NCCL(ncclCommInitAll, (ncclComm_t *comm, int ndev, const int *devlist));

/* Making communicators from others. */

CINCH_NCCL(ncclCommSplit, (ncclComm_t comm, int color, int key, ncclComm_t *newcomm,
                           ncclConfig_t *config));
CINCH_NCCL(ncclCommShrink, (ncclComm_t comm, int *excludeRanksList, int excludeRanksCount,
                            ncclComm_t *newcomm, ncclConfig_t *config, int shrinkFlags));
/* Of NCCL 2.29. One rank of comm makes an id. Ranks of comm pass rank -1; new ranks pass NULL as comm, and the
   id. */
CINCH_NCCL(ncclCommGetUniqueId, (ncclComm_t comm, ncclUniqueId *uniqueId));
CINCH_NCCL(ncclCommGrow, (ncclComm_t comm, int nRanks, const ncclUniqueId *uniqueId, int rank,
                          ncclComm_t *newcomm, ncclConfig_t *config));

/* Leaving. Finalizing waits for what this rank has called, not for other ranks to leave; destroying without
   finalizing waits as finalizing does. Aborting waits for nothing. */

CINCH_NCCL(ncclCommFinalize, (ncclComm_t comm));
CINCH_NCCL(ncclCommDestroy, (ncclComm_t comm));
CINCH_NCCL(ncclCommAbort, (ncclComm_t comm));
CINCH_NCCL(ncclCommRevoke, (ncclComm_t comm, int revokeFlags));
/* Not supported. */
CINCH_NCCL(ncclCommSuspend, (ncclComm_t comm, int flags));
CINCH_NCCL(ncclCommResume, (ncclComm_t comm));

/* Asking. */

CINCH_NCCL(ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t *asyncError));
CINCH_NCCL(ncclCommCount, (const ncclComm_t comm, int *count));
CINCH_NCCL(ncclCommCuDevice, (const ncclComm_t comm, int *device));
CINCH_NCCL(ncclCommUserRank, (const ncclComm_t comm, int *rank));
CINCH_NCCL(ncclCommMemStats, (ncclComm_t comm, ncclCommMemStat_t stat, uint64_t *value));

/* Memory. Registration changes nothing; a window is NULL. */

CINCH_NCCL(ncclMemAlloc, (void **ptr, size_t size));
CINCH_NCCL(ncclMemFree, (void *ptr));
CINCH_NCCL(ncclCommRegister, (const ncclComm_t comm, void *buff, size_t size, void **handle));
CINCH_NCCL(ncclCommDeregister, (const ncclComm_t comm, void *handle));
CINCH_NCCL(ncclCommWindowRegister, (ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win,
                                    int winFlags));
CINCH_NCCL(ncclCommWindowDeregister, (ncclComm_t comm, ncclWindow_t win));
/* Not supported. */
CINCH_NCCL(ncclWinGetUserPtr, (ncclComm_t comm, ncclWindow_t win, void **outUserPtr));

/* Operators: sums of contributions, each times its rank's scalar. A device scalar is read when a
 * call runs. */

CINCH_NCCL(ncclRedOpCreatePreMulSum, (ncclRedOp_t *op, void *scalar, ncclDataType_t datatype,
                                      ncclScalarResidence_t residence, ncclComm_t comm));
CINCH_NCCL(ncclRedOpDestroy, (ncclRedOp_t op, ncclComm_t comm));

/* Collectives. They return when they are queued on the stream. The variants with a config take
 * NULL for none; all ranks pass the same. */

CINCH_NCCL(ncclAllReduce, (const void *sendbuff, void *recvbuff, size_t count,
                           ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream));
CINCH_NCCL(ncclAllReduceConfig, (const void *sendbuff, void *recvbuff, size_t count,
                                 ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                                 cudaStream_t stream, const ncclCollConfig_t *config));
CINCH_NCCL(ncclBroadcast, (const void *sendbuff, void *recvbuff, size_t count,
                           ncclDataType_t datatype, int root, ncclComm_t comm,
                           cudaStream_t stream));
CINCH_NCCL(ncclBroadcastConfig, (const void *sendbuff, void *recvbuff, size_t count,
                                 ncclDataType_t datatype, int root, ncclComm_t comm,
                                 cudaStream_t stream, const ncclCollConfig_t *config));
CINCH_NCCL(ncclBcast, (void *buff, size_t count, ncclDataType_t datatype, int root,
                       ncclComm_t comm, cudaStream_t stream));
CINCH_NCCL(ncclReduce, (const void *sendbuff, void *recvbuff, size_t count,
                        ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm,
                        cudaStream_t stream));
CINCH_NCCL(ncclReduceConfig, (const void *sendbuff, void *recvbuff, size_t count,
                              ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm,
                              cudaStream_t stream, const ncclCollConfig_t *config));
CINCH_NCCL(ncclAllGather, (const void *sendbuff, void *recvbuff, size_t sendcount,
                           ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream));
CINCH_NCCL(ncclAllGatherConfig, (const void *sendbuff, void *recvbuff, size_t sendcount,
                                 ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream,
                                 const ncclCollConfig_t *config));
CINCH_NCCL(ncclReduceScatter, (const void *sendbuff, void *recvbuff, size_t recvcount,
                               ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream));
CINCH_NCCL(ncclReduceScatterConfig, (const void *sendbuff, void *recvbuff, size_t recvcount,
                                     ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                                     cudaStream_t stream, const ncclCollConfig_t *config));
CINCH_NCCL(ncclAlltoAll, (const void *sendbuff, void *recvbuff, size_t count,
                          ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream));
CINCH_NCCL(ncclAlltoAllConfig, (const void *sendbuff, void *recvbuff, size_t count,
                                ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream,
                                const ncclCollConfig_t *config));
CINCH_NCCL(ncclGather, (const void *sendbuff, void *recvbuff, size_t count,
                        ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream));
CINCH_NCCL(ncclGatherConfig, (const void *sendbuff, void *recvbuff, size_t count,
                              ncclDataType_t datatype, int root, ncclComm_t comm,
                              cudaStream_t stream, const ncclCollConfig_t *config));
CINCH_NCCL(ncclScatter, (const void *sendbuff, void *recvbuff, size_t count,
                         ncclDataType_t datatype, int root, ncclComm_t comm,
                         cudaStream_t stream));
CINCH_NCCL(ncclScatterConfig, (const void *sendbuff, void *recvbuff, size_t count,
                               ncclDataType_t datatype, int root, ncclComm_t comm,
                               cudaStream_t stream, const ncclCollConfig_t *config));

/* Messages. Those that need one another to make progress go into a group. */

CINCH_NCCL(ncclSend, (const void *sendbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream));
CINCH_NCCL(ncclRecv, (void *recvbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream));
/* Not supported. */
CINCH_NCCL(ncclPutSignal, (const void *localbuff, size_t count, ncclDataType_t datatype, int peer,
                           ncclWindow_t peerWin, size_t peerWinOffset, int sigIdx, int ctx,
                           unsigned int flags, ncclComm_t comm, cudaStream_t stream));
CINCH_NCCL(ncclSignal, (int peer, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm,
                        cudaStream_t stream));
CINCH_NCCL(ncclWaitSignal, (int nDesc, ncclWaitSignalDesc_t *signalDescs, ncclComm_t comm,
                            cudaStream_t stream));

/* Groups belong to a thread, and nest. The outermost end runs what was called since the outermost
 * start; if a call in between failed, it returns that failure and nothing runs. */

CINCH_NCCL(ncclGroupStart, (void));
CINCH_NCCL(ncclGroupEnd, (void));
/* Ends a group without running it; estimates its time by the model that chooses algorithms. */
CINCH_NCCL(ncclGroupSimulateEnd, (ncclSimInfo_t *simInfo));

/* Not supported. */
CINCH_NCCL(ncclSetEncryption, (const ncclEncryptionConfig_t *config));
CINCH_NCCL(ncclParamBind, (ncclParamHandle_t *out, const char *key));
CINCH_NCCL(ncclParamGetI8, (ncclParamHandle_t h, int8_t *out));
CINCH_NCCL(ncclParamGetI16, (ncclParamHandle_t h, int16_t *out));
CINCH_NCCL(ncclParamGetI32, (ncclParamHandle_t h, int32_t *out));
CINCH_NCCL(ncclParamGetI64, (ncclParamHandle_t h, int64_t *out));
CINCH_NCCL(ncclParamGetU8, (ncclParamHandle_t h, uint8_t *out));
CINCH_NCCL(ncclParamGetU16, (ncclParamHandle_t h, uint16_t *out));
CINCH_NCCL(ncclParamGetU32, (ncclParamHandle_t h, uint32_t *out));
CINCH_NCCL(ncclParamGetU64, (ncclParamHandle_t h, uint64_t *out));
CINCH_NCCL(ncclParamGetStr, (ncclParamHandle_t h, const char **out));
CINCH_NCCL(ncclParamGet, (ncclParamHandle_t h, void *out, int maxLen, int *len));
CINCH_NCCL(ncclParamGetParameter, (const char *key, const char **value, int *valueLen));
CINCH_NCCL(ncclParamGetAllParameterKeys, (const char ***table, int *tableLen));
void ncclParamDumpAll(void);
void pncclParamDumpAll(void);

#undef CINCH_NCCL

#ifdef __cplusplus
}
#endif

#endif
