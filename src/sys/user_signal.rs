//! SIGUSR2 as a byte in a pipe, for a thread that writes what a user wants to see.

use crate::error::{Error, ErrorKind, Result};
use crate::sys::fork_safe::ForkSafeOnce;
use nix::fcntl::OFlag;
use nix::unistd::pipe2;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};

/// Byte that the handler writes.
pub const SIGNALLED: u8 = b's';

/// Number of the pipe's end that the handler writes to; -1 before it is installed.
static PIPE: AtomicI32 = AtomicI32::new(-1);
/// Process that installed the handler. A forked child may have another file under the pipe's number.
static OWNER: AtomicI32 = AtomicI32::new(-1);
/// Both ends of the pipe. They stay open, because a handler may run at any time.
static ENDS: ForkSafeOnce<[OwnedFd; 2]> = ForkSafeOnce::new();

extern "C" fn handler(_: libc::c_int) {
    // SAFETY: `write`, `getpid` and the errno are async-signal-safe. The pipe does not wait, and is never closed in the
    // process that `OWNER` names.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        if libc::getpid() == OWNER.load(Ordering::Relaxed) {
            let pipe = PIPE.load(Ordering::Relaxed);
            libc::write(pipe, [SIGNALLED].as_ptr().cast(), 1);
        }
        *errno = before;
    }
}

/// Handles SIGUSR2 from now on, and returns the pipe that gets a byte for each. A second call returns the same pipe.
///
/// # Errors
/// Invalid usage if the program handles or ignores the signal, or in a forked child of the process that installed the
/// handler; system.
pub fn pipe_of_user_signal() -> Result<BorrowedFd<'static>> {
    let own = std::process::id() as i32;
    if let Some([reader, _]) = ENDS.get() {
        return match OWNER.load(Ordering::Relaxed) == own {
            true => Ok(reader.as_fd()),
            false => Err(Error::new(
                ErrorKind::InvalidUsage,
                "the process from which this process was forked handles SIGUSR2",
            )),
        };
    }
    let failed = |what| Error::system(what, std::io::Error::last_os_error());
    // SAFETY: `known` is plain data, valid as zero, and outlives the call.
    let known = unsafe {
        let mut known: libc::sigaction = std::mem::zeroed();
        match libc::sigaction(libc::SIGUSR2, std::ptr::null(), &mut known) {
            0 => known.sa_sigaction,
            _ => return Err(failed("reading the action of SIGUSR2")),
        }
    };
    if known != libc::SIG_DFL {
        return Err(Error::new(
            ErrorKind::InvalidUsage,
            "this program handles or ignores SIGUSR2 already",
        ));
    }
    let (reader, writer) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)
        .map_err(|error| Error::system("making a pipe", error))?;
    let ends = ENDS.get_or_init(|| [reader, writer]);
    PIPE.store(ends[1].as_raw_fd(), Ordering::Relaxed);
    OWNER.store(own, Ordering::Relaxed);
    // SAFETY: `action` is plain data, valid as zero, and outlives the call. The handler is async-signal-safe.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        if libc::sigaction(libc::SIGUSR2, &action, std::ptr::null_mut()) != 0 {
            return Err(failed("handling SIGUSR2"));
        }
    }
    Ok(ends[0].as_fd())
}

#[cfg(test)]
mod tests {
    use super::super::fork::tests::in_child;
    use super::*;
    use nix::unistd::read;

    fn raise() {
        // SAFETY: the handler above runs.
        unsafe { libc::raise(libc::SIGUSR2) };
    }

    #[test]
    fn signal_arrives_as_a_byte_in_the_process_that_asked_for_it() {
        assert!(in_child(|| {
            let pipe = pipe_of_user_signal().unwrap();
            let mut bytes = [0; 4];
            raise();
            let arrived = read(pipe, &mut bytes) == Ok(1) && bytes[0] == SIGNALLED;
            let again = pipe_of_user_signal().is_ok();
            // A forked child has the handler, which must not write for its parent.
            let child_is_refused = in_child(|| {
                raise();
                pipe_of_user_signal().is_err()
            });
            let nothing_more = read(pipe, &mut bytes).is_err();
            arrived && again && child_is_refused && nothing_more
        }));
    }

    #[test]
    fn handler_of_the_program_stays() {
        assert!(in_child(|| {
            // SAFETY: ignoring a signal needs no state.
            unsafe { libc::signal(libc::SIGUSR2, libc::SIG_IGN) };
            pipe_of_user_signal().is_err_and(|error| error.kind() == ErrorKind::InvalidUsage)
        }));
    }
}
