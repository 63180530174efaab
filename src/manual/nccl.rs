//! # The drop-in: `libnccl.so.2`
//!
//! `nccl/` builds a library with NCCL's interface on this crate. A program that was built for NCCL
//! runs on it unchanged: preload it (`LD_PRELOAD=/path/to/libnccl.so.2`), or name it where a
//! framework asks for a path (`VLLM_NCCL_SO_PATH`). `include/nccl.h` is its header; programs that
//! were compiled with NVIDIA's need no other. With nothing set it is exact. What it takes of NCCL's
//! environment, and its own defaults, are in [`codec_rules`](super::codec_rules).
//!
//! **Where buffers are.** On the GPU of the thread's current context when a communicator is made.
//! `CINCH_DEVICE=host` puts them in host memory, with NULL as stream: for tests and machines without
//! a GPU. Several ranks may share a GPU; those of one process need `CUDA_DEVICE_MAX_CONNECTIONS=32`, that
//! their streams do not queue behind each other, and streams on which something has run before: the
//! first kernel of a stream may wait for all that run on the GPU. A communicator has 32 ranks on GPUs at
//! most, of all hosts together; between hosts their data goes through pinned memory and a thread of each
//! rank.
//!
//! **Version.** `ncclGetVersion` answers `CINCH_NCCL_VERSION` (22809): programs choose features by
//! it, and above 22900 they expect windows, which are not there.
//!
//! **Deadlines.** NCCL has none, so the drop-in waits an hour for ranks to join and a day for a
//! peer in a call, unless `CINCH_INIT_TIMEOUT` and `CINCH_TIMEOUT` say otherwise. A rank that dies
//! is an error at once.
//!
//! **Codes.** `ncclGetLastError` has the sentence of the thread's last failure, in memory that is
//! never freed.
//!
//! | kind of error | code |
//! | --- | --- |
//! | invalid argument | `ncclInvalidArgument` |
//! | invalid usage, unsupported, ranks that disagree | `ncclInvalidUsage` |
//! | the system or the driver | `ncclSystemError` |
//! | a peer died or left, a deadline passed, an abort | `ncclRemoteError` |
//! | a defect of the library | `ncclInternalError` |
//!
//! **Groups.** A call that fails inside a group returns its error, and so does the outermost
//! `ncclGroupEnd`; nothing of the group runs then. Communicators that a group makes are connected
//! at its end, at once, before its other calls run; if one cannot be, none is made. Those that it
//! ends are left behind its other calls. On a
//! non-blocking communicator, init, split and finalize return `ncclInProgress` and go on in the
//! background; everything else returns when it is queued, as on any other. `ncclCommGetAsyncError`
//! says `ncclInProgress` meanwhile, and never of a blocking communicator.
//!
//! **Leaving.** `ncclCommFinalize` and `ncclCommDestroy` wait until what this rank called has ended, and
//! for no rank but where that does: ranks may end communicators in any order, and one that ends without a
//! word, or never ends, is no error to them. What a communicator holds is kept until all its ranks have
//! left or are gone, and freed then in the background; on a GPU where the process uses others by a call that
//! makes or ends one there (an abort ends none) while none has calls under way, or where many wait. What
//! a graph holds that is there longer goes with the graph. The end of the process waits for that one second at most. In
//! a group they wait at its end; if the group fails, a finalized one is open again, and a
//! destroyed one ends without waiting. `ncclCommAbort` waits for no rank, and at most 2 s for kernels that
//! it has told to stop. On host memory it leaves in
//! good order where it cuts no call short: others still get what was sent, and fail when they miss
//! this rank; else, and on GPUs, they are told at once. `ncclCommRevoke` ends a split that waits for ranks, too, and
//! returns when nothing of the communicator runs on this rank, on a GPU at most 10 s later; it can then be split, shrunk, destroyed
//! or aborted.
//!
//! **Numbers.** As in [`numerics`](super::numerics). `ncclAvg` of float16 and float8 multiplies each
//! contribution by 1/n first, as NCCL's does; other types divide the sum. Sums of float8 beyond its range
//! are infinite (e5m2) or NaN (e4m3), where NCCL's are the largest number: overflow shows.
//!
//! **Two libraries.** A program that also opens `libnccl.so`, without the number (TensorRT-LLM's symmetric
//! memory does), finds NVIDIA's there, which takes no handle of this one. Put a folder in front of
//! `LD_LIBRARY_PATH` in which both names are links to this library.
//!
//! **Splitting.** Without a config a new communicator has its parent's; with one, nothing of it, its
//! name and codec rules neither. What ends the parent ends a split that is under way. Once it is made, the new
//! communicator goes on when its parent fails, is aborted or revoked; with `splitShare` 1 in its
//! config it fails with it.
//!
//! **A codec for one call.** `ncclCollConfig_t.ext` is a list of options; those with `key.vendorId`
//! 0xC14C48 are ours, and NVIDIA's library ignores them.
//!
//! | `key.optionId` | value | what it does |
//! | --- | --- | --- |
//! | 1, `CINCH_NCCL_OPTION_CODEC` | `val.s`, a name with parameters as `linear8:block=128`, or `off` | the codec of this call; an error where it cannot carry it |
//! | 2, `CINCH_NCCL_OPTION_BLOCK` | `val.i` | elements that share a scale, of the codec named beside it |
//! | 3, `CINCH_NCCL_OPTION_OFF` | `val.i`, 1 | the call is exact, whatever else is set |
//!
//! **Graphs.** Replays take their place among a communicator's other calls when they are launched, on
//! whatever stream; with `NCCL_GRAPH_MIXING_SUPPORT=0` or `graphUsageMode` 0 or 1 the program orders
//! them. On Hopper and newer a call's kernel begins while the kernel ahead of it ends, and the edge
//! between the two says so: a program that reads a graph's edges by functions that know no such ones
//! (`cudaErrorLossyQuery`; PyTorch before its change 168305 does with
//! `graph_capture_record_stream_reuse`) needs `CINCH_EARLY_LAUNCH=0`. So does one whose own kernels are
//! launched with that attribute and do not wait (`cudaGridDependencySynchronize`), ahead of a call or
//! behind it: those behind it would read what it still writes, those ahead of it hide what is ahead of
//! them.
//!
//! **Hints.** Fields of `ncclConfig_t` and `ncclCollConfig_t` that steer NVIDIA's implementation are
//! checked and change nothing, but for `blocking`, `maxCTAs`, `commName`, `splitShare`,
//! `graphUsageMode`, `algSelection` and `ext`.
//! Registering a buffer changes nothing either: kernels work on any memory of their GPU. A window
//! is NULL, as NCCL has it where windows are not supported. Buffers in pinned or managed memory are
//! refused.
//!
//! **Not supported.** These functions are there because programs do not load without them. They
//! return `ncclInvalidUsage`, or a team or a number of zeros.
//!
//! | functions | why |
//! | --- | --- |
//! | `ncclDevCommCreate` `ncclDevCommDestroy` `ncclLLA2ACreateRequirement` `ncclLsaBarrierCreateRequirement` `ncclGinBarrierCreateRequirement` `ncclGinInboxA2ACreateRequirement` `ncclGinOutboxCreateRequirement` | kernels of a program cannot communicate; call collectives from the host |
//! | `ncclTeamWorld` `ncclTeamLsa` `ncclTeamRail` `ncclTeamCft` `ncclTeamCftMultimem` | kernels of a program cannot communicate, so there are no teams for them |
//! | `ncclLLA2ACalcSlots` `ncclTeamRankToWorld` `ncclTeamRankToLsa` | kernels of a program cannot communicate, so there is nothing to count |
//! | `ncclWinGetUserPtr` `ncclGetLsaDevicePointer` `ncclGetLsaMultimemDevicePointer` `ncclGetMultimemDevicePointer` `ncclGetPeerDevicePointer` `ncclGetCftDeviceLeInfo` `ncclGetMultimemDeviceLeInfo` `ncclGetPeerDeviceLeInfo` | windows are NULL and have no addresses; pass buffers to collectives as they are |
//! | `ncclPutSignal` `ncclSignal` `ncclWaitSignal` | one-sided messages are not there; use ncclSend and ncclRecv |
//! | `ncclCommGrow` `ncclCommGetUniqueId` | a communicator gets no more ranks; make a new one |
//! | `ncclCommSuspend` `ncclCommResume` | a communicator's memory cannot be taken from it; destroy it and make a new one |
//! | `ncclCommQueryProperties` | ask ncclCommCount, ncclCommUserRank and ncclCommCuDevice |
//! | `ncclSetEncryption` | connections are authenticated and not encrypted; use trusted networks |
//! | `ncclParamBind` `ncclParamGet` `ncclParamGetI8` `ncclParamGetI16` `ncclParamGetI32` `ncclParamGetI64` `ncclParamGetU8` `ncclParamGetU16` `ncclParamGetU32` `ncclParamGetU64` `ncclParamGetStr` `ncclParamGetParameter` `ncclParamGetAllParameterKeys` | NCCL's parameters are not there; `cinch info` shows the settings in effect |
//! | `ncclParamDumpAll` | NCCL's parameters are not there, and nothing is dumped; `cinch info` shows the settings |
