//! Bounded reads of files that users name.

use std::fs::OpenOptions;
use std::io::{Error, ErrorKind, Read, Result};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

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
