//! Writes lines to standard error without the log, and without waiting for its reader.
//!
//! The fork handlers report failures here, because the log itself depends on them. The thread that watches the other
//! ranks logs too. A pipe that nobody reads, or a stopped terminal, must not stop that thread.

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, send};
use nix::sys::stat::{Mode, SFlag, fstat};
use std::fmt::Arguments;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of lines that could not be written since the last line that could.
static LOST: AtomicU64 = AtomicU64::new(0);

/// Writes `text` to standard error. A line that would have to wait is lost; the next line that can be written begins
/// with the number of lost lines.
///
/// The standard library's handle cannot be used: a child that is forked while another thread holds
/// the lock of the handle would wait for ever.
pub(super) fn write(text: &str) {
    // SAFETY: this library never closes standard error. If the program has closed it, writing fails.
    let stderr = unsafe { BorrowedFd::borrow_raw(libc::STDERR_FILENO) };
    let kind = fstat(stderr).map_or(SFlag::empty(), |stat| {
        SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT
    });
    match kind {
        SFlag::S_IFSOCK => write_counted(text, |bytes| {
            send(
                stderr.as_raw_fd(),
                bytes,
                MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL,
            )
        }),
        // A pipe or a terminal belongs to other processes too, so its flags stay as they are. Opened anew, it has
        // flags of its own.
        SFlag::S_IFIFO | SFlag::S_IFCHR => {
            let flags = OFlag::O_WRONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
            match open(c"/proc/self/fd/2", flags, Mode::empty()) {
                Ok(own) => write_to(own.as_fd(), text),
                // The device belongs to another user, the pipe has no reader, or /proc is missing.
                Err(_) => write_counted(text, |bytes| write_if_ready(stderr, bytes)),
            }
        }
        // A file has one offset for all its writers, which a file opened anew would not share.
        _ => write_to(stderr, text),
    }
}

/// Writes a line to a descriptor that does not wait, or to a file; counts the line if it is lost.
pub(super) fn write_to(descriptor: BorrowedFd<'_>, text: &str) {
    write_counted(text, |bytes| nix::unistd::write(descriptor, bytes));
}

/// Writes at most a page, which a pipe takes without waiting once it is ready and no other process writes meanwhile.
fn write_if_ready(descriptor: BorrowedFd<'_>, bytes: &[u8]) -> nix::Result<usize> {
    let mut ready = [PollFd::new(descriptor, PollFlags::POLLOUT)];
    let count = poll(&mut ready, PollTimeout::ZERO)?;
    let events = ready[0].revents().unwrap_or(PollFlags::empty());
    match count {
        0 => Err(Errno::EAGAIN),
        // The reader is gone. A write would raise SIGPIPE, which ends programs that do not ignore it.
        _ if events.contains(PollFlags::POLLERR) => Err(Errno::EPIPE),
        _ => nix::unistd::write(descriptor, &bytes[..bytes.len().min(4096)]),
    }
}

fn write_counted(text: &str, mut write: impl FnMut(&[u8]) -> nix::Result<usize>) {
    // Relaxed: the number counts lines, and orders nothing.
    let lost = LOST.swap(0, Ordering::Relaxed);
    let complaint = match lost {
        0 => String::new(),
        _ => log_line(
            "warn",
            format_args!("{lost} lines before this line are lost, because the log was full"),
        ),
    };
    for (line, lines) in [(complaint.as_str(), lost), (text, 1)] {
        if !write_all(line.as_bytes(), &mut write) {
            LOST.fetch_add(lines, Ordering::Relaxed);
        }
    }
}

fn write_all(mut bytes: &[u8], write: &mut impl FnMut(&[u8]) -> nix::Result<usize>) -> bool {
    while !bytes.is_empty() {
        match write(bytes) {
            Ok(0) => return false,
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::EINTR) => {}
            // Without standard error the text is lost: reporting must not stop a training run.
            Err(_) => return false,
        }
    }
    true
}

/// Returns a log line in the library's own format, as opposed to NCCL's.
pub(super) fn log_line(level: &str, text: Arguments<'_>) -> String {
    format!("cinch[{}] {level}: {text}\n", std::process::id())
}

#[cfg(test)]
mod tests {
    use super::super::fork::tests::in_child;
    use super::*;
    use nix::unistd::{dup2_stderr, pipe, read};
    use std::os::unix::net::UnixStream;

    /// Fills standard error, writes a line, makes room again, writes another line, and returns what arrived last.
    fn after_a_full_stderr(fill: impl Fn(&[u8]) -> bool, drain: impl Fn() -> Vec<u8>) -> String {
        while fill(&[b'.'; 512]) {}
        write("lost\n");
        while !drain().is_empty() {}
        write("kept\n");
        String::from_utf8(drain()).unwrap()
    }

    fn is_right(text: &str) -> bool {
        text.ends_with("kept\n")
            && text.contains("warn: 1 lines before")
            && !text.contains("lost\n")
    }

    #[test]
    fn a_pipe_that_nobody_reads_loses_lines_and_stops_nothing() {
        assert!(in_child(|| {
            let (reader, writer) = pipe().unwrap();
            let set = |fd: BorrowedFd<'_>| {
                nix::fcntl::fcntl(fd, nix::fcntl::FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap()
            };
            dup2_stderr(&writer).unwrap();
            // The pipe itself waits, as standard error does; the test fills and drains it by other descriptors.
            let flags = OFlag::O_WRONLY | OFlag::O_NONBLOCK;
            let filler = open(c"/proc/self/fd/2", flags, Mode::empty()).unwrap();
            set(reader.as_fd());
            let text = after_a_full_stderr(
                |bytes| nix::unistd::write(&filler, bytes).is_ok(),
                || {
                    let mut bytes = vec![0; 1 << 20];
                    let got = read(&reader, &mut bytes).unwrap_or(0);
                    bytes.truncate(got);
                    bytes
                },
            );
            is_right(&text)
        }));
    }

    #[test]
    fn a_socket_that_nobody_reads_loses_lines_and_stops_nothing() {
        assert!(in_child(|| {
            let (reader, writer) = UnixStream::pair().unwrap();
            reader.set_nonblocking(true).unwrap();
            dup2_stderr(&writer).unwrap();
            let fill =
                |bytes: &[u8]| send(writer.as_raw_fd(), bytes, MsgFlags::MSG_DONTWAIT).is_ok();
            let text = after_a_full_stderr(fill, || {
                let mut bytes = vec![0; 1 << 20];
                let got = read(&reader, &mut bytes).unwrap_or(0);
                bytes.truncate(got);
                bytes
            });
            is_right(&text)
        }));
    }
}
