//! Child processes: they do not outlive their parent, and start with a clean signal mask. What this
//! process was told to ignore. Threads on which no signal handler of the program's runs.

use std::os::unix::process::CommandExt;
use std::process::Command;

/// Has the kernel kill the child (SIGKILL) when the thread that spawns it ends, for whatever
/// reason; so spawn from a thread that lives as long as the child may.
///
/// A parent that dies between fork and the child's request is noticed too: the child then does
/// not start. A program that runs with another user's rights escapes.
pub fn die_with_parent(command: &mut Command) -> &mut Command {
    let parent = std::process::id();
    // SAFETY: between fork and exec the closure only makes system calls that are
    // async-signal-safe, and touches no memory but its own copy of `parent`.
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

/// Keeps signals from this thread, which is not the program's: its handlers do not run here.
pub fn block_signals() {
    let _ = nix::sys::signal::SigSet::all().thread_block();
}

/// Has the child start with no signal blocked, whatever this thread blocks: programs do not
/// expect otherwise.
pub fn unblock_signals(command: &mut Command) -> &mut Command {
    // SAFETY: as above; the signal set is the closure's own, and initialised by `sigemptyset`.
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

/// Has the child start on one core, and stay there.
pub fn start_on(command: &mut Command, core: usize) -> &mut Command {
    // SAFETY: as above; binding makes one system call and uses the stack only.
    unsafe { command.pre_exec(move || super::cpu::bind(core)) }
}

/// Has the ends of this process's children wait to be asked for, though whoever started it may have
/// said that they are ignored: the kernel would forget a child before anybody knew how it ended.
/// Children start so too, as programs expect.
pub fn heed_children() {
    // SAFETY: no function of ours is to run; the default action stops and ends nothing.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
}

/// Whether this process ignores a signal: it does where whoever started it said so, as `nohup` and
/// the shell of a script's background job do.
pub fn ignores(signal: i32) -> bool {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: without a new action the call changes nothing, and where it succeeds it has written
    // the whole of `action`.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn the_child_ends_with_its_parent() {
        // The spawning thread stands for the parent process: the kernel watches threads.
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
