//! # Memory ordering
//!
//! Every pair of an acquire and a release is marked `SYNC POINT name` on both sides, with what it
//! publishes. `grep -rn "SYNC POINT"` lists them all; a name that appears once is a defect.
//!
//! **Slots.** A connection has one producer and one consumer, each a type that cannot be cloned.
//! The producer writes header and payload with plain stores, then stores the message's number into
//! the slot's own line with release. The consumer loads that number with acquire, and then reads
//! the header beside it and the payload: one line crosses between the cores where a counter of its
//! own would need two. The way back is `head`: the consumer's release says that it has finished
//! reading, and the producer's acquire makes sure that no write overtakes that. Numbers are 64-bit
//! and never wrap, so there is no ABA problem and no reset to order. Each lies in the memory of
//! the side that polls it: a poll stays in the poller's cache until the other side writes.
//!
//! **RDMA.** A message is one write of line and payload with an immediate, or, beyond 8 KiB, a write
//! of the payload and then one of the line with an immediate, on the same reliable queue pair. Writes
//! of one queue pair take effect in the order in which they were posted, and the receiver's completion
//! of a write with an immediate is reported only when all of it, and all before it, is in memory
//! (InfiniBand specification, volume 1, chapter 9). So the receiver polls completions and no slot:
//! what memory shows before the completion, and in which order, is nobody's promise. Polling the
//! queue is the acquire, posting the release: libibverbs has the barriers. With several queue pairs
//! messages overtake each other; the immediate is the message's number, and the receiver waits for the
//! next. Credits go the other way as writes of nothing with an immediate that holds the count of slots
//! taken: their completion ends the sender's sleep as a message ends the receiver's, and no memory is
//! polled. A slot is written again when its credit is
//! there, even if the device has not reported the write of its last message as done: the peer has it
//! whole, and drops what may still be sent again.
//!
//! **What a peer writes is a hint.** Another process may write anything at any time. A counter is
//! bounded by local geometry before it is used, a header is copied out before it is checked, and
//! codecs decode any bytes to some numbers. Two reads of a payload may differ; nothing but wrong
//! numbers follows from it.
//!
//! **Sleeping.** A rank that sleeps must not miss the store that it waits for. It writes
//! "sleeping", fences, and reads the counters once more; a peer writes its counter, fences, and
//! reads "sleeping". The fences are sequentially consistent on both sides, because store then load
//! is the one order that acquire and release do not keep: at least one of the two sees the other.
//! Where each rank has a core of its own, peers leave their fence out: it waits for the message's
//! stores to cross between the cores, which costs as much as the message. A ring may then miss a
//! rank that announces itself in the same moment, so naps last at most a millisecond there; no
//! wait depends on a ring alone.
//!
//! The sleep itself is a futex on a word that every ring changes, so a ring between the last look
//! and the sleep makes the kernel refuse to sleep.
//!
//! **Kernels of one stream.** A kernel of a call begins while the one ahead of it ends, and waits for that
//! end, and for its writes, before it touches memory. All of a call's kernels do, on every way: what comes
//! behind one takes its end for the end of everything ahead of it, as far as that are kernels of calls, or
//! others that begin behind what is ahead of them or wait for it. A kernel lets the next one begin only
//! when none of its threads waits for a peer any more, since that one takes room that a peer on the same GPU
//! may need; it may still be writing its output.
//!
//! **The fault.** The first writer of [`crate::sync::Fault`] sets the reason, and a deadline if it
//! has only heard of another rank's end, then the state with release. Wait loops look at the state
//! with a relaxed load, which costs nothing; who sees it set goes through
//! [`crate::sync::Fault::check`] or [`crate::sync::Fault::ends_waits`], whose acquire makes reason and
//! deadline visible.
//!
//! **Models.** The lock-free parts and the fault use the atomics and locks of `crate::sync`, loom's under
//! `--cfg loom`. Tests whose names begin with `loom_` explore all interleavings up to a bound:
//! `scripts/test models`. x86-64 hides missing barriers; loom does not.
