//! The counts of all calls of a communicator.

use super::core::arguments::check_out;
use super::describe::copy_text;
use super::error::cinch_result_t;
use super::handle::{self, cinch_comm_t};
use super::versioned;
use crate::comm::{CodecStats, RawReason};
use std::ffi::c_char;

/// Length of `cinch_comm_stats_t.exact_calls`, which counts calls without compression by reason.
pub const CINCH_EXACT_REASONS: usize = 16;
/// Index: no codec was set, or only one inside hosts while the algorithm treats all ranks alike.
pub const CINCH_EXACT_NOT_ASKED: usize = 0;
/// Index: compression is off for the process or the communicator.
pub const CINCH_EXACT_OFF: usize = 1;
/// Index: the call itself set codec raw.
pub const CINCH_EXACT_BY_CALL: usize = 2;
/// Index: the default codec does not apply to this collective; a call can name it.
pub const CINCH_EXACT_COLLECTIVE: usize = 3;
/// Index: the element type is not f32, f16 or bf16.
pub const CINCH_EXACT_DTYPE: usize = 4;
/// Index: the operator is neither a sum nor an average.
pub const CINCH_EXACT_OPERATION: usize = 5;
/// Index: the input is smaller than `CINCH_CODEC_MIN_BYTES`.
pub const CINCH_EXACT_SMALL: usize = 6;
/// Index: the codec keeps scales per tensor and the call names no tensor.
pub const CINCH_EXACT_NO_TENSOR: usize = 7;
/// Index: a sampled error exceeded its bound, so compression was switched off.
pub const CINCH_EXACT_SWITCHED_OFF: usize = 8;
/// Index: the cost model predicted no gain from the codec.
pub const CINCH_EXACT_COSTS: usize = 9;
/// Index: the input is larger than a rule codes (`max=`).
pub const CINCH_EXACT_LARGE: usize = 10;

/// Counts since the communicator was created, on this rank. A captured call counts once, when the
/// stream records it.
///
/// Initialise it with `cinch_comm_stats_default(&stats)`. New fields are only ever added at the end.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct cinch_comm_stats_t {
    /// Bytes of the struct in the program's header. Set by `cinch_comm_stats_default`.
    pub size: usize,
    /// Constant by which the library detects an uninitialised struct. Set by `cinch_comm_stats_default`.
    pub magic: u32,
    /// Version of the program's header. Set by `cinch_comm_stats_default`.
    pub version: u32,
    /// Calls that a codec compressed, inside hosts or between them.
    pub coded_calls: u64,
    /// Bytes that this rank sent.
    pub wire_bytes: u64,
    /// Bytes that this rank would have sent with the same algorithms and without codecs.
    pub raw_bytes: u64,
    /// Compressed calls of which a sample was also reduced exactly and compared.
    pub sampled: u64,
    /// Largest relative RMS error of these samples.
    pub worst_error: f64,
    /// 1 if such an error exceeded its bound and compression was switched off; else 0.
    pub switched_off: u64,
    /// Calls without compression by reason; `CINCH_EXACT_SMALL` and so on are the indices.
    pub exact_calls: [u64; CINCH_EXACT_REASONS],
}

cinch_struct!(cinch_comm_stats_t, magic 0xC1C4_57A7, first 192, now 192);
const _: () = {
    assert!(RawReason::ALL.len() <= CINCH_EXACT_REASONS);
    assert!(CINCH_EXACT_NOT_ASKED == RawReason::NotAsked as usize);
    assert!(CINCH_EXACT_OFF == RawReason::Off as usize);
    assert!(CINCH_EXACT_BY_CALL == RawReason::ByCall as usize);
    assert!(CINCH_EXACT_COLLECTIVE == RawReason::Collective as usize);
    assert!(CINCH_EXACT_DTYPE == RawReason::DType as usize);
    assert!(CINCH_EXACT_OPERATION == RawReason::Operation as usize);
    assert!(CINCH_EXACT_SMALL == RawReason::Small as usize);
    assert!(CINCH_EXACT_NO_TENSOR == RawReason::NoTensor as usize);
    assert!(CINCH_EXACT_SWITCHED_OFF == RawReason::SwitchedOff as usize);
    assert!(CINCH_EXACT_COSTS == RawReason::Costs as usize);
    assert!(CINCH_EXACT_LARGE == RawReason::Large as usize);
};

/// Initialises `*stats` with zeros.
///
/// C programs use `cinch_comm_stats_default(&stats)`, which passes `sizeof(cinch_comm_stats_t)` and
/// `CINCH_API_VERSION` of the program's header as `size` and `version`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_stats_init(
    stats: *mut cinch_comm_stats_t,
    size: usize,
    version: u32,
) -> cinch_result_t {
    guard!("cinch_comm_stats_init", {
        // SAFETY: cinch.h requires of the program that `stats` is NULL or writable for `size`
        // bytes.
        unsafe { versioned::initialise(stats, size, version) }
    })
}

/// Stores the counts of `comm` on this rank in `*stats`. Does not wait; any thread may call it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_stats(
    comm: *const cinch_comm_t,
    stats: *mut cinch_comm_stats_t,
) -> cinch_result_t {
    guard!("cinch_comm_stats", {
        // SAFETY: cinch.h requires of the program that `stats` is NULL or a readable struct.
        unsafe { versioned::check(stats) }?;
        let counted = handle::lookup(comm)?.comm.codec_stats();
        // SAFETY: `check` accepted the struct, and cinch.h requires of the program that it is
        // writable.
        unsafe { versioned::fill(stats, &c_stats(&counted)) };
        Ok(())
    })
}

/// Copies the counters of `comm` on this rank to `buffer` as text with a NUL behind it, and stores its size with the
/// NUL in `*bytes`. Does not wait; any thread may call it.
///
/// The text is one JSON object. `calls` has, by `collective`, `codec` and `size_class` (bytes of the larger buffer, up
/// to a power of two), the number of `calls`, their `bytes`, the `wire_bytes` that this rank sent and the
/// `raw_bytes` that it would have sent without codecs, and `timed_calls`
/// with their `timed_seconds`: small calls on host memory are timed in turn, those on GPUs not at all. `peer_waits` has
/// the seconds that this rank has waited for other ranks, in waits of a millisecond and more.
///
/// With `buffer` NULL only the size is stored. If `capacity` is smaller than the size, the call fails and copies
/// nothing; calls on other threads may have added classes meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_metrics(
    comm: *const cinch_comm_t,
    buffer: *mut c_char,
    capacity: usize,
    bytes: *mut usize,
) -> cinch_result_t {
    guard!("cinch_comm_metrics", {
        check_out("bytes", bytes)?;
        let text = handle::lookup(comm)?.comm.metrics_json();
        // SAFETY: cinch.h requires of the program that `bytes` is NULL or writable, and `buffer` NULL or writable for
        // `capacity` bytes.
        unsafe { copy_text("metrics", &text, (buffer, capacity), bytes) }
    })
}

fn c_stats(stats: &CodecStats) -> cinch_comm_stats_t {
    let mut exact_calls = [0; CINCH_EXACT_REASONS];
    exact_calls[..RawReason::ALL.len()].copy_from_slice(&stats.exact_calls);
    cinch_comm_stats_t {
        size: 0,
        magic: 0,
        version: 0,
        coded_calls: stats.coded_calls,
        wire_bytes: stats.wire_bytes,
        raw_bytes: stats.raw_bytes,
        sampled: stats.sampled,
        worst_error: stats.worst_error,
        switched_off: stats.switched_off.into(),
        exact_calls,
    }
}
