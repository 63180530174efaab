//! Identity of this process and its host, and the state of other processes in /proc.

use super::keys;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::sys::fork_safe::ForkSafeOnce;
use crate::sys::socket::{SHARED_DIRECTORY, is_shortage};

/// State of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ProcessState {
    /// The process runs, or its state is unknown.
    Running,
    /// A signal or a debugger has stopped the process, which may continue at any time.
    Stopped,
    /// The process ends or has ended, with the observed state as a phrase.
    Ended(&'static str),
}

/// Flags of a task that ends. The kernel sets them at once, while freeing memory and files of a
/// large process takes seconds.
const ENDING: u64 = EXITING | DUMPING;
/// Flags of a task that exits. It may be the only one: a main thread may end by `pthread_exit`
/// while other threads run.
const EXITING: u64 = 0x4 | 0x8;
/// Flag of a task that dumps core, after which its whole process ends.
const DUMPING: u64 = 0x200;

/// Looks up a process that started `start_time` ticks after boot (see [`start_time`]).
pub(super) fn state(pid: u32, start_time: u64) -> ProcessState {
    let text = match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(text) => text,
        // Mounted with hidepid=2, /proc shows no process of another user.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return match exists(pid) {
                true => ProcessState::Running,
                false => ProcessState::Ended("its process is gone"),
            };
        }
        // ESRCH: the process vanished between open and read.
        Err(error) if error.raw_os_error() == Some(nix::libc::ESRCH) => {
            return ProcessState::Ended("its process is gone");
        }
        Err(_) => return ProcessState::Running,
    };
    match parse(&text) {
        None => ProcessState::Running,
        Some(stat) if stat.start_time != start_time => ProcessState::Ended("its process is gone"),
        Some(stat) if stat.flags & DUMPING != 0 => ProcessState::Ended("its process is exiting"),
        Some(stat) if stat.is_ending() => match other_tasks(pid) {
            OtherTasks::Run => ProcessState::Running,
            OtherTasks::Stopped => ProcessState::Stopped,
            OtherTasks::Gone if stat.has_ended() => ProcessState::Ended("its process has ended"),
            OtherTasks::Gone => ProcessState::Ended("its process is exiting"),
        },
        Some(stat) if stat.is_stopped() => ProcessState::Stopped,
        Some(_) => ProcessState::Running,
    }
}

/// Returns whether there is a process with this number, whoever owns it.
fn exists(pid: u32) -> bool {
    use nix::errno::Errno;
    let pid = nix::unistd::Pid::from_raw(pid as i32);
    nix::sys::signal::kill(pid, None) != Err(Errno::ESRCH)
}

/// State of the tasks of a process except its first.
enum OtherTasks {
    Run,
    Stopped,
    Gone,
}

fn other_tasks(pid: u32) -> OtherTasks {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
    let tasks = tasks.into_iter().flatten().flatten();
    let mut found = OtherTasks::Gone;
    for task in tasks.filter(|task| *task.file_name() != *pid.to_string()) {
        // A task whose file has vanished has ended.
        let text = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        match parse(&text) {
            Some(stat) if stat.is_ending() || stat.is_killed() => {}
            Some(stat) if stat.is_stopped() => found = OtherTasks::Stopped,
            Some(_) => return OtherTasks::Run,
            None => {}
        }
    }
    found
}

/// Fields of `/proc/PID/stat` that show whether a task runs, is stopped, or ends.
struct Stat {
    state: char,
    flags: u64,
    start_time: u64,
    /// Pending signals of this task alone.
    pending: u64,
}

impl Stat {
    fn is_ending(&self) -> bool {
        self.has_ended() || self.flags & ENDING != 0
    }

    fn has_ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X' | 'x')
    }

    /// Returns whether SIGKILL is pending, which ends the task in every state.
    fn is_killed(&self) -> bool {
        self.pending & 1 << (nix::libc::SIGKILL - 1) != 0
    }

    fn is_stopped(&self) -> bool {
        matches!(self.state, 'T' | 't')
    }
}

/// Parses `/proc/PID/stat`. The name in parentheses may contain parentheses.
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

/// Returns the start time of a process in clock ticks since boot. No other process ever has the
/// same pid and start time.
pub(super) fn start_time(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    parse(&text).map(|stat| stat.start_time)
}

/// Identifies the namespace of pids: a pid of another namespace means nothing here. 0 if unknown.
pub(super) fn pid_namespace() -> u64 {
    namespace("pid")
}

/// Identifies the host: equal for two processes exactly if they share a kernel, a network namespace
/// and the user's `CINCH_HOST_ID`.
///
/// # Errors
/// System if descriptors or memory lack. A system without the kernel's id counts as one host.
pub(super) fn host_id(config: &Config) -> Result<[u8; 16]> {
    let boot = match std::fs::read_to_string("/proc/sys/kernel/random/boot_id") {
        // Without the id this rank would count as another host.
        Err(error) if is_shortage(&error) => {
            return Err(Error::system("reading the id of this host's kernel", error));
        }
        boot => boot.unwrap_or_default(),
    };
    let network = namespace("net").to_le_bytes();
    let user = config.host_id.as_deref().unwrap_or_default();
    let hash = keys::digest(&[
        b"cinch host",
        &(boot.len() as u64).to_le_bytes(),
        boot.as_bytes(),
        &network,
        user.as_bytes(),
    ]);
    Ok(std::array::from_fn(|at| hash[at]))
}

/// Identifies the directory of socket files by which processes of one kernel, user and `CINCH_HOST_ID` reach each other
/// across network namespaces. Two processes with equal ids have the same directory. `None` if there is none, or if the
/// kernel does not identify itself.
pub fn shared_directory_id(config: &Config) -> Option<[u8; 16]> {
    use std::os::unix::fs::MetadataExt;
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let directory = std::fs::metadata(SHARED_DIRECTORY).ok()?;
    // Users of different user namespaces cannot prove to each other who they are.
    let users = namespace("user");
    let user = nix::unistd::geteuid().as_raw();
    let hash = keys::digest(&[
        b"cinch shared directory",
        &(boot.len() as u64).to_le_bytes(),
        boot.as_bytes(),
        &directory.dev().to_le_bytes(),
        &directory.ino().to_le_bytes(),
        &users.to_le_bytes(),
        &user.to_le_bytes(),
        config.host_id.as_deref().unwrap_or_default().as_bytes(),
    ]);
    Some(std::array::from_fn(|at| hash[at]))
}

/// Identifies the process: equal on two ranks exactly if they are threads of one process. A forked
/// child has another id.
pub(super) fn process_id() -> Result<[u8; 16]> {
    static RANDOM: ForkSafeOnce<[u8; 12]> = ForkSafeOnce::new();
    let random = match RANDOM.get() {
        Some(random) => random,
        None => {
            let fresh = keys::random()?;
            RANDOM.get_or_init(|| fresh)
        }
    };
    let mut id = [0; 16];
    id[..12].copy_from_slice(random);
    id[12..].copy_from_slice(&std::process::id().to_le_bytes());
    Ok(id)
}

/// Returns the name of this host, for messages.
pub fn host_name() -> String {
    nix::unistd::gethostname()
        .ok()
        .and_then(|name| name.into_string().ok())
        .map(|name| name.chars().take(255).collect())
        .unwrap_or_else(|| "unknown".into())
}

/// Checks that `need` more descriptors can be opened: running out of them later would name neither
/// need nor limit.
///
/// # Errors
/// System, naming need and limit.
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
    fn stat_of_a_name_with_parentheses_is_parsed() {
        // Parses a `stat` line of a zombie with these pending signals.
        let of = |pending: u32| {
            parse(&format!(
                "7 (a) Z 1 (x) ) S 1 7 7 0 -1 4194308 0 0 0 0 0 0 0 0 20 0 1 0 977 0 0 9 1 1 1 0 0 \
                 {pending} 0 4096"
            ))
        };
        let stat = of(0).unwrap();
        assert!(!stat.is_killed() && of(256).unwrap().is_killed());
        assert_eq!(
            (stat.state, stat.flags & ENDING, stat.start_time),
            ('S', 4, 977)
        );
        assert!(parse("7 (a) S 1").is_none());
    }

    #[test]
    fn state_follows_a_real_process() {
        let me = std::process::id();
        let born = start_time(me).unwrap();
        assert_eq!(state(me, born), ProcessState::Running);
        assert!(matches!(state(me, born + 1), ProcessState::Ended(_)));
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let born = start_time(child.id()).unwrap();
        let pid = nix::unistd::Pid::from_raw(child.id() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::SIGSTOP).unwrap();
        let until = std::time::Instant::now() + std::time::Duration::from_secs(5);
        let eventually = |right: fn(ProcessState) -> bool| {
            while !right(state(child.id(), born)) {
                assert!(std::time::Instant::now() < until);
                std::thread::yield_now();
            }
        };
        eventually(|state| state == ProcessState::Stopped);
        nix::sys::signal::kill(pid, nix::sys::signal::SIGKILL).unwrap();
        // The process is a zombie before `wait`.
        eventually(|state| matches!(state, ProcessState::Ended(_)));
        child.wait().unwrap();
        let gone = ProcessState::Ended("its process is gone");
        assert_eq!(state(child.id(), born), gone);
    }

    /// Ends the main thread of a process while another thread goes on.
    #[test]
    #[allow(unsafe_code)] // fork, and the end of one thread
    fn process_runs_without_its_first_thread() {
        use nix::libc;
        use nix::sys::signal::{Signal, kill};
        use nix::unistd::{ForkResult, fork};
        // SAFETY: the child only starts a thread and ends its main thread: no code of the test
        // harness runs there.
        let child = match unsafe { fork() }.unwrap() {
            ForkResult::Parent { child } => child,
            ForkResult::Child => {
                std::thread::spawn(|| {
                    std::thread::sleep(std::time::Duration::from_secs(20));
                    // SAFETY: `_exit` has no preconditions.
                    unsafe { libc::_exit(0) }
                });
                // SAFETY: both calls end the thread; no destructor of the test harness runs.
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
                assert!(std::time::Instant::now() < until, "{:?}", state(pid, born));
                std::thread::yield_now();
            }
        };
        let letter = || {
            let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            parse(&text).unwrap().state
        };
        eventually(&|| letter() == 'Z');
        assert_eq!(state(pid, born), ProcessState::Running);
        kill(child, Signal::SIGSTOP).unwrap();
        eventually(&|| state(pid, born) == ProcessState::Stopped);
        kill(child, Signal::SIGKILL).unwrap();
        let ended = ProcessState::Ended("its process has ended");
        eventually(&|| state(pid, born) == ended);
        nix::sys::wait::waitpid(child, None).unwrap();
    }

    #[test]
    fn ids_are_stable_and_tell_hosts_apart() {
        assert_eq!(process_id().unwrap(), process_id().unwrap());
        let other = Config {
            host_id: Some("b".into()),
            ..Config::default()
        };
        let id = |config: &Config| host_id(config).unwrap();
        assert_eq!(id(&Config::default()), id(&Config::default()));
        assert_ne!(id(&Config::default()), id(&other));
        assert!(check_descriptors(1, "a test").is_ok());
        let error = check_descriptors(1 << 40, "a test").unwrap_err();
        assert!(error.message().contains(&(1u64 << 40).to_string()));
    }
}
