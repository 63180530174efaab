//! The recorders of this process, and the threads that show them: to `cinch ps` over a socket, in a file, and by the
//! text service of the front end.

use super::gather::suffix;
use super::prometheus::prometheus_text;
use super::snapshot::{ProcessSnapshot, RankSnapshot};
use super::socket_file::NamedListener;
use super::text_service::{self, TextListeners, TextServiceSettings};
use super::{CommLabel, FlightRecorder, process_json};
use crate::error::{Error, Result};
use crate::sys::file;
use crate::sys::fork::{CloseOnFork, ProcessId};
use crate::sys::fork_safe::ForkSafe;
use crate::sys::log::{self, Level};
use crate::sys::process::{block_signals, thread_error};
use crate::sys::user_signal::{SIGNALLED, pipe_of_user_signal};
use crate::wire::Wire;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::pipe2;
use std::io::ErrorKind::WouldBlock;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Pause after a system call that failed for lack of something.
const PAUSE: Duration = Duration::from_millis(20);

/// Where recorders are shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecorderSettings {
    /// Whether this process answers `cinch ps`.
    pub answers_ps: bool,
    /// File that gets the recorders when a communicator fails, and at SIGUSR2; `%h` and `%p` stand for host and
    /// process.
    pub dump_file: Option<PathBuf>,
    /// File that gets the counters in Prometheus' text format, and the interval; `%h` and `%p` as above.
    pub metrics_file: Option<(PathBuf, Duration)>,
    /// Name of this host.
    pub host: String,
}

impl RecorderSettings {
    fn needs_thread(&self) -> bool {
        self.answers_ps || self.dump_file.is_some() || self.metrics_file.is_some()
    }
}

/// The recorder of a communicator, which is shown until this value is dropped.
#[derive(Debug)]
pub struct RecorderHandle(Arc<FlightRecorder>);

impl Deref for RecorderHandle {
    type Target = Arc<FlightRecorder>;

    fn deref(&self) -> &Arc<FlightRecorder> {
        &self.0
    }
}

struct RecorderList {
    owner: ProcessId,
    recorders: Vec<Arc<FlightRecorder>>,
    /// Settings of the first communicator that asked for the threads.
    settings: RecorderSettings,
    text: Option<TextServiceSettings>,
    threads: ThreadState,
}

enum ThreadState {
    None,
    /// A rank starts the threads, which will show the recorders of the others too.
    Starting,
    Running(ShowingThreads),
}

struct ShowingThreads {
    handles: Vec<JoinHandle<()>>,
    /// The threads end when this end of their pipe is closed.
    end: CloseOnFork<OwnedFd>,
}

impl ShowingThreads {
    fn join(self) {
        drop(self.end);
        for handle in self.handles {
            let _ = handle.join();
        }
    }
}

static REGISTRY: ForkSafe<Option<RecorderList>> = ForkSafe::new(None);

/// Runs `work` on this process's list. A forked child has neither the communicators nor the thread of its parent, and
/// leaks their memory.
fn with_list<R>(work: impl FnOnce(&mut RecorderList) -> R) -> R {
    let this = ProcessId::this();
    REGISTRY.with(|list| {
        if list.as_ref().is_none_or(|list| !list.owner.is_this()) {
            std::mem::forget(list.take());
        }
        work(list.get_or_insert_with(|| RecorderList {
            owner: this,
            recorders: Vec::new(),
            settings: RecorderSettings::default(),
            text: None,
            threads: ThreadState::None,
        }))
    })
}

/// Makes communicators that are created from now on start a text service, which answers until the last of them ends.
/// The first settings of a process stay.
pub fn offer_text_service(settings: TextServiceSettings) {
    with_list(|list| {
        list.text.get_or_insert(settings);
    });
}

/// Makes the recorder of a communicator. The first communicator whose settings ask for it starts the threads that
/// show all recorders. If that fails, a warning is logged.
pub fn register(label: CommLabel, settings: RecorderSettings) -> RecorderHandle {
    let recorder = Arc::new(FlightRecorder::new(label));
    let starts = with_list(|list| {
        list.recorders.push(recorder.clone());
        let wants_threads = settings.needs_thread() || list.text.is_some();
        if !(wants_threads && matches!(list.threads, ThreadState::None)) {
            return None;
        }
        list.settings = settings;
        list.threads = ThreadState::Starting;
        Some((list.settings.clone(), list.text.clone()))
    });
    let handle = RecorderHandle(recorder);
    if let Some((settings, text)) = starts {
        let (state, error) = match start(settings, text) {
            Ok(threads) => (ThreadState::Running(threads), None),
            Err(error) => (ThreadState::None, Some(error)),
        };
        with_list(|list| list.threads = state);
        if let Some(error) = error {
            log::line(
                Level::Warn,
                format_args!("the flight recorder of this process cannot be shown: {error}"),
            );
        }
    }
    handle
}

impl Drop for RecorderHandle {
    fn drop(&mut self) {
        self.write_last_metrics();
        let threads = with_list(|list| {
            list.recorders.retain(|one| !Arc::ptr_eq(one, &self.0));
            // Threads that another rank starts stay until that rank's recorder is dropped.
            match list.recorders.is_empty() {
                true => std::mem::replace(&mut list.threads, ThreadState::None),
                false => ThreadState::None,
            }
        });
        if let ThreadState::Running(threads) = threads {
            threads.join();
        }
    }
}

impl RecorderHandle {
    /// Writes the counters once more while this communicator's are among them, so that those of short jobs are kept.
    fn write_last_metrics(&self) {
        let settings = with_list(|list| match list.threads {
            ThreadState::Running(_) => Some(list.settings.clone()),
            _ => None,
        });
        let Some(settings) = settings else { return };
        if let Some((pattern, _)) = &settings.metrics_file {
            // A failure was logged at the first write, or is the end of a job of less than an interval.
            let _ = write_metrics(&expanded(pattern, &settings.host), &settings.host);
        }
    }
}

/// Writes all recorders of this process to the file of the settings, if there is one, with the reason.
pub fn dump(reason: &str) {
    let settings =
        REGISTRY.with(|registry| registry.as_ref().map(|registry| registry.settings.clone()));
    let Some(settings) = settings else { return };
    let Some(pattern) = &settings.dump_file else {
        return;
    };
    let path = expanded(pattern, &settings.host);
    match file::replace(Path::new(&path), &snapshot(&settings.host, reason), 0o600) {
        Ok(()) => log::line(
            Level::Warn,
            format_args!("the latest calls are in {path} ({reason})"),
        ),
        Err(error) => log::line(
            Level::Warn,
            format_args!("the latest calls cannot be written to {path}: {error}"),
        ),
    }
}

/// Returns a path with host and process in the places of `%h` and `%p`.
fn expanded(pattern: &Path, host: &str) -> String {
    let text = pattern.to_string_lossy().replace("%h", host);
    text.replace("%p", &std::process::id().to_string())
}

/// Writes the counters of all communicators of this process. Readers find the old file or the new one, whole; other
/// users may read it, as the exporter of a monitoring system is one.
fn write_metrics(path: &str, host: &str) -> std::io::Result<()> {
    let recorders = with_list(|list| list.recorders.clone());
    let recorders: Vec<&FlightRecorder> = recorders.iter().map(|it| &**it).collect();
    // The last communicator has ended: the file keeps its counts.
    if recorders.is_empty() {
        return Ok(());
    }
    file::replace(Path::new(path), &prometheus_text(&recorders, host), 0o644)
}

fn snapshot(host: &str, reason: &str) -> String {
    let recorders = with_list(|list| list.recorders.clone());
    process_json(recorders.iter().map(|recorder| &**recorder), host, reason)
}

/// Returns the state of all ranks of this process.
fn process_snapshot(host: &str, service: &str) -> ProcessSnapshot {
    let recorders = with_list(|list| list.recorders.clone());
    ProcessSnapshot {
        host: host.into(),
        pid: std::process::id(),
        service: service.into(),
        ranks: recorders
            .iter()
            .map(|recorder| RankSnapshot::of(recorder))
            .collect(),
    }
}

/// Sockets and pipes at which the thread of the recorders waits.
struct ShownPlaces {
    host: String,
    /// Socket of `cinch ps`.
    ps: Option<NamedListener>,
    /// Socket by which the text services of other processes get the snapshot, and the address of the service.
    snapshots: Option<(NamedListener, String)>,
    /// File of the counters, and the interval at which it is written.
    metrics: Option<(String, Duration)>,
    /// Pipe that gets a byte at SIGUSR2.
    signals: Option<BorrowedFd<'static>>,
}

fn start(settings: RecorderSettings, text: Option<TextServiceSettings>) -> Result<ShowingThreads> {
    let ps = settings.answers_ps.then(|| NamedListener::bind("sock"));
    let snapshots = text.as_ref().map(|text| {
        let named = NamedListener::bind(&suffix(&text.name));
        named.map(|listener| (listener, text.name.clone()))
    });
    let signals = settings.dump_file.as_ref().and_then(|_| {
        let failed = |error: &Error| {
            log::line(
                Level::Warn,
                format_args!("SIGUSR2 does not write CINCH_DUMP_FILE: {error}"),
            );
        };
        pipe_of_user_signal().inspect_err(failed).ok()
    });
    let places = ShownPlaces {
        host: settings.host.clone(),
        metrics: settings
            .metrics_file
            .as_ref()
            .map(|(pattern, interval)| (expanded(pattern, &settings.host), *interval)),
        ps: ps.transpose()?,
        snapshots: snapshots.transpose()?,
        signals,
    };
    let mut ended = None;
    let end = CloseOnFork::open(|| {
        let (reader, writer) = pipe2(OFlag::O_CLOEXEC)?;
        ended = Some(Arc::new(reader));
        Ok(writer)
    })
    .map_err(|error: nix::Error| Error::system("making a pipe", error))?;
    let Some(ended) = ended else {
        return Err(Error::internal("a pipe without a reader"));
    };
    let mut threads = ShowingThreads {
        handles: Vec::new(),
        end,
    };
    let for_text = ended.clone();
    let shows = spawn("cinch-recorder", move || places.show(&ended));
    threads.handles.push(shows?);
    if let Some(text) = text {
        // Before the thread runs, so that a client finds the service as soon as the communicator exists.
        let listeners = TextListeners::open(&text);
        let answers = spawn("cinch-text", move || {
            let own = || process_snapshot(&settings.host, &text.name);
            text_service::serve(&text, listeners, &own, &for_text);
        });
        match answers {
            Ok(handle) => threads.handles.push(handle),
            Err(error) => {
                threads.join();
                return Err(error);
            }
        }
    }
    Ok(threads)
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    std::thread::Builder::new()
        .name(name.into())
        .stack_size(256 << 10)
        .spawn(move || {
            block_signals();
            work();
        })
        .map_err(|cause| thread_error("cannot start a thread of the flight recorder", cause))
}

impl ShownPlaces {
    /// Answers until the other end of `ended` is closed.
    fn show(&self, ended: &OwnedFd) {
        let mut schedule = self
            .metrics
            .as_ref()
            .map(|(path, interval)| MetricsSchedule::new(path, *interval));
        loop {
            let wait = |descriptor| PollFd::new(descriptor, PollFlags::POLLIN);
            let mut ready = vec![wait(ended.as_fd())];
            ready.extend(self.signals.map(wait));
            ready.extend(self.ps.as_ref().map(|named| wait(named.as_fd())));
            ready.extend(
                self.snapshots
                    .as_ref()
                    .map(|(named, _)| wait(named.as_fd())),
            );
            let limit = schedule
                .as_mut()
                .map_or(PollTimeout::NONE, |it| it.write_if_due(&self.host));
            if poll(&mut ready, limit).is_err() {
                std::thread::sleep(PAUSE);
                continue;
            }
            if ready[0].any().unwrap_or(false) {
                return;
            }
            // The pipe of the signal, behind that of the end.
            if self.signals.is_some() && ready[1].any().unwrap_or(false) {
                self.write_at_signal();
            }
            // The listeners do not wait, so that those without a visitor need not be left out.
            if let Some(named) = &self.ps {
                answer(named, || snapshot(&self.host, "cinch ps").into_bytes());
            }
            if let Some((named, service)) = &self.snapshots {
                answer(named, || process_snapshot(&self.host, service).to_bytes());
            }
        }
    }

    /// Writes the file of the settings if the pipe has the byte of SIGUSR2.
    fn write_at_signal(&self) {
        let mut bytes = [0; 64];
        if let Some(signals) = self.signals
            && nix::unistd::read(signals, &mut bytes).is_ok_and(|n| bytes[..n].contains(&SIGNALLED))
        {
            dump("SIGUSR2");
        }
    }
}

/// When the file of the counters is written next.
struct MetricsSchedule<'a> {
    path: &'a str,
    interval: Duration,
    due: Instant,
    has_failed: bool,
}

impl MetricsSchedule<'_> {
    fn new(path: &str, interval: Duration) -> MetricsSchedule<'_> {
        MetricsSchedule {
            path,
            interval,
            due: Instant::now() + interval,
            has_failed: false,
        }
    }

    /// Writes the file if it is time, and returns the time until the next write. The first failure in a row is
    /// logged.
    fn write_if_due(&mut self, host: &str) -> PollTimeout {
        let now = Instant::now();
        if now >= self.due {
            self.due = now + self.interval;
            let written = write_metrics(self.path, host);
            if let (Err(error), false) = (&written, self.has_failed) {
                let path = self.path;
                log::line(
                    Level::Warn,
                    format_args!(
                        "the counters cannot be written to {path} (CINCH_METRICS_FILE): {error}"
                    ),
                );
            }
            self.has_failed = written.is_err();
        }
        let left = self.due.saturating_duration_since(now) + Duration::from_millis(1);
        PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
    }
}

fn answer(named: &NamedListener, text: impl FnOnce() -> Vec<u8>) {
    match named.answer(text) {
        Ok(()) => {}
        Err(error) if error.kind() == WouldBlock => {}
        // Without descriptors the visitor stays; without a pause this thread would spin.
        Err(_) => std::thread::sleep(PAUSE),
    }
}
