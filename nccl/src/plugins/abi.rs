//! Layouts and numbers of NCCL's plug-in interfaces: profiler versions 5 and 6, tuner versions 5 and 6.
//!
//! Version 6 of both interfaces begins as version 5 does: the profiler's adds kinds of events that cinch does not
//! have, and the tuner's adds `getChunkSize` behind the functions that cinch calls.

use crate::types::ncclResult_t;
use std::ffi::{c_char, c_int, c_ulong, c_void};
use std::ptr::null_mut;

/// `ncclDebugLogger_t`: level, subsystems, file, line, format, and the format's arguments.
pub(super) type LogFunction =
    unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char);

/// Kinds of events, which are bits of the activation mask.
pub(super) mod event {
    pub const GROUP: u64 = 1 << 0;
    pub const COLL: u64 = 1 << 1;
    pub const P2P: u64 = 1 << 2;
    pub const GROUP_API: u64 = 1 << 8;
    pub const COLL_API: u64 = 1 << 9;
    pub const P2P_API: u64 = 1 << 10;
    pub const KERNEL_LAUNCH: u64 = 1 << 11;
}

/// State of a group API event: the call that began it has returned to the program.
pub(super) const GROUP_START_API_STOP: c_int = 23;
/// State of a group API event: the outermost end of the group has begun.
pub(super) const GROUP_END_API_START: c_int = 24;

/// `ncclProfiler_v5_t` and `ncclProfiler_v6_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct ProfilerFunctions {
    pub name: *const c_char,
    pub init: Option<
        unsafe extern "C" fn(
            *mut *mut c_void,
            u64,
            *mut c_int,
            *const c_char,
            c_int,
            c_int,
            c_int,
            LogFunction,
        ) -> ncclResult_t,
    >,
    pub start: Option<
        unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut EventDescriptor) -> ncclResult_t,
    >,
    pub stop: Option<unsafe extern "C" fn(*mut c_void) -> ncclResult_t>,
    pub record: Option<unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> ncclResult_t>,
    pub finalize: Option<unsafe extern "C" fn(*mut c_void) -> ncclResult_t>,
}

/// `ncclProfilerEventDescr_v6_t`, of which version 5 is the beginning.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct EventDescriptor {
    pub kind: u64,
    pub parent: *mut c_void,
    pub rank: c_int,
    pub details: EventDetails,
}

impl EventDescriptor {
    /// Returns the descriptor of an event whose fields are zero.
    pub(super) fn new(kind: u64, parent: *mut c_void) -> EventDescriptor {
        EventDescriptor {
            kind,
            parent,
            rank: 0,
            details: EventDetails { words: [0; 11] },
        }
    }
}

/// Details of an event, by its kind.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) union EventDetails {
    pub group_api: GroupApiDetails,
    pub coll_api: CollApiDetails,
    pub p2p_api: P2pApiDetails,
    pub kernel_launch: *mut c_void,
    pub coll: CollDetails,
    pub p2p: P2pDetails,
    /// As large as the details of copy-engine events, the largest of version 6.
    words: [u64; 11],
}

/// Details of [`event::GROUP_API`].
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct GroupApiDetails {
    pub captured: bool,
    pub depth: c_int,
}

/// Details of [`event::COLL_API`].
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct CollApiDetails {
    pub func: *const c_char,
    pub count: usize,
    pub datatype: *const c_char,
    pub root: c_int,
    pub stream: *mut c_void,
    pub captured: bool,
}

/// Details of [`event::P2P_API`].
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct P2pApiDetails {
    pub func: *const c_char,
    pub count: usize,
    pub datatype: *const c_char,
    pub stream: *mut c_void,
    pub captured: bool,
}

/// Details of [`event::COLL`].
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct CollDetails {
    pub sequence: u64,
    pub func: *const c_char,
    pub sendbuff: *const c_void,
    pub recvbuff: *mut c_void,
    pub count: usize,
    pub root: c_int,
    pub datatype: *const c_char,
    pub channels: u8,
    pub warps: u8,
    pub algorithm: *const c_char,
    pub protocol: *const c_char,
    pub group: *mut c_void,
}

/// Details of [`event::P2P`].
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct P2pDetails {
    pub func: *const c_char,
    pub buffer: *mut c_void,
    pub datatype: *const c_char,
    pub count: usize,
    pub peer: c_int,
    pub channels: u8,
    pub group: *mut c_void,
}

/// Number of NCCL's algorithms: tree, ring, and others that cinch does not have.
pub(super) const ALGORITHMS: usize = 7;
/// Number of NCCL's protocols: ll, ll128, simple.
pub(super) const PROTOCOLS: usize = 3;
/// Entry of a cost table for a combination that does not exist.
pub(super) const NO_COST: f32 = -1.0;
/// Predicted microseconds of a call by algorithm and protocol.
pub(super) type CostTable = [[f32; PROTOCOLS]; ALGORITHMS];

/// The functions of `ncclTuner_v5_t` and `ncclTuner_v6_t` that cinch calls.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct TunerFunctions {
    pub name: *const c_char,
    pub init: Option<
        unsafe extern "C" fn(
            *mut *mut c_void,
            u64,
            usize,
            usize,
            LogFunction,
            *mut NvlinkDomains,
            *mut TunerConstants,
        ) -> ncclResult_t,
    >,
    pub coll_info: Option<
        unsafe extern "C" fn(
            *mut c_void,
            c_int,
            usize,
            c_int,
            *mut *mut f32,
            c_int,
            c_int,
            c_int,
            *mut c_int,
        ) -> ncclResult_t,
    >,
    pub finalize: Option<unsafe extern "C" fn(*mut c_void) -> ncclResult_t>,
}

/// `ncclNvlDomainInfo_v5_t`.
#[repr(C)]
pub(super) struct NvlinkDomains {
    pub count: c_int,
    pub least_ranks: c_int,
    pub most_ranks: c_int,
}

/// Number of the doubles in `ncclTunerConstants_v5_t`: base latencies, latencies of three kinds of links, and five
/// tables of bandwidths of four GPU generations at three scales.
const CONSTANTS: usize = ALGORITHMS * PROTOCOLS * (1 + 3) + 5 * 4 * 3;

/// `ncclTunerConstants_v5_t`: constants of NCCL's own cost model, which cinch does not have.
#[derive(Clone, Copy, PartialEq)]
#[repr(C)]
pub(super) struct TunerConstants(pub [f64; CONSTANTS]);

impl TunerConstants {
    pub(super) const ZERO: TunerConstants = TunerConstants([0.0; CONSTANTS]);
}

/// Returns a handle or a context that a plug-in has not set.
pub(super) fn unset() -> *mut c_void {
    null_mut()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    /// Offsets that gcc computes from NVIDIA's headers `profiler_v6.h` and `tuner_v6.h` on 64-bit Linux.
    #[test]
    fn layouts_are_those_of_the_headers() {
        assert_eq!(size_of::<EventDescriptor>(), 112);
        assert_eq!(offset_of!(EventDescriptor, rank), 16);
        assert_eq!(offset_of!(EventDescriptor, details), 24);
        assert_eq!(offset_of!(GroupApiDetails, depth), 4);
        assert_eq!(offset_of!(CollApiDetails, stream), 32);
        assert_eq!(offset_of!(CollApiDetails, captured), 40);
        assert_eq!(offset_of!(P2pApiDetails, captured), 32);
        assert_eq!(offset_of!(CollDetails, root), 40);
        assert_eq!(offset_of!(CollDetails, channels), 56);
        assert_eq!(offset_of!(CollDetails, warps), 57);
        assert_eq!(offset_of!(CollDetails, algorithm), 64);
        assert_eq!(offset_of!(CollDetails, group), 80);
        assert_eq!(offset_of!(P2pDetails, peer), 32);
        assert_eq!(offset_of!(P2pDetails, channels), 36);
        assert_eq!(offset_of!(P2pDetails, group), 40);
        assert_eq!(size_of::<ProfilerFunctions>(), 48);
        assert_eq!(size_of::<TunerFunctions>(), 32);
        assert_eq!(size_of::<NvlinkDomains>(), 12);
        assert_eq!(size_of::<TunerConstants>(), 1152);
        assert_eq!(size_of::<CostTable>(), 84);
    }
}
