//! What a call did.

use super::error::cinch_result_t;
use super::types::{algorithm_number, algorithm_of, transport_number, transport_of};
use super::versioned::{self, Versioned};
use crate::comm::Report;
use crate::error::Result;
use std::ffi::c_char;

/// In `cinch_report_t.valid`: `saturated`, `non_finite`, `abs_max` and `l2_norm` were taken. They
/// are while this rank's input is encoded on the host, so not with codec raw, nor on a rank without
/// input, nor in calls on GPUs: there they are 0, and say nothing.
pub const CINCH_REPORT_INPUT: u32 = 1;

/// What one call did on this rank.
///
/// Initialise it with `cinch_report_default(&report)`. New fields are only ever added at the end.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct cinch_report_t {
    /// Bytes of the struct in the program's header. Set by `cinch_report_default`.
    pub size: usize,
    /// Tells an initialised struct from garbage. Set by `cinch_report_default`.
    pub magic: u32,
    /// Meaning of the fields. Set by `cinch_report_default`.
    pub version: u32,
    /// Which of the fields about the input hold something: `CINCH_REPORT_INPUT` or 0.
    pub valid: u32,
    /// The algorithm that ran.
    pub algorithm: algorithm_number,
    /// The slowest transport that carried data; `CINCH_TRANSPORT_UNSET` if none did.
    pub transport: transport_number,
    /// Channels used.
    pub channels: u32,
    /// Payload bytes that this rank sent.
    pub wire_bytes: u64,
    /// Finite elements, of the input or of sums that this rank encoded, beyond the codec's largest
    /// value, which saturated.
    pub saturated: u64,
    /// NaN and infinite input elements.
    pub non_finite: u64,
    /// Largest magnitude among the finite input elements.
    pub abs_max: f64,
    /// Root of the sum of squares of the finite input elements.
    pub l2_norm: f64,
    /// The codec that ran, with its parameters, as text: `linear8:block=256`; where hosts have one
    /// of their own `intra=raw,inter=linear8:block=256`.
    pub codec: [c_char; 64],
    /// Calls of a group that travelled as one with this one, itself included; 1 if it went alone.
    pub fused: u64,
}

// SAFETY: `repr(C)`, numbers, without padding (asserted below).
unsafe impl Versioned for cinch_report_t {
    const NAME: &'static str = "cinch_report_t";
    const MAGIC: u32 = 0xC1C4_4E90;
    const FIRST_BYTES: usize = 136;
}

#[cfg(target_pointer_width = "64")]
const _: () = assert!(size_of::<cinch_report_t>() == 144);

/// Empties `*report`. `size` and `version` are `sizeof(cinch_report_t)` and `CINCH_API_VERSION` of
/// the program's header: C programs use `cinch_report_default(&report)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_report_init(
    report: *mut cinch_report_t,
    size: usize,
    version: u32,
) -> cinch_result_t {
    guard!("cinch_report_init", {
        // SAFETY: NULL or writable for `size` bytes, by the documented contract.
        unsafe { versioned::initialise(report, size, version) }
    })
}

/// Where a report goes, once the call has run: nowhere, or to a struct that was checked.
#[derive(Debug)]
pub(super) struct ReportTarget(*mut cinch_report_t);

impl ReportTarget {
    /// No report.
    pub(super) const NONE: ReportTarget = ReportTarget(std::ptr::null_mut());

    /// The struct at `report`, or nowhere for NULL.
    ///
    /// # Safety
    /// `report` is NULL or readable, and writable until the call (of a group: all calls) has run.
    pub(super) unsafe fn new(report: *mut cinch_report_t) -> Result<ReportTarget> {
        if !report.is_null() {
            // SAFETY: as ours.
            unsafe { versioned::check(report) }?;
        }
        Ok(ReportTarget(report))
    }

    /// Writes the report.
    pub(super) fn fill(&self, report: &Report) {
        if !self.0.is_null() {
            // SAFETY: `new` checked it, and its caller vouches for its life.
            unsafe { versioned::fill(self.0, &c_report(report)) };
        }
    }
}

fn c_report(report: &Report) -> cinch_report_t {
    let mut codec = [0; 64];
    // The last byte stays NUL, whatever codecs will be called.
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::EncodeStats;
    use crate::types::{Algorithm, CodecKind, CodecSetting, CodecSpec, ScaleRule, TransportKind};
    use std::ffi::CStr;

    #[test]
    fn every_field_is_filled_and_the_header_kept() {
        let mut report = std::mem::MaybeUninit::<cinch_report_t>::uninit();
        let size = size_of::<cinch_report_t>();
        // SAFETY: a live struct, initialised by the call.
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
                fused: 9,
            });
            report.assume_init()
        };
        assert_eq!(report.size, size);
        assert_eq!((report.magic, report.version), (cinch_report_t::MAGIC, 1));
        assert_eq!(report.valid, CINCH_REPORT_INPUT);
        assert_eq!((report.algorithm, report.transport), (6, 3));
        assert_eq!((report.channels, report.wire_bytes), (2, 1234));
        assert_eq!((report.saturated, report.non_finite), (3, 4));
        assert_eq!((report.abs_max, report.l2_norm), (2.5, 12.0));
        assert_eq!(report.fused, 9);
        // SAFETY: the last byte is NUL.
        let codec = unsafe { CStr::from_ptr(report.codec.as_ptr()) };
        assert_eq!(codec, c"intra=raw,inter=dynamic8:tensor=1048576");
    }
}
