//! Child processes with their signals and cores, and the signals of this process.

use crate::error::{Error, ErrorKind};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Makes the kernel kill the child (SIGKILL) when the thread that spawns it ends. Spawn from a
/// thread that lives as long as the child may.
///
/// If the parent dies between fork and this request, the child does not start. The kernel clears
/// the request when the child executes a program with other privileges (set-user-ID).
pub fn die_with_parent(command: &mut Command) -> &mut Command {
    let parent = std::process::id();
    // SAFETY: between fork and exec the closure makes only system calls that are async-signal-safe,
    // and reads only its own copy of `parent`.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            if libc::getppid() as u32 != parent {
                return Err(std::io::ErrorKind::BrokenPipe.into());
            }
            Ok(())
        })
    }
}

/// Blocks all signals on this thread, so that the program's handlers do not run on a thread of the
/// library.
pub fn block_signals() {
    let _ = nix::sys::signal::SigSet::all().thread_block();
}

/// Makes the child start with no signal blocked, even if this thread blocks some: programs expect
/// that.
pub fn unblock_signals(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec the closure makes only async-signal-safe calls. The set is its
    // own, initialised by `sigemptyset`.
    unsafe {
        command.pre_exec(|| {
            let mut none = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
            let failed = libc::sigemptyset(none.as_mut_ptr()) != 0
                || libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut()) != 0;
            match failed {
                true => Err(std::io::Error::last_os_error()),
                false => Ok(()),
            }
        })
    }
}

/// Returns the error of a thread that cannot start, with the user's limit, which may be the reason.
pub fn thread_error(what: &str, cause: std::io::Error) -> Error {
    // SAFETY: `limit` is plain data, valid as zero, and outlives the call.
    let limit = unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        match libc::getrlimit(libc::RLIMIT_NPROC, &mut limit) {
            0 => limit.rlim_cur,
            _ => libc::RLIM_INFINITY,
        }
    };
    let limit = match limit {
        libc::RLIM_INFINITY => "any number of".to_string(),
        limit => limit.to_string(),
    };
    Error::new(
        ErrorKind::System,
        format!(
            "{what}: {cause}; this user may have {limit} processes and threads (`ulimit -u`), if the \
             cgroup allows (pids.max)"
        ),
    )
}

/// Makes the child run on `core` only.
pub fn pin_to_core(command: &mut Command, core: usize) -> &mut Command {
    // SAFETY: between fork and exec `bind` makes one system call and uses only the stack.
    unsafe { command.pre_exec(move || super::cpu::bind(core)) }
}

/// Restores the default action of SIGCHLD, for this process and its children. A parent may have set
/// it to be ignored; then the kernel discards the exit status of children before it can be read.
pub fn restore_child_signal() {
    // SAFETY: SIG_DFL installs no handler, and the default action of SIGCHLD does nothing.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
}

/// Returns whether this process ignores `signal`, as `nohup` and the shell's background jobs
/// arrange.
pub fn ignores_signal(signal: i32) -> bool {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: without a new action `sigaction` changes nothing, and after success it has
    // initialised `action`.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_error_has_cause_and_limit() {
        let cause = std::io::Error::from_raw_os_error(libc::EAGAIN);
        let error = thread_error("cannot start a thread", cause);
        assert_eq!(error.kind(), ErrorKind::System);
        let message = error.message();
        assert!(
            message.contains("os error 11") && message.contains("ulimit -u"),
            "{message}"
        );
    }
    use std::time::{Duration, Instant};

    #[test]
    fn child_is_killed_when_its_parent_ends() {
        // The spawning thread takes the part of the parent process, because the kernel watches the
        // thread.
        let mut child = std::thread::spawn(|| {
            let mut command = Command::new("sleep");
            die_with_parent(command.arg("600")).spawn().unwrap()
        })
        .join()
        .unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        let status = loop {
            match child.try_wait().unwrap() {
                Some(status) => break status,
                None if Instant::now() > deadline => {
                    child.kill().unwrap();
                    panic!("the child outlived its parent");
                }
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        use std::os::unix::process::ExitStatusExt;
        assert_eq!(status.signal(), Some(libc::SIGKILL));
    }
}
