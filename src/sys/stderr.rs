//! Writes lines to standard error without the log.
//!
//! The fork handlers report failures here, because the log itself depends on them.

use std::fmt::Arguments;
use std::fs::File;
use std::io::Write;
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;

/// Writes `text` to standard error.
///
/// The standard library's handle cannot be used: a child that is forked while another thread holds
/// the lock of the handle would wait for ever.
pub(super) fn write(text: &str) {
    // SAFETY: this library never closes standard error, and `ManuallyDrop` keeps `file` from
    // closing it.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(libc::STDERR_FILENO) });
    // Without standard error the text is lost: reporting must not stop a training run.
    let _ = (&*file).write_all(text.as_bytes());
}

/// Returns a log line in the library's own format, as opposed to NCCL's.
pub(super) fn log_line(level: &str, text: Arguments<'_>) -> String {
    format!("cinch[{}] {level}: {text}\n", std::process::id())
}
