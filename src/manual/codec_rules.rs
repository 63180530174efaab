//! # Which calls compress
//!
//! Nothing does unless somebody asks. Three levels may ask, and the narrowest that speaks wins:
//!
//! | level | how |
//! | --- | --- |
//! | process | `CINCH_CODEC=dynamic8` |
//! | communicator | `CINCH_CODEC_RULES`, by the communicator's name; or the program that makes it |
//! | call | `Call::codec`, `cinch_call_t.codec` |
//!
//! `off`, by process or by rule, is final: no rule and no call turns compression on again. `raw` is
//! the exact codec, which something narrower may replace. A rule that says `off` beats the program;
//! otherwise a program that speaks of one communicator is narrower than a pattern of names.
//!
//! ```text
//! CINCH_CODEC_RULES="dp*=dynamic8,tp*=off,emb=linear8:min=64K:for=all_gather+reduce_scatter"
//! ```
//!
//! **What process and communicator ask for** carries all_reduce and reduce_scatter of f32, f16 and
//! bf16 under sum, average and pre-multiplied sum, from `CINCH_CODEC_MIN_BYTES` of input on.
//! Everything else stays exact, and is counted by reason ([`crate::comm::Exact`]). Other collectives
//! are named, with `CINCH_CODEC_COLLECTIVES` or `for=`: they carry weights, tokens, indices and
//! pickles as well. `CINCH_CODEC_LINKS=network` leaves communicators alone whose ranks are all on
//! one host.
//!
//! **What a call asks for** runs at any size and in any collective, or is an error where the codec
//! cannot carry it.
//!
//! **Agreement.** Whether a call compresses follows from the call and from settings alone. Ranks
//! compare the settings that are in effect when they join; a difference is an error that names two
//! ranks and both values. Unknown codecs, collectives and malformed rules are errors of joining too.
//!
//! **Samples.** With `CINCH_CODEC_SAMPLE=K` every K-th coded all_reduce or reduce_scatter of a
//! communicator is also run exactly, on a slice of at most 4,096 elements that lies elsewhere each
//! time. The relative RMS error goes to the log (`CINCH_LOG=info`, subsystem `COLL`) and into the
//! counters; elements that are not finite are left out, and a slice that comes back without a finite
//! one where the exact sums have some is a warning and no sample. Beyond `CINCH_CODEC_BOUND` the
//! communicator goes on without its codec, and warns. All ranks find the same number, and so decide
//! alike, without asking each other. On a GPU the verdict is taken when the next sample is due: a call
//! waits then for the sample before it, and for nothing else; if that does not end within
//! `CINCH_TIMEOUT`, the communicator fails. Captured calls are not sampled, nor are calls
//! on host memory that are in groups, even alone: with samples, all ranks must make such a sum in a group,
//! or none. On a GPU a group must not hold more than K coded sums of one communicator.
//!
//! **Counters.** [`crate::Communicator::codec_stats`] and `cinch_comm_stats`: coded calls, exact
//! calls by reason, bytes sent, bytes that would have been sent without a codec, samples. A communicator
//! says them in its last line of the log (`CINCH_LOG=info`).
//!
//! # NCCL's environment
//!
//! A program that was built for NCCL gets its settings from [`crate::Config::for_nccl`]: first our
//! own names, then those of NCCL that mean something here ([`crate::config::NCCL_NAMES`]), then
//! defaults that such programs count on: the GPU of the current context, codecs from 1 MiB, a
//! day's patience with a rank that is late. Where one of ours and one of NCCL's differ, ours counts
//! and a warning says so. A value of NCCL's that means nothing here is left out with a warning, a
//! name that has no effect with a line at `INFO`. Names that begin with `CINCH_CODEC` and are none
//! are errors: such a run would be exact by mistake.
//!
//! | NCCL | here |
//! | --- | --- |
//! | `NCCL_SOCKET_IFNAME`, `NCCL_SOCKET_FAMILY`, `NCCL_COMM_ID` | `CINCH_` with the same name |
//! | `NCCL_P2P_DISABLE`, `NCCL_P2P_LEVEL=LOC` | `CINCH_P2P_DISABLE` |
//! | `NCCL_SHM_DISABLE` | `CINCH_SHM_DISABLE` |
//! | `NCCL_GRAPH_MIXING_SUPPORT` | `CINCH_GRAPH_MIXING` |
//! | `NCCL_MAX_CTAS`, `NCCL_MAX_NCHANNELS` | upper bounds beside `CINCH_GPU_CHANNELS`, which raise nothing |
//! | `NCCL_ALGO=Ring` or `Tree`, `NCCL_PROTO=Simple`, `LL` or `LL128` | `CINCH_ALGO`, `CINCH_PROTO` |
//! | `NCCL_DEBUG`, `NCCL_DEBUG_SUBSYS`, `NCCL_DEBUG_FILE` | `CINCH_LOG`, `CINCH_LOG_SUBSYS`, `CINCH_LOG_FILE` |
//! | `NCCL_IB_DISABLE`, `NCCL_IB_HCA`, `NCCL_IB_TIMEOUT`, `NCCL_IB_SL`, `NCCL_IB_TC` | `CINCH_` with the same name |
//! | `NCCL_IB_GID_INDEX`, `NCCL_IB_RETRY_CNT`, `NCCL_IB_QPS_PER_CONNECTION` | `CINCH_IB_GID`, `CINCH_IB_RETRY`, `CINCH_IB_QPS` |
//! | `NCCL_NET=Socket` or `IB` | `CINCH_IB_DISABLE` |
//! | `NCCL_NET_GDR_LEVEL`, `NCCL_TOPO_FILE`, `NCCL_CONF_FILE` | nothing; said at `INFO` |
//!
//! Lines of the log then look as NCCL's do: `host:pid:tid CINCH INFO text`.
