//! Runs C programs against the shared library, on host memory, so that no GPU is needed. They
//! compile without a warning with cinch's nccl.h, and run with a deadline.

use super::{library, out, root};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Time after which a program counts as hung.
const DEADLINE: Duration = Duration::from_secs(120);

/// Compiles a program against the library of this build, and returns its path.
pub(super) fn compile(name: &str) -> PathBuf {
    let source = root().join(format!("nccl/tests/programs/{name}.c"));
    let program = out().join(format!("nccl-{name}"));
    let library = library();
    let compiled = Command::new("gcc")
        .args([
            "-std=gnu11",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-g",
            "-O1",
            "-pthread",
            "-I",
        ])
        .arg(root().join("include"))
        .arg(&source)
        .arg("-L")
        .arg(library)
        .arg(format!("-Wl,-rpath,{}", library.display()))
        .args(["-lnccl", "-o"])
        .arg(&program)
        .output()
        .expect("gcc");
    assert!(
        compiled.status.success(),
        "{}",
        String::from_utf8_lossy(&compiled.stderr)
    );
    program
}

fn run(name: &str, variables: &[(&str, &str)]) {
    let mut child = Command::new(compile(name))
        .env("CINCH_DEVICE", "host")
        .envs(variables.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > DEADLINE {
            child.kill().unwrap();
            let output = child.wait_with_output().unwrap();
            panic!("{name} hangs: {}", String::from_utf8_lossy(&output.stderr));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().unwrap();
    let (said, errors) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(
        output.status.success() && said == "ok\n" && errors.is_empty(),
        "{name}: {}\n{said}{errors}",
        output.status
    );
}

#[test]
fn address() {
    // The system assigns free ports in turn, so no other process is likely to get this port soon.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = port.local_addr().unwrap().to_string();
    drop(port);
    run("address", &[("NCCL_COMM_ID", &address)]);
}

#[test]
fn arguments() {
    run("arguments", &[]);
}

#[test]
fn groups() {
    run("groups", &[]);
}

#[test]
fn background() {
    run("background", &[]);
}

#[test]
fn codecs() {
    run("codecs", &[]);
}

#[test]
fn parents() {
    run("parents", &[]);
}

#[test]
fn exit() {
    run("exit", &[]);
}

#[test]
fn processes() {
    run("processes", &[]);
}

#[test]
fn grow() {
    run("grow", &[]);
}

#[test]
fn shrink() {
    run("shrink", &[]);
}

#[test]
fn stopped() {
    // The log would have a warning of the stopped rank.
    run("stopped", &[("CINCH_LOG", "none")]);
}
