//! The folder with the sockets of this user's processes, and the sockets in it.

use crate::config::runtime_directory;
use crate::error::{Error, ErrorKind, Result};
use crate::sys::fork::CloseOnFork;
use nix::errno::Errno;
use nix::sys::signal::kill;
use nix::unistd::{Pid, geteuid};
use std::fs::{self, DirBuilder, Permissions};
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Longest time for which a process that reads an answer may delay the thread.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

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

/// Removes the socket that a killed process left. A process that lives is about to listen.
pub fn remove_stale(pid: u32, path: &Path) {
    if kill(Pid::from_raw(pid as i32), None) == Err(Errno::ESRCH) {
        let _ = fs::remove_file(path);
    }
}

/// A socket with a name, which is removed with it.
pub(super) struct NamedListener {
    listener: CloseOnFork<UnixListener>,
    path: PathBuf,
    /// Device and inode of the name. A later thread of this process may have put its own socket there.
    id: (u64, u64),
}

impl NamedListener {
    /// Listens at the file with this process's number and `suffix` in the folder of the sockets.
    ///
    /// # Errors
    /// System; invalid usage if others can enter the folder.
    pub fn bind(suffix: &str) -> Result<NamedListener> {
        let folder = socket_folder();
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&folder)
            .map_err(|error| Error::system(format!("making {}", folder.display()), error))?;
        check_folder(&folder)?;
        let path = folder.join(format!("{}.{suffix}", std::process::id()));
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

    /// Sends the bytes of `answer` to the next process that waits, if one does. A process that does not read loses
    /// the rest.
    ///
    /// # Errors
    /// The errors of accepting, such as would-block.
    pub fn answer(&self, answer: impl FnOnce() -> Vec<u8>) -> std::io::Result<()> {
        let (stream, _) = self.listener.accept()?;
        let _ = send(stream, &answer());
        Ok(())
    }
}

impl AsFd for NamedListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
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

fn send(mut stream: UnixStream, bytes: &[u8]) -> std::io::Result<()> {
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    stream.set_nonblocking(false)?;
    let mut rest = bytes;
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
