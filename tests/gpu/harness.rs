//! Definition of a check, and the worker process that runs checks.

use crate::options::Options;
use cinch::gpu::{Driver, kernels};
use std::io::Write;
use std::panic::AssertUnwindSafe;
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Prefix of the stdout lines that a worker or rank process sends to its parent.
pub const MARK: &str = "@@";

/// A named test.
pub struct Check {
    pub name: String,
    /// Time after which the supervisor kills the worker.
    pub limit: Duration,
    /// GPUs that the check needs; 0 if it runs without any.
    pub gpus: usize,
    /// Whether the check can run on host memory instead.
    pub on_host: bool,
    #[allow(clippy::type_complexity)]
    pub run: Box<dyn Fn(&Setup) -> Verdict>,
}

impl Check {
    pub fn new(
        name: impl Into<String>,
        gpus: usize,
        run: impl Fn(&Setup) -> Verdict + 'static,
    ) -> Check {
        Check {
            name: name.into(),
            limit: Duration::from_secs(60),
            gpus,
            on_host: false,
            run: Box::new(run),
        }
    }

    pub fn within(self, seconds: u64) -> Check {
        Check {
            limit: Duration::from_secs(seconds),
            ..self
        }
    }

    pub fn also_on_host(self) -> Check {
        Check {
            on_host: true,
            ..self
        }
    }

    /// Returns the reason why the check cannot run on this machine, or `None` if it can.
    pub fn refusal(&self, setup: &Setup) -> Option<String> {
        if self.gpus == 0 {
            return None;
        }
        match &setup.gpus {
            _ if setup.options.host && self.on_host => None,
            _ if setup.options.host => Some("it needs a GPU, and --host asks for none".into()),
            Err(why) => Some(why.clone()),
            Ok(gpus) if *gpus < self.gpus => {
                Some(format!("it takes {} GPUs, there are {gpus}", self.gpus))
            }
            Ok(_) => None,
        }
    }
}

/// A summary of a check that passed, or the reason why it stopped.
pub type Verdict = Result<String, Stop>;

/// The reason why a check ended early.
#[derive(Clone, Debug)]
pub enum Stop {
    Wrong(String),
    Skipped(String),
}

impl Stop {
    pub fn wrong<T>(why: impl Into<String>) -> Result<T, Stop> {
        Err(Stop::Wrong(why.into()))
    }

    pub fn skipped<T>(why: impl Into<String>) -> Result<T, Stop> {
        Err(Stop::Skipped(why.into()))
    }

    pub fn context(self, what: impl std::fmt::Display) -> Stop {
        match self {
            Stop::Wrong(why) => Stop::Wrong(format!("{what}: {why}")),
            skipped => skipped,
        }
    }
}

impl From<cinch::Error> for Stop {
    fn from(error: cinch::Error) -> Stop {
        Stop::Wrong(format!("{:?}: {}", error.kind(), error.message()))
    }
}

impl From<std::io::Error> for Stop {
    fn from(error: std::io::Error) -> Stop {
        Stop::Wrong(error.to_string())
    }
}

/// Returns `Stop::Wrong` with the text of `why` unless `holds`.
pub fn ensure(holds: bool, why: impl FnOnce() -> String) -> Result<(), Stop> {
    if holds {
        Ok(())
    } else {
        Err(Stop::Wrong(why()))
    }
}

/// Options of the run and the GPUs of this machine.
pub struct Setup {
    pub options: Options,
    /// Number of GPUs, or the reason why none can be used.
    pub gpus: Result<usize, String>,
}

impl Setup {
    pub fn new(options: &Options) -> Setup {
        let gpus = match kernels::STATE {
            kernels::State::Missing { why } => Err(format!("no kernels in this build: {why}")),
            kernels::State::Built { .. } => Driver::load()
                .and_then(|driver| driver.device_count())
                .map(|count| count as usize)
                .map_err(|error| error.message().to_string()),
        };
        Setup {
            options: options.clone(),
            gpus,
        }
    }

    /// Returns the number of GPUs, or 1 if there are none, so that callers can divide by it.
    pub fn count(&self) -> usize {
        self.gpus.as_ref().map_or(1, |gpus| (*gpus).max(1))
    }
}

/// Text of the running check's first panic, taken when the check ends.
static PANIC: Mutex<Option<String>> = Mutex::new(None);

/// Runs the checks from number `from` on and sends each result to the supervisor. The process exits
/// after a failed check, because a CUDA context stays broken after a kernel's fault.
pub fn work(options: &Options, checks: &[Check], from: usize) -> ExitCode {
    end_with_parent();
    std::panic::set_hook(Box::new(|info| {
        let text = info.to_string().replace('\n', " ");
        if let Ok(mut first) = PANIC.lock() {
            first.get_or_insert(text);
        }
    }));
    let setup = Setup::new(options);
    for (index, check) in checks.iter().enumerate().skip(from) {
        say(&format!("begin {index}"));
        let begin = Instant::now();
        let verdict = match check.refusal(&setup) {
            Some(why) => Stop::skipped(why),
            None => std::panic::catch_unwind(AssertUnwindSafe(|| (check.run)(&setup)))
                .unwrap_or_else(|_| {
                    let text = PANIC.lock().ok().and_then(|mut text| text.take());
                    Stop::wrong(text.unwrap_or_else(|| "a panic without words".into()))
                }),
        };
        let seconds = begin.elapsed().as_secs_f64();
        let (word, text, ends) = match verdict {
            Ok(note) => ("pass", note, false),
            Err(Stop::Skipped(why)) => ("skip", why, false),
            Err(Stop::Wrong(why)) => ("fail", why, true),
        };
        say(&format!(
            "{word} {index} {seconds:.1} {}",
            text.replace('\n', " ")
        ));
        if ends {
            // Destructors could wait forever for the work that failed.
            std::process::exit(0);
        }
    }
    say("done");
    ExitCode::SUCCESS
}

pub fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{MARK}{line}").and_then(|()| out.flush());
}

/// Ends this process when its parent ends, which closes the other end of stdin.
pub fn end_with_parent() {
    std::thread::spawn(|| {
        let mut line = String::new();
        while matches!(std::io::stdin().read_line(&mut line), Ok(1..)) {}
        std::process::exit(4);
    });
}
