//! Builds the C library and the programs of this tree, for tests that link or start them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Builds the workspace once with the profile of the running test. Returns the folder with the C library, the
/// NCCL drop-in, the tool and the examples.
///
/// Cargo builds them for `cargo test --workspace` too, but not for `cargo test --test NAME`.
pub fn build() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(build_workspace)
}

fn build_workspace() -> PathBuf {
    // The test's executable is in target/PROFILE/deps.
    let test = std::env::current_exe().unwrap();
    let folder = test.ancestors().nth(2).unwrap();
    let profile = match folder.file_name().unwrap().to_str().unwrap() {
        "debug" => "dev",
        profile => profile,
    };
    let built = Command::new(env!("CARGO"))
        .args([
            "build",
            "--locked",
            "--workspace",
            "--lib",
            "--bins",
            "--examples",
        ])
        .args(["--profile", profile, "--target-dir"])
        .arg(folder.parent().unwrap())
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")))
        .output()
        .expect("cargo");
    let text = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "cargo build --workspace:\n{text}");
    folder.to_path_buf()
}
