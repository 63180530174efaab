//! # One allreduce, from the call to the last byte
//!
//! Four ranks call `comm.all_reduce(&input, &mut output, ReduceOp::Sum)`.
//!
//! 1. **The call** becomes a [`crate::comm::Call`]: collective, type, operation, count, and what
//!    the caller insists on (codec, algorithm). Its buffers are checked against it before anything
//!    moves; a wrong length or a lossy codec under a maximum is an error here, and the
//!    communicator lives on.
//! 2. **The plan.** Codec and algorithm are chosen by a pure function of the call and of what all
//!    ranks know alike, so every rank chooses the same. The schedule of one pass is generated for
//!    this rank alone, in time proportional to its own steps.
//! 3. **The signature.** Collective, type, operation, count, root, codec, algorithm and the number
//!    of calls before this one travel in the header of every message
//!    ([`crate::types::CallSignature`]). A receiver that expects another one raises the mismatch
//!    error; nobody waits for data that will never fit.
//! 4. **Passes.** A message is longer than the slots. The schedule describes one pass over some
//!    chunks; [`crate::schedule::walk`] repeats it over the message and overlaps passes: pass p
//!    runs stage s at time p + s. So a rank sends the next pass's contributions before it waits
//!    for this pass's sums.
//! 5. **A step.** `recv_reduce_copy_send` of a two-shot, as an example. For each tile that fits
//!    into the first-level cache: load this rank's elements, widened to the accumulator type; add
//!    the decoded message of each peer, in rank order; divide if it is an average; encode into
//!    the free slot of the first receiver; decode that encoding into the output. The wire bytes
//!    are then copied for the other receivers. The input is read once, the output written once.
//! 6. **The slot.** Publishing is one release store of the slot counter (shared memory) or a
//!    vectored write (TCP). The receiver finds header and payload, checks the signature, and
//!    returns the slot as soon as its step has read it.
//!    Bytes that travel as they lie in the user's buffers need no slot where the transport copies
//!    them anyway: over TCP a raw chunk goes from the buffer to the kernel, and from the kernel to
//!    its place in the output, each in one copy (`engine::by_reference`).
//! 7. **Forwarding.** `recv_copy_send` passes the received bytes on as they are. No rank encodes
//!    what was encoded for it: that, and the owner's decoding of its own encoding in step 5, is
//!    why all ranks end with the same bits.
//! 8. **Waiting.** When no step can go on, the rank spins, then yields its core, then sleeps until
//!    a peer wakes it. Every wait looks at the communicator's fault and at a deadline.
//! 9. **The report** says what ran: codec, algorithm, transport, channels, bytes sent, and what
//!    the encode pass learnt about the input on its way (largest magnitude, sum of squares,
//!    saturated and non-finite elements; on GPUs that is not known).
//!
//! Bytes take no other path. A new collective, codec or transport changes one of the boxes above
//! and none of the arrows.
//!
//! # A codec that is left to the model
//! With `CINCH_CODEC=auto:dynamic8`, or `Call::auto`, step 2 makes candidates with and without the
//! codec and takes the cheapest of all. A communicator whose setting is `auto:` measures when it is
//! made, in a few milliseconds: encode, decode and addition on its core, and trips of two sizes to
//! a partner on another host where there is one, all pairs at once; messages inside hosts cost
//! what the constants say there. Each cost is a line
//! T(x) = A + B x ([`crate::plan::MeasuredCosts`]). Ranks exchange their lines and go by the
//! largest of each: a rank that went by what it alone has measured would wait for data that the
//! others never send. The same lines choose the number of chunks: over TCP a finer cut hides work
//! behind the wire until messages cost more than it gains; in shared memory the cores carry the
//! bytes, and there is nothing to hide behind. On GPUs the costs are the constants of their model.
//! `cinch bench --explain` prints both costs, the lines and the winner, the report what ran.
//! `auto:raw` measures for calls that ask for themselves and leaves all others raw.
//!
//! # Small calls of a group
//! All_reduces of a group up to `CINCH_FUSE_BYTES` that follow one another on a communicator and
//! have type, operator, codec and algorithm in common travel as one call over a gathered buffer of
//! up to 1 MiB. Which do follows from what all ranks know, never from addresses; therefore all ranks
//! must group them alike, or be set to `CINCH_FUSE_BYTES=0`: a rank that makes two of them in a group
//! makes another call than one that makes them by themselves, or a group of three. The signature has
//! their number and a digest of their counts, so ranks that differ get an error that says so. Each
//! tensor begins a block of its own, of the codecs on both levels, and fills its last one with its last
//! element; under a codec that goes by more than the extremes of a block (`onebit`, `terngrad`) only
//! tensors of whole blocks travel together. Every call gets its own report, with its share of the bytes
//! sent. Results are those of separate calls wherever arithmetic is exact; a rounded sum may differ in
//! its last bits, as it does between algorithms, since a longer message may have other owners, and what
//! is rounded at random draws other numbers.
//! Separate stay calls with error feedback or kept scales, which belong to a tensor; pre-multiplied
//! sums, whose factor one rank alone knows; calls of other collectives; and calls on GPUs, where
//! gathering and scattering would take a copy on the stream for each tensor, as long as the launch
//! that it saves, out of memory that a captured graph would have to keep. Inputs are gathered when the
//! calls before have ended, and outputs are there before the calls behind start, so that these may
//! depend on each other as in any group. Calls that travel together must not: that one reads what
//! another writes is found on the rank where it is so, before anything moves.
//!
//! # On a GPU
//! `comm.call_on(&call, buffers)` comes to the same plan by the same function, whose candidates now
//! have a protocol and as many channels as fit the GPU. Then:
//! 1. `engine::gpu::pack` writes the steps for the kernel: chains joined, places resolved, waits
//!    that do not concern each other taken together.
//! 2. `engine::gpu::order` lets the caller's stream wait for the communicator's last launch, if that
//!    was on another stream or a graph's.
//! 3. One launch on the caller's stream, the packed steps in its argument. The call returns. On Hopper
//!    and newer the GPU begins it while what is ahead in the stream still ends (programmatic dependent
//!    launch; `CINCH_EARLY_LAUNCH`): it takes its steps from the argument, and then waits until that has
//!    ended, before it touches any memory (`kernels/ptx/grid.cuh`).
//! 4. `kernels/exec/interpret.cuh` walks the steps as the host's engine does, one channel a block;
//!    its warps wait, move data and publish side by side. Cursors live in device memory, so that a
//!    graph may replay the launch.
//! 5. What a kernel finds wrong it writes to host memory; the watchdog makes it the fault of the
//!    communicator, on all ranks, and ends all waits.
//!
//! ## Small messages
//! Walking steps takes time: 8 bytes are broadcast over 2 H200 in 3.5 us so, and in 2.0 by a kernel
//! without a schedule (`kernels/fused`), which small calls have. Each rank stores what it has for a peer
//! right into an area of the peer's box, with flags among the data, and polls its own: in packets of 8
//! bytes and as many of flag, or, where NVLink leads everywhere and all GPUs are of one kind of which
//! it is known that lines arrive whole, in lines of 120 and 8. There is no room to
//! be waited for: an area has two halves, used in turn, and a rank that has seen what all others sent in
//! the next call knows that they are through with this one. So each call lets every rank hear from every
//! other; in a broadcast or reduce those who have nothing for each other send an empty tile. Through
//! `linear8`, `dynamic8` and `minmax4` a warp encodes 512 elements at a time and sends them in such lines
//! (`kernels/fused/coded.cuh`), in 8 bits up to 6.8 MiB of fp32 over 8 GPUs, with the bits of the same schedule in one
//! pass. Flags carry
//! the number of the call, which lives in device memory: a graph may replay it; and a few bits of what the
//! call is: a rank that makes another one waits, and says for whom, and takes nothing for what it is not.
//!
//! ## Ranks on several hosts
//! A kernel neither knows of a network nor waits for one. To it a rank of another host is a peer
//! whose boxes lie in pinned host memory; both boxes are this host's, and a thread of the rank, the
//! proxy (`engine::gpu::proxy`), stands in for the peer:
//!
//! ```text
//! kernel -> outbox, pinned -> proxy -> TCP or RDMA -> proxy -> inbox, pinned -> kernel
//!           tail moves        copies                  copies  tail moves
//! ```
//! 1. It polls the tails of all outboxes. A slot does not say how many bytes of it are used, so the
//!    proxy runs the plan too: the first message of a launch on each lane carries the signature,
//!    from which it makes the same plan and walks the same steps (`engine::gpu::course`). Nobody
//!    tells it of calls. Hence replays of a graph are carried like any launch.
//! 2. It copies the payload into a slot of the host transport, gives the kernel its slot back, and
//!    sends. On the other side it copies what came, once the kernel there has room, and moves the
//!    tail. Over TCP the boxes are what is sent from and received into. What came has the length
//!    that its call has there, or is refused before it is copied; the signature the kernel checks.
//! 3. Each lane is a connection of its own: a lane whose kernel is late holds up no other. Slots in
//!    both boxes and in the transport add up; there is no other flow control.
//!
//! Only slots with counters cross hosts: calls in which ranks of several hosts take part use
//! protocol simple, whatever `CINCH_PROTO` says. Ranks of one host keep peer memory, and a
//! hierarchical schedule sends most bytes there. With 8 lanes by default (`CINCH_GPU_CHANNELS`)
//! slots are large, since a message costs the proxy the same whatever its size. A kernel has one
//! codec for a call, so a codec by level is for host buffers and refused here.
//!
//! How the proxy waits, and what that costs, stands at `engine::gpu::proxy`: some microseconds while
//! there is work, a look each millisecond where there is none.
