//! Functions that exist because programs do not load without them, and that return an error.
//!
//! `docs/nccl.md` contains the same table, which a test compares.

use crate::error;
use crate::types::{ncclInvalidUsage, ncclResult_t};
use cinch::Error;
use std::ffi::c_int;

/// A set of unsupported functions that have one reason in common.
#[derive(Clone, Copy, Debug)]
pub struct Stub {
    /// Names of the functions; each has a second name with the prefix `p`.
    pub names: &'static [&'static str],
    /// Reason, as given in `docs/nccl.md` and in the thread's last error.
    pub why: &'static str,
}

/// `ncclTeam_t` of NCCL's device interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct ncclTeam_t {
    /// Number of ranks in the team.
    pub nRanks: c_int,
    /// Number of this rank in the team.
    pub rank: c_int,
    /// Distance between neighbouring ranks.
    pub stride: c_int,
}

const REFUSED: ncclResult_t = ncclInvalidUsage;
const NO_TEAM: ncclTeam_t = ncclTeam_t {
    nRanks: 0,
    rank: 0,
    stride: 0,
};

macro_rules! stubs {
    ($($why:literal returns $type:ty = $value:expr; $($name:ident | $twin:ident)*;)*) => {
        /// All unsupported functions.
        pub const STUBS: &[Stub] = &[
            $(Stub { names: &[$(stringify!($name)),*], why: $why }),*
        ];
        $($(
            // Defined without arguments: the functions read none, and in the C calling convention
            // the caller removes them from the stack.
            export! {
                /// Returns an error; see [`STUBS`].
                fn $name | $twin() returning $type {
                    error::remember(&refusal(stringify!($name), $why));
                    $value
                } else $value
            }
        )*)*
    };
}

/// Returns the error of an unsupported function.
fn refusal(name: &str, why: &str) -> Error {
    Error::invalid_usage(format!(
        "{name} is not supported by cinch {}: {why}",
        cinch::VERSION
    ))
}

stubs! {
    "kernels of a program cannot communicate; call collectives from the host"
        returns ncclResult_t = REFUSED;
        ncclDevCommCreate | pncclDevCommCreate
        ncclDevCommDestroy | pncclDevCommDestroy
        ncclLLA2ACreateRequirement | pncclLLA2ACreateRequirement
        ncclLsaBarrierCreateRequirement | pncclLsaBarrierCreateRequirement
        ncclGinBarrierCreateRequirement | pncclGinBarrierCreateRequirement
        ncclGinInboxA2ACreateRequirement | pncclGinInboxA2ACreateRequirement
        ncclGinOutboxCreateRequirement | pncclGinOutboxCreateRequirement;
    "kernels of a program cannot communicate, so there are no teams for them"
        returns ncclTeam_t = NO_TEAM;
        ncclTeamWorld | pncclTeamWorld
        ncclTeamLsa | pncclTeamLsa
        ncclTeamRail | pncclTeamRail
        ncclTeamCft | pncclTeamCft
        ncclTeamCftMultimem | pncclTeamCftMultimem;
    "kernels of a program cannot communicate, so there is nothing to count"
        returns c_int = 0;
        ncclLLA2ACalcSlots | pncclLLA2ACalcSlots
        ncclTeamRankToWorld | pncclTeamRankToWorld
        ncclTeamRankToLsa | pncclTeamRankToLsa;
    "windows are NULL and have no addresses; pass buffers to collectives as they are"
        returns ncclResult_t = REFUSED;
        ncclWinGetUserPtr | pncclWinGetUserPtr
        ncclGetLsaDevicePointer | pncclGetLsaDevicePointer
        ncclGetLsaMultimemDevicePointer | pncclGetLsaMultimemDevicePointer
        ncclGetMultimemDevicePointer | pncclGetMultimemDevicePointer
        ncclGetPeerDevicePointer | pncclGetPeerDevicePointer
        ncclGetCftDeviceLeInfo | pncclGetCftDeviceLeInfo
        ncclGetMultimemDeviceLeInfo | pncclGetMultimemDeviceLeInfo
        ncclGetPeerDeviceLeInfo | pncclGetPeerDeviceLeInfo;
    "one-sided messages are not there; use ncclSend and ncclRecv"
        returns ncclResult_t = REFUSED;
        ncclPutSignal | pncclPutSignal
        ncclSignal | pncclSignal
        ncclWaitSignal | pncclWaitSignal;
    "a communicator's memory cannot be taken from it; destroy it and make a new one"
        returns ncclResult_t = REFUSED;
        ncclCommSuspend | pncclCommSuspend
        ncclCommResume | pncclCommResume;
    "ask ncclCommCount, ncclCommUserRank and ncclCommCuDevice"
        returns ncclResult_t = REFUSED;
        ncclCommQueryProperties | pncclCommQueryProperties;
    "connections are authenticated and not encrypted; use trusted networks"
        returns ncclResult_t = REFUSED;
        ncclSetEncryption | pncclSetEncryption;
    "NCCL's parameters are not there; `cinch info` shows the settings in effect"
        returns ncclResult_t = REFUSED;
        ncclParamBind | pncclParamBind
        ncclParamGet | pncclParamGet
        ncclParamGetI8 | pncclParamGetI8
        ncclParamGetI16 | pncclParamGetI16
        ncclParamGetI32 | pncclParamGetI32
        ncclParamGetI64 | pncclParamGetI64
        ncclParamGetU8 | pncclParamGetU8
        ncclParamGetU16 | pncclParamGetU16
        ncclParamGetU32 | pncclParamGetU32
        ncclParamGetU64 | pncclParamGetU64
        ncclParamGetStr | pncclParamGetStr
        ncclParamGetParameter | pncclParamGetParameter
        ncclParamGetAllParameterKeys | pncclParamGetAllParameterKeys;
    "NCCL's parameters are not there, and nothing is dumped; `cinch info` shows the settings"
        returns () = ();
        ncclParamDumpAll | pncclParamDumpAll;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::sentence;

    #[test]
    fn stub_returns_error_with_reason() {
        // SAFETY: stubs take no arguments and read no memory.
        assert_eq!(unsafe { ncclCommSuspend() }, ncclInvalidUsage);
        let said = sentence();
        assert!(
            said.contains("ncclCommSuspend is not supported") && said.contains("make a new one"),
            "{said}"
        );
        // SAFETY: stubs take no arguments and read no memory.
        assert_eq!(unsafe { pncclTeamWorld() }, NO_TEAM);
        assert!(sentence().contains("ncclTeamWorld"));
        // SAFETY: stubs take no arguments and read no memory.
        unsafe { ncclParamDumpAll() };
        assert!(sentence().contains("`cinch info`"));
    }
}
