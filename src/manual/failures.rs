//! # Failures
//!
//! No call waits for ever. It returns a result, or an error with a kind and a sentence that names
//! ranks, hosts, processes and numbers. The first failure decides: it raises the communicator's
//! [`crate::sync::Fault`], is announced to the other ranks, and every wait, there and here, ends
//! with that same reason. After it the communicator is good for abort and drop only, and the
//! output of the call is undefined.
//!
//! **Data comes before faults.** A rank that aborts or dies right after a call has done its part of
//! it, and others may still be in that call. They hear of the end, which refuses new calls at once;
//! waits look for data first, and go on for one heartbeat (`CINCH_HEARTBEAT`), at most 0.2 s: what is on
//! its way arrives, and who has all it needs completes. Only who still lacks something then gets the
//! error. What happens on a rank itself, its own abort for one, ends its waits at once, and so does
//! everything that is wrong with the calls themselves, on all ranks.
//!
//! | what happens | every other rank gets | how it is found |
//! | --- | --- | --- |
//! | a rank dies | remote, naming rank, host and pid | its control connection ends; a missed heartbeat and a look at the process for large ones, whose end the kernel delays |
//! | a rank is stopped | nothing at first, then timeout | deadline of the call (`CINCH_TIMEOUT`); going on before that loses nothing |
//! | a host is cut off | remote, naming the rank | TCP: data that nobody acknowledges for 3 s; RDMA: a write that is not answered within `CINCH_IB_TIMEOUT` and `CINCH_IB_RETRY`, 1.1 s by default, and a probe every 0.5 s where a rank waits and nothing is on its way |
//! | a device refuses or fails work | remote or system, naming rank, port, status, its cause and what to do | the completion's status; an event of the device |
//! | ranks disagree about a call | mismatch, with both ranks and both values | the signature in the first message; notes of calls over the control connections where no data is exchanged |
//! | a rank aborts | aborted | announced; also by communicators split from this one |
//! | an impossible argument | invalid argument, on this rank only | before anything moves; the communicator lives on |
//! | a stranger connects | nothing | it must prove knowledge of the job's secret, within a bounded time and 96 bytes |
//!
//! Between GPUs of several hosts a proxy sees the connection end. It becomes the fault of those who
//! wait for it: a rank whose kernels send, or whose calls are in flight, 200 ms later, unless the
//! control connection has told of a better cause by then. The fault, at the end of its grace if it has
//! one, sets the abort word that kernels poll. In the replay of a graph, of whose calls the host knows
//! nothing, a rank that only receives has the control connection and the kernel's own deadline. The
//! proxy ends with the communicator, within a second or with a warning.
//!
//! A rank that leaves in good order says goodbye; what then happens to its connections is no
//! failure. Waiting for its data is one: in memory of one host 0.3 s later, when all that it published
//! is surely seen; over a network when the connection ends, behind its last byte; for a kernel, which
//! alone knows, at its own deadline. A rank whose communicator had failed before it left says so first.
//!
//! **RDMA.** Seven retries mean for ever to some devices, so `CINCH_IB_RETRY` ends at 6: a dead peer
//! always becomes an error. A port that goes down is a warning in the log at once, and part of the
//! error if it does not come back within that time. A rank that leaves says so over each queue pair,
//! after its last message, and waits at most 0.2 s for what is on its way. Where nothing asks for RDMA
//! and a rank cannot use it, or not reach another by it, all ranks use TCP, and the log says which rank
//! and why. Each queue pair is tried with a write of nothing before the ranks agree, since those of ports
//! on networks apart are connected all the same.
//!
//! **Left behind.** Nothing: no descriptor, thread, mapping, queue pair, memory region or name, after drop and after the
//! crash of a peer. Shared memory is an anonymous sealed file that was never in a file system, so
//! there is nothing to clean up after a crash. Sealed, because a peer that could shrink it could
//! kill its neighbours.
//!
//! **Forks.** A child that the program forks, a data loader's worker say, closes its copies of the
//! library's sockets before `fork` returns in it: a rank's end is seen at once although its
//! workers live on. Communicators that were made before are dead there: calls fail with invalid
//! usage, abort and drop do nothing, and the parent goes on. The child may make its own. Children
//! of `vfork`, `posix_spawn`, `_Fork` and bare `clone`, which run no handlers, are expected to
//! exec, which closes everything. Memory that is registered for RDMA is kept from children
//! (`ibv_fork_init`) where the kernel does not copy it for them; a warning says where that fails.
//!
//! **Measured** by `CINCH_TEST_KILLS=200 cargo test --test kills -- --nocapture` (kills at random
//! moments, 4 to 8 ranks, shared memory and TCP) and
//! `CINCH_TEST_MISMATCHES=1000 cargo test --test mismatch -- --nocapture`. Both run in a short form
//! with every `cargo test`; `CINCH_TEST_SEED` repeats a run.
//!
//! **Not promised:** protection from a rank that holds the secret and lies on purpose beyond memory
//! safety; timing on a machine that is overloaded.
