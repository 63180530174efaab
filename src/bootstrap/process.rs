//! What the kernel says about a process: who we are, and whether a silent peer still lives.

use super::keys;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::sys::fork_safe::First;

/// What became of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// Nothing is wrong, or nothing can be known.
    Alive,
    /// Stopped by a signal or a debugger; it can go on any time.
    Stopped,
    /// It will not come back; why, as a phrase.
    Dead(&'static str),
}

/// Flags of a task that is on its way out. The kernel sets them at once, while memory and files
/// of a large process go on for seconds.
const LEAVING: u64 = EXITING | DUMPING;
/// It ends, or is past the point where it could dump core; perhaps it alone: a main thread may
/// end by `pthread_exit` while the others go on.
const EXITING: u64 = 0x4 | 0x8;
/// It writes the core of its process, all of which ends.
const DUMPING: u64 = 0x200;

/// Looks at a process that started `start_time` ticks after boot (see [`start_time`]).
pub(super) fn fate(pid: u32, start_time: u64) -> Fate {
    let text = match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Fate::Dead("its process is gone");
        }
        // ESRCH: it vanished between open and read.
        Err(error) if error.raw_os_error() == Some(nix::libc::ESRCH) => {
            return Fate::Dead("its process is gone");
        }
        Err(_) => return Fate::Alive,
    };
    match parse(&text) {
        None => Fate::Alive,
        Some(stat) if stat.start_time != start_time => Fate::Dead("its process is gone"),
        Some(stat) if stat.flags & DUMPING != 0 => Fate::Dead("its process is exiting"),
        Some(stat) if stat.is_gone() => match others(pid) {
            Others::Run => Fate::Alive,
            Others::Stopped => Fate::Stopped,
            Others::Gone if stat.has_ended() => Fate::Dead("its process has ended"),
            Others::Gone => Fate::Dead("its process is exiting"),
        },
        Some(stat) if stat.is_stopped() => Fate::Stopped,
        Some(_) => Fate::Alive,
    }
}

/// The tasks of a process beside its first.
enum Others {
    Run,
    Stopped,
    Gone,
}

fn others(pid: u32) -> Others {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
    let tasks = tasks.into_iter().flatten().flatten();
    let mut found = Others::Gone;
    for task in tasks.filter(|task| *task.file_name() != *pid.to_string()) {
        // One that ends meanwhile is gone.
        let text = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        match parse(&text) {
            Some(stat) if stat.is_gone() || stat.is_killed() => {}
            Some(stat) if stat.is_stopped() => found = Others::Stopped,
            Some(_) => return Others::Run,
            None => {}
        }
    }
    found
}

struct Stat {
    state: char,
    flags: u64,
    start_time: u64,
    /// Signals for this task alone that it has not taken yet.
    pending: u64,
}

impl Stat {
    fn is_gone(&self) -> bool {
        self.has_ended() || self.flags & LEAVING != 0
    }

    fn has_ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X' | 'x')
    }

    /// Its process is ending, and so will it, whatever it is stuck in.
    fn is_killed(&self) -> bool {
        self.pending & 1 << (nix::libc::SIGKILL - 1) != 0
    }

    fn is_stopped(&self) -> bool {
        matches!(self.state, 'T' | 't')
    }
}

/// Fields of `/proc/PID/stat`. The name in parentheses may hold anything, parentheses included.
fn parse(text: &str) -> Option<Stat> {
    let (_, rest) = text.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    Some(Stat {
        state: fields.first()?.chars().next()?,
        flags: fields.get(6)?.parse().ok()?,
        start_time: fields.get(19)?.parse().ok()?,
        pending: fields.get(28)?.parse().ok()?,
    })
}

/// When a process started, in clock ticks since boot: with the pid it names a process for good.
pub(super) fn start_time(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    parse(&text).map(|stat| stat.start_time)
}

/// Tells apart namespaces of pids: a pid of another one means nothing here. 0 if unknown.
pub(super) fn pid_namespace() -> u64 {
    namespace("pid")
}

/// Equal on two processes exactly if they share a kernel, a network namespace and the user's
/// `CINCH_HOST_ID`.
pub(super) fn host_id(config: &Config) -> [u8; 16] {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = namespace("net").to_le_bytes();
    let user = config.host_id.as_deref().unwrap_or_default();
    let hash = keys::digest(&[
        b"cinch host",
        &(boot.len() as u64).to_le_bytes(),
        boot.as_bytes(),
        &network,
        user.as_bytes(),
    ]);
    std::array::from_fn(|at| hash[at])
}

/// Equal on two ranks exactly if they are threads of one process, fork included.
pub(super) fn process_id() -> Result<[u8; 16]> {
    static RANDOM: First<[u8; 12]> = First::new();
    let random = match RANDOM.get() {
        Some(random) => random,
        None => {
            let fresh = keys::random()?;
            RANDOM.get_or_make(|| fresh)
        }
    };
    let mut id = [0; 16];
    id[..12].copy_from_slice(random);
    id[12..].copy_from_slice(&std::process::id().to_le_bytes());
    Ok(id)
}

/// This host's name, for messages.
pub fn host_name() -> String {
    nix::unistd::gethostname()
        .ok()
        .and_then(|name| name.into_string().ok())
        .map(|name| name.chars().take(255).collect())
        .unwrap_or_else(|| "unknown".into())
}

/// Checks that `need` more descriptors can be opened.
///
/// # Errors
/// System, naming need and limit: running out in the middle of a meeting would name neither.
pub(super) fn check_descriptors(need: usize, what: &str) -> Result<()> {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let limit = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"))
        .and_then(|rest| rest.split_ascii_whitespace().next()?.parse::<usize>().ok());
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    match limit {
        Some(limit) if open + need > limit => Err(Error::system(
            format!(
                "{what} needs {need} file descriptors, {open} are open and the limit is {limit}; \
                 raise it (ulimit -n {})",
                open + need
            ),
            std::io::Error::from_raw_os_error(nix::libc::EMFILE),
        )),
        _ => Ok(()),
    }
}

fn namespace(kind: &str) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(format!("/proc/self/ns/{kind}")).map_or(0, |metadata| metadata.ino())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn names_with_parentheses_do_not_confuse() {
        // From the state to the signals that the task has not taken.
        let of = |pending: u32| {
            parse(&format!(
                "7 (a) Z 1 (x) ) S 1 7 7 0 -1 4194308 0 0 0 0 0 0 0 0 20 0 1 0 977 0 0 9 1 1 1 0 0 \
                 {pending} 0 4096"
            ))
        };
        let stat = of(0).unwrap();
        assert!(!stat.is_killed() && of(256).unwrap().is_killed());
        assert_eq!(
            (stat.state, stat.flags & LEAVING, stat.start_time),
            ('S', 4, 977)
        );
        assert!(parse("7 (a) S 1").is_none());
    }

    #[test]
    fn fates_of_real_processes() {
        let me = std::process::id();
        let born = start_time(me).unwrap();
        assert_eq!(fate(me, born), Fate::Alive);
        assert!(matches!(fate(me, born + 1), Fate::Dead(_)));
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let born = start_time(child.id()).unwrap();
        let pid = nix::unistd::Pid::from_raw(child.id() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::SIGSTOP).unwrap();
        let until = std::time::Instant::now() + std::time::Duration::from_secs(5);
        let eventually = |right: fn(Fate) -> bool| {
            while !right(fate(child.id(), born)) {
                assert!(std::time::Instant::now() < until);
                std::thread::yield_now();
            }
        };
        eventually(|fate| fate == Fate::Stopped);
        nix::sys::signal::kill(pid, nix::sys::signal::SIGKILL).unwrap();
        // Not yet waited for: a zombie.
        eventually(|fate| matches!(fate, Fate::Dead(_)));
        child.wait().unwrap();
        assert_eq!(fate(child.id(), born), Fate::Dead("its process is gone"));
    }

    /// The main thread ends, another one goes on: the process lives as long as that does.
    #[test]
    #[allow(unsafe_code)] // fork, and the end of one thread
    fn a_process_lives_without_its_first_thread() {
        use nix::libc;
        use nix::sys::signal::{Signal, kill};
        use nix::unistd::{ForkResult, fork};
        // SAFETY: the child starts a thread and ends its only other one: nothing of the test
        // harness runs there.
        let child = match unsafe { fork() }.unwrap() {
            ForkResult::Parent { child } => child,
            ForkResult::Child => {
                std::thread::spawn(|| {
                    std::thread::sleep(std::time::Duration::from_secs(20));
                    // SAFETY: ends the process.
                    unsafe { libc::_exit(0) }
                });
                // SAFETY: the bare system call ends this thread alone.
                unsafe {
                    libc::syscall(libc::SYS_exit, 0);
                    libc::_exit(1)
                }
            }
        };
        let pid = child.as_raw() as u32;
        let born = start_time(pid).unwrap();
        let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
        let eventually = |right: &dyn Fn() -> bool| {
            while !right() {
                assert!(std::time::Instant::now() < until, "{:?}", fate(pid, born));
                std::thread::yield_now();
            }
        };
        let state = || {
            let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            parse(&text).unwrap().state
        };
        eventually(&|| state() == 'Z');
        assert_eq!(fate(pid, born), Fate::Alive);
        kill(child, Signal::SIGSTOP).unwrap();
        eventually(&|| fate(pid, born) == Fate::Stopped);
        kill(child, Signal::SIGKILL).unwrap();
        eventually(&|| fate(pid, born) == Fate::Dead("its process has ended"));
        nix::sys::wait::waitpid(child, None).unwrap();
    }

    #[test]
    fn identities() {
        assert_eq!(process_id().unwrap(), process_id().unwrap());
        let other = Config {
            host_id: Some("b".into()),
            ..Config::default()
        };
        assert_eq!(host_id(&Config::default()), host_id(&Config::default()));
        assert_ne!(host_id(&Config::default()), host_id(&other));
        assert!(check_descriptors(1, "a test").is_ok());
        let error = check_descriptors(1 << 40, "a test").unwrap_err();
        assert!(error.message().contains(&(1u64 << 40).to_string()));
    }
}
