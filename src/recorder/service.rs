//! The recorders of this process, and the thread that shows them: to `cinch ps` over a socket, and in a file.

use super::{CommLabel, FlightRecorder, process_json};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::file;
use crate::sys::fork::{CloseOnFork, ProcessId};
use crate::sys::fork_safe::ForkSafe;
use crate::sys::log::{self, Level};
use crate::sys::process::{block_signals, thread_error};
use crate::sys::user_signal::{SIGNALLED, UserSignal};
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{geteuid, pipe2};
use std::fs::{self, DirBuilder, Permissions};
use std::io::Write;
use std::ops::Deref;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Longest time for which an asking process may delay the thread.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);

/// Where recorders are shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecorderSettings {
    /// Whether `cinch ps` may ask this process.
    pub answers_ps: bool,
    /// File that gets the recorders when a communicator fails, and at SIGUSR2; `%h` and `%p` stand for host and
    /// process.
    pub dump_file: Option<PathBuf>,
    /// Name of this host.
    pub host: String,
}

impl RecorderSettings {
    fn needs_thread(&self) -> bool {
        self.answers_ps || self.dump_file.is_some()
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

#[derive(Default)]
struct RecorderList {
    recorders: Vec<Arc<FlightRecorder>>,
    /// Settings of the first communicator that asked for the thread.
    settings: RecorderSettings,
    thread: Option<ShowingThread>,
}

struct ShowingThread {
    owner: ProcessId,
    handle: JoinHandle<()>,
    /// The thread ends when this end of its pipe is closed.
    _pipe: CloseOnFork<OwnedFd>,
}

static REGISTRY: ForkSafe<Option<RecorderList>> = ForkSafe::new(None);

/// Makes the recorder of a communicator. The first communicator whose settings ask for it starts the thread that
/// shows all recorders. If that fails, a warning is logged.
pub fn register(label: CommLabel, settings: RecorderSettings) -> RecorderHandle {
    let recorder = Arc::new(FlightRecorder::new(label));
    let wants_thread = settings.needs_thread();
    let starts = REGISTRY.with(|registry| {
        let registry = registry.get_or_insert_default();
        // A forked child has neither the communicators nor the thread of its parent. It leaks their memory.
        if registry
            .thread
            .as_ref()
            .is_some_and(|thread| !thread.owner.is_this())
        {
            std::mem::forget(std::mem::take(registry));
        }
        registry.recorders.push(recorder.clone());
        let starts = wants_thread && registry.thread.is_none();
        if starts {
            registry.settings = settings.clone();
        }
        starts
    });
    if starts {
        match start(settings) {
            Ok(thread) => {
                // Two first communicators may both have started a thread; the second ends when it is dropped.
                let surplus = REGISTRY.with(|registry| match registry {
                    Some(registry) if registry.thread.is_none() => {
                        registry.thread = Some(thread);
                        None
                    }
                    _ => Some(thread),
                });
                end(surplus);
            }
            Err(error) => log::line(
                Level::Warn,
                format_args!("the flight recorder of this process cannot be shown: {error}"),
            ),
        }
    }
    RecorderHandle(recorder)
}

impl Drop for RecorderHandle {
    fn drop(&mut self) {
        let thread = REGISTRY.with(|registry| {
            let registry = registry.as_mut()?;
            registry.recorders.retain(|one| !Arc::ptr_eq(one, &self.0));
            match registry.recorders.is_empty() {
                true => registry.thread.take(),
                false => None,
            }
        });
        end(thread);
    }
}

/// Ends a thread of this process.
fn end(thread: Option<ShowingThread>) {
    let Some(thread) = thread else { return };
    if !thread.owner.is_this() {
        return std::mem::forget(thread);
    }
    let ShowingThread { handle, _pipe, .. } = thread;
    drop(_pipe);
    let _ = handle.join();
}

/// Writes all recorders of this process to the file of the settings, if there is one, with the reason.
pub fn dump(reason: &str) {
    let settings =
        REGISTRY.with(|registry| registry.as_ref().map(|registry| registry.settings.clone()));
    let Some(settings) = settings else { return };
    let Some(pattern) = &settings.dump_file else {
        return;
    };
    let path = pattern
        .to_string_lossy()
        .replace("%h", &settings.host)
        .replace("%p", &std::process::id().to_string());
    match file::replace(Path::new(&path), &snapshot(&settings.host, reason)) {
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

fn snapshot(host: &str, reason: &str) -> String {
    let recorders = REGISTRY.with(|registry| {
        let registry = registry.as_ref();
        registry.map_or_else(Vec::new, |registry| registry.recorders.clone())
    });
    process_json(recorders.iter().map(|recorder| &**recorder), host, reason)
}

/// Returns the folder with the sockets of this user's processes: `cinch` in `$XDG_RUNTIME_DIR`, or `/tmp/cinch-UID`.
pub fn socket_folder() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty()) {
        Some(folder) => Path::new(&folder).join("cinch"),
        None => PathBuf::from(format!("/tmp/cinch-{}", geteuid())),
    }
}

/// A socket with a name, which is removed with it.
struct NamedListener {
    listener: CloseOnFork<UnixListener>,
    path: PathBuf,
}

impl NamedListener {
    fn bind(folder: &Path) -> Result<NamedListener> {
        let shown = folder.display();
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)
            .map_err(|error| Error::system(format!("making {shown}"), error))?;
        let known = fs::symlink_metadata(folder)
            .map_err(|error| Error::system(format!("reading {shown}"), error))?;
        if !known.is_dir() || known.uid() != geteuid().as_raw() || known.mode() & 0o077 != 0 {
            return Err(Error::new(
                ErrorKind::InvalidUsage,
                format!(
                    "{shown} has mode {:o} and owner {}: it must be a folder that only you can enter (chmod 700)",
                    known.mode() & 0o7777,
                    known.uid()
                ),
            ));
        }
        let path = folder.join(format!("{}.sock", std::process::id()));
        // An earlier process with this number may have left its socket.
        let _ = fs::remove_file(&path);
        let listener = CloseOnFork::open(|| UnixListener::bind(&path))
            .and_then(|listener| {
                listener.set_nonblocking(true)?;
                fs::set_permissions(&path, Permissions::from_mode(0o600)).map(|()| listener)
            })
            .map_err(|error| Error::system(format!("listening at {}", path.display()), error))?;
        Ok(NamedListener { listener, path })
    }
}

impl Drop for NamedListener {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn start(settings: RecorderSettings) -> Result<ShowingThread> {
    let listener = match settings.answers_ps {
        true => Some(NamedListener::bind(&socket_folder())?),
        false => None,
    };
    let pipe = || {
        pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)
            .map_err(|error| Error::system("making a pipe", error))
    };
    // The end of the first pipe ends the thread; the second pipe carries signals.
    let (ended, keep) = pipe()?;
    let (signals, signal_end) = pipe()?;
    let signal = match settings.dump_file {
        None => None,
        Some(_) => UserSignal::to_pipe(signal_end)
            .inspect_err(|error| {
                log::line(
                    Level::Warn,
                    format_args!("SIGUSR2 does not write CINCH_DUMP_FILE: {error}"),
                );
            })
            .ok(),
    };
    let keep = CloseOnFork::open(|| Ok::<_, Error>(keep))?;
    let handle = std::thread::Builder::new()
        .name("cinch-recorder".into())
        .stack_size(256 << 10)
        .spawn(move || {
            block_signals();
            let _signal = signal;
            show(&settings.host, listener.as_ref(), &ended, &signals);
        })
        .map_err(|cause| thread_error("cannot start the thread of the flight recorder", cause))?;
    Ok(ShowingThread {
        owner: ProcessId::this(),
        handle,
        _pipe: keep,
    })
}

/// Answers until the other end of `ended` is closed.
fn show(host: &str, listener: Option<&NamedListener>, ended: &OwnedFd, signals: &OwnedFd) {
    loop {
        let wait = |descriptor| PollFd::new(descriptor, PollFlags::POLLIN);
        let mut ready = vec![wait(ended.as_fd()), wait(signals.as_fd())];
        ready.extend(listener.map(|named| wait(named.listener.as_fd())));
        if poll(&mut ready, PollTimeout::NONE).is_err() {
            continue;
        }
        let is_ready = |at: usize| ready.get(at).and_then(PollFd::any).unwrap_or(false);
        if is_ready(0) {
            return;
        }
        let mut bytes = [0; 64];
        if is_ready(1)
            && nix::unistd::read(signals, &mut bytes).is_ok_and(|n| bytes[..n].contains(&SIGNALLED))
        {
            dump("SIGUSR2");
        }
        if let Some(named) = listener.filter(|_| is_ready(2))
            && let Ok((stream, _)) = named.listener.accept()
        {
            // A process that does not read loses the answer.
            let _ = answer(stream, host);
        }
    }
}

fn answer(mut stream: UnixStream, host: &str) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    stream.write_all(snapshot(host, "cinch ps").as_bytes())
}
