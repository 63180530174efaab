//! Starts this test program again: as a rank of a test, or to run a test in a process of its own.

use std::process::Command;

/// Variable of a started process: the module that started it, a space, and the task.
pub const TASK: &str = "CINCH_TEST_CHILD";
const ALONE: &str = "alone";

/// Returns the module and the task of this process if a test of this program started it.
pub fn task() -> Option<(String, String)> {
    let text = std::env::var(TASK).ok()?;
    let (module, task) = text.split_once(' ').unwrap_or((&text, ""));
    Some((module.into(), task.into()))
}

/// Returns the command of a process that runs `rank_process` of `module` with `task`. The command begins with
/// the words of `prefix`.
pub fn rank(prefix: &[&str], module: &str, task: &str) -> Command {
    let own = std::env::current_exe().expect("own path");
    let words = [prefix, &[own.to_str().expect("a path in UTF-8")]].concat();
    let mut command = Command::new(words[0]);
    command
        .args(&words[1..])
        .args(["--exact", "rank_process", "--nocapture"])
        .env(TASK, format!("{module} {task}"));
    command
}

/// Runs `body`, the complete body of a test, in a process that runs no other test. Tests that fork, or that
/// count the descriptors and threads of their process, need this.
///
/// # Panics
/// If the test fails there, or if `body` is not a closure of the test itself.
pub fn alone<F: FnOnce()>(body: F) {
    if task().is_some_and(|(module, _)| module == ALONE) {
        return body();
    }
    // The type name has the form PROGRAM::MODULE::TEST::{{closure}}.
    let path = std::any::type_name::<F>();
    let test = path
        .split_once("::")
        .and_then(|(_, path)| path.strip_suffix("::{{closure}}"));
    let done = Command::new("timeout")
        .args(["--kill-after=5", "300"])
        .arg(std::env::current_exe().expect("own path"))
        .args(["--exact", test.expect("a closure of a test"), "--nocapture"])
        .env(TASK, ALONE)
        .output()
        .expect("a process of this program");
    let output = String::from_utf8_lossy(&done.stdout);
    let errors = String::from_utf8_lossy(&done.stderr);
    println!("{output}");
    assert!(
        done.status.success() && output.contains(" 1 passed"),
        "{path}: {}\n{errors}",
        done.status
    );
}
