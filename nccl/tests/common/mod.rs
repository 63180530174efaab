//! Shared by the tests of the drop-in: the folder of the library, and a folder for output.
#![allow(dead_code)] // every test file is a crate of its own and uses a part

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Returns the root of the repository.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the member lies in the repository")
}

/// Returns a folder for output of tests.
pub fn out() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

/// Returns a folder with the library of this build, under the names that linkers and loaders look for.
pub fn library() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        // Cargo always puts it into deps/, but not always one level up.
        let this = std::env::current_exe().unwrap();
        let built = this.with_file_name("libnccl.so");
        let folder = out().join(this.file_name().unwrap());
        fs::create_dir_all(&folder).unwrap();
        for name in ["libnccl.so", "libnccl.so.2"] {
            let link = folder.join(name);
            let _ = fs::remove_file(&link);
            std::os::unix::fs::symlink(&built, link).unwrap();
        }
        assert!(
            folder.join("libnccl.so.2").exists(),
            "{} is not there; was it built by this cargo test?",
            built.display()
        );
        folder
    })
}
