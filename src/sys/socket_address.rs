//! Addresses of listeners, and the files of those that have one.

use std::ffi::OsStr;
use std::fmt;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Directory of socket files. Containers that share memory have it in common.
pub const SHARED_DIRECTORY: &str = "/dev/shm";

/// Address of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Address {
    /// A name in the abstract UNIX namespace: it has no file, and disappears with its socket.
    Local([u8; 16]),
    /// A name of a socket file in [`SHARED_DIRECTORY`], which processes in other network namespaces reach.
    Shared([u8; 16]),
    /// A TCP port.
    Tcp(SocketAddr),
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Address {
        Address::Tcp(address)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Local(_) => f.write_str("its local socket"),
            Address::Shared(_) => write!(f, "its socket in {SHARED_DIRECTORY}"),
            Address::Tcp(address) => address.fmt(f),
        }
    }
}

/// A socket file, which is removed when the value is dropped.
#[derive(Debug)]
pub struct SocketFile(PathBuf);

impl SocketFile {
    /// Returns the file of a socket that listens at `address`; `None` if the address has no file.
    pub fn of(address: &Address) -> Option<SocketFile> {
        match address {
            Address::Shared(name) => Some(SocketFile(shared_path(name))),
            Address::Local(_) | Address::Tcp(_) => None,
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // A file that is gone already, or cannot be removed, harms nobody: its name is random.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Returns the path of the socket file of [`Address::Shared`].
pub(super) fn shared_path(name: &[u8; 16]) -> PathBuf {
    let text = text(name);
    Path::new(SHARED_DIRECTORY).join(OsStr::from_bytes(&text))
}

/// Returns the name of a local socket, or of a socket file, as text.
pub(super) fn text(name: &[u8; 16]) -> [u8; 38] {
    let mut text = *b"cinch-00000000000000000000000000000000";
    for (index, byte) in name.iter().enumerate() {
        let digits = b"0123456789abcdef";
        text[6 + 2 * index] = digits[usize::from(byte >> 4)];
        text[7 + 2 * index] = digits[usize::from(byte & 15)];
    }
    text
}
