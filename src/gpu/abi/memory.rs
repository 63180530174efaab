//! Structs in memory that the host and all kernels of a rank share: peer buffers, cursors, and the
//! control words. The memory exists as long as the communicator.

use crate::config::MOST_GPU_CHANNELS;

/// Largest number of ranks of a communicator with GPU buffers, over all hosts.
pub const MAX_RANKS: usize = 256;
/// Largest number of ranks with which one launch exchanges messages. A communicator of at most as many ranks numbers
/// them by their ranks, this rank included.
pub const MAX_PEERS: usize = 32;
/// Largest number of channels between two ranks.
pub const MAX_CHANNELS: usize = MOST_GPU_CHANNELS;
/// Bytes of a line: a slot's header, the distance between counters, and the alignment of all offsets in
/// a peer buffer.
pub const LINE_BYTES: usize = 128;
/// Number of 64-bit words in a call's signature.
pub const SIGNATURE_WORDS: usize = crate::types::SIGNATURE_WORDS;
/// Number of kernel protocols that have FIFOs: simple, ll and ll128.
pub const PROTOCOLS: usize = 3;

pub use crate::types::Protocol;

/// Counters of one channel and protocol in the peer buffer that rank `from` writes for rank `to`
/// (`cinch_counters`).
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Counters {
    /// Number of messages that `from` has published on this channel; used by the simple protocol
    /// only.
    pub tail: u64,
    /// Padding, so that `head` begins 64 bytes after `tail`, in another cache line.
    pub unused0: [u64; 7],
    /// Number of messages that `from` has received from `to` on this channel.
    pub head: u64,
    /// Padding to 128 bytes.
    pub unused1: [u64; 7],
}

/// The FIFOs of one protocol in a peer buffer (`cinch_fifo`). Offsets count bytes from the start of the
/// peer buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Fifo {
    /// Offset of channel 0's [`Counters`].
    pub counters: u64,
    /// Offset of slot 0's payload.
    pub slots: u64,
    /// Distance between two slots in bytes.
    pub stride: u32,
    /// Payload bytes of a slot, without flags.
    pub slot_bytes: u32,
    /// Number of slots of a channel.
    pub depth: u32,
    /// Number of channels, each with its own counters and slots.
    pub channels: u32,
}

/// Message counts of one connection (`cinch_cursor`). The array `[protocol][channel][rank]` has [`MAX_CHANNELS`]
/// channels and the communicator's number of ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Cursor {
    /// Messages sent since the communicator was made.
    pub sent: u64,
    /// Messages received since the communicator was made.
    pub received: u64,
}

/// Partial sums of a call's statistics, to which all thread blocks add (`cinch_statistics_sums`). Zero between calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct StatisticsSums {
    /// Finite numbers that saturated.
    pub saturated: u64,
    /// Elements that are not finite.
    pub non_finite: u64,
    /// Bits of the sum of squares, an fp64 number.
    pub sum_squares: u64,
    /// Bits of the largest magnitude, an fp64 number.
    pub abs_max: u64,
    /// Bits of the verdict.
    pub verdict: u32,
    /// Number of thread blocks that have finished the call.
    pub arrived: u32,
}

/// Bytes from the end of a rank's [`Cursor`] array to its [`StatisticsSums`].
pub const SUMS_OFFSET: usize = 64;

/// Returns the bytes of the [`Cursor`] array of a rank of `nranks`.
pub const fn cursors_bytes(nranks: usize) -> usize {
    PROTOCOLS * MAX_CHANNELS * nranks * size_of::<Cursor>()
}

/// Value of [`Trouble::kind`]: no failure.
pub const TROUBLE_NONE: u32 = 0;
/// Value of [`Trouble::kind`]: the kernel waited too long for `peer`, either for a message (`sends` = 0) or
/// for a free slot (`sends` = 1).
pub const TROUBLE_TIMEOUT: u32 = 1;
/// Value of [`Trouble::kind`]: `peer` runs another call, with the signature `theirs`.
pub const TROUBLE_MISMATCH: u32 = 2;

/// Value of [`Trouble::state`]: the report is complete.
pub const TROUBLE_COMPLETE: u32 = 2;

/// The report of a rank's first failure (`cinch_trouble`). A kernel writes it once. The host reads the
/// other fields after it has seen `state` = [`TROUBLE_COMPLETE`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Trouble {
    /// 0, then 1 while a kernel writes the report, then [`TROUBLE_COMPLETE`].
    pub state: u32,
    /// Value [`TROUBLE_NONE`], [`TROUBLE_TIMEOUT`] or [`TROUBLE_MISMATCH`].
    pub kind: u32,
    /// Rank that the kernel waited for.
    pub peer: u32,
    /// 1 if the kernel waited for a free slot, 0 if it waited for a message.
    pub sends: u32,
    /// Channel on which the kernel waited.
    pub channel: u32,
    /// Step of the schedule in which the kernel waited.
    pub step: u32,
    /// Pass of the schedule in which the kernel waited.
    pub pass: u32,
    /// Number of the [`KernelProtocol`](crate::types::KernelProtocol).
    pub protocol: u32,
    /// Counter value that the kernel waited for; in a fused kernel the number of the call.
    pub expected: u64,
    /// Counter value at the timeout; unused by fused kernels.
    pub seen: u64,
    /// Signature of this rank's call.
    pub mine: [u64; SIGNATURE_WORDS],
    /// Signature that the peer sent.
    pub theirs: [u64; SIGNATURE_WORDS],
}

/// Pinned host memory that the host and all kernels of a rank share (`cinch_control`). `mem`'s
/// `ControlWords` owns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Control {
    /// Set by the host to end all waits.
    pub abort: u32,
    /// Padding, so that `trouble` shares no cache line of 128 bytes with `abort`.
    pub unused: [u32; 31],
    /// Report of the rank's first failure: all zeros until a kernel fills it.
    pub trouble: Trouble,
}

/// The communicator, as a launch passes it to a kernel (`cinch_comm_view`).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CommView {
    /// Address of the peer buffer from each peer to this rank; 0 for this rank itself and beyond
    /// the last peer.
    pub inbox: [u64; MAX_PEERS],
    /// Address of the peer buffer from this rank to each peer; 0 for this rank itself and beyond
    /// the last peer.
    pub outbox: [u64; MAX_PEERS],
    /// Device memory with a [`Cursor`] for each protocol, channel and rank.
    pub cursors: u64,
    /// Device address of [`Control`].
    pub control: u64,
    /// Time limit of one wait, in nanoseconds.
    pub timeout_ns: u64,
    /// Number of this rank in the communicator.
    pub rank: u32,
    /// Number of ranks of the communicator.
    pub nranks: u32,
    /// FIFOs of the launch's protocol.
    pub fifo: Fifo,
    /// Number of the [`KernelProtocol`](crate::types::KernelProtocol).
    pub protocol: u32,
    /// Number of peers of the launch.
    pub npeers: u32,
    /// Rank of each peer.
    pub ranks: [u8; MAX_PEERS],
}

macro_rules! layout {
    ($type:ty: $bytes:literal, $($field:ident @ $at:literal),*) => {
        const _: () = assert!(size_of::<$type>() == $bytes);
        $(const _: () = assert!(std::mem::offset_of!($type, $field) == $at);)*
    };
}

mod asserts {
    use super::*;
    const _: () = assert!(SIGNATURE_WORDS == 5);
    layout!(Counters: 128, tail @ 0, head @ 64);
    layout!(Fifo: 32, counters @ 0, slots @ 8, stride @ 16, slot_bytes @ 20, depth @ 24, channels @ 28);
    layout!(Cursor: 16, sent @ 0, received @ 8);
    layout!(Trouble: 128, state @ 0, kind @ 4, peer @ 8, sends @ 12, channel @ 16, step @ 20,
        pass @ 24, protocol @ 28, expected @ 32, seen @ 40, mine @ 48, theirs @ 88);
    layout!(Control: 256, abort @ 0, trouble @ 128);
    layout!(CommView: 616, inbox @ 0, outbox @ 256, cursors @ 512, control @ 520,
        timeout_ns @ 528, rank @ 536, nranks @ 540, fifo @ 544, protocol @ 576, npeers @ 580, ranks @ 584);
}
