//! NCCL's XML format of topologies, which `NCCL_TOPO_DUMP_FILE` writes and `NCCL_TOPO_FILE` reads.

mod limits;
mod read;
mod write;

use crate::error::{Error, Result};
use crate::sys::file;
use std::path::Path;

pub use read::read;
pub use write::write;

/// Returns the text of an XML file, of at most 8 MiB.
///
/// # Errors
/// Invalid argument if the file cannot be read, is longer, or is not UTF-8. The sentence names the line at which a
/// readable file cannot be used.
pub fn file_text(path: &Path) -> Result<String> {
    let bytes = file::read_start(path, limits::MAX_BYTES + 1)
        .map_err(|error| Error::invalid_argument(error.to_string()))?;
    limits::check_size(&bytes)?;
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let line = limits::line(error.as_bytes(), at);
        Error::invalid_argument(format!(
            "line {line}: no UTF-8 text; convert the file to UTF-8"
        ))
    })
}
