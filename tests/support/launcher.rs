//! Runs the command line tool as a launcher, with default signal handling and a time limit on every
//! wait.

use super::c_library;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// Longest wait for an event that should take milliseconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns the path of the tool.
pub fn tool() -> PathBuf {
    c_library::build().join("cinch")
}

/// Returns a command that runs the tool with default signal handling, as in a terminal. Background
/// jobs of scripts ignore some signals, and the tool would inherit this. A test that sends such a
/// signal would then wait for ever. `env` becomes the tool by exec, so the pid stays the same.
pub fn cinch() -> Command {
    let mut command = Command::new("env");
    command
        .arg("--default-signal=INT,QUIT,HUP,TERM")
        .arg(tool());
    for name in ["RANK", "WORLD_SIZE", "CINCH_LAUNCH_SIZE"] {
        command.env_remove(name);
    }
    command
}

/// Kills a launcher, and thereby its ranks, if it still runs after [`PATIENCE`]. Readers of its
/// output then reach the end. Dropping this value cancels the kill.
pub struct Deadline {
    _disarm: Sender<()>,
}

impl Deadline {
    pub fn of(launcher: &Child) -> Deadline {
        let pid = launcher.id();
        let (disarm, disarmed) = channel();
        std::thread::spawn(move || {
            if disarmed.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                eprintln!("the launcher (pid {pid}) is killed: it took longer than {PATIENCE:?}");
                signal(pid, "KILL");
            }
        });
        Deadline { _disarm: disarm }
    }
}

/// Runs a launcher until it ends, and returns its output.
pub fn output(command: &mut Command) -> Output {
    let launcher = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let _deadline = Deadline::of(&launcher);
    launcher.wait_with_output().unwrap()
}

pub fn end(launcher: &mut Child) -> ExitStatus {
    let begin = Instant::now();
    loop {
        if let Some(status) = launcher.try_wait().unwrap() {
            return status;
        }
        if begin.elapsed() > PATIENCE {
            let _ = launcher.kill();
            let _ = launcher.wait();
            panic!("the launcher did not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns whether a process exists and is not a zombie.
pub fn alive(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(')').next().unwrap().starts_with(" Z"))
}

pub fn signal(pid: u32, name: &str) {
    let kill = format!("kill -{name} {pid}");
    let status = Command::new("sh").args(["-c", &kill]).status();
    assert!(status.unwrap().success(), "{kill}");
}
