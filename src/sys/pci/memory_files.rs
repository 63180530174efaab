//! A directory tree in memory, for tests.

use super::{MAX_FILE_BYTES, PciFiles};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

/// A file or a symbolic link of a [`MemoryFiles`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryEntry {
    /// A regular file with its content.
    File(Vec<u8>),
    /// A symbolic link with its target.
    Link(String),
}

/// A tree of files. Directories exist where an entry lies below them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryFiles {
    /// Files and links by path.
    pub entries: BTreeMap<String, MemoryEntry>,
}

impl MemoryFiles {
    /// Adds a file with `text` and a line break, as Linux does.
    pub fn file(&mut self, path: &str, text: &str) {
        let content = format!("{text}\n").into_bytes();
        self.entries.insert(path.into(), MemoryEntry::File(content));
    }

    /// Adds a symbolic link at `path` to `target`, which is a path below the root.
    pub fn link_to(&mut self, path: &str, target: &str) {
        let up = "../".repeat(path.matches('/').count());
        let link = MemoryEntry::Link(format!("{up}{target}"));
        self.entries.insert(path.into(), link);
    }

    /// Writes the tree below `root`.
    pub fn write_to(&self, root: &Path) {
        for (path, entry) in &self.entries {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            match entry {
                MemoryEntry::File(content) => fs::write(path, content).unwrap(),
                MemoryEntry::Link(target) => symlink(target, path).unwrap(),
            }
        }
    }
}

impl PciFiles for MemoryFiles {
    fn link(&self, path: &str) -> Option<String> {
        match self.entries.get(path)? {
            MemoryEntry::Link(target) => Some(target.clone()),
            MemoryEntry::File(_) => None,
        }
    }

    fn names(&self, directory: &str, most: usize) -> Option<Vec<String>> {
        let start = format!("{directory}/");
        let mut names: Vec<String> = Vec::new();
        for (path, _) in self.entries.range(start.clone()..) {
            let Some(rest) = path.strip_prefix(&start) else {
                break;
            };
            let name = rest.split('/').next().unwrap_or(rest);
            if names.last().is_none_or(|last| last != name) {
                names.push(name.into());
            }
            if names.len() >= most {
                break;
            }
        }
        (!names.is_empty()).then_some(names)
    }

    fn content(&self, file: &str) -> Option<Vec<u8>> {
        match self.entries.get(file)? {
            MemoryEntry::File(content) => {
                (content.len() <= MAX_FILE_BYTES).then(|| content.clone())
            }
            MemoryEntry::Link(_) => None,
        }
    }
}
