//! `cinch run --hosts`: starts ranks on several hosts over ssh, watches them, and ends all of them.
//!
//! Each host gets one ssh session, which runs `cinch run --agent` there. The agent reads its task, including
//! the job's secret, from standard input, because any user can read command lines. Afterwards the launcher
//! keeps this input open and sends nothing more. The agent ends its ranks when the input ends, which means
//! that the launcher has exited or wants the ranks to end. A lost connection therefore leaves no ranks
//! behind.

use super::host_file::{self, Host};
use super::join::{create_id_between_hosts, job_number};
use super::launch::{LocalLaunch, Signals, TERM_TO_KILL, exit_code};
use super::master;
use super::preload;
use super::run::{RunOptions, bound};
use super::{FAILURE, USAGE};
use cinch::Config;
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use std::ffi::{OsStr, OsString};
use std::io::{self, BufRead, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The task of an agent, which the launcher sends as one line of JSON.
#[derive(Serialize, Deserialize)]
struct Task {
    /// Version of cinch, which must be the same on both sides.
    version: String,
    command: Vec<String>,
    variables: Vec<(String, String)>,
    directory: String,
    /// Number of ranks on earlier hosts (`before`), on this host (`ranks`), and on all hosts
    /// (`all`).
    before: usize,
    ranks: usize,
    all: usize,
    label: bool,
    bind: bool,
    exit_timeout: f64,
    /// Path of the drop-in libnccl on the agent's host, if it is to be preloaded. An empty path
    /// selects the drop-in beside the tool.
    preload: Option<String>,
}

/// The exit code of ssh if it could not open a session.
const SSH_FAILED: i32 = 255;

/// Largest number of bytes of a task line. Program arguments may be long, but an endless line must
/// not fill the memory.
const TASK_BYTES: u64 = 4 << 20;

/// Runs `cinch run --hosts` and returns the first failure's exit code.
///
/// # Errors
/// Returns an exit code and an error message if the file or an option is invalid, or if a session
/// cannot be started.
pub fn run(
    options: &RunOptions,
    file: &Path,
    variables: Variables,
    config: &Config,
) -> crate::ExitResult {
    let (hosts, passed_on) = read(options, file).map_err(|sentence| (USAGE, sentence))?;
    // The last value of a variable wins, so an option overrides the environment.
    let variables = [passed_on, variables].concat();
    run_on(options, hosts, variables, config).map_err(|sentence| (FAILURE, sentence))
}

/// Names and values of environment variables.
type Variables = Vec<(String, String)>;

/// Returns the hosts with their slots, and the environment variables for their ranks.
fn read(options: &RunOptions, file: &Path) -> Result<(Vec<Host>, Variables), String> {
    let shown = file.display();
    let text =
        std::fs::read_to_string(file).map_err(|error| format!("cannot read {shown}: {error}"))?;
    let hosts = host_file::parse(&text).map_err(|why| format!("{shown}: {why}"))?;
    let hosts = host_file::fill(hosts, options.ranks.map(|ranks| ranks as usize))?;
    Ok((hosts, passed_on(&options.environment)?))
}

/// Starts a session on each host and waits for all sessions.
fn run_on(
    options: &RunOptions,
    hosts: Vec<Host>,
    mut variables: Variables,
    config: &Config,
) -> Result<i32, String> {
    let command: Vec<String> = options
        .command
        .iter()
        .map(|word| utf8(word))
        .collect::<Result<_, _>>()?;
    let directory = std::env::current_dir()
        .map_err(|error| format!("cannot find the current folder: {error}"))?;
    let cinch = remote_tool(options.remote_cinch.as_deref())?;
    let preload = match &options.preload {
        Some(Some(path)) => Some(utf8(path.as_os_str())?),
        Some(None) => Some(String::new()),
        None => None,
    };
    let signals = Signals::block()?;
    let id = create_id_between_hosts(config).map_err(|error| error.to_string())?;
    variables.push(("CINCH_LAUNCH_ID".into(), id.to_hex()));
    let first = hosts.first().map(|host| host.name.as_str());
    let given = |name: &str| std::env::var(name).ok();
    variables.extend(master::variables(given, first, job_number(&id)));
    let all = hosts.iter().map(|host| host.slots).sum();
    let mut sessions = Sessions::default();
    let mut before = 0;
    for host in hosts {
        let task = Task {
            version: cinch::VERSION.into(),
            command: command.clone(),
            variables: variables.clone(),
            directory: utf8(directory.as_os_str())?,
            before,
            ranks: host.slots,
            all,
            label: options.label,
            bind: options.bind,
            exit_timeout: options.exit_timeout,
            preload: preload.clone(),
        };
        before += host.slots;
        // An early return drops `sessions`, which ends the sessions that were started.
        sessions.start(&options.ssh, &cinch, host, &task)?;
    }
    sessions.watch(&signals, Duration::from_secs_f64(options.exit_timeout))
}

/// Returns the `CINCH_` settings of this environment, the address of torch's store if it is set, and the variables
/// that `--env` names.
pub(super) fn passed_on(asked: &[String]) -> Result<Variables, String> {
    let settings = std::env::vars_os().filter_map(|(name, value)| {
        let name = name.into_string().ok()?;
        let setting = name.starts_with("CINCH_") && !name.starts_with("CINCH_LAUNCH_");
        let is_store = master::NAMES.contains(&name.as_str());
        (setting || is_store).then_some((name, value))
    });
    let mut found: Vec<(String, OsString)> = settings.collect();
    for name in asked {
        let value = std::env::var_os(name).ok_or_else(|| format!("--env {name}: it is not set"))?;
        found.push((name.clone(), value));
    }
    let text = |(name, value): (String, OsString)| match value.into_string() {
        Ok(value) => Ok((name, value)),
        Err(_) => Err(format!("{name} is not UTF-8 and cannot go to other hosts")),
    };
    found.into_iter().map(text).collect()
}

fn utf8(text: &OsStr) -> Result<String, String> {
    let text = text.to_str().map(str::to_string);
    text.ok_or_else(|| "arguments and paths for other hosts must be UTF-8".to_string())
}

/// Sessions on hosts. Dropping this value ends the sessions that still run.
#[derive(Default)]
struct Sessions {
    running: Vec<Session>,
}

struct Session {
    host: Host,
    /// Whether the program is ssh itself, which exits with [`SSH_FAILED`] if it cannot log in.
    is_ssh: bool,
    child: Child,
    /// The agent's standard input. The agent ends its ranks when this pipe is closed.
    lifeline: Option<ChildStdin>,
}

impl Sessions {
    fn start(&mut self, ssh: &OsStr, cinch: &str, host: Host, task: &Task) -> Result<(), String> {
        let is_ssh = is_ssh(ssh);
        let mut command = remote_command(ssh, &host.name, cinch, "run --agent");
        command.stdin(Stdio::piped());
        let failed =
            |error: io::Error| format!("cannot start {} {}: {error}", ssh.display(), host.name);
        let mut child = cinch::sys::process::unblock_signals(&mut command)
            .spawn()
            .map_err(failed)?;
        let mut lifeline = child.stdin.take();
        let mut line = serde_json::to_string(task).map_err(|error| error.to_string())?;
        line.push('\n');
        if let Some(input) = &mut lifeline {
            // A write error is ignored: a session that failed at once reports that by its exit
            // code.
            let _ = input
                .write_all(line.as_bytes())
                .and_then(|()| input.flush());
        }
        self.running.push(Session {
            host,
            is_ssh,
            child,
            lifeline,
        });
        Ok(())
    }

    /// Waits for all sessions. Some time after the first failure, ends the others.
    fn watch(mut self, signals: &Signals, exit_timeout: Duration) -> Result<i32, String> {
        let mut first = None;
        let mut let_go_at: Option<Instant> = None;
        let mut kill_at: Option<Instant> = None;
        while !self.running.is_empty() {
            self.end_those_that_ask();
            for (host, is_ssh, code) in self.reap()? {
                if code != 0 && first.is_none() {
                    first = Some(code);
                    let host = host.name;
                    eprintln!(
                        "cinch: the ranks on {host} ended with code {code}; {} more hosts are running \
                         and will be ended",
                        self.running.len()
                    );
                    if is_ssh && code == SSH_FAILED {
                        eprintln!("cinch: if ssh could not log in: {}", log_in(&host));
                    }
                    let_go_at = Some(Instant::now() + exit_timeout);
                }
            }
            let now = Instant::now();
            if let_go_at.is_some_and(|at| at <= now) {
                self.let_go();
                let_go_at = None;
                // The agent itself waits this long before it kills its ranks. The remaining time is
                // for the connection.
                kill_at = Some(now + exit_timeout + 2 * TERM_TO_KILL);
            }
            if kill_at.is_some_and(|at| at <= now) {
                self.kill();
                kill_at = Some(now + TERM_TO_KILL);
            }
            if let Some(signal) = signals.wait(Duration::from_millis(50))? {
                match kill_at {
                    // A second signal kills the sessions without waiting.
                    Some(_) => self.kill(),
                    None => self.let_go(),
                }
                first = first.or(Some(128 + signal as i32));
                let_go_at = None;
                kill_at = Some(Instant::now() + exit_timeout + 2 * TERM_TO_KILL);
            }
        }
        Ok(first.unwrap_or(0))
    }

    /// Kills sessions that the kernel has stopped because they read from or write to the terminal.
    /// Otherwise they would neither end nor continue.
    fn end_those_that_ask(&self) {
        let flags = WaitPidFlag::WSTOPPED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        for session in &self.running {
            let pid = Pid::from_raw(session.child.id() as i32);
            if let Ok(WaitStatus::Stopped(_, Signal::SIGTTIN | Signal::SIGTTOU)) =
                waitid(Id::Pid(pid), flags)
            {
                let host = &session.host.name;
                eprintln!(
                    "cinch: the session on {host} asks something, but it has no terminal: {}",
                    log_in(host)
                );
                let _ = killpg(pid, Signal::SIGKILL);
            }
        }
    }

    /// Returns each session that has ended: host, whether it ran ssh itself, and exit code.
    fn reap(&mut self) -> Result<Vec<(Host, bool, i32)>, String> {
        let mut ended = Vec::new();
        let mut failure = None;
        self.running
            .retain_mut(|session| match session.child.try_wait() {
                Ok(None) => true,
                Ok(Some(status)) => {
                    ended.push((session.host.clone(), session.is_ssh, exit_code(status)));
                    false
                }
                Err(error) => {
                    let host = &session.host.name;
                    failure = Some(format!("cannot wait for the session on {host}: {error}"));
                    true
                }
            });
        failure.map_or(Ok(ended), Err)
    }

    /// Closes the agents' standard input, which makes the agents end their ranks.
    fn let_go(&mut self) {
        for session in &mut self.running {
            session.lifeline = None;
        }
    }

    fn kill(&self) {
        for session in &self.running {
            // The child has not been reaped yet, so no other process can have its id.
            let _ = killpg(Pid::from_raw(session.child.id() as i32), Signal::SIGKILL);
        }
    }
}

impl Drop for Sessions {
    fn drop(&mut self) {
        self.let_go();
        self.kill();
        for session in &mut self.running {
            let _ = session.child.wait();
        }
    }
}

/// Returns whether the program of sessions is ssh itself.
fn is_ssh(program: &OsStr) -> bool {
    Path::new(program).file_name() == Some(OsStr::new("ssh"))
}

/// Returns the command that runs the tool with `words` on a host.
pub(super) fn remote_command(ssh: &OsStr, host: &str, cinch: &str, words: &str) -> Command {
    let mut command = Command::new(ssh);
    // The session has no terminal, so a question of ssh would block for ever.
    if is_ssh(ssh) {
        command.args(["-o", "BatchMode=yes"]);
    }
    command
        .arg(host)
        .arg(format!("exec {} {words}", quoted(cinch)))
        // A process group of its own keeps an interrupt from the terminal away from the session. The
        // launcher receives it and then ends the sessions.
        .process_group(0);
    command
}

/// Returns the path of the tool on other hosts: `given`, or the path on this host.
///
/// # Errors
/// Returns an error message if the path of this program is unknown or not UTF-8.
pub(super) fn remote_tool(given: Option<&str>) -> Result<String, String> {
    if let Some(path) = given {
        return Ok(path.to_string());
    }
    let path =
        std::env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?;
    utf8(path.as_os_str())
}

/// Returns advice for a host whose ssh session asks a question, such as for a password.
pub(super) fn log_in(host: &str) -> String {
    format!(
        "`ssh {host} true` must work without a question, so log in once to accept the host's key, and \
         use a key without a passphrase or an agent"
    )
}

/// Quotes a word for a POSIX shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

/// Runs `cinch run --agent`: the ranks of one host, until they end or standard input ends.
///
/// # Errors
/// Returns an error message if standard input has no valid task or the ranks cannot be started.
pub fn agent() -> Result<i32, String> {
    let mut line = String::new();
    io::stdin()
        .lock()
        .take(TASK_BYTES)
        .read_line(&mut line)
        .map_err(|error| format!("cannot read the task from standard input: {error}"))?;
    let task: Task = serde_json::from_str(&line).map_err(|error| {
        format!("--agent expects a task from cinch run --hosts on standard input: {error}")
    })?;
    let host = nix::unistd::gethostname().unwrap_or_default();
    let host = host.display();
    if task.version != cinch::VERSION {
        return Err(format!(
            "cinch on {host} is {}, and the launcher's is {}: use one version",
            cinch::VERSION,
            task.version
        ));
    }
    std::env::set_current_dir(&task.directory)
        .map_err(|error| format!("no folder {} on {host}: {error}", task.directory))?;
    let given = task.variables.into_iter();
    let mut variables: Vec<(String, OsString)> =
        given.map(|(name, value)| (name, value.into())).collect();
    if let Some(path) = task.preload {
        let path = Some(Path::new(&path)).filter(|path| !path.as_os_str().is_empty());
        let library = preload::find(path).map_err(|why| format!("on {host}: {why}"))?;
        let earlier = variables
            .iter()
            .rev()
            .find(|(name, _)| name == "LD_PRELOAD");
        let earlier = earlier.map(|(_, value)| value.clone());
        let earlier = earlier.or_else(|| std::env::var_os("LD_PRELOAD"));
        variables.extend(preload::variables(&library, earlier));
    }
    // Signals are blocked before the thread starts, as it inherits the mask.
    let signals = Signals::block()?;
    let orphaned = Arc::new(AtomicBool::new(false));
    let seen = orphaned.clone();
    std::thread::spawn(move || {
        // The launcher sends nothing more, so the end of this copy means that the launcher has
        // exited or closed the input.
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        seen.store(true, Ordering::Relaxed);
    });
    let launch = LocalLaunch {
        command: task.command.into_iter().map(Into::into).collect(),
        ranks: task.ranks,
        variables,
        label: task.label,
        cores: bound(task.bind, task.ranks)?,
        exit_timeout: Duration::try_from_secs_f64(task.exit_timeout)
            .map_err(|error| error.to_string())?,
        world: Some((task.before, task.all)),
        orphaned: Some(orphaned),
    };
    launch.run(&signals)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_words_survive_the_shell() {
        for text in ["plain", "with space", "it\'s", "$HOME;`x`\\\""] {
            let out = Command::new("sh")
                .args(["-c", &format!("printf %s {}", quoted(text))])
                .output()
                .unwrap();
            assert_eq!(String::from_utf8(out.stdout).unwrap(), text);
        }
    }
}
