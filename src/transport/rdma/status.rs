//! Errors for failed completions: the cause, and what the user can do.

use super::ports::Port;
use crate::error::{Error, ErrorKind};
use crate::sys::ibverbs::*;
use std::ffi::c_uint;
use std::time::Duration;

/// Returns how long a queue pair waits for an answer, with all retries.
pub(super) fn patience(timeout: u8, retries: u8) -> Duration {
    Duration::from_nanos(4096 << timeout) * (u32::from(retries) + 1)
}

/// Returns the error for failed work on the connection to `who` through `port`.
#[cold]
pub(super) fn explain(
    who: &str,
    port: &Port,
    completion: &IbvWc,
    (timeout, retries): (u8, u8),
) -> Error {
    let status = completion.status;
    let (kind, name, cause) = cause(status);
    let mut text =
        format!("RDMA to {who} through {port} failed with status {status} ({name}): {cause}");
    match status {
        IBV_WC_RETRY_EXC_ERR | IBV_WC_RESP_TIMEOUT_ERR => {
            text += &format!(
                " within {:.1} s (CINCH_IB_TIMEOUT={timeout}, CINCH_IB_RETRY={retries})",
                patience(timeout, retries).as_secs_f64()
            );
        }
        _ => {}
    }
    if let Some(state) = port.trouble() {
        text += &format!("; {state}");
    } else if let Some(step) = next_step(status) {
        text += &format!("; {step}");
    }
    if completion.vendor_err != 0 {
        text += &format!(" (vendor error {:#x})", completion.vendor_err);
    }
    Error::new(kind, text)
}

/// Returns error kind, name and cause of a completion status.
fn cause(status: c_uint) -> (ErrorKind, &'static str, &'static str) {
    use ErrorKind::{Internal, Remote, System};
    match status {
        IBV_WC_RETRY_EXC_ERR => (Remote, "retries exceeded", "the peer has not answered"),
        IBV_WC_RESP_TIMEOUT_ERR => (Remote, "response timeout", "the peer has not answered"),
        IBV_WC_RNR_RETRY_EXC_ERR => (
            Remote,
            "receiver not ready",
            "the peer had no room for a message, which it always should",
        ),
        IBV_WC_WR_FLUSH_ERR => (
            Remote,
            "flushed",
            "the queue pair was broken before this work ran",
        ),
        IBV_WC_REM_ACCESS_ERR => (
            Remote,
            "remote access error",
            "the peer's device refused a write: its memory is registered no more",
        ),
        IBV_WC_REM_INV_REQ_ERR => (
            Remote,
            "remote invalid request",
            "the peer's device did not understand a write",
        ),
        IBV_WC_REM_OP_ERR | IBV_WC_REM_ABORT_ERR => (
            Remote,
            "remote operation error",
            "the peer's device could not do what it was asked",
        ),
        IBV_WC_BAD_RESP_ERR => (Remote, "bad response", "the peer's answer makes no sense"),
        IBV_WC_LOC_PROT_ERR | IBV_WC_LOC_ACCESS_ERR => (
            System,
            "local protection error",
            "our device could not read our memory",
        ),
        IBV_WC_LOC_LEN_ERR | IBV_WC_LOC_QP_OP_ERR => (
            Internal,
            "local operation error",
            "our device did not understand what it was given",
        ),
        IBV_WC_FATAL_ERR | IBV_WC_GENERAL_ERR => (System, "fatal", "our device has failed"),
        _ => (System, "not documented", "our device reports no cause"),
    }
}

/// Returns what the user can do about a completion status.
fn next_step(status: c_uint) -> Option<&'static str> {
    match status {
        IBV_WC_RETRY_EXC_ERR | IBV_WC_RESP_TIMEOUT_ERR => Some(
            "its process or host is gone, or packets do not reach it: see whether the addresses \
             reach each other (CINCH_IB_HCA, CINCH_IB_GID), whether switches let packets of that \
             MTU through, and, on RoCE, whether they drop under load (PFC or ECN)",
        ),
        IBV_WC_REM_ACCESS_ERR | IBV_WC_REM_INV_REQ_ERR | IBV_WC_REM_OP_ERR => {
            Some("look at the peer's log: it has most likely failed first")
        }
        IBV_WC_FATAL_ERR | IBV_WC_GENERAL_ERR | IBV_WC_LOC_PROT_ERR => {
            Some("look at the kernel's log of this host")
        }
        _ => None,
    }
}

/// Returns a device event as a phrase.
pub(super) fn event_name(event: c_uint) -> &'static str {
    match event {
        IBV_EVENT_CQ_ERR => "a completion queue overran",
        IBV_EVENT_QP_FATAL | IBV_EVENT_QP_REQ_ERR | IBV_EVENT_QP_ACCESS_ERR => {
            "a queue pair is broken"
        }
        IBV_EVENT_DEVICE_FATAL => "the device has failed",
        IBV_EVENT_PORT_ACTIVE => "the port is active",
        IBV_EVENT_PORT_ERR => "the port went down",
        IBV_EVENT_LID_CHANGE => "the port's LID changed",
        IBV_EVENT_GID_CHANGE => "the port's addresses changed",
        _ => "another event",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_patience_is_about_a_second() {
        let patience = patience(16, 3);
        assert!((Duration::from_millis(1070)..Duration::from_millis(1080)).contains(&patience));
    }

    #[test]
    fn completion_status_has_a_cause() {
        for status in 1..=22 {
            let (_, name, cause) = cause(status);
            assert!(!name.is_empty() && !cause.is_empty());
        }
        assert_eq!(cause(IBV_WC_RETRY_EXC_ERR).0, ErrorKind::Remote);
        assert!(next_step(IBV_WC_RETRY_EXC_ERR).is_some());
    }
}
