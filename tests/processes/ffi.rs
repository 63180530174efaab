//! Tests C and C++ programs of `ffi-tests/` and `examples/` on the C ABI.
//!
//! Every installed compiler must compile them without a warning. They run as 1 and 4 processes, plain and
//! under AddressSanitizer (the library itself is not instrumented). Tests named `live_` need ranks that can
//! connect to each other; the others need the library only.

use crate::support::c_library;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

const PROGRAMS: &[&str] = &[
    "ffi-tests/bad_arguments.c",
    "ffi-tests/all_collectives.c",
    "ffi-tests/groups.c",
    "ffi-tests/report.c",
    "ffi-tests/requests.c",
    "ffi-tests/codecs.c",
    "ffi-tests/adapt.c",
    "ffi-tests/split.c",
    "ffi-tests/shrink.c",
    "ffi-tests/grow.c",
    "ffi-tests/cpp_header.cpp",
    "examples/c/groups.c",
    "examples/c/host_all_reduce.c",
];
const STRICT: &[&str] = &[
    "-Wall",
    "-Wextra",
    "-Werror",
    "-pedantic",
    "-g",
    "-O1",
    "-pthread",
];

/// Time after which a program counts as hung.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(120);
/// Time that the other ranks have to end after one rank has failed.
const PEER_EXIT_TIMEOUT: Duration = Duration::from_secs(20);

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn starts(tool: &str) -> bool {
    Command::new(tool)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Returns a folder with the libraries of this build; the shared library has its two names there.
fn library() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let built = c_library::build();
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("ffi-lib");
        fs::create_dir_all(&folder).unwrap();
        for (name, file) in [
            ("libcinch.so", "libcinch.so"),
            ("libcinch.so.0", "libcinch.so"),
            ("libcinch.a", "libcinch.a"),
        ] {
            let link = folder.join(name);
            let _ = fs::remove_file(&link);
            std::os::unix::fs::symlink(built.join(file), link).unwrap();
        }
        folder
    })
}

/// Compiles `source` to an executable that belongs to `test`.
fn compile(source: &str, test: &str, flags: &[&str]) -> PathBuf {
    let stem = Path::new(source).file_stem().unwrap().to_string_lossy();
    let sanitized = if flags.is_empty() { "" } else { "-sanitized" };
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{test}-{stem}{sanitized}"));
    let (compiler, standard) = if source.ends_with(".cpp") {
        ("g++", "-std=c++17")
    } else {
        ("gcc", "-std=c11")
    };
    let library = library();
    let output = Command::new(compiler)
        .arg(standard)
        .args(STRICT)
        .args(flags)
        .arg("-I")
        .arg(root().join("include"))
        .arg(root().join(source))
        .arg("-L")
        .arg(library)
        .arg(format!("-Wl,-rpath,{}", library.display()))
        .args(["-lcinch", "-lm", "-o"])
        .arg(&program)
        .output()
        .unwrap_or_else(|error| panic!("{compiler} does not start: {error}"));
    assert!(
        output.status.success(),
        "{compiler} refuses {source}:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    program
}

/// Started processes. Dropping this value kills the processes that still run, by their ids.
struct Ranks {
    children: Vec<(Child, PathBuf)>,
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for (child, log) in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
            let _ = fs::remove_file(log);
        }
    }
}

impl Ranks {
    /// Starts one process for each list of arguments.
    fn start(program: &Path, name: &str, arguments: &[Vec<String>]) -> Ranks {
        let mut ranks = Ranks {
            children: Vec::new(),
        };
        for (rank, arguments) in arguments.iter().enumerate() {
            let log = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{rank}.log"));
            let output = File::create(&log).unwrap();
            let mut command = Command::new(program);
            for (variable, _) in std::env::vars_os() {
                if variable.to_string_lossy().starts_with("CINCH_") {
                    command.env_remove(variable);
                }
            }
            let child = command
                .args(arguments)
                .stdin(Stdio::null())
                .stdout(output.try_clone().unwrap())
                .stderr(output)
                .spawn()
                .unwrap_or_else(|error| panic!("{} does not start: {error}", program.display()));
            ranks.children.push((child, log));
        }
        ranks
    }

    /// Waits for all processes and returns their output; panics with it if one fails.
    fn join(mut self, name: &str) -> Vec<String> {
        let mut deadline = Instant::now() + PROGRAM_TIMEOUT;
        let mut failed = false;
        loop {
            let states: Vec<_> = self
                .children
                .iter_mut()
                .map(|(child, _)| child.try_wait().unwrap())
                .collect();
            if !failed && states.iter().flatten().any(|status| !status.success()) {
                failed = true;
                deadline = deadline.min(Instant::now() + PEER_EXIT_TIMEOUT);
            }
            let over = Instant::now() > deadline;
            if states.iter().all(Option::is_some) || over {
                let logs: Vec<_> = self
                    .children
                    .iter()
                    .map(|(_, log)| {
                        String::from_utf8_lossy(&fs::read(log).unwrap_or_default()).into_owned()
                    })
                    .collect();
                if failed || over {
                    let mut text = format!("{name} failed");
                    for (rank, (state, log)) in states.iter().zip(&logs).enumerate() {
                        let state = state.map_or("still running, killed".into(), |s| s.to_string());
                        text += &format!("\n--- process {rank}: {state}\n{log}");
                    }
                    panic!("{text}");
                }
                return logs;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Returns the path of the file in which one run shares its id; removes an old file.
fn id_file(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.id"));
    let _ = fs::remove_file(&path);
    path
}

fn run(source: &str, test: &str, flags: &[&str], nranks: usize) {
    let program = compile(source, test, flags);
    let name = format!("{test}-{nranks}{}", flags.concat());
    let id = id_file(&name);
    let arguments: Vec<_> = (0..nranks)
        .map(|rank| {
            vec![
                rank.to_string(),
                nranks.to_string(),
                id.display().to_string(),
            ]
        })
        .collect();
    Ranks::start(&program, &name, &arguments).join(&name);
    let _ = fs::remove_file(id);
}

const ASAN: &[&str] = &["-fsanitize=address", "-fno-omit-frame-pointer"];

fn run_in_all_modes(source: &str, test: &str) {
    for flags in [&[], ASAN] {
        for nranks in [1, 4] {
            run(source, test, flags, nranks);
        }
    }
}

#[test]
fn program_compiles_without_warning_on_every_compiler() {
    let mut missing = Vec::new();
    for (c, cpp) in [("gcc", "g++"), ("clang", "clang++")] {
        for source in PROGRAMS {
            let (compiler, standards) = if source.ends_with(".cpp") {
                (cpp, ["c++11", "c++17"])
            } else {
                (c, ["c99", "c11"])
            };
            if !starts(compiler) {
                assert!(c != "gcc", "{compiler} is needed");
                missing.push(compiler);
                continue;
            }
            for standard in standards {
                let output = Command::new(compiler)
                    .arg(format!("-std={standard}"))
                    .args(STRICT)
                    .args(["-c", "-o", "/dev/null", "-I"])
                    .arg(root().join("include"))
                    .arg(root().join(source))
                    .output()
                    .unwrap();
                assert!(
                    output.status.success() && output.stderr.is_empty(),
                    "{compiler} -std={standard} {source}:\n{}",
                    String::from_utf8_lossy(&output.stderr)
                );
            }
        }
    }
    missing.dedup();
    if !missing.is_empty() {
        println!("SKIPPED: not installed: {}", missing.join(", "));
    }
}

#[test]
fn bad_argument_without_communicator_is_an_error() {
    for flags in [&[], ASAN] {
        let program = compile("ffi-tests/bad_arguments.c", "static", flags);
        let name = format!("static{}", flags.concat());
        let logs = Ranks::start(&program, &name, &[vec!["static".into()]]).join(&name);
        assert!(logs[0].contains("all well"), "{}", logs[0]);
        // Each case prints the code and the message of its error.
        let cases = logs[0]
            .lines()
            .filter(|line| line.contains(" -> 4: "))
            .count();
        assert!(cases > 150, "{cases} cases ran:\n{}", logs[0]);
    }
}

#[test]
fn header_compiles_and_links_as_cpp() {
    let program = compile("ffi-tests/cpp_header.cpp", "cpp", &[]);
    Ranks::start(&program, "cpp", &[vec![]]).join("cpp");
}

#[test]
fn live_bad_arguments() {
    run_in_all_modes("ffi-tests/bad_arguments.c", "bad_arguments");
}

#[test]
fn live_duplicate_ranks() {
    let program = compile("ffi-tests/bad_arguments.c", "duplicate", &[]);
    let id = id_file("duplicate");
    let arguments: Vec<_> = ["0", "1"]
        .map(|first| vec!["duplicate".into(), first.into(), id.display().to_string()])
        .into();
    Ranks::start(&program, "duplicate", &arguments).join("duplicate");
    let _ = fs::remove_file(id);
}

#[test]
fn live_all_collectives() {
    run_in_all_modes("ffi-tests/all_collectives.c", "all_collectives");
}

#[test]
fn live_groups() {
    run_in_all_modes("ffi-tests/groups.c", "groups");
}

#[test]
fn live_requests() {
    run_in_all_modes("ffi-tests/requests.c", "requests");
}

#[test]
fn live_report() {
    run_in_all_modes("ffi-tests/report.c", "report");
}

#[test]
fn live_codecs() {
    for flags in [&[], ASAN] {
        run("ffi-tests/codecs.c", "codecs", flags, 1);
    }
}

#[test]
fn live_adapt() {
    run_in_all_modes("ffi-tests/adapt.c", "adapt");
}

#[test]
fn live_split() {
    run_in_all_modes("ffi-tests/split.c", "split");
}

#[test]
fn live_shrink() {
    run_in_all_modes("ffi-tests/shrink.c", "shrink");
}

#[test]
fn live_grow() {
    run_in_all_modes("ffi-tests/grow.c", "grow");
}

#[test]
fn live_cpp() {
    run_in_all_modes("ffi-tests/cpp_header.cpp", "cpp_live");
}
