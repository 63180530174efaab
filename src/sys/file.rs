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
    // Without O_NONBLOCK, opening a FIFO waits for a writer.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Err(Error::new(
            ErrorKind::InvalidData,
            "it is not a regular file",
        ));
    }
    let mut bytes = Vec::new();
    file.take(most as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > most {
        let text = format!("it has more than {most} bytes");
        return Err(Error::new(ErrorKind::InvalidData, text));
    }
    String::from_utf8(bytes).map_err(|_| Error::new(ErrorKind::InvalidData, "it is not UTF-8 text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_are_too_long_or_no_text_or_not_regular_are_refused() {
        let path = std::env::temp_dir().join(format!("cinch-file-{}", std::process::id()));
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(read_text(&path, 5).unwrap(), "12345");
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
