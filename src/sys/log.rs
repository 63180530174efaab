//! The log: lines to standard error or a file, at a threshold that the first communicator of the
//! process sets. Nothing is logged on the data path.

use super::fork_safe::First;
use crate::types::{Subsystem, Subsystems};
use std::fmt::Arguments;
use std::fs::File;
use std::io::Write;
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;
use std::path::Path;

/// How much is said. Each level has an audience.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Nothing.
    None,
    /// For whoever wants to know what ran: the version.
    Version,
    /// For whoever runs the job: something is not as it was asked for.
    Warn,
    /// For whoever tunes it: what was chosen, and why.
    Info,
    /// For whoever debugs the library.
    Trace,
}

impl Level {
    const ALL: [(Level, &'static str); 5] = [
        (Level::None, "none"),
        (Level::Version, "version"),
        (Level::Warn, "warn"),
        (Level::Info, "info"),
        (Level::Trace, "trace"),
    ];

    fn name(self) -> &'static str {
        Level::ALL[self as usize].1
    }
}

/// Where lines go, which, and how they look.
#[derive(Clone, Copy, Debug)]
pub struct Settings<'a> {
    /// Threshold, a `CINCH_LOG` value.
    pub level: &'a str,
    /// What lines of `info` and `trace` may be about; warnings are never left out.
    pub subsystems: Subsystems,
    /// Destination; `%h` and `%p` stand for host and process. `None` = standard error.
    pub file: Option<&'a Path>,
    /// This host's name.
    pub host: &'a str,
    /// Whether lines look as those of NCCL do, for tools that know these.
    pub as_nccl: bool,
}

struct Sink {
    level: Level,
    subsystems: Subsystems,
    /// Without a lock, which a forked child could find held: a line is one system call.
    file: Option<File>,
    /// The host, if lines look as NCCL's.
    as_nccl: Option<String>,
}

static SINK: First<Sink> = First::new();

/// Opens the log; the first call of a process decides. Returns whether this one did. A file that
/// cannot be opened is reported on standard error, where the log then goes.
pub fn configure(settings: &Settings<'_>) -> bool {
    if SINK.get().is_some() {
        return false;
    }
    let (sink, complaint) = Sink::new(settings);
    let decided = SINK.give(sink);
    if decided && let Some(complaint) = complaint {
        to_standard_error(&complaint);
    }
    decided
}

/// Whether lines of `level` about joining go anywhere.
pub fn enabled(level: Level) -> bool {
    enabled_for(Subsystem::Init, level)
}

/// Whether lines of `level` about `subsystem` go anywhere.
pub fn enabled_for(subsystem: Subsystem, level: Level) -> bool {
    SINK.get()
        .map_or(level <= Level::Warn, |sink| sink.wants(subsystem, level))
}

/// Writes one line about joining and what came of it.
pub fn line(level: Level, text: Arguments<'_>) {
    line_of(Subsystem::Init, level, text);
}

/// Writes one line.
pub fn line_of(subsystem: Subsystem, level: Level, text: Arguments<'_>) {
    if level == Level::None || !enabled_for(subsystem, level) {
        return;
    }
    match SINK.get() {
        Some(sink) => sink.write(level, text),
        None => to_standard_error(&own_format(level, text)),
    }
}

/// Not by the standard library's handle: another thread may have its lock when a child is forked,
/// which would wait for it for ever.
fn to_standard_error(line: &str) {
    // SAFETY: the number is standard error's for all who do not ask, and is not closed here.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(libc::STDERR_FILENO) });
    // A log that cannot be written must not stop a training run.
    let _ = (&*file).write_all(line.as_bytes());
}

impl Sink {
    /// And what is wrong with the settings.
    fn new(settings: &Settings<'_>) -> (Sink, Option<String>) {
        let mut complaint = None;
        let level = Level::ALL.iter().find(|(_, name)| *name == settings.level);
        let file = settings.file.and_then(|path| {
            let path = path
                .to_string_lossy()
                .replace("%h", settings.host)
                .replace("%p", &std::process::id().to_string());
            match File::options().create(true).append(true).open(&path) {
                Ok(file) => Some(file),
                Err(error) => {
                    complaint = Some(format!(
                        "cinch: the log file {path} cannot be opened: {error}\n"
                    ));
                    None
                }
            }
        });
        let sink = Sink {
            level: level.map_or(Level::Warn, |(level, _)| *level),
            subsystems: settings.subsystems,
            file,
            as_nccl: settings.as_nccl.then(|| settings.host.to_string()),
        };
        (sink, complaint)
    }

    fn write(&self, level: Level, text: Arguments<'_>) {
        let line = self.format(level, text);
        match self.file.as_ref() {
            // As above: what cannot be written is lost.
            Some(mut file) => drop(file.write_all(line.as_bytes())),
            None => to_standard_error(&line),
        }
    }

    fn wants(&self, subsystem: Subsystem, level: Level) -> bool {
        level <= self.level && (level <= Level::Warn || self.subsystems.has(subsystem))
    }

    fn format(&self, level: Level, text: Arguments<'_>) -> String {
        match &self.as_nccl {
            None => own_format(level, text),
            Some(host) => format!(
                "{host}:{}:{} CINCH {} {text}\n",
                std::process::id(),
                nix::unistd::gettid(),
                level.name().to_ascii_uppercase()
            ),
        }
    }
}

fn own_format(level: Level, text: Arguments<'_>) -> String {
    format!("cinch[{}] {}: {text}\n", std::process::id(), level.name())
}

#[cfg(test)]
mod tests {
    use super::super::fork::tests::in_child;
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn sink(level: &str, subsystems: &str, as_nccl: bool) -> Sink {
        Sink::new(&Settings {
            level,
            subsystems: Subsystems::parse(subsystems).0,
            file: None,
            host: "node7",
            as_nccl,
        })
        .0
    }

    #[test]
    fn thresholds_and_subsystems() {
        let info = sink("info", "COLL", false);
        assert!(info.wants(Subsystem::Coll, Level::Info));
        assert!(!info.wants(Subsystem::Init, Level::Info));
        assert!(!info.wants(Subsystem::Coll, Level::Trace));
        // A warning is for everybody.
        assert!(info.wants(Subsystem::Init, Level::Warn));
        let version = sink("version", "ALL", true);
        assert!(version.wants(Subsystem::Init, Level::Version));
        assert!(!version.wants(Subsystem::Init, Level::Warn));
    }

    #[test]
    fn lines_look_as_asked() {
        let (pid, tid) = (std::process::id(), nix::unistd::gettid());
        assert_eq!(
            sink("info", "ALL", true).format(Level::Info, format_args!("text")),
            format!("node7:{pid}:{tid} CINCH INFO text\n")
        );
        assert_eq!(
            sink("info", "ALL", false).format(Level::Warn, format_args!("text")),
            format!("cinch[{pid}] warn: text\n")
        );
    }

    #[test]
    fn files_have_the_host_and_the_process_in_their_names() {
        let folder = std::env::temp_dir();
        let pattern = folder.join("cinch-log-test-%h-%p");
        let host = format!("host-{:x}", &raw const pattern as usize);
        let (sink, complaint) = Sink::new(&Settings {
            level: "warn",
            subsystems: Subsystems::ALL,
            file: Some(&pattern),
            host: &host,
            as_nccl: false,
        });
        assert!(sink.file.is_some() && complaint.is_none());
        let path = folder.join(format!("cinch-log-test-{host}-{}", std::process::id()));
        std::fs::remove_file(path).unwrap();
    }

    /// Also those that are forked while other threads write.
    #[test]
    fn children_write_lines_too() {
        let (to_file, _) = Sink::new(&Settings {
            level: "warn",
            subsystems: Subsystems::ALL,
            file: Some(Path::new("/dev/null")),
            host: "node7",
            as_nccl: false,
        });
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    to_file.write(Level::Warn, format_args!("text"));
                }
            });
            // Held while the child is forked, as any `eprintln` holds it for a moment.
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let lock = std::io::stderr().lock();
                    std::thread::sleep(std::time::Duration::from_millis(1));
                    drop(lock);
                }
            });
            let written = (0..20).all(|_| {
                in_child(|| {
                    to_file.write(Level::Warn, format_args!("text"));
                    to_standard_error("");
                    true
                })
            });
            done.store(true, Ordering::Relaxed);
            assert!(written, "a child hangs");
        });
    }
}
