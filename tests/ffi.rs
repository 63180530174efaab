//! The C ABI from C and C++: the programs of `ffi-tests/` and `examples/`, compiled without a
//! warning by every compiler that is here, run as 1 and 4 processes, plain and under
//! AddressSanitizer (the library itself is not instrumented).
//!
//! Tests named `live_` need ranks that can talk to each other; the others only the library.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime};

const PROGRAMS: &[&str] = &[
    "ffi-tests/bad_arguments.c",
    "ffi-tests/all_collectives.c",
    "ffi-tests/groups.c",
    "ffi-tests/report.c",
    "ffi-tests/codecs.c",
    "ffi-tests/adapt.c",
    "ffi-tests/split.c",
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

/// A program that runs longer hangs.
const DEADLINE: Duration = Duration::from_secs(120);
/// How long the others may go on once one rank has failed.
const GRACE: Duration = Duration::from_secs(20);

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

/// A folder with the libraries that were built with this very test, the shared one under its two
/// names.
fn library() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        // deps/ holds it whether or not cargo has also put it one level up.
        let this = std::env::current_exe().unwrap();
        let built = this.with_file_name("libcinch.so");
        let modified = |path: &Path| fs::metadata(path).unwrap().modified().unwrap();
        let newest = newest_source(&root().join("src"), &modified);
        assert!(
            modified(&built) >= newest,
            "{} is older than the sources; was it built by this cargo test?",
            built.display()
        );
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("ffi-lib");
        fs::create_dir_all(&folder).unwrap();
        for (name, file) in [
            ("libcinch.so", "libcinch.so"),
            ("libcinch.so.0", "libcinch.so"),
            ("libcinch.a", "libcinch.a"),
        ] {
            let link = folder.join(name);
            let _ = fs::remove_file(&link);
            std::os::unix::fs::symlink(this.with_file_name(file), link).unwrap();
        }
        folder
    })
}

fn newest_source(directory: &Path, modified: &dyn Fn(&Path) -> SystemTime) -> SystemTime {
    let entries = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    entries
        .map(|path| match path.is_dir() {
            true => newest_source(&path, modified),
            false => modified(&path),
        })
        .max()
        .unwrap_or(SystemTime::UNIX_EPOCH)
}

/// Compiles `source` to an executable of this test's own.
fn compile(source: &str, test: &str, flags: &[&str]) -> PathBuf {
    let stem = Path::new(source).file_stem().unwrap().to_string_lossy();
    let sanitized = if flags.is_empty() { "" } else { "-sanitized" };
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{test}-{stem}{sanitized}"));
    let (compiler, standard) = match source.ends_with(".cpp") {
        true => ("g++", "-std=c++17"),
        false => ("gcc", "-std=c11"),
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

/// Started processes; those that still run when it is dropped are killed, by their own ids.
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
    /// One process for each list of arguments.
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

    /// Waits for all; returns what each wrote, or fails with all of it.
    fn join(mut self, name: &str) -> Vec<String> {
        let mut deadline = Instant::now() + DEADLINE;
        let mut failed = false;
        loop {
            let states: Vec<_> = self
                .children
                .iter_mut()
                .map(|(child, _)| child.try_wait().unwrap())
                .collect();
            if !failed && states.iter().flatten().any(|status| !status.success()) {
                failed = true;
                deadline = deadline.min(Instant::now() + GRACE);
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

/// A path for the id of one run, where nothing is yet.
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

fn run_all_ways(source: &str, test: &str) {
    for flags in [&[], ASAN] {
        for nranks in [1, 4] {
            run(source, test, flags, nranks);
        }
    }
}

#[test]
fn every_compiler_accepts_every_program() {
    let mut missing = Vec::new();
    for (c, cpp) in [("gcc", "g++"), ("clang", "clang++")] {
        for source in PROGRAMS {
            let (compiler, standards) = match source.ends_with(".cpp") {
                true => (cpp, ["c++11", "c++17"]),
                false => (c, ["c99", "c11"]),
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
fn bad_arguments_without_a_communicator_are_errors() {
    for flags in [&[], ASAN] {
        let program = compile("ffi-tests/bad_arguments.c", "static", flags);
        let name = format!("static{}", flags.concat());
        let logs = Ranks::start(&program, &name, &[vec!["static".into()]]).join(&name);
        assert!(logs[0].contains("all well"), "{}", logs[0]);
        // Each case prints its code and its sentence.
        let cases = logs[0]
            .lines()
            .filter(|line| line.contains(" -> 4: "))
            .count();
        assert!(cases > 150, "{cases} cases ran:\n{}", logs[0]);
    }
}

#[test]
fn the_header_serves_cpp() {
    let program = compile("ffi-tests/cpp_header.cpp", "cpp", &[]);
    Ranks::start(&program, "cpp", &[vec![]]).join("cpp");
}

#[test]
fn live_bad_arguments() {
    run_all_ways("ffi-tests/bad_arguments.c", "bad_arguments");
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
    run_all_ways("ffi-tests/all_collectives.c", "all_collectives");
}

#[test]
fn live_groups() {
    run_all_ways("ffi-tests/groups.c", "groups");
}

#[test]
fn live_report() {
    run_all_ways("ffi-tests/report.c", "report");
}

#[test]
fn live_codecs() {
    for flags in [&[], ASAN] {
        run("ffi-tests/codecs.c", "codecs", flags, 1);
    }
}

#[test]
fn live_adapt() {
    run_all_ways("ffi-tests/adapt.c", "adapt");
}

#[test]
fn live_split() {
    run_all_ways("ffi-tests/split.c", "split");
}

#[test]
fn live_cpp() {
    run_all_ways("ffi-tests/cpp_header.cpp", "cpp_live");
}
