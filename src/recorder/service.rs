//! The recorders of this process, and the thread that shows them: to `cinch ps` over a socket, and in a file.

use super::{CommLabel, FlightRecorder, process_json};
use crate::config::runtime_directory;
use crate::error::{Error, ErrorKind, Result};
use crate::sys::file;
use crate::sys::fork::{CloseOnFork, ProcessId};
use crate::sys::fork_safe::ForkSafe;
use crate::sys::log::{self, Level};
use crate::sys::process::{block_signals, thread_error};
use crate::sys::user_signal::{SIGNALLED, pipe_of_user_signal};
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{geteuid, pipe2};
use std::fs::{self, DirBuilder, Permissions};
use std::io::ErrorKind::WouldBlock;
use std::io::Write;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest time for which a process that reads an answer may delay the thread.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

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

struct RecorderList {
    owner: ProcessId,
    recorders: Vec<Arc<FlightRecorder>>,
    /// Settings of the first communicator that asked for the thread.
    settings: RecorderSettings,
    thread: ThreadState,
}

enum ThreadState {
    None,
    /// A rank starts the thread, which will show the recorders of the others too.
    Starting,
    Running(ShowingThread),
}

struct ShowingThread {
    handle: JoinHandle<()>,
    /// The thread ends when this end of its pipe is closed.
    end: CloseOnFork<OwnedFd>,
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
            thread: ThreadState::None,
        }))
    })
}

/// Makes the recorder of a communicator. The first communicator whose settings ask for it starts the thread that
/// shows all recorders. If that fails, a warning is logged.
pub fn register(label: CommLabel, settings: RecorderSettings) -> RecorderHandle {
    let recorder = Arc::new(FlightRecorder::new(label));
    let wants_thread = settings.needs_thread();
    let starts = with_list(|list| {
        list.recorders.push(recorder.clone());
        let starts = wants_thread && matches!(list.thread, ThreadState::None);
        if starts {
            list.settings = settings.clone();
            list.thread = ThreadState::Starting;
        }
        starts
    });
    let handle = RecorderHandle(recorder);
    if starts {
        let (state, error) = match start(settings) {
            Ok(thread) => (ThreadState::Running(thread), None),
            Err(error) => (ThreadState::None, Some(error)),
        };
        with_list(|list| list.thread = state);
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
        let thread = with_list(|list| {
            list.recorders.retain(|one| !Arc::ptr_eq(one, &self.0));
            // A thread that another rank starts stays until that rank's recorder is dropped.
            match list.recorders.is_empty() {
                true => std::mem::replace(&mut list.thread, ThreadState::None),
                false => ThreadState::None,
            }
        });
        if let ThreadState::Running(ShowingThread { handle, end }) = thread {
            drop(end);
            let _ = handle.join();
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
    let recorders = with_list(|list| list.recorders.clone());
    process_json(recorders.iter().map(|recorder| &**recorder), host, reason)
}

/// Returns the folder with the sockets of this user's processes: `cinch` in `$XDG_RUNTIME_DIR`, or `/tmp/cinch-UID`.
pub fn socket_folder() -> PathBuf {
    runtime_directory().unwrap_or_else(|| PathBuf::from(format!("/tmp/cinch-{}", geteuid())))
}

/// Checks that only this user can enter the folder of the sockets, so that no other user can put sockets there.
///
/// # Errors
/// System if the folder cannot be read; invalid usage, with its mode and owner, if others can enter it.
pub fn check_folder(folder: &Path) -> Result<()> {
    let shown = folder.display();
    let known = fs::symlink_metadata(folder)
        .map_err(|error| Error::system(format!("reading {shown}"), error))?;
    match known.is_dir() && known.uid() == geteuid().as_raw() && known.mode() & 0o077 == 0 {
        true => Ok(()),
        false => Err(Error::new(
            ErrorKind::InvalidUsage,
            format!(
                "{shown} has mode {:o} and owner {}: it must be a folder that only you can enter (chmod 700)",
                known.mode() & 0o7777,
                known.uid()
            ),
        )),
    }
}

/// A socket with a name, which is removed with it.
struct NamedListener {
    listener: CloseOnFork<UnixListener>,
    path: PathBuf,
    /// Device and inode of the name. A later thread of this process may have put its own socket there.
    id: (u64, u64),
}

impl NamedListener {
    fn bind(folder: &Path) -> Result<NamedListener> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)
            .map_err(|error| Error::system(format!("making {}", folder.display()), error))?;
        check_folder(folder)?;
        let path = folder.join(format!("{}.sock", std::process::id()));
        // An earlier process with this number may have left its socket.
        let _ = fs::remove_file(&path);
        let bound = CloseOnFork::open(|| UnixListener::bind(&path)).and_then(|listener| {
            listener.set_nonblocking(true)?;
            fs::set_permissions(&path, Permissions::from_mode(0o600))?;
            Ok((listener, inode(&path)?))
        });
        let (listener, id) = bound
            .map_err(|error| Error::system(format!("listening at {}", path.display()), error))?;
        Ok(NamedListener { listener, path, id })
    }
}

impl Drop for NamedListener {
    fn drop(&mut self) {
        if inode(&self.path).is_ok_and(|id| id == self.id) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn inode(path: &Path) -> std::io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|known| (known.dev(), known.ino()))
}

fn start(settings: RecorderSettings) -> Result<ShowingThread> {
    let listener = match settings.answers_ps {
        true => Some(NamedListener::bind(&socket_folder())?),
        false => None,
    };
    let signals = match settings.dump_file {
        None => None,
        Some(_) => pipe_of_user_signal()
            .inspect_err(|error| {
                log::line(
                    Level::Warn,
                    format_args!("SIGUSR2 does not write CINCH_DUMP_FILE: {error}"),
                );
            })
            .ok(),
    };
    let mut ended = None;
    let end = CloseOnFork::open(|| {
        let (reader, writer) = pipe2(OFlag::O_CLOEXEC)?;
        ended = Some(reader);
        Ok(writer)
    })
    .map_err(|error: nix::Error| Error::system("making a pipe", error))?;
    let handle = std::thread::Builder::new()
        .name("cinch-recorder".into())
        .stack_size(256 << 10)
        .spawn(move || {
            block_signals();
            if let Some(ended) = ended {
                show(&settings.host, listener.as_ref(), &ended, signals);
            }
        })
        .map_err(|cause| thread_error("cannot start the thread of the flight recorder", cause))?;
    Ok(ShowingThread { handle, end })
}

/// Answers until the other end of `ended` is closed.
fn show(
    host: &str,
    listener: Option<&NamedListener>,
    ended: &OwnedFd,
    signals: Option<BorrowedFd<'_>>,
) {
    loop {
        let wait = |descriptor| PollFd::new(descriptor, PollFlags::POLLIN);
        let mut ready = vec![wait(ended.as_fd())];
        ready.extend(signals.map(wait));
        ready.extend(listener.map(|named| wait(named.listener.as_fd())));
        if poll(&mut ready, PollTimeout::NONE).is_err() {
            std::thread::sleep(PAUSE);
            continue;
        }
        let mut states = ready.iter().map(|one| one.any().unwrap_or(false));
        if states.next() == Some(true) {
            return;
        }
        let is_signalled = signals.is_some() && states.next() == Some(true);
        let has_visitor = states.next() == Some(true);
        let mut bytes = [0; 64];
        if let Some(signals) = signals.filter(|_| is_signalled)
            && nix::unistd::read(signals, &mut bytes).is_ok_and(|n| bytes[..n].contains(&SIGNALLED))
        {
            dump("SIGUSR2");
        }
        let Some(named) = listener.filter(|_| has_visitor) else {
            continue;
        };
        match named.listener.accept() {
            // A process that does not read loses the answer.
            Ok((stream, _)) => drop(answer(stream, host)),
            Err(error) if error.kind() == WouldBlock => {}
            // Without descriptors the visitor stays; without a pause this thread would spin.
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

fn answer(mut stream: UnixStream, host: &str) -> std::io::Result<()> {
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    stream.set_nonblocking(false)?;
    let text = snapshot(host, "cinch ps");
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        // A timeout of zero would wait for ever.
        stream.set_write_timeout(Some(left.max(Duration::from_millis(1))))?;
        let written = stream.write(rest)?;
        if written == 0 || left.is_zero() {
            break;
        }
        rest = &rest[written..];
    }
    Ok(())
}
