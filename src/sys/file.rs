//! Bounded reads of files that users name, and replacement of whole files.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Reads a text file of at most `most` bytes. A FIFO or a device is refused instead of waited for.
///
/// # Errors
/// The system's errors; invalid data if the file is longer, is no regular file, or is not UTF-8.
pub fn read_text(path: &Path, most: usize) -> Result<String> {
    let bytes = limited(start_of(path, most + 1, 0)?, most)?;
    String::from_utf8(bytes).map_err(|_| Error::new(ErrorKind::InvalidData, "it is not UTF-8 text"))
}

/// Reads a file of at most `most` bytes, as [`read_text`] does, but refuses a symbolic link.
///
/// # Errors
/// The system's errors; invalid data if the file is longer or is no regular file.
pub fn read_without_link(path: &Path, most: usize) -> Result<Vec<u8>> {
    limited(start_of(path, most + 1, libc::O_NOFOLLOW)?, most)
}

/// Reads the first `most` bytes of a file. A FIFO or a device is refused instead of waited for.
///
/// # Errors
/// The system's errors; invalid data if the file is no regular file.
pub fn read_start(path: &Path, most: usize) -> Result<Vec<u8>> {
    start_of(path, most, 0)
}

/// Writes `text` to a file with the permissions `mode`, and creates missing directories, for its user alone. Other processes read either
/// the old text or the new text, because the text goes to a temporary file that is then renamed.
///
/// # Errors
/// The system's errors; invalid input if the path names no file.
pub fn replace(path: &Path, text: &str, mode: u32) -> Result<()> {
    /// Number of files that this process has written, because several threads may write one file.
    static WRITTEN: AtomicUsize = AtomicUsize::new(0);
    let no_name = || Error::new(ErrorKind::InvalidInput, "the path names no file");
    let name = path.file_name().ok_or_else(no_name)?;
    if let Some(directory) = path.parent() {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)?;
    }
    let mut temporary = name.to_os_string();
    let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
    temporary.push(format!(".{}.{number}.tmp", std::process::id()));
    let temporary = path.with_file_name(temporary);
    // An earlier process with this number may have left a file, or a link, of this name.
    let _ = fs::remove_file(&temporary);
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&temporary)?;
    let written = file
        .write_all(text.as_bytes())
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

fn start_of(path: &Path, most: usize, flags: i32) -> Result<Vec<u8>> {
    // Without O_NONBLOCK, opening a FIFO waits for a writer.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | flags)
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Err(Error::new(
            ErrorKind::InvalidData,
            "it is not a regular file",
        ));
    }
    let mut bytes = Vec::new();
    file.take(most as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn limited(bytes: Vec<u8>, most: usize) -> Result<Vec<u8>> {
    if bytes.len() > most {
        let text = format!("it has more than {most} bytes");
        return Err(Error::new(ErrorKind::InvalidData, text));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaced_files_have_the_new_text_and_leave_nothing_behind() {
        let root = std::env::temp_dir().join(format!("cinch-replace-{}", std::process::id()));
        let path = root.join("below/file");
        for text in ["one", "two"] {
            replace(&path, text, 0o600).unwrap();
            assert_eq!(read_text(&path, 5).unwrap(), text);
        }
        let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&path).unwrap());
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(root.join("below")).unwrap().count(), 1);
        assert!(replace(&root.join("below"), "three", 0o600).is_err());
        assert_eq!(std::fs::read_dir(&root).unwrap().count(), 1);
        assert!(replace(&path.join("under a file"), "four", 0o600).is_err());
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn files_that_are_too_long_or_no_text_or_not_regular_are_refused() {
        let path = std::env::temp_dir().join(format!("cinch-file-{}", std::process::id()));
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(read_text(&path, 5).unwrap(), "12345");
        assert_eq!(read_start(&path, 3).unwrap(), b"123");
        assert_eq!(read_without_link(&path, 5).unwrap(), b"12345");
        assert!(read_without_link(&path, 4).is_err());
        let link = path.with_extension("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(read_text(&link, 5).is_ok() && read_without_link(&link, 5).is_err());
        std::fs::remove_file(&link).unwrap();
        assert!(
            read_text(&path, 4)
                .unwrap_err()
                .to_string()
                .contains("more than 4 bytes")
        );
        std::fs::write(&path, [0xff, 0xfe]).unwrap();
        assert!(
            read_text(&path, 5)
                .unwrap_err()
                .to_string()
                .contains("UTF-8")
        );
        std::fs::remove_file(&path).unwrap();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(
            read_text(&path, 5)
                .unwrap_err()
                .to_string()
                .contains("regular file")
        );
        std::fs::remove_file(&path).unwrap();
        assert!(read_text(Path::new("/dev/zero"), 5).is_err());
        assert_eq!(read_text(&path, 5).unwrap_err().kind(), ErrorKind::NotFound);
    }
}
