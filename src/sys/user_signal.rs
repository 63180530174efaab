//! SIGUSR2 as a byte in a pipe, for a thread that writes what a user asks for.

use crate::error::{Error, ErrorKind, Result};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};

/// Byte that the handler writes.
pub const SIGNALLED: u8 = b's';

/// Number of the pipe's end that the handler writes to; -1 while nobody reads.
static PIPE: AtomicI32 = AtomicI32::new(-1);

extern "C" fn handler(_: libc::c_int) {
    // SAFETY: `write` and the errno are async-signal-safe. The pipe does not wait, and its number is valid until
    // `UserSignal` is dropped.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        let pipe = PIPE.load(Ordering::Relaxed);
        if pipe >= 0 {
            libc::write(pipe, [SIGNALLED].as_ptr().cast(), 1);
        }
        *errno = before;
    }
}

/// Passes SIGUSR2 on to a pipe. When dropped, the signal has its default action again.
#[derive(Debug)]
pub struct UserSignal {
    /// Keeps the number in [`PIPE`] valid.
    _pipe: OwnedFd,
}

impl UserSignal {
    /// Writes a byte to `pipe`, which does not wait, for each SIGUSR2.
    ///
    /// # Errors
    /// Invalid usage if the program handles the signal, or another value of this type exists; system.
    pub fn to_pipe(pipe: OwnedFd) -> Result<UserSignal> {
        let failed = |what| Error::system(what, std::io::Error::last_os_error());
        // SAFETY: both actions are plain data, valid as zero, and outlive the calls. The handler is
        // async-signal-safe.
        unsafe {
            let mut known: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(libc::SIGUSR2, std::ptr::null(), &mut known) != 0 {
                return Err(failed("reading the action of SIGUSR2"));
            }
            if known.sa_sigaction != libc::SIG_DFL {
                return Err(Error::new(
                    ErrorKind::InvalidUsage,
                    "this program handles or ignores SIGUSR2 already",
                ));
            }
            PIPE.store(pipe.as_raw_fd(), Ordering::Relaxed);
            let mut own: libc::sigaction = std::mem::zeroed();
            own.sa_sigaction = handler as *const () as usize;
            own.sa_flags = libc::SA_RESTART;
            if libc::sigaction(libc::SIGUSR2, &own, std::ptr::null_mut()) != 0 {
                PIPE.store(-1, Ordering::Relaxed);
                return Err(failed("handling SIGUSR2"));
            }
        }
        Ok(UserSignal { _pipe: pipe })
    }
}

impl Drop for UserSignal {
    fn drop(&mut self) {
        // SAFETY: `known` is plain data that `sigaction` fills; the default action of a signal needs no state. The
        // pipe is closed after the handler is gone.
        unsafe {
            let mut known: libc::sigaction = std::mem::zeroed();
            let read = libc::sigaction(libc::SIGUSR2, std::ptr::null(), &mut known);
            if read == 0 && known.sa_sigaction == handler as *const () as usize {
                libc::signal(libc::SIGUSR2, libc::SIG_DFL);
            }
        }
        PIPE.store(-1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::fork::tests::in_child;
    use super::*;
    use nix::fcntl::OFlag;
    use nix::unistd::{pipe2, read};

    #[test]
    fn signal_arrives_as_a_byte_and_a_handler_of_the_program_stays() {
        assert!(in_child(|| {
            let pipe = || pipe2(OFlag::O_NONBLOCK).unwrap();
            let (reader, writer) = pipe();
            let signal = UserSignal::to_pipe(writer).unwrap();
            let second = UserSignal::to_pipe(pipe().1).unwrap_err();
            // SAFETY: the handler above runs.
            unsafe { libc::raise(libc::SIGUSR2) };
            let mut bytes = [0; 2];
            let arrived = read(&reader, &mut bytes) == Ok(1) && bytes[0] == SIGNALLED;
            drop(signal);
            let again = UserSignal::to_pipe(pipe().1);
            arrived && again.is_ok() && second.kind() == ErrorKind::InvalidUsage
        }));
    }
}
