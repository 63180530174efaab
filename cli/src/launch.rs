//! Starts ranks on this machine, watches them, and ends all of them.
//!
//! Each rank is a process group of its own. A signal to the group also reaches processes that the
//! rank has started. An interrupt from the terminal reaches the rank only once, from the launcher.
//! The kernel kills a rank whose launcher has exited, but not the rank's children.

use super::forward::Forwarders;
use cinch::Config;
use cinch::sys::cpu;
use cinch::sys::process::{die_with_parent, ignores_signal, pin_to_core, unblock_signals};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::signal::{SigSet, Signal, killpg};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A set of ranks to start on this machine.
#[derive(Clone, Debug)]
pub struct LocalLaunch {
    /// Program, followed by its arguments.
    pub command: Vec<OsString>,
    /// Number of ranks.
    pub ranks: usize,
    /// Environment variables for all ranks, in addition to the variables of each rank.
    pub variables: Vec<(String, OsString)>,
    /// Whether each line of output begins with the rank.
    pub label: bool,
    /// The core to which each rank is bound; empty leaves placement to the system.
    pub cores: Vec<usize>,
    /// Time from the first failure until the other ranks receive SIGTERM.
    pub exit_timeout: Duration,
    /// Number of ranks on earlier hosts, and number of ranks on all hosts; `None` if all ranks are
    /// on this host.
    pub world: Option<(usize, usize)>,
    /// Flag that becomes true when the launcher on the other host has exited.
    pub orphaned: Option<Arc<AtomicBool>>,
}

/// Default time that the other ranks have to end by themselves after one failed.
pub(super) const PEER_EXIT_TIMEOUT: Duration = Duration::from_secs(3);

/// Time from SIGTERM to SIGKILL.
pub(super) const TERM_TO_KILL: Duration = Duration::from_secs(2);

/// Returns a core for each rank, or `None` if this process may use fewer cores than there are
/// ranks.
pub fn one_core_each(ranks: usize) -> Option<Vec<usize>> {
    let allowed = cpu::allowed();
    let cores: Vec<usize> = (0..64 * allowed.len())
        .filter(|core| allowed[core / 64] >> (core % 64) & 1 == 1)
        .take(ranks)
        .collect();
    (cores.len() == ranks).then_some(cores)
}

impl LocalLaunch {
    /// Describes a launch of `command` as `ranks` ranks of a new communicator, not bound to cores.
    pub fn new(command: Vec<OsString>, ranks: usize) -> LocalLaunch {
        LocalLaunch {
            command,
            ranks,
            variables: Vec::new(),
            label: false,
            cores: Vec::new(),
            exit_timeout: PEER_EXIT_TIMEOUT,
            world: None,
            orphaned: None,
        }
    }

    /// Describes a launch of this process's own command line as `ranks` ranks.
    ///
    /// # Errors
    /// Returns an error message if the path of this program is unknown.
    pub fn of_this_command(ranks: usize) -> Result<LocalLaunch, String> {
        let program = std::env::current_exe()
            .map_err(|error| format!("cannot find this program: {error}"))?;
        let arguments = std::env::args_os().skip(1);
        let command = std::iter::once(program.into_os_string()).chain(arguments);
        Ok(LocalLaunch::new(command.collect(), ranks))
    }

    /// Creates a unique id, serves its rendezvous in this process, and runs the ranks with it. Ranks also get an
    /// address for torch's store.
    /// Returns the exit code.
    ///
    /// # Errors
    /// Returns an error message if the id cannot be created or the program cannot be started.
    pub fn run_with_rendezvous(mut self, config: &Config) -> Result<i32, String> {
        // Signals are blocked before the thread of the rendezvous starts, as threads inherit the
        // mask. A thread that does not block a signal would let it end the process.
        let signals = Signals::block()?;
        let id = super::join::create_id(config).map_err(|error| error.to_string())?;
        self.variables
            .push(("CINCH_LAUNCH_ID".to_string(), id.to_hex().into()));
        let given = |name: &str| std::env::var(name).ok();
        let master = super::master::variables(given, None, super::join::job_number(&id));
        let master = master.into_iter().map(|(name, value)| (name, value.into()));
        self.variables.extend(master);
        self.run(&signals)
    }

    /// Runs the ranks and returns the exit code: 0, or the code of the first failure. A rank ended
    /// by a signal has code 128 + signal.
    pub(super) fn run(&self, signals: &Signals) -> Result<i32, String> {
        let before = self.world.map_or(0, |(before, _)| before);
        let mut ranks = Ranks::new()?;
        for rank in 0..self.ranks {
            // An early return drops `ranks`, which kills those already started.
            let child = self.spawn(rank)?;
            ranks.add(before + rank, child, self.label);
        }
        let mut first: Option<i32> = None;
        let mut term_at: Option<Instant> = None;
        let mut kill_at: Option<Instant> = None;
        loop {
            for (rank, pid, status) in ranks.reap()? {
                let code = exit_code(status);
                if code == 0 {
                    continue;
                }
                if first.is_none() {
                    first = Some(code);
                    let left = ranks.running.len();
                    eprintln!("cinch: rank {rank} (pid {pid}) {}", describe(status, left));
                    term_at = Some(Instant::now() + self.exit_timeout);
                }
            }
            if ranks.running.is_empty() {
                break;
            }
            let now = Instant::now();
            if term_at.is_some_and(|at| at <= now) {
                ranks.signal(Signal::SIGTERM);
                term_at = None;
                kill_at = kill_at.or(Some(now + TERM_TO_KILL));
            }
            if kill_at.is_some_and(|at| at <= now) {
                ranks.signal(Signal::SIGKILL);
                kill_at = Some(now + TERM_TO_KILL);
            }
            let orphaned = || {
                let flag = self.orphaned.as_ref()?;
                let ended = kill_at.is_some() || !flag.load(Ordering::Relaxed);
                (!ended).then_some(Signal::SIGTERM)
            };
            let asked = signals.wait(Duration::from_millis(50))?;
            if let Some(signal) = asked.or_else(orphaned) {
                // A second signal kills the ranks without waiting.
                let again = kill_at.is_some();
                ranks.signal(if again { Signal::SIGKILL } else { signal });
                first = first.or(Some(128 + signal as i32));
                term_at = None;
                kill_at = Some(Instant::now() + self.exit_timeout.max(TERM_TO_KILL));
            }
        }
        let look = || signals.wait(Duration::from_millis(10));
        let asked = ranks.forwarders.drain(look)?;
        Ok(first
            .or(asked.map(|signal| 128 + signal as i32))
            .unwrap_or(0))
    }

    fn spawn(&self, rank: usize) -> Result<Child, String> {
        let program = self.command.first().ok_or("no program was given")?;
        let (before, all) = self.world.unwrap_or((0, self.ranks));
        let mut command = Command::new(program);
        command
            .args(&self.command[1..])
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            // A rank that is bound to one core must still report the cores of the whole machine.
            .env(
                "CINCH_LAUNCH_CORES",
                cpu::count(&cpu::allowed()).to_string(),
            )
            .env("CINCH_LAUNCH_RANK", (before + rank).to_string())
            .env("CINCH_LAUNCH_SIZE", all.to_string())
            .env("RANK", (before + rank).to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", all.to_string())
            .env("LOCAL_WORLD_SIZE", self.ranks.to_string())
            .stdin(Stdio::null())
            .process_group(0);
        if self.label {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        }
        if let Some(&core) = self.cores.get(rank) {
            pin_to_core(&mut command, core);
        }
        unblock_signals(die_with_parent(&mut command))
            .spawn()
            .map_err(|error| not_started(program, &error))
    }
}

/// Returns the message for a program that did not start. Scripts are often named without their interpreter.
pub fn not_started(program: &OsStr, error: &io::Error) -> String {
    let file = program.display();
    let hint = match Path::new(program).extension() {
        Some(end) if end == "py" && error.kind() == io::ErrorKind::PermissionDenied => {
            format!("; run `python3 {file}` in its place")
        }
        _ => String::new(),
    };
    format!("cannot start {file}: {error}{hint}")
}

/// The started ranks. Dropping this value kills and reaps the ranks that still run.
struct Ranks {
    running: Vec<(usize, Child)>,
    forwarders: Forwarders,
}

impl Ranks {
    fn new() -> Result<Ranks, String> {
        let forwarders = Forwarders::new();
        Ok(Ranks {
            running: Vec::new(),
            forwarders: forwarders.map_err(|error| format!("cannot create a pipe: {error}"))?,
        })
    }

    fn add(&mut self, rank: usize, mut child: Child, label: bool) {
        if label {
            if let Some(out) = child.stdout.take() {
                self.forwarders.add(rank, out, io::stdout());
            }
            if let Some(err) = child.stderr.take() {
                self.forwarders.add(rank, err, io::stderr());
            }
        }
        self.running.push((rank, child));
    }

    /// Returns the ranks that have ended since the last call, in ascending order.
    fn reap(&mut self) -> Result<Vec<(usize, u32, ExitStatus)>, String> {
        let mut ended = Vec::new();
        let mut failure = None;
        self.running.retain_mut(|(rank, child)| match end(child) {
            Ok(None) => true,
            Ok(Some(status)) => {
                ended.push((*rank, child.id(), status));
                false
            }
            Err(error) => {
                failure = Some(format!("cannot wait for rank {rank}: {error}"));
                true
            }
        });
        failure.map_or(Ok(ended), Err)
    }

    /// Sends a signal to the process groups of the ranks that still run.
    fn signal(&self, signal: Signal) {
        for (_, child) in &self.running {
            // The child has not been reaped yet, so no other process can have its id.
            let _ = killpg(Pid::from_raw(child.id() as i32), signal);
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.signal(Signal::SIGKILL);
        for (_, child) in &mut self.running {
            let _ = child.wait();
        }
    }
}

/// Returns a child's exit status if it has ended, after killing the rest of its process group. The
/// group is killed before the child is reaped, as its id could be reused afterwards.
fn end(child: &mut Child) -> io::Result<Option<ExitStatus>> {
    let pid = Pid::from_raw(child.id() as i32);
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    if waitid(Id::Pid(pid), flags)? == WaitStatus::StillAlive {
        return Ok(None);
    }
    let _ = killpg(pid, Signal::SIGKILL);
    child.wait().map(Some)
}

/// Signals that the launcher receives through a file descriptor.
pub(super) struct Signals(SignalFd);

impl Signals {
    /// Blocks the signals and opens a descriptor for them. Signals that this process ignores are
    /// left out, because the descriptor would report them too. A job started by `nohup`, or by a
    /// script in the background, would then end.
    pub(super) fn block() -> Result<Signals, String> {
        let mut set = SigSet::empty();
        for signal in [
            Signal::SIGINT,
            Signal::SIGTERM,
            Signal::SIGHUP,
            Signal::SIGQUIT,
        ] {
            if !ignores_signal(signal as i32) {
                set.add(signal);
            }
        }
        set.add(Signal::SIGCHLD);
        let failed = |error: Errno| format!("cannot receive signals through a descriptor: {error}");
        set.thread_block().map_err(failed)?;
        SignalFd::with_flags(&set, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)
            .map(Signals)
            .map_err(failed)
    }

    /// Waits for a signal that the ranks should receive, and returns it. Returns `None` after
    /// `time`, or earlier if a child has ended. If another thread has received SIGCHLD, the end of
    /// a child is noticed only after `time`.
    pub(super) fn wait(&self, time: Duration) -> Result<Option<Signal>, String> {
        let timeout = PollTimeout::try_from(time).unwrap_or(PollTimeout::ZERO);
        let mut entries = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        match nix::poll::poll(&mut entries, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(format!("cannot wait for ranks: {error}")),
        }
        let event = self
            .0
            .read_signal()
            .map_err(|error| format!("cannot read a signal: {error}"))?;
        Ok(event
            .and_then(|event| Signal::try_from(event.ssi_signo as i32).ok())
            .filter(|&signal| signal != Signal::SIGCHLD))
    }
}

pub(super) fn exit_code(status: ExitStatus) -> i32 {
    status
        .code()
        .or(status.signal().map(|signal| 128 + signal))
        .unwrap_or(1)
}

fn describe(status: ExitStatus, left: usize) -> String {
    let how = match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with code {code}"),
        (_, Some(signal)) => match Signal::try_from(signal) {
            Ok(name) => format!("was ended by {name}"),
            Err(_) => format!("was ended by signal {signal}"),
        },
        _ => "ended".into(),
    };
    match left {
        0 => how,
        n => format!("{how}; {n} more ranks are running and will be ended"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_without_its_interpreter_gets_a_hint() {
        let denied = io::Error::from(io::ErrorKind::PermissionDenied);
        let message = |program: &str| not_started(program.as_ref(), &denied);
        assert!(message("job/train.py").ends_with("run `python3 job/train.py` in its place"));
        assert!(message("train").ends_with("permission denied"));
        let missing = io::Error::from(io::ErrorKind::NotFound);
        assert!(not_started("trian.py".as_ref(), &missing).ends_with("not found"));
    }

    fn launch(ranks: usize, script: &str, exit_timeout: f64) -> i32 {
        // The launch runs on its own thread, so that the blocked signals stay blocked only there.
        let command = ["sh", "-c", script].map(OsString::from).to_vec();
        let launch = LocalLaunch {
            variables: vec![("CINCH_TEST_WORD".into(), "word".into())],
            exit_timeout: Duration::from_secs_f64(exit_timeout),
            ..LocalLaunch::new(command, ranks)
        };
        std::thread::spawn(move || launch.run(&Signals::block().unwrap()).unwrap())
            .join()
            .unwrap()
    }

    fn file(name: &str) -> std::path::PathBuf {
        let name = format!("cinch-launch-test-{}-{name}", std::process::id());
        std::env::temp_dir().join(name)
    }

    fn lines(path: &std::path::Path) -> Vec<String> {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let _ = std::fs::remove_file(path);
        let mut lines: Vec<_> = text.lines().map(str::to_string).collect();
        lines.sort();
        lines
    }

    /// Returns whether a process exists and is not a zombie.
    fn alive(pid: &str) -> bool {
        std::fs::read_to_string(format!("/proc/{pid}/stat"))
            .is_ok_and(|stat| !stat.rsplit(')').next().unwrap().starts_with(" Z"))
    }

    #[test]
    fn ranks_learn_who_they_are() {
        let path = file("who");
        let script = format!(
            "echo $CINCH_LAUNCH_RANK $CINCH_LAUNCH_SIZE $RANK $WORLD_SIZE $LOCAL_RANK \
             $CINCH_TEST_WORD >> {}",
            path.display()
        );
        assert_eq!(launch(3, &script, 1.0), 0);
        assert_eq!(
            lines(&path),
            ["0 3 0 3 0 word", "1 3 1 3 1 word", "2 3 2 3 2 word"]
        );
    }

    #[test]
    fn bound_ranks_know_the_cores_of_all() {
        let path = file("cores");
        let script = format!("echo $(nproc) of $CINCH_LAUNCH_CORES > {}", path.display());
        let allowed = cpu::count(&cpu::allowed());
        let launch = LocalLaunch {
            cores: one_core_each(1).unwrap(),
            ..LocalLaunch::new(["sh", "-c", &script].map(OsString::from).to_vec(), 1)
        };
        let run = move || launch.run(&Signals::block().unwrap()).unwrap();
        assert_eq!(std::thread::spawn(run).join().unwrap(), 0);
        assert_eq!(lines(&path), [format!("1 of {allowed}")]);
    }

    #[test]
    fn the_first_failure_is_the_exit_code_and_ends_the_rest() {
        let path = file("rest");
        // Rank 1 fails. Each other rank waits ten minutes for a child of its own.
        let script = format!(
            "[ $RANK = 1 ] && {{ sleep 0.2; exit 7; }}; sleep 600 & echo $! >> {0}; wait",
            path.display()
        );
        assert_eq!(launch(3, &script, 0.1), 7);
        let sleepers = lines(&path);
        assert_eq!(sleepers.len(), 2);
        for pid in sleepers {
            let end = Instant::now() + Duration::from_secs(10);
            while alive(&pid) {
                assert!(Instant::now() < end, "{pid} is still running");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }

    #[test]
    fn processes_that_a_rank_leaves_behind_are_ended() {
        let path = file("left");
        let script = format!("sleep 600 & echo $! >> {}", path.display());
        assert_eq!(launch(1, &script, 0.1), 0);
        let pid = lines(&path).remove(0);
        let end = Instant::now() + Duration::from_secs(10);
        while alive(&pid) {
            assert!(Instant::now() < end, "{pid} is still running");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn ranks_that_ignore_sigterm_are_killed() {
        let script = "[ $RANK = 0 ] && exit 3; trap '' TERM; while :; do sleep 0.1; done";
        assert_eq!(launch(2, script, 0.0), 3);
    }

    #[test]
    fn death_by_signal_gives_code_128_plus_signal() {
        assert_eq!(
            launch(2, "[ $RANK = 1 ] && kill -KILL $$; exit 0", 0.5),
            128 + 9
        );
        // Ranks must not inherit the launcher's blocked signals.
        assert_eq!(launch(1, "kill -TERM $$; exit 0", 0.5), 128 + 15);
    }

    #[test]
    fn no_zombies_remain() {
        assert_eq!(launch(4, "exit 0", 0.5), 0);
        let me = std::process::id().to_string();
        // A zombie may remain for a moment until it is reaped. Other tests in this process also
        // have children, so this test polls until no zombie is left.
        let zombies = || {
            std::fs::read_dir("/proc")
                .unwrap()
                .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
                .filter_map(|pid| std::fs::read_to_string(format!("/proc/{pid}/stat")).ok())
                .filter(|stat| {
                    let mut fields = stat.rsplit(')').next().unwrap().split_whitespace();
                    fields.next() == Some("Z") && fields.next() == Some(&me)
                })
                .count()
        };
        let end = Instant::now() + Duration::from_secs(10);
        while zombies() > 0 {
            assert!(Instant::now() < end, "{} zombies", zombies());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    #[test]
    fn missing_program_gives_an_error_message() {
        let launch = LocalLaunch::new(vec!["/no/such/program".into()], 2);
        let error = std::thread::spawn(move || launch.run(&Signals::block().unwrap()))
            .join()
            .unwrap()
            .unwrap_err();
        assert!(error.contains("/no/such/program"), "{error}");
    }
}
