//! `cinch doctor --hosts`: starts an agent on each host over ssh, and compares their reports.
//!
//! The agent writes a line when it is ready, reads the variables of the job, answers with its clock at once, and then
//! with its report. The clock's answer costs one way there and back, not the time of logging in.

use super::check_result::{self, CheckResult, Severity};
use super::clock::{self, ClockDifference};
use super::{DoctorOptions, EnvironmentVariables, MachineReport, Scope, exit_code, write_json};
use crate::host_file;
use crate::hosts::{log_in, passed_on, remote_command, remote_tool};
use crate::{ExitResult, FAILURE, USAGE, finish};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const AREA: &str = "hosts";

/// Longest time for the answers of all hosts.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// First line of an agent.
const READY: &str = "cinch doctor is ready";

/// Longest line of an agent, in bytes.
const MOST_BYTES: u64 = 4 << 20;

/// Answer of a host.
type HostAnswer = Result<(MachineReport, ClockDifference), String>;

/// Object that `--json` prints.
#[derive(Serialize)]
struct HostsReport {
    hosts: BTreeMap<String, MachineReport>,
    results: Vec<CheckResult>,
}

/// Time of an agent's clock.
#[derive(Serialize, Deserialize)]
struct ClockLine {
    unix_nanoseconds: i128,
}

/// Runs the agent on a host.
///
/// # Errors
/// Returns an exit code and an error message if standard input has no task or standard output is closed.
pub fn agent(out: &mut dyn Write) -> ExitResult {
    let failure = |error: io::Error| (FAILURE, error.to_string());
    writeln!(out, "{READY}")
        .and_then(|()| out.flush())
        .map_err(failure)?;
    let mut line = String::new();
    let mut input = io::stdin().lock().take(MOST_BYTES);
    input.read_line(&mut line).map_err(failure)?;
    let unix_nanoseconds = now();
    let clock = serde_json::to_string(&ClockLine { unix_nanoseconds });
    let clock = clock.map_err(|error| (FAILURE, error.to_string()))?;
    writeln!(out, "{clock}")
        .and_then(|()| out.flush())
        .map_err(failure)?;
    let given: Vec<(String, String)> = serde_json::from_str(&line).map_err(|error| {
        (
            USAGE,
            format!("--agent expects the task of cinch doctor --hosts: {error}"),
        )
    })?;
    let scope = Scope::here();
    let mut variables = EnvironmentVariables::read(&scope).map_err(failure)?;
    variables.0.extend(given);
    let report = serde_json::to_string(&MachineReport::of(&scope, &variables));
    let report = report.map_err(|error| (FAILURE, error.to_string()))?;
    finish(writeln!(out, "{report}"))
}

fn now() -> i128 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos() as i128)
}

/// Checks the hosts of a file.
///
/// # Errors
/// Returns an exit code and an error message if the file or an option is invalid.
pub fn run(options: &DoctorOptions, file: &Path, out: &mut dyn Write) -> ExitResult {
    let usage = |sentence: String| (USAGE, sentence);
    let shown = file.display();
    let text = std::fs::read_to_string(file).map_err(|error| usage(format!("{shown}: {error}")))?;
    let hosts = host_file::parse(&text).map_err(|why| usage(format!("{shown}: {why}")))?;
    let names: Vec<String> = hosts.into_iter().map(|host| host.name).collect();
    let variables = passed_on(&[]).map_err(usage)?;
    let task = serde_json::to_string(&variables).map_err(|error| usage(error.to_string()))?;
    let answers = ask_all(options, &names, &task).map_err(|sentence| (FAILURE, sentence))?;
    let results = compare(&answers);
    let reports = answers
        .into_iter()
        .filter_map(|(name, answer)| Some((name, answer.ok()?.0)));
    let report = HostsReport {
        hosts: reports.collect(),
        results,
    };
    let code = report
        .hosts
        .values()
        .map(|host| exit_code(&host.results))
        .fold(exit_code(&report.results), i32::max);
    finish(match options.json {
        true => write_json(&report, out),
        false => write_text(&report, out),
    })
    .map(|_| code)
}

/// Starts the agents of all hosts at once, and waits for their reports. A host that does not answer in time is an error, and its session is ended.
fn ask_all(
    options: &DoctorOptions,
    names: &[String],
    task: &str,
) -> Result<Vec<(String, HostAnswer)>, String> {
    let tool = remote_tool(options.remote_cinch.as_deref())?;
    let (sender, receiver) = channel();
    let mut sessions = Vec::new();
    let mut answers: BTreeMap<usize, HostAnswer> = BTreeMap::new();
    for (at, name) in names.iter().enumerate() {
        let mut command = remote_command(&options.ssh, name, &tool, "doctor --agent");
        let started = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = match started {
            Ok(child) => child,
            Err(error) => {
                let why = format!("cannot start {}: {error}", options.ssh.display());
                answers.insert(at, Err(why));
                continue;
            }
        };
        let (sender, task) = (sender.clone(), task.to_string());
        if let Some((input, output)) = child.stdin.take().zip(child.stdout.take()) {
            std::thread::spawn(move || {
                // The receiver may have stopped waiting.
                let _ = sender.send((at, ask(input, output, &task)));
            });
        }
        sessions.push(child);
    }
    drop(sender);
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    while answers.len() < names.len() {
        let left = deadline.saturating_duration_since(Instant::now());
        let Ok((at, answer)) = receiver.recv_timeout(left) else {
            break;
        };
        answers.insert(at, answer);
    }
    for mut session in sessions {
        // The session has a process group of its own, and is not reaped yet.
        let _ = killpg(Pid::from_raw(session.id() as i32), Signal::SIGKILL);
        let _ = session.wait();
    }
    let late = || Err(format!("no answer within {} s", ANSWER_TIMEOUT.as_secs()));
    let named = names.iter().enumerate();
    Ok(named
        .map(|(at, name)| (name.clone(), answers.remove(&at).unwrap_or_else(late)))
        .collect())
}

/// Receives the report of one agent.
fn ask(mut input: ChildStdin, output: ChildStdout, task: &str) -> HostAnswer {
    let mut output = BufReader::new(output.take(2 * MOST_BYTES));
    // Shells may print lines of their own before the agent starts.
    while next_line(&mut output)? != READY {}
    let before = now();
    writeln!(input, "{task}")
        .and_then(|()| input.flush())
        .map_err(|error| format!("the session ended: {error}"))?;
    let clock = next_line(&mut output)?;
    let after = now();
    let malformed = |error: serde_json::Error| format!("malformed answer: {error}");
    let clock: ClockLine = serde_json::from_str(&clock).map_err(malformed)?;
    let report = serde_json::from_str(&next_line(&mut output)?).map_err(malformed)?;
    let difference = ClockDifference::new(before, clock.unix_nanoseconds, after);
    Ok((report, difference))
}

fn next_line(output: &mut impl BufRead) -> Result<String, String> {
    let mut line = String::new();
    match output.read_line(&mut line) {
        Ok(0) => Err("the session ended without an answer".into()),
        Ok(_) => Ok(line.trim_end().to_string()),
        Err(error) => Err(format!("the session cannot be read: {error}")),
    }
}

/// Judges what differs between hosts, and those that did not answer.
fn compare(answers: &[(String, HostAnswer)]) -> Vec<CheckResult> {
    let mut results = Vec::new();
    for (name, answer) in answers {
        match answer {
            Ok((_, difference)) => results.push(clock::judge(name, *difference)),
            Err(why) => results.push(CheckResult::error(
                AREA,
                name,
                why.clone(),
                format!(
                    "is cinch of this version there (--remote-cinch)? {}",
                    log_in(name)
                ),
            )),
        }
    }
    let reports = || {
        let answered = answers
            .iter()
            .filter_map(|(name, answer)| Some((name, answer.as_ref().ok()?)));
        answered.map(|(name, (report, _))| (name.as_str(), report))
    };
    let version =
        |report: &MachineReport| format!("{}, wire format {}", report.version, report.wire_format);
    let driver = |report: &MachineReport| report.driver.clone().unwrap_or("none".into());
    let install = "install one version on all hosts: ranks of others are refused when they join";
    let groups = grouped(reports().map(|(name, report)| (name, version(report))));
    results.push(match groups.len() {
        0 | 1 => CheckResult::ok(AREA, "cinch", listed(&groups)),
        _ => CheckResult::error(AREA, "cinch", listed(&groups), install),
    });
    let groups = grouped(reports().map(|(name, report)| (name, driver(report))));
    results.push(match groups.len() {
        0 | 1 => CheckResult::ok(AREA, "driver", listed(&groups)),
        _ => CheckResult::warning(
            AREA,
            "driver",
            listed(&groups),
            "install one version of NVIDIA's driver; speeds, and the kernels that it takes, may differ",
        ),
    });
    results.push(addresses(reports()));
    results.sort_by(|a, b| a.area.cmp(&b.area));
    results
}

/// Judges the addresses of hosts: a name of an interface for containers gives many hosts one address.
fn addresses<'a>(reports: impl Iterator<Item = (&'a str, &'a MachineReport)>) -> CheckResult {
    let known = reports.filter_map(|(name, report)| Some((name, report.address.clone()?)));
    let groups = grouped(known);
    match groups.values().any(|hosts| hosts.len() > 1) {
        true => CheckResult::error(
            AREA,
            "addresses",
            format!("hosts would listen at one address: {}", listed(&groups)),
            "set CINCH_SOCKET_IFNAME to an interface that connects the hosts",
        ),
        false => CheckResult::ok(AREA, "addresses", listed(&groups)),
    }
}

/// Returns the hosts by value.
fn grouped<'a>(values: impl Iterator<Item = (&'a str, String)>) -> BTreeMap<String, Vec<&'a str>> {
    let mut groups: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (host, value) in values {
        groups.entry(value).or_default().push(host);
    }
    groups
}

fn listed(groups: &BTreeMap<String, Vec<&str>>) -> String {
    let group = |(value, hosts): (&String, &Vec<&str>)| format!("{value} on {}", hosts.join(", "));
    groups.iter().map(group).collect::<Vec<_>>().join("; ")
}

/// Prints what is wrong on each host, and what differs. `--json` has all results.
fn write_text(report: &HostsReport, out: &mut dyn Write) -> io::Result<()> {
    for (name, host) in &report.hosts {
        let wrong = host.results.iter().filter(|it| it.level != Severity::Ok);
        let wrong: Vec<CheckResult> = wrong.cloned().collect();
        writeln!(
            out,
            "\nhost {name}: {} results, {} not ok",
            host.results.len(),
            wrong.len()
        )?;
        if !wrong.is_empty() {
            check_result::write(&wrong, out)?;
        }
    }
    writeln!(out, "\nbetween hosts")?;
    check_result::write(&report.results, out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(version: &str, driver: Option<&str>, address: &str) -> HostAnswer {
        let report = MachineReport {
            host: "x".into(),
            version: version.into(),
            wire_format: 1,
            driver: driver.map(str::to_string),
            address: Some(address.into()),
            results: Vec::new(),
        };
        Ok((report, ClockDifference::new(0, 1, 2)))
    }

    fn level(answers: &[(String, HostAnswer)], check: &str) -> Severity {
        let results = compare(answers);
        let found = results.iter().find(|it| it.check == check);
        found
            .unwrap_or_else(|| panic!("{check}: {results:?}"))
            .level
    }

    #[test]
    fn hosts_that_differ_are_found() {
        let a = || ("a".to_string(), answer("0.1.0", Some("580"), "10.0.0.1"));
        let b = |answer| ("b".to_string(), answer);
        let equal = [a(), b(answer("0.1.0", Some("580"), "10.0.0.2"))];
        for check in ["cinch", "driver", "addresses", "a", "b"] {
            assert_eq!(level(&equal, check), Severity::Ok, "{check}");
        }
        let version = [a(), b(answer("0.2.0", Some("580"), "10.0.0.2"))];
        assert_eq!(level(&version, "cinch"), Severity::Error);
        let driver = [a(), b(answer("0.1.0", None, "10.0.0.2"))];
        assert_eq!(level(&driver, "driver"), Severity::Warning);
        let address = [a(), b(answer("0.1.0", Some("580"), "10.0.0.1"))];
        assert_eq!(level(&address, "addresses"), Severity::Error);
        let silent = [a(), b(Err("no answer within 60 s".into()))];
        assert_eq!(level(&silent, "b"), Severity::Error);
        assert_eq!(level(&silent, "cinch"), Severity::Ok);
    }
}
