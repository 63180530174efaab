//! Tests the drop-in `libnccl.so.2`: its exported symbols, and C programs that use it.

mod environment;
mod exports;
mod plugins;
mod programs;
mod ras;

use crate::support::c_library;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Returns the root of the repository.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns a folder for output of tests.
fn out() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

/// Returns a folder with the library of this build, under the names that linkers and loaders look for.
fn library() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let built = c_library::build().join("libnccl.so");
        let folder = out().join("nccl-lib");
        fs::create_dir_all(&folder).unwrap();
        for name in ["libnccl.so", "libnccl.so.2"] {
            let link = folder.join(name);
            let _ = fs::remove_file(&link);
            std::os::unix::fs::symlink(&built, link).unwrap();
        }
        folder
    })
}
