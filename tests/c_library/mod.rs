//! Builds the C library of this tree, for tests that link or inspect it.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds the package `cinch-capi` with the profile of the running test, and returns the folder with
/// `libcinch.so` and `libcinch.a`.
///
/// Cargo cannot build them for a test by itself: a test may only depend on Rust libraries.
pub fn build() -> PathBuf {
    // The test is in target/PROFILE/deps.
    let test = std::env::current_exe().unwrap();
    let folder = test.ancestors().nth(2).unwrap();
    let profile = match folder.file_name().unwrap().to_str().unwrap() {
        "debug" => "dev",
        profile => profile,
    };
    // Both packages, so that the Rust library has the features that it has for tests.
    let built = Command::new(env!("CARGO"))
        .args([
            "build",
            "--locked",
            "--lib",
            "-p",
            "cinch-ccl",
            "-p",
            "cinch-capi",
        ])
        .args(["--profile", profile, "--target-dir"])
        .arg(folder.parent().unwrap())
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")))
        .output()
        .expect("cargo");
    let text = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "cargo build -p cinch-capi:\n{text}");
    folder.to_path_buf()
}
