//! Tests the text protocol of NCCL's RAS subsystem with clients that read what Ray and SGLang read.

use super::programs::compile;
use serde_json::Value;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Time in which a state must show.
const DEADLINE: Duration = Duration::from_secs(20);

/// The ranks of `ras.c`, with their sockets in a folder of their own.
struct Job {
    program: Child,
    lines: BufReader<ChildStdout>,
    pids: Vec<i64>,
    port: u16,
    folder: PathBuf,
}

impl Job {
    fn start(name: &str, variables: &[(&str, &str)]) -> Job {
        // The tests of this file run at once, and a running program cannot be written.
        static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
        let program = PROGRAM.get_or_init(|| compile("ras"));
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = free.local_addr().unwrap().port();
        // The ranks listen there next.
        drop(free);
        let folder = std::env::temp_dir().join(format!("cinch-ras-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut program = Command::new(program)
            .env("CINCH_DEVICE", "host")
            .env("XDG_RUNTIME_DIR", &folder)
            .env("NCCL_RAS_ADDR", format!("localhost:{port}"))
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(program.stdout.take().unwrap());
        let mut job = Job {
            program,
            lines,
            pids: Vec::new(),
            port,
            folder,
        };
        let line = job.line();
        let numbers = line.strip_prefix("ready ").unwrap().split(' ');
        job.pids = numbers.map(|pid| pid.parse().unwrap()).collect();
        job
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line.trim_end().into()
    }

    fn step(&mut self, step: &str) {
        writeln!(self.program.stdin.as_ref().unwrap(), "{step}").unwrap();
        assert_eq!(self.line(), if step == "end" { "ok" } else { "done" });
    }

    /// Sends lines and returns all that comes until the connection ends.
    fn ask(&self, lines: &str) -> std::io::Result<String> {
        let mut client = TcpStream::connect(("127.0.0.1", self.port))?;
        client.set_read_timeout(Some(Duration::from_secs(3)))?;
        client.write_all(lines.as_bytes())?;
        let mut answer = String::new();
        client.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// Asks for the status as SGLang does: two commands in one connection, and JSON behind the first line. Asks again
    /// if a stopped process got the connection.
    fn status(&self) -> Value {
        let begun = Instant::now();
        loop {
            match self.ask("TIMEOUT 1\nSET FORMAT json\nSTATUS\n") {
                Ok(answer) => {
                    let json = answer.strip_prefix("OK\nOK\n").unwrap();
                    return serde_json::from_str(json).unwrap();
                }
                Err(error) => {
                    let is_stopped = matches!(
                        error.kind(),
                        ErrorKind::WouldBlock | ErrorKind::ConnectionReset
                    );
                    assert!(is_stopped && begun.elapsed() < DEADLINE, "{error}");
                }
            }
        }
    }

    /// Returns the first status of which `holds` is true.
    fn status_with(&self, holds: impl Fn(&Value) -> bool) -> Value {
        let begun = Instant::now();
        loop {
            let status = self.status();
            if holds(&status["communicators"][0]) {
                return status;
            }
            assert!(begun.elapsed() < DEADLINE, "{status:#}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn signal(&self, rank: usize, signal: &str) {
        let pid = self.pids[rank].to_string();
        let sent = Command::new("kill").args([signal, &pid]).status().unwrap();
        assert!(sent.success());
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // The ranks end when the pipes of the program close; a stopped one is killed.
        let _ = self.program.kill();
        let _ = self.program.wait();
        if std::thread::panicking() {
            for pid in &self.pids {
                let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
            }
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Returns the calls of each rank, if all made as many of a collective as `expected`.
fn all_reduces(comm: &Value) -> Vec<i64> {
    let ranks = comm["ranks"].as_array().unwrap().iter();
    ranks
        .map(|rank| rank["collective_counts"]["AllReduce"].as_i64().unwrap())
        .collect()
}

#[test]
fn consumers_of_nccl_find_the_state_of_a_hung_stopped_and_failed_job() {
    let mut job = Job::start("job", &[("NCCL_RAS_ENABLE", "1")]);
    // Ranks 0 and 1 are in their fourth call, in which they wait for rank 2.
    let hung = job.status_with(|comm| all_reduces(comm) == [4, 4, 3]);
    check_consumers_fields(&hung, &job.pids);
    check_text(&job);

    job.signal(2, "-STOP");
    let stopped = job.status_with(|comm| comm["missing_ranks_count"] == 1);
    let missing = &stopped["communicators"][0]["missing_ranks"][0];
    assert_eq!(missing["rank"], 2);
    assert_eq!(missing["pid"], job.pids[2]);
    assert_eq!(missing["status"]["unresponsive"], true);
    assert_eq!(missing["status"]["considered_dead"], false);
    assert_eq!(stopped["ras"]["timeouts_count"], 1);
    job.signal(2, "-CONT");

    job.step("kill");
    let failed = job.status_with(|comm| {
        let ranks = comm["ranks"].as_array().unwrap();
        ranks.len() == 2 && ranks.iter().all(|rank| rank["status"]["async_error"] == 6)
    });
    let missing = &failed["communicators"][0]["missing_ranks"][0]["status"];
    assert_eq!(missing["considered_dead"], true, "{failed:#}");
    let left = std::fs::read_dir(job.folder.join("cinch")).unwrap().count();
    assert_eq!(left, 2, "the socket of the killed rank stays");
    job.step("end");
    let left = std::fs::read_dir(job.folder.join("cinch")).unwrap().count();
    assert_eq!(left, 0);
    assert!(job.ask("STATUS\n").is_err(), "the service stays behind");
}

/// Checks every field of NCCL's JSON, by its name, place and type.
fn check_consumers_fields(status: &Value, pids: &[i64]) {
    assert_eq!(status["nccl_version"], "2.28.9");
    assert!(status["cuda_runtime_version"].is_i64() && status["cuda_driver_version"].is_i64());
    // SGLang reads the time by this pattern.
    let time = status["timestamp"].as_str().unwrap();
    let pattern: String = time
        .chars()
        .map(|c| if c.is_ascii_digit() { '0' } else { c })
        .collect();
    assert_eq!(pattern, "0000-00-00 00:00:00");
    assert_eq!(status["communicators_count"], 1);
    assert!(status["ras"]["collection_time_sec"].is_f64());
    assert_eq!(status["ras"]["timeouts_count"], 0);
    let comm = &status["communicators"][0];
    let hash = comm["hash"].as_str().unwrap().strip_prefix("0x").unwrap();
    assert!(u64::from_str_radix(hash, 16).is_ok());
    let (host, pid) = comm["secondary_hash"]
        .as_str()
        .unwrap()
        .split_once(':')
        .unwrap();
    assert!(host.starts_with("0x") && pid.starts_with("0x"));
    assert_eq!(comm["size"], 3);
    assert_eq!(comm["ranks_count"], 3);
    assert_eq!(comm["missing_ranks_count"], 0);
    assert_eq!(comm["missing_ranks"], serde_json::json!([]));
    for (rank, pid) in pids.iter().enumerate() {
        let found = &comm["ranks"][rank];
        assert_eq!(found["rank"], rank);
        assert_eq!(found["pid"], *pid);
        assert!(!found["host"].as_str().unwrap().is_empty());
        assert_eq!(found["cuda_dev"], -1);
        assert_eq!(found["nvml_dev"], -1);
        let expected = serde_json::json!({
            "init_state": 0,
            "async_error": 0,
            "finalize_called": false,
            "destroy_flag": false,
            "abort_flag": false,
        });
        assert_eq!(found["status"], expected);
        let counts = &found["collective_counts"];
        assert_eq!(counts["Broadcast"], 1);
        for name in ["Reduce", "AllGather", "ReduceScatter"] {
            assert_eq!(counts[name], 0, "{name}");
        }
    }
}

/// Checks the text, and the answers that NCCL's own client expects before it.
fn check_text(job: &Job) {
    let ask = || {
        job.ask("client protocol 2\r\nTIMEOUT 5\nverbose status\n")
            .unwrap()
    };
    // A wait is shown once it has taken some tenths of a second.
    let begun = Instant::now();
    let mut text = ask();
    while !text.contains("WAIT: rank 0 waits") {
        assert!(begun.elapsed() < DEADLINE, "{text}");
        std::thread::sleep(Duration::from_millis(20));
        text = ask();
    }
    let text = text.strip_prefix("SERVER PROTOCOL 2\nOK\n").unwrap();
    let part = "MISMATCH: AllReduce calls: 3 on ranks 2, 4 on ranks 0, 1";
    assert!(text.contains(part), "{part} in\n{text}");
}

#[test]
fn clients_that_misbehave_do_not_keep_others_from_an_answer() {
    let mut job = Job::start("hostile", &[("NCCL_RAS_ENABLE", "1")]);
    let connect = || TcpStream::connect(("127.0.0.1", job.port)).unwrap();
    let silent: Vec<TcpStream> = (0..200).map(|_| connect()).collect();
    // A line without an end, of more than the service keeps.
    let mut long = connect();
    let _ = long.write_all(&[b'x'; 100_000]);
    let mut begun = connect();
    begun.write_all(b"STAT").unwrap();
    // Many answers that nobody reads.
    let mut unread = connect();
    unread
        .set_write_timeout(Some(Duration::from_millis(100)))
        .unwrap();
    while unread
        .write_all(&b"CLIENT PROTOCOL 2\n".repeat(1000))
        .is_ok()
    {}
    let status = job.status();
    assert_eq!(status["communicators"][0]["ranks_count"], 3);
    long.set_read_timeout(Some(DEADLINE)).unwrap();
    let ended = long.read(&mut [0; 16]);
    assert!(ended.is_err() || ended.is_ok_and(|count| count == 0));
    drop((silent, begun, unread));
    job.step("go");
    job.step("end");
}

#[test]
fn nothing_listens_unless_asked() {
    let mut job = Job::start("off", &[]);
    assert!(job.ask("STATUS\n").is_err());
    assert!(!job.folder.join("cinch").exists());
    for pid in &job.pids {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        for task in tasks.flatten() {
            let name = std::fs::read_to_string(task.path().join("comm")).unwrap();
            assert!(!["cinch-text\n", "cinch-recorder\n"].contains(&name.as_str()));
        }
    }
    job.step("go");
    job.step("end");
}

#[test]
fn port_of_another_program_is_a_warning() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("127.0.0.1:{}", taken.local_addr().unwrap().port());
    let log = std::env::temp_dir().join(format!("cinch-ras-log-{}-%p", std::process::id()));
    let variables = [
        ("NCCL_RAS_ENABLE", "1"),
        ("NCCL_RAS_ADDR", address.as_str()),
        ("CINCH_LOG_FILE", log.to_str().unwrap()),
    ];
    let mut job = Job::start("taken", &variables);
    job.step("go");
    job.step("end");
    let warning = format!("cannot be shown at {address}");
    for pid in &job.pids {
        let log = log.to_str().unwrap().replace("%p", &pid.to_string());
        let text = std::fs::read_to_string(&log).unwrap();
        let _ = std::fs::remove_file(&log);
        assert_eq!(text.matches(&warning).count(), 1, "once a process: {text}");
    }
}
