//! The report of a call, and where it is written.

use super::error::cinch_result_t;
use super::types::{algorithm_number, algorithm_of, transport_number, transport_of};
use super::versioned;
use crate::comm::Report;
use crate::error::Result;
use crate::types::CallStatistics;
use std::ffi::c_char;

/// Bit of `cinch_report_t.valid`: `saturated`, `non_finite`, `abs_max` and `l2_norm` were measured.
///
/// They are measured when a codec encodes this rank's input on the host. Otherwise they are 0 and mean
/// nothing: for codec raw, for a rank without input, and for calls on GPUs, unless
/// `cinch_report_add_statistics` has set them.
pub const CINCH_REPORT_INPUT: u32 = 1;

/// Bit of `cinch_report_t.valid`: `residual_l2_norm` was measured, in a call with error feedback on host
/// memory.
pub const CINCH_REPORT_RESIDUAL: u32 = 2;

/// Report of one call on this rank.
///
/// Initialise it with `cinch_report_default(&report)`. New fields are only ever added at the end.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct cinch_report_t {
    /// Bytes of the struct in the program's header. Set by `cinch_report_default`.
    pub size: usize,
    /// Constant by which the library detects an uninitialised struct. Set by `cinch_report_default`.
    pub magic: u32,
    /// Version of the program's header. Set by `cinch_report_default`.
    pub version: u32,
    /// Bits of the fields that were measured: `CINCH_REPORT_INPUT`, `CINCH_REPORT_RESIDUAL`.
    pub valid: u32,
    /// Algorithm that ran.
    pub algorithm: algorithm_number,
    /// Slowest transport that carried data; `CINCH_TRANSPORT_UNSET` if no data moved.
    pub transport: transport_number,
    /// Number of channels that were used.
    pub channels: u32,
    /// Payload bytes that this rank sent, after encoding.
    pub wire_bytes: u64,
    /// Finite elements beyond the codec's largest value, which saturated: elements of the input, or, on host memory, of
    /// partial sums that this rank encoded.
    pub saturated: u64,
    /// Number of NaN and infinite elements of the input.
    pub non_finite: u64,
    /// Largest magnitude of the finite elements of the input.
    pub abs_max: f64,
    /// L2 norm of the finite elements of the input.
    pub l2_norm: f64,
    /// Codec that ran, with its parameters, as text: `linear8:block=256`; with another codec inside
    /// hosts: `intra=raw,inter=linear8:block=256`.
    pub codec: [c_char; 64],
    /// Number of calls in the fused message of this call; 1 if it was not fused.
    pub fused: u64,
    /// L2 norm of this rank's residuals of the tensor `feedback` after the call.
    pub residual_l2_norm: f64,
}

cinch_struct!(cinch_report_t, magic 0xC1C4_4E90, first 136, now 152);

/// Initialises `*report` with zeros.
///
/// C programs use `cinch_report_default(&report)`, which passes `sizeof(cinch_report_t)` and
/// `CINCH_API_VERSION` of the program's header as `size` and `version`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_report_init(
    report: *mut cinch_report_t,
    size: usize,
    version: u32,
) -> cinch_result_t {
    guard!("cinch_report_init", {
        // SAFETY: cinch.h requires of the program that `report` is NULL or writable for `size`
        // bytes.
        unsafe { versioned::initialise(report, size, version) }
    })
}

/// Address of a program's checked struct for a report, or NULL.
#[derive(Debug)]
pub(super) struct ReportTarget(*mut cinch_report_t);

impl ReportTarget {
    /// Target for a call whose report the program does not want.
    pub(super) const NONE: ReportTarget = ReportTarget(std::ptr::null_mut());

    /// Returns a target that writes to `report`, or nowhere if it is NULL.
    ///
    /// # Errors
    /// Invalid argument if the struct was not initialised.
    ///
    /// # Safety
    /// `report` is NULL, or readable and writable until the call (in a group: the group) has run.
    pub(super) unsafe fn new(report: *mut cinch_report_t) -> Result<ReportTarget> {
        if !report.is_null() {
            // SAFETY: the caller passes `report` as NULL or readable.
            unsafe { versioned::check(report) }?;
        }
        Ok(ReportTarget(report))
    }

    /// Sets the statistics of the input in the struct that the C caller passed.
    pub(super) fn add(&self, statistics: &CallStatistics) {
        if self.0.is_null() {
            return;
        }
        // SAFETY: `new` checked the struct, which its caller keeps valid.
        unsafe {
            if let Ok(mut report) = versioned::read(self.0) {
                report.valid |= CINCH_REPORT_INPUT;
                report.saturated = statistics.saturated;
                report.non_finite = statistics.non_finite;
                report.abs_max = statistics.abs_max;
                report.l2_norm = statistics.l2_norm();
                versioned::fill(self.0, &report);
            }
        }
    }

    /// Writes `report` to the struct that the C caller passed. Does nothing if the caller passed NULL.
    pub(super) fn fill(&self, report: &Report) {
        if !self.0.is_null() {
            // SAFETY: `new` checked the struct, which its caller keeps writable until the call has run.
            unsafe { versioned::fill(self.0, &c_report(report)) };
        }
    }
}

fn c_report(report: &Report) -> cinch_report_t {
    let mut codec = [0; 64];
    // The loop leaves the last byte NUL, however long the codec's name is.
    for (to, from) in codec[..63].iter_mut().zip(report.codec.to_string().bytes()) {
        *to = from as c_char;
    }
    let input = report.input.unwrap_or_default();
    cinch_report_t {
        size: 0,
        magic: 0,
        version: 0,
        valid: if report.input.is_some() {
            CINCH_REPORT_INPUT
        } else {
            0
        } | if report.residual_norm.is_some() {
            CINCH_REPORT_RESIDUAL
        } else {
            0
        },
        algorithm: algorithm_of(report.algorithm),
        transport: transport_of(report.transport),
        channels: u32::try_from(report.channels).unwrap_or(u32::MAX),
        wire_bytes: report.wire_bytes,
        saturated: input.saturated,
        non_finite: input.non_finite,
        abs_max: input.abs_max.into(),
        l2_norm: input.sum_squares.sqrt(),
        codec,
        fused: report.fused as u64,
        residual_l2_norm: report.residual_norm.unwrap_or(0.0),
    }
}

#[cfg(test)]
mod tests {
    use super::super::core::versioned_struct::VersionedStruct;
    use super::*;
    use crate::codec::EncodeStats;
    use crate::types::{Algorithm, CodecKind, CodecSetting, CodecSpec, ScaleRule, TransportKind};
    use std::ffi::CStr;

    #[test]
    fn report_fills_every_field_and_keeps_header() {
        let mut report = std::mem::MaybeUninit::<cinch_report_t>::uninit();
        let size = size_of::<cinch_report_t>();
        // SAFETY: `report` has `size` bytes and is initialised by the first call.
        let report = unsafe {
            cinch_report_init(report.as_mut_ptr(), size, 1);
            let target = ReportTarget::new(report.as_mut_ptr()).unwrap();
            target.fill(&Report {
                codec: CodecSetting {
                    intra: CodecSpec::RAW,
                    inter: CodecSpec {
                        scale: ScaleRule::Tensor { refresh: 1 << 20 },
                        ..CodecSpec::of(CodecKind::Dynamic8)
                    },
                    auto: false,
                },
                algorithm: Algorithm::Hierarchical,
                transport: Some(TransportKind::Shm),
                channels: 2,
                wire_bytes: 1234,
                raw_bytes: 4936,
                input: Some(EncodeStats {
                    saturated: 3,
                    non_finite: 4,
                    abs_max: 2.5,
                    sum_squares: 144.0,
                }),
                residual_norm: Some(0.75),
                fused: 9,
            });
            report.assume_init()
        };
        assert_eq!(report.size, size);
        assert_eq!((report.magic, report.version), (cinch_report_t::MAGIC, 1));
        assert_eq!(report.valid, CINCH_REPORT_INPUT | CINCH_REPORT_RESIDUAL);
        assert_eq!((report.algorithm, report.transport), (6, 3));
        assert_eq!((report.channels, report.wire_bytes), (2, 1234));
        assert_eq!((report.saturated, report.non_finite), (3, 4));
        assert_eq!((report.abs_max, report.l2_norm), (2.5, 12.0));
        assert_eq!((report.fused, report.residual_l2_norm), (9, 0.75));
        // SAFETY: `c_report` leaves the last byte NUL.
        let codec = unsafe { CStr::from_ptr(report.codec.as_ptr()) };
        assert_eq!(codec, c"intra=raw,inter=dynamic8:tensor=1048576");
    }
}
