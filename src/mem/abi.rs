//! What `kernels/abi.h` says about the memory of a communicator, in Rust: same names, same sizes,
//! same places. Both sides assert them, so that neither can move alone.
//!
//! Device addresses are plain `u64`: nothing on the host may follow them.

use crate::config::MOST_GPU_CHANNELS;

/// Ranks of a communicator whose buffers are on GPUs, of all hosts together.
pub const MAX_RANKS: usize = 32;
/// Parallel connections of a pair.
pub const MAX_CHANNELS: usize = MOST_GPU_CHANNELS;
/// Header of a slot; distance of counters; what offsets in a box are multiples of.
pub const LINE_BYTES: usize = 128;
/// Words of a call's signature.
pub const SIGNATURE_WORDS: usize = crate::types::SIGNATURE_WORDS;
/// Ways in which a message announces itself.
pub const PROTOCOLS: usize = 3;

pub use crate::types::Protocol;

/// Counters of one channel of one protocol in a box (`cinch_counters`).
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Counters {
    /// Messages that `from` has published on this channel (simple only).
    pub tail: u64,
    /// Nothing: the next word is on a line of its own.
    pub unused0: [u64; 7],
    /// Messages of the other direction that `from` has taken on this channel.
    pub head: u64,
    /// Nothing.
    pub unused1: [u64; 7],
}

/// The FIFOs of one protocol within a box (`cinch_fifo`). Offsets in bytes from the box.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Fifo {
    /// Offset of channel 0's [`Counters`].
    pub counters: u64,
    /// Offset of slot 0's payload.
    pub slots: u64,
    /// Bytes from slot to slot.
    pub stride: u32,
    /// Payload bytes of a slot, without flags.
    pub slot_bytes: u32,
    /// Slots of a channel.
    pub depth: u32,
    /// Channels.
    pub channels: u32,
}

/// Where a rank stands on one connection (`cinch_cursor`): `[protocol][channel][peer]`, always with
/// [`MAX_CHANNELS`] and [`MAX_RANKS`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Cursor {
    /// Messages sent since the beginning.
    pub sent: u64,
    /// Messages received since the beginning.
    pub received: u64,
}

/// Bytes of the cursors of a rank.
pub const CURSORS_BYTES: usize = PROTOCOLS * MAX_CHANNELS * MAX_RANKS * size_of::<Cursor>();

/// `cinch_trouble::kind`: nothing went wrong.
pub const TROUBLE_NONE: u32 = 0;
/// `peer` did not send (`sends` = 0) or take (`sends` = 1) in time.
pub const TROUBLE_TIMEOUT: u32 = 1;
/// `peer` runs another call: `theirs`.
pub const TROUBLE_MISMATCH: u32 = 2;

/// [`Trouble::state`] once the report is complete.
pub const TROUBLE_COMPLETE: u32 = 2;

/// What went wrong first (`cinch_trouble`). Kernels write it once; the host reads the rest after
/// it has seen `state` = [`TROUBLE_COMPLETE`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Trouble {
    /// 0, then 1 while it is written, then [`TROUBLE_COMPLETE`].
    pub state: u32,
    /// `TROUBLE_*`.
    pub kind: u32,
    /// Rank that is waited for.
    pub peer: u32,
    /// Whether the wait was for room to send.
    pub sends: u32,
    /// Channel.
    pub channel: u32,
    /// Step of the schedule.
    pub step: u32,
    /// Pass of the schedule.
    pub pass: u32,
    /// [`Protocol`](crate::types::Protocol), as a number.
    pub protocol: u32,
    /// Counter that was waited for; of a fused kernel, the number of the call.
    pub expected: u64,
    /// Counter that was there; of a fused kernel nothing.
    pub seen: u64,
    /// Signature of the own call.
    pub mine: [u64; SIGNATURE_WORDS],
    /// Signature that the peer sent.
    pub theirs: [u64; SIGNATURE_WORDS],
}

/// Pinned host memory that the host and all kernels of a rank share (`cinch_control`); see
/// [`super::ControlWords`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Control {
    /// The host sets it to end every wait.
    pub abort: u32,
    /// Nothing: `trouble` is on lines of its own.
    pub unused: [u32; 31],
    /// The report.
    pub trouble: Trouble,
}

/// A communicator as a kernel sees it (`cinch_comm_view`).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CommView {
    /// Box of the pair p -> me; 0 for this rank itself and beyond the last rank.
    pub inbox: [u64; MAX_RANKS],
    /// Box of the pair me -> p; 0 likewise.
    pub outbox: [u64; MAX_RANKS],
    /// [`Cursor`] of each protocol, channel and peer, in device memory.
    pub cursors: u64,
    /// [`Control`], as the device addresses it.
    pub control: u64,
    /// Of one wait.
    pub timeout_ns: u64,
    /// This rank.
    pub rank: u32,
    /// Ranks of the communicator.
    pub nranks: u32,
    /// Of the protocol that the launch uses.
    pub fifo: Fifo,
    /// [`Protocol`], as a number.
    pub protocol: u32,
    /// Nothing.
    pub unused: u32,
}

macro_rules! places {
    ($type:ty: $bytes:literal, $($field:ident @ $at:literal),*) => {
        const _: () = assert!(size_of::<$type>() == $bytes);
        $(const _: () = assert!(std::mem::offset_of!($type, $field) == $at);)*
    };
}

mod asserts {
    use super::*;
    const _: () = assert!(SIGNATURE_WORDS == 5);
    places!(Counters: 128, tail @ 0, head @ 64);
    places!(Fifo: 32, counters @ 0, slots @ 8, stride @ 16, slot_bytes @ 20, depth @ 24, channels @ 28);
    places!(Cursor: 16, sent @ 0, received @ 8);
    places!(Trouble: 128, state @ 0, kind @ 4, peer @ 8, sends @ 12, channel @ 16, step @ 20,
        pass @ 24, protocol @ 28, expected @ 32, seen @ 40, mine @ 48, theirs @ 88);
    places!(Control: 256, abort @ 0, trouble @ 128);
    places!(CommView: 584, inbox @ 0, outbox @ 256, cursors @ 512, control @ 520,
        timeout_ns @ 528, rank @ 536, nranks @ 540, fifo @ 544, protocol @ 576, unused @ 580);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// The numbers of the header, by the words in front of them: a constant that changes there
    /// must change here.
    #[test]
    fn the_header_says_the_same() {
        let text = include_str!("../../kernels/abi.h");
        let number = |name: &str| -> usize {
            let at = text.find(&format!("{name} = ")).expect(name) + name.len() + 3;
            let digits: String = text[at..]
                .chars()
                .take_while(char::is_ascii_digit)
                .collect();
            digits.parse().expect(name)
        };
        assert_eq!(number("CINCH_MAX_RANKS"), MAX_RANKS);
        assert_eq!(number("CINCH_MAX_LANES"), MAX_CHANNELS);
        assert_eq!(number("CINCH_LINE_BYTES"), LINE_BYTES);
        assert_eq!(number("CINCH_SIGNATURE_WORDS"), SIGNATURE_WORDS);
        assert_eq!(number("CINCH_PROTOCOLS"), PROTOCOLS);
        assert_eq!(number("CINCH_SIMPLE"), Protocol::Simple as usize);
        assert_eq!(number("CINCH_LL"), Protocol::Ll as usize);
        assert_eq!(number("CINCH_LL128"), Protocol::Ll128 as usize);
        assert_eq!(number("CINCH_TROUBLE_TIMEOUT"), TROUBLE_TIMEOUT as usize);
        assert_eq!(number("CINCH_TROUBLE_MISMATCH"), TROUBLE_MISMATCH as usize);
        for (name, bytes) in [
            ("cinch_fifo", size_of::<Fifo>()),
            ("cinch_trouble", size_of::<Trouble>()),
            ("cinch_control", size_of::<Control>()),
            ("cinch_comm_view", size_of::<CommView>()),
        ] {
            let line = format!("static_assert(sizeof({name}) == {bytes}, \"abi\");");
            assert!(text.contains(&line), "{line}");
        }
        assert_eq!(CURSORS_BYTES, 196_608);
        assert_eq!(size_of::<Counters>(), LINE_BYTES);
    }

    #[test]
    fn protocols_count_up() {
        for (index, protocol) in Protocol::ALL.into_iter().enumerate() {
            assert_eq!(protocol as usize, index);
        }
        assert_eq!(Protocol::Ll128.name(), "ll128");
    }
}
