//! What a communicator's calls did.

use super::error::cinch_result_t;
use super::handle::{self, cinch_comm_t};
use super::versioned::{self, Versioned};
use crate::comm::{CodecStats, RawReason};

/// Reasons in `cinch_comm_stats_t.exact_calls`; new ones are only ever added at the end, up to 16.
pub const CINCH_EXACT_REASONS: usize = 16;
/// Index: nobody asked for a codec, or for one inside hosts only and the algorithm has one level.
pub const CINCH_EXACT_NOT_ASKED: usize = 0;
/// Index: compression is off for good, by process or communicator.
pub const CINCH_EXACT_OFF: usize = 1;
/// Index: the call asked for it.
pub const CINCH_EXACT_BY_CALL: usize = 2;
/// Index: the codec is not for this collective unless it is named.
pub const CINCH_EXACT_COLLECTIVE: usize = 3;
/// Index: codecs carry f32, f16 and bf16.
pub const CINCH_EXACT_DTYPE: usize = 4;
/// Index: codecs carry sums and averages.
pub const CINCH_EXACT_OPERATION: usize = 5;
/// Index: below the smallest size.
pub const CINCH_EXACT_SMALL: usize = 6;
/// Index: the codec keeps scales for tensors, and the call names none.
pub const CINCH_EXACT_NO_TENSOR: usize = 7;
/// Index: a sample was beyond the bound.
pub const CINCH_EXACT_SWITCHED_OFF: usize = 8;
/// Index: the model of costs said that the codec does not pay.
pub const CINCH_EXACT_COSTS: usize = 9;

/// Counts since the communicator was made, on this rank. A captured call counts once, when it is
/// recorded.
///
/// Initialise it with `cinch_comm_stats_default(&stats)`. New fields are only ever added at the
/// end.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct cinch_comm_stats_t {
    /// Bytes of the struct in the program's header. Set by `cinch_comm_stats_default`.
    pub size: usize,
    /// Tells an initialised struct from garbage. Set by `cinch_comm_stats_default`.
    pub magic: u32,
    /// Meaning of the fields. Set by `cinch_comm_stats_default`.
    pub version: u32,
    /// Calls that a codec carried, inside hosts or between them.
    pub coded_calls: u64,
    /// Bytes that this rank sent.
    pub wire_bytes: u64,
    /// Bytes that it would have sent with the same algorithms and no codec.
    pub raw_bytes: u64,
    /// Coded calls of which a slice was also run exactly, and compared.
    pub sampled: u64,
    /// The largest relative RMS error of those.
    pub worst_error: f64,
    /// 1 if such an error was beyond the bound, so that calls have been exact since; else 0.
    pub switched_off: u64,
    /// Calls that ran exactly, by reason: `CINCH_EXACT_SMALL` and so on.
    pub exact_calls: [u64; CINCH_EXACT_REASONS],
}

// SAFETY: `repr(C)`, numbers, without padding (asserted below).
unsafe impl Versioned for cinch_comm_stats_t {
    const NAME: &'static str = "cinch_comm_stats_t";
    const MAGIC: u32 = 0xC1C4_57A7;
    const FIRST_BYTES: usize = 192;
}

#[cfg(target_pointer_width = "64")]
const _: () = assert!(size_of::<cinch_comm_stats_t>() == 192);
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
};

/// Empties `*stats`. `size` and `version` are `sizeof(cinch_comm_stats_t)` and `CINCH_API_VERSION`
/// of the program's header: C programs use `cinch_comm_stats_default(&stats)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_stats_init(
    stats: *mut cinch_comm_stats_t,
    size: usize,
    version: u32,
) -> cinch_result_t {
    guard!("cinch_comm_stats_init", {
        // SAFETY: NULL or writable for `size` bytes, by the documented contract.
        unsafe { versioned::initialise(stats, size, version) }
    })
}

/// What the calls of `comm` did so far on this rank, to `*stats`. Does not wait; may be called from
/// any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_stats(
    comm: *const cinch_comm_t,
    stats: *mut cinch_comm_stats_t,
) -> cinch_result_t {
    guard!("cinch_comm_stats", {
        // SAFETY: NULL or readable, by the documented contract.
        unsafe { versioned::check(stats) }?;
        let handle = handle::lookup(comm)?;
        handle.comm.check_process()?;
        let counted = handle.comm.codec_stats();
        // SAFETY: checked, and writable by the documented contract.
        unsafe { versioned::fill(stats, &c_stats(&counted)) };
        Ok(())
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
