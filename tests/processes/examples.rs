//! Builds the programs of `examples/` by the commands in their comments, and runs them on several ranks.
//!
//! Each program checks its own results, and exits with an error if one is wrong.

use crate::support::c_library::build;
use cinch::gpu::{Driver, kernels};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Seconds after which an example counts as hung, as an argument of `timeout`.
const EXAMPLE_TIMEOUT: &str = "120";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Runs a command in the root of the tree; panics with its output if it fails.
fn succeed(what: &str, command: &mut Command) -> Output {
    let output = command
        .current_dir(root())
        .output()
        .unwrap_or_else(|error| panic!("{what}: {command:?} does not start: {error}"));
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{what}: {}\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    output
}

/// Returns whether the program is installed.
fn is_installed(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok()
}

/// Compiles an example by the command of `compiler` in its comment, against the libraries of this
/// build and with `extra` arguments. Returns the program.
fn compile(example: &str, compiler: &str, path: &Path, extra: &[&str]) -> PathBuf {
    let source = std::fs::read_to_string(root().join(example)).unwrap();
    let command = source
        .lines()
        .map(|line| line.trim_start_matches([' ', '*', '/']))
        .find_map(|line| line.strip_prefix(compiler)?.strip_prefix(' '))
        .unwrap_or_else(|| panic!("{example} has no command of {compiler}"));
    let stem = Path::new(example).file_stem().unwrap().to_str().unwrap();
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("example-{stem}"));
    let arguments = command.split_whitespace().map(|word| {
        if word == stem {
            program.clone()
        } else if let Some(library) = word.strip_prefix("target/release/") {
            build().join(library)
        } else {
            word.into()
        }
    });
    let mut compile = Command::new(path);
    let output = succeed(example, compile.args(arguments).args(extra));
    let warnings = String::from_utf8_lossy(&output.stderr);
    assert!(warnings.is_empty(), "{example}:\n{warnings}");
    program
}

/// Returns a command without cinch's environment variables; `timeout` ends it if the example hangs.
fn limited(program: impl AsRef<Path>) -> Command {
    let mut command = Command::new("timeout");
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("CINCH_") {
            command.env_remove(name);
        }
    }
    command
        .args(["--kill-after=5", EXAMPLE_TIMEOUT])
        .arg(program.as_ref());
    command
}

/// Runs `program` as `nranks` processes by `cinch run`. Every rank prints `rank R of N: `.
fn run(program: &Path, nranks: usize) {
    let mut cinch = limited(build().join("cinch"));
    cinch.args(["run", "-n", &nranks.to_string(), "--"]);
    let output = succeed(&format!("{nranks} ranks"), cinch.arg(program));
    check_ranks(&output, nranks);
}

fn check_ranks(output: &Output, nranks: usize) {
    let text = String::from_utf8_lossy(&output.stdout);
    for rank in 0..nranks {
        let begin = format!("rank {rank} of {nranks}: ");
        assert!(text.contains(&begin), "no line \"{begin}\" in:\n{text}");
    }
}

#[test]
fn host_all_reduce_in_c_is_within_its_bound() {
    let program = compile("examples/c/host_all_reduce.c", "cc", "cc".as_ref(), &[]);
    for nranks in [1, 2, 4] {
        run(&program, nranks);
    }
}

#[test]
fn groups_in_c_are_exact() {
    let program = compile("examples/c/groups.c", "cc", "cc".as_ref(), &[]);
    for nranks in [1, 2, 4] {
        run(&program, nranks);
    }
}

/// Returns the compiler that `build.rs` would find.
fn nvcc() -> Option<PathBuf> {
    let named = std::env::var_os("NVCC").map(PathBuf::from);
    let home = std::env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("bin/nvcc"));
    let path = is_installed("nvcc").then(|| "nvcc".into());
    let local = root().join("target/cuda/nvidia/cu13/bin/nvcc");
    named.or(home).or(path).or(local.is_file().then_some(local))
}

#[test]
fn gpu_stream_in_c_is_exact() {
    let Some(nvcc) = nvcc() else {
        return println!("SKIPPED: no nvcc in NVCC, CUDA_HOME, PATH or target/cuda");
    };
    // The nvcc from PyPI looks for its libraries in the folder lib64, which the PyPI packages lack.
    let libraries = nvcc.ancestors().nth(2).map(|home| home.join("lib"));
    let libraries = libraries.map_or(String::new(), |lib| format!("-L{}", lib.display()));
    let program = compile("examples/c/gpu_stream.c", "nvcc", &nvcc, &[&libraries]);
    if let Err(error) = Driver::load().and_then(|driver| driver.devices()) {
        return println!("SKIPPED: compiled, but did not run: {error}");
    }
    if !matches!(kernels::STATE, kernels::State::Built { .. }) {
        return println!(
            "SKIPPED: compiled, but did not run: kernels {}",
            kernels::STATE
        );
    }
    for nranks in [1, 2, 4] {
        run(&program, nranks);
    }
}

#[test]
fn mpi_start_in_cpp_equals_mpi() {
    for program in ["mpicxx", "mpirun"] {
        if !is_installed(program) {
            return println!("SKIPPED: no {program} (packages openmpi-bin and libopenmpi-dev)");
        }
    }
    let program = compile(
        "examples/cpp/mpi_start.cpp",
        "mpicxx",
        "mpicxx".as_ref(),
        &[],
    );
    for nranks in [2, 4] {
        let mut mpirun = limited("mpirun");
        // Open MPI refuses to run as root, and more ranks than cores, unless these are set.
        for name in [
            "OMPI_ALLOW_RUN_AS_ROOT",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
            "OMPI_MCA_rmaps_base_oversubscribe",
        ] {
            mpirun.env(name, "1");
        }
        mpirun.args(["-n", &nranks.to_string()]).arg(&program);
        check_ranks(&succeed("mpi_start", &mut mpirun), nranks);
    }
}

#[test]
fn all_reduce_in_rust_is_exact() {
    let mut example = limited(build().join("examples/all_reduce"));
    check_ranks(&succeed("all_reduce", &mut example), 4);
}

#[test]
fn sub_groups_in_rust_hold_their_ranks() {
    let program = build().join("examples/sub_groups");
    for nranks in [2, 3, 4] {
        run(&program, nranks);
    }
}

#[test]
fn arrays_in_rust_are_within_their_bound() {
    let mut example = limited(build().join("examples/arrays"));
    let output = succeed("arrays", &mut example);
    assert!(String::from_utf8_lossy(&output.stdout).contains("100000 elements in"));
}
