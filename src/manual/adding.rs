//! # Adding a codec, an algorithm, a transport
//!
//! These axes are independent: a new member is one folder or file and one line in a table, and the
//! conformance suite of its folder runs on it without a change.
//!
//! ## A codec
//! 1. `types/codec_spec.rs`: one line in the table of [`crate::types::CodecKind`], with a number
//!    that was never used, a name, and which parameters may follow it.
//! 2. `codec/NAME/`: the scalar form first. It is the specification: encode is true nearest (ties
//!    as the format has them), an all-zero block decodes to +0, a non-finite element reaches the
//!    decoder as something not finite, no absolute epsilon, no state. One line in
//!    [`crate::codec::build`] makes it known, one in `plan/cost.rs` says what it costs.
//! 3. State `error_bound` and `description` honestly: tests, `cinch bench` and other devices go by
//!    them. The conformance suite, `cinch codecs`, the benchmark and the collectives' tests run
//!    through [`crate::CodecSpec::samples`] and so find the codec by themselves.
//! 4. Vector forms equal the scalar one bit for bit, on every bit pattern, tail and alignment.
//! 5. A change of an existing layout raises [`crate::types::FORMAT_VERSION`]: old and new ranks
//!    then refuse each other at the first message instead of decoding noise.
//! 6. The bound in `tests/oracle`, which is written down a second time on purpose.
//! 7. GPUs refuse it until it has kernels: `kernels/codec/NAME.cuh`, a Format as
//!    `kernels/codec/codec.cuh` describes it, of which a lane holds 16 elements;
//!    `kernels/entry/coded_NAME.cu` and a line in `kernels/entry/codec.cu`; its words in
//!    [`crate::codec::kernel_params`], and then a line in [`crate::codec::KERNEL_CODECS`], from which
//!    names, refusals and tests follow. Formats that differ by a number alone share kernels
//!    ([`crate::codec::kernel_family`]): each costs the library about 350 KB. Small messages of one have a
//!    fused kernel if it is in [`crate::codec::FUSED_CODECS`], too, and `kernels/entry/oneshot_NAME.cu`
//!    makes it: formats with numbers of blocks, and codes of 8 bits or fewer.
//!
//! ## An algorithm
//! 1. `types/algorithm.rs`: number and name. `schedule/NAME.rs`: a header with phases, messages
//!    and bytes sent by a rank, and a generator of one rank's steps in one pass. Pure, no I/O, no
//!    randomness, time proportional to the rank's own steps.
//! 2. One line in the table of generators. The verifier then proves, for many rank counts, that
//!    each output chunk holds each contribution exactly once, that sends meet receives in order on
//!    each connection, and that the slots that `Pattern::slots` says are enough.
//! 3. Sums are formed in an order that does not depend on arrival. If several ranks form the same
//!    sum each for itself, they take their own contribution through the codec.
//! 4. The cost model learns its counts. Selection stays a function of the call and of what all
//!    ranks know alike.
//!
//! ## A transport
//! 1. `types/algorithm.rs`: a new [`crate::types::TransportKind`]. `transport/NAME/`: the traits
//!    [`crate::transport::SendEnd`], [`crate::transport::RecvEnd`] and
//!    [`crate::transport::Waiter`]. Nothing in them blocks but the waiter, and that wakes.
//! 2. Connecting proves on both sides that the other belongs to the communicator before anything
//!    else is read from it, and has a deadline.
//! 3. A broken connection is a remote error that names the peer; an impossible header is a
//!    mismatch error. After drop no descriptor, thread, mapping or name is left.
//!    What a device or a driver can refuse is refused in a test: `sys` has a stand-in beside what it
//!    opens at run time (`sys/cuda/mock`, `sys/ibverbs/fake`), which counts what is not given back.
//! 4. The conformance suite, `tests/collectives.rs`, `tests/kills.rs` and `tests/mismatch.rs` take
//!    the new kind in their lists.
