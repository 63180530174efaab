//! Lines to standard error that do not pass through the log.
//!
//! The fork handlers report failures here: the log itself depends on them.

use std::fmt::Arguments;
use std::fs::File;
use std::io::Write;
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;

/// Writes `text` to standard error.
///
/// The standard library's handle does not serve: a child that is forked while another thread holds
/// the lock of the handle would wait for ever.
pub(super) fn write(text: &str) {
    // SAFETY: this library never closes standard error, and `ManuallyDrop` keeps `file` from
    // closing it.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(libc::STDERR_FILENO) });
    // Without standard error the text is lost: reporting must not stop a training run.
    let _ = (&*file).write_all(text.as_bytes());
}

/// Returns a line of the log in the library's own format.
pub(super) fn log_line(level: &str, text: Arguments<'_>) -> String {
    format!("cinch[{}] {level}: {text}\n", std::process::id())
}
