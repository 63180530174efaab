//! The log: lines to standard error or a file, at a threshold that the first communicator of the
//! process sets. Nothing is logged on the data path.

use std::fmt::Arguments;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::{Mutex, OnceLock};

/// How much is said. Each level has an audience.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Nothing.
    None,
    /// For whoever runs the job: something is not as it was asked for.
    Warn,
    /// For whoever tunes it: what was chosen, and why.
    Info,
    /// For whoever debugs the library.
    Trace,
}

impl Level {
    const ALL: [(Level, &'static str); 4] = [
        (Level::None, "none"),
        (Level::Warn, "warn"),
        (Level::Info, "info"),
        (Level::Trace, "trace"),
    ];

    fn name(self) -> &'static str {
        Level::ALL[self as usize].1
    }
}

struct Sink {
    level: Level,
    file: Option<Mutex<File>>,
}

static SINK: OnceLock<Sink> = OnceLock::new();

/// Sets threshold (a `CINCH_LOG` value) and destination; the first call of a process decides.
/// `%h` and `%p` in the path stand for host and process. A file that cannot be opened is reported
/// on standard error, where the log then goes.
pub fn configure(level: &str, file: Option<&Path>, host: &str) {
    SINK.get_or_init(|| {
        let level = Level::ALL.iter().find(|(_, name)| *name == level);
        let file = file.and_then(|path| {
            let path = path
                .to_string_lossy()
                .replace("%h", host)
                .replace("%p", &std::process::id().to_string());
            match File::options().create(true).append(true).open(&path) {
                Ok(file) => Some(Mutex::new(file)),
                Err(error) => {
                    eprintln!("cinch: the log file {path} cannot be opened: {error}");
                    None
                }
            }
        });
        Sink {
            level: level.map_or(Level::Warn, |(level, _)| *level),
            file,
        }
    });
}

/// Whether lines of `level` go anywhere.
pub fn enabled(level: Level) -> bool {
    level <= SINK.get().map_or(Level::Warn, |sink| sink.level)
}

/// Writes one line.
pub fn line(level: Level, text: Arguments<'_>) {
    if !enabled(level) || level == Level::None {
        return;
    }
    let line = format!("cinch[{}] {}: {text}\n", std::process::id(), level.name());
    let file = SINK.get().and_then(|sink| sink.file.as_ref());
    // A log that cannot be written must not stop a training run.
    let _ = match file.and_then(|file| file.lock().ok()) {
        Some(mut file) => file.write_all(line.as_bytes()),
        None => std::io::stderr().write_all(line.as_bytes()),
    };
}
