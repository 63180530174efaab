//! Tests the environment variables of cinch and of NCCL in a C program on host memory.

use super::{library, out, root};
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::OnceLock;

fn program() -> &'static PathBuf {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let program = out().join("nccl-environment");
        let compiled = Command::new("gcc")
            .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-I"])
            .arg(root().join("include"))
            .arg(root().join("nccl/tests/programs/environment.c"))
            .arg("-L")
            .arg(library())
            .arg(format!("-Wl,-rpath,{}", library().display()))
            .args(["-lnccl", "-o"])
            .arg(&program)
            .output()
            .expect("gcc");
        let said = String::from_utf8_lossy(&compiled.stderr);
        assert!(compiled.status.success(), "{said}");
        program
    })
}

fn run(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new("timeout");
    command.arg("120").arg(program()).args(arguments);
    for (name, _) in std::env::vars() {
        if name.starts_with("CINCH_") || name.starts_with("NCCL_") {
            command.env_remove(name);
        }
    }
    let variables = variables.iter().copied();
    command
        .env("CINCH_DEVICE", "host")
        .envs(variables)
        .output()
        .unwrap()
}

#[test]
fn rule_of_a_name_sets_codec_and_is_logged() {
    let log = out().join(format!("environment-{}.log", std::process::id()));
    let _ = std::fs::remove_file(&log);
    let ran = run(
        &[],
        &[
            ("CINCH_CODEC_RULES", "dp*=dynamic8,tp=off"),
            ("NCCL_DEBUG", "INFO"),
            ("NCCL_DEBUG_FILE", log.to_str().unwrap()),
            ("NCCL_TOPO_FILE", "topology.xml"),
            ("NCCL_ALGO", "NVLS"),
            ("NCCL_NVLS_ENABLE", "0"),
        ],
    );
    let text = std::fs::read_to_string(&log).unwrap_or_default();
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{said}\n{text}");
    for part in [
        " CINCH INFO ",
        " CINCH WARN NCCL_ALGO=\"NVLS\" is left out",
        "NCCL_TOPO_FILE has no effect",
        "without effect: NCCL_NVLS_ENABLE",
        "of communicator \"dp0\"",
        "dynamic8:block=256 of all_reduce,reduce_scatter from 1048576 bytes, by the rule \
         dp*=dynamic8",
        "compression off: by the rule tp=off",
        "compression off: no CINCH_CODEC",
        "calls of communicator \"dp0\": 1 coded, 1 exact (1 small)",
        "calls of communicator \"tp\": 0 coded, 1 exact (1 off)",
    ] {
        assert!(text.contains(part), "no \"{part}\" in\n{text}");
    }
    std::fs::remove_file(&log).unwrap();
}

#[test]
fn misspelt_setting_is_refused() {
    for (name, value, said) in [
        ("CINCH_CODEC", "int8", "CINCH_CODEC"),
        ("CINCH_CODEC", "dynamic8:tensor=50", "tensor"),
        ("CINCH_CODEC_RULES", "dp=dynamic8,*", "PATTERN"),
        ("CINCH_CODEC_RULE", "dp=dynamic8", "CINCH_CODEC_RULES"),
    ] {
        let ran = run(&[said], &[(name, value)]);
        let errors = String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success(), "{name}={value}: {errors}");
    }
}
