//! Tests the ranges that a profiler gets by NVTX.

use crate::support::launcher;
use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

#[test]
fn a_profiler_gets_a_range_for_each_call() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let library = folder.join("libnvtx_profiler.so");
    let compiled = Command::new("gcc")
        .args(["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(root.join("ffi-tests/nvtx_profiler.c"))
        .status();
    assert!(compiled.unwrap().success());
    let file = folder.join(format!("nvtx-{}", std::process::id()));
    let _ = std::fs::remove_file(&file);
    let line = "bench all_reduce --ranks 2 -b 64K -e 64K --codec linear8 -n 3 -w 0 -c 1";
    let output = launcher::output(
        launcher::cinch()
            .args(line.split(' '))
            .env("NVTX_INJECTION64_PATH", &library)
            .env("NVTX_TEST_FILE", &file),
    );
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    let mut ranks: HashMap<&str, (usize, usize, usize)> = HashMap::new();
    for line in text.lines() {
        let (pid, event) = line.split_once(' ').unwrap();
        let (pushed, popped, coded) = ranks.entry(pid).or_default();
        *pushed += usize::from(event.starts_with("push cinch 1 "));
        *popped += usize::from(event == "pop");
        let range = "push cinch 1 65536 all_reduce f32 linear8:block=256";
        *coded += usize::from(event.starts_with(range));
    }
    assert_eq!(ranks.len(), 2, "{text}");
    for (pushed, popped, coded) in ranks.into_values() {
        assert!(pushed == popped && coded >= 4, "{text}");
    }
}

#[test]
fn a_profiler_that_cannot_be_opened_is_a_warning() {
    let output = launcher::output(
        launcher::cinch()
            .args("bench all_reduce --ranks 1 -b 8 -e 8 -n 1 -w 0 -c 1".split(' '))
            .env("NVTX_INJECTION64_PATH", "/nowhere/profiler.so"),
    );
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert!(
        errors.contains("NVTX_INJECTION64_PATH cannot be opened"),
        "{errors}"
    );
}
