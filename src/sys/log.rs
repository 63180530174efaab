//! The log: lines to standard error or to a file, up to a level that the first communicator of the
//! process sets. The data path logs nothing.

use super::fork_safe::ForkSafeOnce;
use super::json_string::escaped;
use super::{clock, stderr};
use crate::types::{Subsystem, Subsystems};
use std::cell::RefCell;
use std::fmt::{Arguments, Write};
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

/// Level of a log line, or the highest level that is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// No line is logged.
    None,
    /// The version, for users who want to know what ran.
    Version,
    /// Settings and conditions that differ from the request, for operators of a job.
    Warn,
    /// Choices and their reasons, for tuning.
    Info,
    /// Internal steps, for debugging of the library.
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

/// Form of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineForm {
    /// Process, level and text.
    Short,
    /// Time, host, process, rank, communicator, level and text.
    Long,
    /// A JSON object with the fields of the long form, the subsystem and the thread.
    Json,
    /// NCCL's, for tools that parse NCCL's log: host, process, thread, level and text.
    Nccl,
}

/// The rank about which a thread logs.
#[derive(Debug)]
pub struct LogLabel {
    /// Rank in the communicator.
    pub rank: usize,
    /// Name of the communicator; may be empty.
    pub communicator: String,
}

/// Restores the earlier label of the thread when it is dropped.
#[derive(Debug)]
pub struct LabelGuard(Option<Arc<LogLabel>>);

thread_local! {
    static LABEL: RefCell<Option<Arc<LogLabel>>> = const { RefCell::new(None) };
}

/// Labels the lines of this thread until the guard is dropped.
pub fn label(label: LogLabel) -> LabelGuard {
    LabelGuard(LABEL.replace(Some(Arc::new(label))))
}

impl Drop for LabelGuard {
    fn drop(&mut self) {
        LABEL.set(self.0.take());
    }
}

/// Destination, level and format of the log.
#[derive(Clone, Copy, Debug)]
pub struct Settings<'a> {
    /// Highest level that is logged, a `CINCH_LOG` value.
    pub level: &'a str,
    /// Subsystems whose `info` and `trace` lines are logged; warnings are always logged.
    pub subsystems: Subsystems,
    /// Path of the log; `%h` and `%p` stand for host and process. `None` logs to standard error.
    pub file: Option<&'a Path>,
    /// Name of this host, for `%h` in the path and for lines.
    pub host: &'a str,
    /// Form of lines.
    pub form: LineForm,
}

struct Sink {
    level: Level,
    subsystems: Subsystems,
    /// The file is used without a lock, because a forked child could find a lock held forever. Each
    /// line is one system call.
    file: Option<File>,
    host: String,
    form: LineForm,
}

static SINK: ForkSafeOnce<Sink> = ForkSafeOnce::new();

/// Opens the log. The first call of a process decides, and only that call returns true. If the file
/// cannot be opened, standard error gets a report and the log.
pub fn configure(settings: &Settings<'_>) -> bool {
    if SINK.get().is_some() {
        return false;
    }
    let (sink, complaint) = Sink::new(settings);
    let decided = SINK.try_set(sink);
    if decided && let Some(complaint) = complaint {
        stderr::write(&complaint);
    }
    decided
}

/// Returns whether lines of `level` about initialisation are logged.
pub fn enabled(level: Level) -> bool {
    enabled_for(Subsystem::Init, level)
}

/// Returns whether lines of `level` about `subsystem` are logged.
pub fn enabled_for(subsystem: Subsystem, level: Level) -> bool {
    SINK.get()
        .map_or(level <= Level::Warn, |sink| sink.wants(subsystem, level))
}

/// Logs one line about initialisation.
pub fn line(level: Level, text: Arguments<'_>) {
    line_of(Subsystem::Init, level, text);
}

/// Logs one line about `subsystem`.
pub fn line_of(subsystem: Subsystem, level: Level, text: Arguments<'_>) {
    if level == Level::None || !enabled_for(subsystem, level) {
        return;
    }
    match SINK.get() {
        Some(sink) => sink.write(subsystem, level, text),
        None => stderr::write(&stderr::log_line(level.name(), text)),
    }
}

impl Sink {
    /// Makes the sink, and returns it with a report of a file that cannot be opened.
    fn new(settings: &Settings<'_>) -> (Sink, Option<String>) {
        let mut complaint = None;
        let level = Level::ALL.iter().find(|(_, name)| *name == settings.level);
        let file = settings.file.and_then(|path| {
            let path = path
                .to_string_lossy()
                .replace("%h", settings.host)
                .replace("%p", &std::process::id().to_string());
            // Opening a FIFO without a reader fails then, instead of waiting for one.
            let mut options = File::options();
            options.custom_flags(libc::O_NONBLOCK);
            match options.create(true).append(true).open(&path) {
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
            host: settings.host.to_string(),
            form: settings.form,
        };
        (sink, complaint)
    }

    fn write(&self, subsystem: Subsystem, level: Level, text: Arguments<'_>) {
        let line = self.format(subsystem, level, SystemTime::now(), text);
        match self.file.as_ref() {
            Some(file) => stderr::write_to(file.as_fd(), &line),
            None => stderr::write(&line),
        }
    }

    fn wants(&self, subsystem: Subsystem, level: Level) -> bool {
        level <= self.level && (level <= Level::Warn || self.subsystems.has(subsystem))
    }

    fn format(
        &self,
        subsystem: Subsystem,
        level: Level,
        time: SystemTime,
        text: Arguments<'_>,
    ) -> String {
        let (host, level, pid) = (&self.host, level.name(), std::process::id());
        let label = LABEL.with_borrow(Option::clone);
        match self.form {
            LineForm::Short => stderr::log_line(level, text),
            LineForm::Nccl => format!(
                "{host}:{pid}:{} CINCH {} {text}\n",
                nix::unistd::gettid(),
                level.to_ascii_uppercase()
            ),
            LineForm::Long => {
                let rank = label.map(|label| match label.communicator.as_str() {
                    "" => format!(" rank {}", label.rank),
                    name => format!(" rank {} of \"{name}\"", label.rank),
                });
                let rank = rank.unwrap_or_default();
                let time = clock::utc(time);
                format!("{time} {host} cinch[{pid}]{rank} {level}: {text}\n")
            }
            LineForm::Json => {
                let mut line = format!(
                    "{{\"time\":\"{}\",\"level\":\"{level}\",\"subsystem\":\"{}\",\"host\":{},\
                     \"pid\":{pid},\"tid\":{}",
                    clock::utc(time),
                    subsystem.name(),
                    escaped(host),
                    nix::unistd::gettid(),
                );
                if let Some(label) = label {
                    let name = escaped(&label.communicator);
                    // Writing to a string cannot fail, here and below.
                    let _ = write!(line, ",\"rank\":{},\"communicator\":{name}", label.rank);
                }
                let _ = writeln!(line, ",\"text\":{}}}", escaped(&text.to_string()));
                line
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fork::tests::in_child;
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn sink(level: &str, subsystems: &str, form: LineForm) -> Sink {
        Sink::new(&Settings {
            level,
            subsystems: Subsystems::parse(subsystems).0,
            file: None,
            host: "node7",
            form,
        })
        .0
    }

    #[test]
    fn level_and_subsystem_select_lines() {
        let info = sink("info", "COLL", LineForm::Short);
        assert!(info.wants(Subsystem::Coll, Level::Info));
        assert!(!info.wants(Subsystem::Init, Level::Info));
        assert!(!info.wants(Subsystem::Coll, Level::Trace));
        // Warnings ignore the list of subsystems.
        assert!(info.wants(Subsystem::Init, Level::Warn));
        let version = sink("version", "ALL", LineForm::Nccl);
        assert!(version.wants(Subsystem::Init, Level::Version));
        assert!(!version.wants(Subsystem::Init, Level::Warn));
    }

    #[test]
    fn lines_have_the_format_of_the_settings() {
        let (pid, tid) = (std::process::id(), nix::unistd::gettid());
        let line = |form| {
            let text = format_args!("a \"text\"");
            sink("info", "ALL", form).format(
                Subsystem::Net,
                Level::Info,
                SystemTime::UNIX_EPOCH,
                text,
            )
        };
        let time = "1970-01-01T00:00:00.000000Z";
        assert_eq!(
            line(LineForm::Short),
            format!("cinch[{pid}] info: a \"text\"\n")
        );
        let nccl = format!("node7:{pid}:{tid} CINCH INFO a \"text\"\n");
        assert_eq!(line(LineForm::Nccl), nccl);
        let long = format!("{time} node7 cinch[{pid}] info: a \"text\"\n");
        assert_eq!(line(LineForm::Long), long);
        let outer = label(LogLabel {
            rank: 3,
            communicator: "dp".into(),
        });
        {
            let _inner = label(LogLabel {
                rank: 1,
                communicator: String::new(),
            });
            let long = format!("{time} node7 cinch[{pid}] rank 1 info: a \"text\"\n");
            assert_eq!(line(LineForm::Long), long);
        }
        let long = format!("{time} node7 cinch[{pid}] rank 3 of \"dp\" info: a \"text\"\n");
        assert_eq!(line(LineForm::Long), long);
        let json = format!(
            "{{\"time\":\"{time}\",\"level\":\"info\",\"subsystem\":\"NET\",\"host\":\"node7\",\"pid\":{pid},\
             \"tid\":{tid},\"rank\":3,\"communicator\":\"dp\",\"text\":\"a \\\"text\\\"\"}}\n"
        );
        assert_eq!(line(LineForm::Json), json);
        drop(outer);
        assert!(!line(LineForm::Json).contains("rank"));
    }

    #[test]
    fn file_name_contains_host_and_process() {
        let folder = std::env::temp_dir();
        let pattern = folder.join("cinch-log-test-%h-%p");
        let host = format!("host-{:x}", &raw const pattern as usize);
        let (sink, complaint) = Sink::new(&Settings {
            level: "warn",
            subsystems: Subsystems::ALL,
            file: Some(&pattern),
            host: &host,
            form: LineForm::Short,
        });
        assert!(sink.file.is_some() && complaint.is_none());
        let path = folder.join(format!("cinch-log-test-{host}-{}", std::process::id()));
        std::fs::remove_file(path).unwrap();
    }

    /// Tests children that are forked while other threads write to the log.
    #[test]
    fn forked_child_logs_without_hanging() {
        let (to_file, _) = Sink::new(&Settings {
            level: "warn",
            subsystems: Subsystems::ALL,
            file: Some(Path::new("/dev/null")),
            host: "node7",
            form: LineForm::Short,
        });
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    to_file.write(Subsystem::Init, Level::Warn, format_args!("text"));
                }
            });
            // Holds the lock of the standard library while children are forked, as any `eprintln`
            // does for a moment.
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let lock = std::io::stderr().lock();
                    std::thread::sleep(std::time::Duration::from_millis(1));
                    drop(lock);
                }
            });
            let written = (0..20).all(|_| {
                in_child(|| {
                    to_file.write(Subsystem::Init, Level::Warn, format_args!("text"));
                    stderr::write("");
                    true
                })
            });
            done.store(true, Ordering::Relaxed);
            assert!(written, "a child hangs");
        });
    }
}
