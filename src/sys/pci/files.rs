//! Access to the files of a directory that looks like /sys.

use super::{MAX_FILE_BYTES, MAX_LEVELS};
use crate::sys::file;
use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Largest number of symbolic links in the resolution of one path, as in Linux.
const MAX_LINKS: usize = 40;

/// Largest number of bytes of a path, as in Linux.
const MAX_PATH_BYTES: usize = 4096;

/// Largest number of directories that a [`Resolver`] remembers.
const MAX_KNOWN_DIRECTORIES: usize = 8192;

/// Read access to a directory that looks like /sys. Paths are relative to the directory. The reader passes only
/// paths without symbolic links, apart from the last name.
pub trait PciFiles {
    /// Returns the target of the symbolic link at `path`; `None` if there is no link.
    fn link(&self, path: &str) -> Option<String>;

    /// Returns the names in a directory, at most `most` of them; `None` if there is no such directory.
    fn names(&self, directory: &str, most: usize) -> Option<Vec<String>>;

    /// Returns the content of a regular file; `None` if there is none or if it has more than
    /// [`MAX_FILE_BYTES`]. Never waits for data.
    fn content(&self, file: &str) -> Option<Vec<u8>>;
}

/// A directory on disk: /sys itself, or a copy of it.
pub struct SysDirectory {
    root: PathBuf,
}

impl SysDirectory {
    /// Creates the access to `root`, which need not exist.
    pub fn new(root: &Path) -> SysDirectory {
        SysDirectory { root: root.into() }
    }
}

impl PciFiles for SysDirectory {
    fn link(&self, path: &str) -> Option<String> {
        let target = fs::read_link(self.root.join(path)).ok()?;
        target.into_os_string().into_string().ok()
    }

    fn names(&self, directory: &str, most: usize) -> Option<Vec<String>> {
        let entries = fs::read_dir(self.root.join(directory)).ok()?;
        let names = entries.take(most).filter_map(Result::ok);
        // A name that is no UTF-8 names no device, but counts towards `most`.
        let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
        Some(names.collect())
    }

    fn content(&self, path: &str) -> Option<Vec<u8>> {
        file::read_without_link(&self.root.join(path), MAX_FILE_BYTES).ok()
    }
}

/// Follows symbolic links inside the root.
pub(super) struct Resolver<'a> {
    files: &'a dyn PciFiles,
    /// Paths that are known to be no symbolic links, to save system calls.
    known: HashSet<String>,
}

impl<'a> Resolver<'a> {
    pub fn new(files: &'a dyn PciFiles) -> Resolver<'a> {
        Resolver {
            files,
            known: HashSet::new(),
        }
    }

    /// Returns `path` without symbolic links; `None` if it leaves the root, or if it has more links, levels or
    /// bytes than allowed. The path need not exist.
    pub fn resolve(&mut self, path: &str) -> Option<String> {
        let mut rest = path.to_string();
        let mut resolved = String::new();
        let (mut begin, mut levels, mut links) = (0, 0, 0);
        while begin < rest.len() {
            let end = rest[begin..].find('/').map_or(rest.len(), |at| begin + at);
            let name = &rest[begin..end];
            begin = end + 1;
            match name {
                "" | "." => continue,
                ".." if levels == 0 => return None,
                ".." => {
                    resolved.truncate(resolved.rfind('/').unwrap_or(0));
                    levels -= 1;
                    continue;
                }
                _ => {}
            }
            let parent = resolved.len();
            if parent > 0 {
                resolved.push('/');
            }
            resolved.push_str(name);
            levels += 1;
            if levels > MAX_LEVELS || resolved.len() > MAX_PATH_BYTES {
                return None;
            }
            if self.known.contains(&resolved) {
                continue;
            }
            if let Some(target) = self.files.link(&resolved) {
                links += 1;
                if links > MAX_LINKS || target.starts_with('/') {
                    return None;
                }
                resolved.truncate(parent);
                levels -= 1;
                rest = format!("{target}/{}", rest.get(begin..).unwrap_or(""));
                begin = 0;
            } else if self.known.len() < MAX_KNOWN_DIRECTORIES {
                self.known.insert(resolved.clone());
            }
        }
        Some(resolved)
    }
}
