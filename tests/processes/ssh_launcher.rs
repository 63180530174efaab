//! Tests `cinch run --hosts` with a script instead of ssh, which runs the command on this host.
//! Covers ranks, environment, failures, interrupts and a killed launcher.

use crate::support::launcher::{self, Deadline, alive, end, output, signal, wait_until};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// A folder with a script that replaces ssh and logs its arguments, and with a file of hosts.
struct Place(PathBuf);

impl Place {
    fn new(name: &str, hosts: &str) -> Place {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("run-hosts-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("hosts"), hosts).unwrap();
        let ssh = folder.join("ssh");
        let script = format!(
            "#!/bin/sh\necho \"$@\" >> '{}'\nshift 2\nhost=$1\nshift\n\
             [ $host = unreachable ] && exit 255\n[ $host = asking ] && kill -TTIN $$\nFAKE_HOST=$host exec sh -c \"$*\"\n",
            folder.join("called").display()
        );
        std::fs::write(&ssh, script).unwrap();
        std::fs::set_permissions(&ssh, PermissionsExt::from_mode(0o755)).unwrap();
        Place(folder)
    }

    fn run(&self, options: &[&str], program: &[&str]) -> Command {
        let mut command = launcher::cinch();
        command
            .args(["run", "--hosts"])
            .arg(self.0.join("hosts"))
            .arg("--ssh")
            .arg(self.0.join("ssh"))
            .args(options)
            .arg("--")
            .args(program)
            .env("CINCH_SOCKET_IFNAME", "lo")
            .env("CINCH_TIMEOUT", "20")
            .stdin(Stdio::null());
        command
    }

    fn called(&self) -> String {
        std::fs::read_to_string(self.0.join("called")).unwrap_or_default()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Starts four ranks on two hosts. Each prints its pid and sleeps.
fn sleepers(place: &Place) -> (Child, Vec<i32>) {
    let mut launcher = place
        .run(
            &["--grace", "0.2"],
            &["sh", "-c", "echo $$; sleep 600 & wait"],
        )
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let _deadline = Deadline::of(&launcher);
    let out = BufReader::new(launcher.stdout.take().unwrap());
    let pids = out
        .lines()
        .take(4)
        .map(|line| line.unwrap().trim().parse().unwrap());
    let pids = pids.collect();
    (launcher, pids)
}

#[test]
fn ranks_on_hosts_learn_who_they_are() {
    let place = Place::new("who", "one slots=2 # first\ntwo slots=3\n");
    let script = "echo $FAKE_HOST $CINCH_LAUNCH_RANK $RANK $WORLD_SIZE $LOCAL_RANK \
                  $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $CINCH_TIMEOUT $GIVEN $CINCH_TRANSPORT $(pwd)";
    let mut run = place.run(
        &["-n", "4", "--env", "GIVEN", "--transport", "tcp"],
        &["sh", "-c", script],
    );
    run.env("GIVEN", "it's given")
        // The `--transport` option overrides this variable.
        .env("CINCH_TRANSPORT", "shm")
        .env_remove("MASTER_ADDR")
        .env("MASTER_PORT", "29501")
        .current_dir(&place.0);
    let out = output(&mut run);
    assert!(out.status.success(), "{out:?}");
    let text = String::from_utf8(out.stdout).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    let tail = format!("one 29501 20 it's given tcp {}", place.0.display());
    let expected = [
        format!("one 0 0 4 0 2 {tail}"),
        format!("one 1 1 4 1 2 {tail}"),
        format!("two 2 2 4 0 2 {tail}"),
        format!("two 3 3 4 1 2 {tail}"),
    ];
    assert_eq!(lines, expected);
    // Command lines must contain neither the secret nor settings nor the program.
    let called = place.called();
    assert_eq!(called.lines().count(), 2, "{called}");
    for line in called.lines() {
        assert!(line.ends_with("run --agent"), "{line}");
        // ssh must not ask questions, because nobody could answer them.
        assert!(line.starts_with("-o BatchMode=yes "), "{line}");
    }
}

/// The doctor receives a report from each host, compares them, and names the host that does not answer.
#[test]
fn doctor_checks_hosts_and_compares_them() {
    let place = Place::new("doctor", "one\ntwo\n");
    let doctor = |hosts: &str| {
        std::fs::write(place.0.join("hosts"), hosts).unwrap();
        let mut command = launcher::cinch();
        command.args(["doctor", "--json", "--hosts"]);
        command.arg(place.0.join("hosts"));
        command.arg("--ssh").arg(place.0.join("ssh"));
        command.env("CINCH_SOCKET_IFNAME", "lo");
        command.env("CINCH_CHANELS", "3");
        let out = output(&mut command);
        let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        (out.status.code(), report)
    };
    let level = |report: &serde_json::Value, check: &str| {
        let all = report["results"].as_array().unwrap();
        let found = all.iter().find(|it| it["check"] == check);
        found.unwrap_or_else(|| panic!("{check}: {report}"))["level"].clone()
    };
    let (code, report) = doctor("one\ntwo\n");
    // Both names are this host, so both take one address.
    assert_eq!(level(&report, "addresses"), "error");
    assert_eq!(code, Some(1));
    assert_eq!(level(&report, "cinch"), "ok");
    assert_eq!(level(&report, "one"), "ok", "its clock is this host's");
    for host in ["one", "two"] {
        let results = report["hosts"][host]["results"].as_array().unwrap();
        let passed_on = results.iter().find(|it| it["check"] == "CINCH_CHANELS");
        let advice = passed_on.expect("the variable is passed on")["advice"].clone();
        assert_eq!(advice, "did you mean CINCH_CHANNELS?");
    }
    let (code, report) = doctor("one\nunreachable\n");
    assert_eq!(
        (code, level(&report, "unreachable")),
        (Some(1), "error".into())
    );
    assert_eq!(level(&report, "addresses"), "ok");
}

/// Each host must preload its own copy of the drop-in, instead of a library that a variable names
/// there.
#[test]
fn each_host_preloads_its_own_drop_in() {
    let place = Place::new("preload", "one\ntwo\n");
    let (source, library) = (place.0.join("nccl.c"), place.0.join("libnccl.so.2"));
    let text = "char mark[] = \"CINCH_CODEC_RULES\"; int ncclGetUniqueId(void) { return 0; }\n";
    std::fs::write(&source, text).unwrap();
    let mut compile = Command::new("cc");
    compile.args(["-shared", "-fPIC", "-o"]);
    assert!(
        compile
            .args([&library, &source])
            .status()
            .unwrap()
            .success()
    );
    let option = format!("--preload={}", library.display());
    let mut run = place.run(
        &[&option, "--env", "VLLM_NCCL_SO_PATH"],
        &["sh", "-c", "echo $LD_PRELOAD $VLLM_NCCL_SO_PATH"],
    );
    let out = output(run.env("VLLM_NCCL_SO_PATH", "/usr/lib/another.so"));
    let path = library.canonicalize().unwrap();
    let line = format!("{0} {0}\n", path.display());
    assert_eq!(
        String::from_utf8_lossy(&out.stdout),
        line.repeat(2),
        "{out:?}"
    );
}

#[test]
fn ranks_on_hosts_compute_together() {
    let place = Place::new("sum", "one slots=2\ntwo slots=2\n");
    let cinch = launcher::tool();
    let cinch = cinch.to_str().unwrap();
    let line = [
        cinch,
        "bench",
        "all_reduce",
        "-b",
        "4K",
        "-e",
        "4K",
        "-n",
        "2",
        "-w",
        "0",
    ];
    let out = output(&mut place.run(&[], &line));
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{out:?}");
    assert!(
        text.contains("4 ranks") || text.contains("ranks 4"),
        "{text}"
    );
}

#[test]
fn the_first_failure_is_the_exit_code_and_ends_all_hosts() {
    let place = Place::new("fail", "one slots=2\ntwo slots=2\n");
    let pids = place.0.join("pids");
    let script = format!(
        "[ $RANK = 1 ] && {{ sleep 0.3; exit 7; }}; sleep 600 & echo $! >> {}; wait",
        pids.display()
    );
    let out = output(&mut place.run(&["--grace", "0.2"], &["sh", "-c", &script]));
    assert_eq!(out.status.code(), Some(7), "{out:?}");
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(
        said.contains("rank 1 (pid") && said.contains("on one ended with code 7"),
        "{said}"
    );
    for pid in std::fs::read_to_string(&pids).unwrap().lines() {
        wait_until("the end of a rank", || !alive(pid.parse().unwrap()));
    }
}

#[test]
fn interrupts_and_a_killed_launcher_leave_nothing() {
    for (name, code) in [("INT", Some(130)), ("TERM", Some(143)), ("KILL", None)] {
        let place = Place::new(name, "one slots=2\ntwo slots=2\n");
        let (mut launcher, pids) = sleepers(&place);
        assert!(pids.len() == 4 && pids.iter().all(|&pid| alive(pid)));
        signal(launcher.id(), name);
        assert_eq!(end(&mut launcher).code(), code, "{name}");
        for pid in pids {
            wait_until("the end of a rank", || !alive(pid));
        }
    }
}

#[test]
fn failed_launches_report_an_error_sentence() {
    for (name, hosts, options, part) in [
        (
            "away",
            "one\nunreachable\n",
            &["--grace", "0.1"][..],
            "on unreachable ended with code 255",
        ),
        (
            "ssh",
            "unreachable\n",
            &[][..],
            "`ssh unreachable true` must work without a question",
        ),
        (
            "asking",
            "one\nasking\n",
            &["--grace", "0.1"][..],
            "on asking asks something",
        ),
        (
            "no-drop-in",
            "one\n",
            &["--preload=/no/such/libnccl.so.2"][..],
            "/no/such/libnccl.so.2",
        ),
        (
            "slots",
            "one slots=2\n",
            &["-n", "3"][..],
            "the hosts have 2 slots",
        ),
        ("line", "one slots\n", &[][..], "line 1"),
        (
            "env",
            "one\n",
            &["--env", "CINCH_NO_SUCH_VARIABLE"][..],
            "it is not set",
        ),
        (
            "old",
            "one\n",
            &["--remote-cinch", "/no/such/cinch"][..],
            "ended with code 127",
        ),
    ] {
        let place = Place::new(name, hosts);
        let out = output(&mut place.run(options, &["sleep", "600"]));
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(
            !out.status.success() && said.contains(part),
            "{name}: {said}"
        );
    }
}
