//! The supervisor process: starts workers, waits for each check with a deadline, and counts the
//! results.

use crate::harness::{Check, MARK, Setup};
use crate::options::Options;
use cinch::gpu::kernels;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Time that a worker may need before its first check, between checks, and after its last check.
const WORKER_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Counts {
    passed: usize,
    failed: usize,
    skipped: usize,
    /// Reason of the last skipped check, and the number of further checks that were skipped for
    /// this reason.
    last_skip: Option<(String, usize)>,
}

pub fn run(options: &Options, checks: &[Check]) -> ExitCode {
    if options.list {
        checks.iter().for_each(|check| println!("{}", check.name));
        return ExitCode::SUCCESS;
    }
    let setup = Setup::new(options);
    println!(
        "{} run, seed {}; kernels {}; {}",
        options.either("quick", "full"),
        options.seed,
        kernels::STATE,
        match &setup.gpus {
            Ok(gpus) => format!("GPUs: {gpus}"),
            Err(why) => format!("no GPU: {why}"),
        }
    );
    let begin = Instant::now();
    let mut counts = Counts::default();
    let mut next = 0;
    while next < checks.len() {
        next = match Worker::start(options, next) {
            Ok(worker) => worker.watch(checks, next, &mut counts),
            Err(error) => {
                counts.print(&checks[next], "fail", "0", &format!("no worker: {error}"));
                next + 1
            }
        };
    }
    counts.end_of_skips();
    println!("{:.1} s", begin.elapsed().as_secs_f64());
    println!(
        "{} passed, {} failed, {} skipped",
        counts.passed, counts.failed, counts.skipped
    );
    ExitCode::from(u8::from(counts.failed > 0))
}

impl Counts {
    /// Prints the result of a check. Consecutive skips for the same reason share a line.
    fn print(&mut self, check: &Check, word: &str, seconds: &str, text: &str) {
        if word == "skip" {
            self.skipped += 1;
            match &mut self.last_skip {
                Some((why, times)) if why == text => *times += 1,
                _ => {
                    self.end_of_skips();
                    println!("skip {}: {text}", check.name);
                    self.last_skip = Some((text.to_string(), 0));
                }
            }
            return;
        }
        self.end_of_skips();
        if word == "pass" {
            self.passed += 1;
            println!("ok   {} ({seconds} s) {text}", check.name);
        } else {
            self.failed += 1;
            println!(
                "FAIL {} ({seconds} s) {text}\n     again: --filter {}",
                check.name, check.name
            );
        }
    }

    fn end_of_skips(&mut self) {
        if let Some((_, times)) = self.last_skip.take()
            && times > 0
        {
            println!("skip {times} more, for the same reason");
        }
    }
}

struct Worker {
    child: Child,
    lines: Receiver<String>,
}

impl Worker {
    fn start(options: &Options, from: usize) -> std::io::Result<Worker> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(options.words())
            .arg(format!("--worker={from}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        // Streams of ranks that share a GPU must not wait for each other in one hardware queue.
        if std::env::var_os("CUDA_DEVICE_MAX_CONNECTIONS").is_none() {
            command.env("CUDA_DEVICE_MAX_CONNECTIONS", "32");
        }
        let mut child = command.spawn()?;
        let (sender, lines) = channel();
        if let Some(output) = child.stdout.take() {
            // The thread ends when the worker closes stdout.
            std::thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    match line.strip_prefix(MARK) {
                        Some(said) if sender.send(said.to_string()).is_err() => return,
                        Some(_) => {}
                        None => println!("     {line}"),
                    }
                }
            });
        }
        Ok(Worker { child, lines })
    }

    /// Prints the results that the worker sends. Returns the number of the check that the next
    /// worker begins with.
    fn watch(mut self, checks: &[Check], from: usize, counts: &mut Counts) -> usize {
        let mut next = from;
        let mut deadline = Instant::now() + WORKER_TIMEOUT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = match self.lines.recv_timeout(left) {
                Ok(line) => line,
                Err(_) if next == checks.len() => return next,
                Err(RecvTimeoutError::Timeout) => {
                    let limit = checks[next].limit.as_secs();
                    let text = format!("did not end within {limit} s; its process was killed");
                    counts.print(&checks[next], "fail", &limit.to_string(), &text);
                    let _ = self.child.kill();
                    return next + 1;
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.child.wait();
                    let ended = status.map_or_else(|e| e.to_string(), |s| s.to_string());
                    let text = format!("its process ended early: {ended}");
                    counts.print(&checks[next], "fail", "?", &text);
                    return next + 1;
                }
            };
            let words: Vec<&str> = line.splitn(4, ' ').collect();
            match words[..] {
                ["begin", _] => deadline = Instant::now() + checks[next].limit,
                ["done"] => deadline = Instant::now() + WORKER_TIMEOUT,
                [word, _, seconds, ref text @ ..] => {
                    counts.print(&checks[next], word, seconds, text.first().unwrap_or(&""));
                    next += 1;
                    deadline = Instant::now() + WORKER_TIMEOUT;
                    if word == "fail" {
                        return next;
                    }
                }
                _ => {}
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // A worker that has run its last check exits, and its child processes exit with it.
        let patience = Instant::now() + Duration::from_secs(10);
        let ended = |child: &mut Child| matches!(child.try_wait(), Ok(Some(_)));
        while self.lines.recv_timeout(Duration::from_millis(20))
            != Err(RecvTimeoutError::Disconnected)
            && Instant::now() < patience
        {}
        if !ended(&mut self.child) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
