//! Checks the ABI of the drop-in: its constants and layouts equal those of `include/nccl.h`, and of NVIDIA's
//! header if that is available.
//!
//! `CINCH_TEST_NCCL_INCLUDE=DIR cargo test -p cinch-nccl abi` compares with `DIR/nccl.h`.

use crate::types::{self, *};
use crate::{
    OPTION_BLOCK, OPTION_CODEC, OPTION_OFF, STUBS, VENDOR_ID, ncclCollConfig_t, ncclConfig_t,
    ncclConfigExt_t, ncclSimInfo_t,
};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the root of the repository.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the member lies in the repository")
}

/// Returns the folder for the files that these tests write.
fn out() -> PathBuf {
    // This test's executable lies in target/PROFILE/deps.
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(3).unwrap().join("tmp")
}

/// Returns the function names in `nccl/symbols.txt`, which the library must export.
fn wanted() -> BTreeSet<String> {
    fs::read_to_string(root().join("nccl/symbols.txt"))
        .unwrap()
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(String::from)
        .collect()
}

#[test]
fn manual_lists_the_unsupported_functions() {
    let manual = fs::read_to_string(root().join("docs/nccl.md")).unwrap();
    let wanted = wanted();
    let mut listed = BTreeSet::new();
    for stub in STUBS {
        for name in stub.names {
            assert!(wanted.contains(*name) && wanted.contains(&format!("p{name}")));
            assert!(listed.insert(*name), "{name} is there twice");
        }
        let names: Vec<String> = stub.names.iter().map(|name| format!("`{name}`")).collect();
        let line = format!("| {} | {} |", names.join(" "), stub.why);
        assert!(manual.contains(&line), "docs/nccl.md lacks\n{line}");
    }
    let refusals = manual
        .lines()
        .filter(|line| line.starts_with("| `nccl"))
        .count();
    assert_eq!(refusals, STUBS.len(), "the manual lists more");
}

/// Returns the library's constants, sizes and offsets as lines of `name value`.
fn ours() -> String {
    let mut text = String::new();
    for (name, value) in types::CONSTANTS {
        text += &format!("{name} {value}\n");
    }
    for (name, size) in [
        ("ncclUniqueId", size_of::<ncclUniqueId>()),
        ("ncclResult_t", size_of::<ncclResult_t>()),
        ("ncclDataType_t", size_of::<ncclDataType_t>()),
        ("ncclRedOp_t", size_of::<ncclRedOp_t>()),
        ("ncclScalarResidence_t", size_of::<ncclScalarResidence_t>()),
        ("ncclComm_t", size_of::<ncclComm_t>()),
        ("ncclWindow_t", size_of::<ncclWindow_t>()),
    ] {
        text += &format!("sizeof {name} {size}\n");
    }
    for (name, fields, size) in structs() {
        for (field, at, _) in fields {
            text += &format!("{name}.{field} {at}\n");
        }
        text += &format!("sizeof {name} {size}\n");
    }
    for (field, at) in [
        ("next", std::mem::offset_of!(ncclConfigExt_t, next)),
        (
            "key.vendorId",
            std::mem::offset_of!(ncclConfigExt_t, key.vendorId),
        ),
        (
            "key.optionId",
            std::mem::offset_of!(ncclConfigExt_t, key.optionId),
        ),
        ("val.i", std::mem::offset_of!(ncclConfigExt_t, val.i)),
        ("val.s", std::mem::offset_of!(ncclConfigExt_t, val.s)),
        ("val.raw", std::mem::offset_of!(ncclConfigExt_t, val.raw)),
    ] {
        text += &format!("ncclConfigExt_t.{field} {at}\n");
    }
    text + &format!("sizeof ncclConfigExt_t {}\n", size_of::<ncclConfigExt_t>())
}

type Fields = &'static [(&'static str, usize, u32)];

fn structs() -> [(&'static str, Fields, usize); 3] {
    [
        (
            "ncclConfig_t",
            ncclConfig_t::FIELDS,
            size_of::<ncclConfig_t>(),
        ),
        (
            "ncclCollConfig_t",
            ncclCollConfig_t::FIELDS,
            size_of::<ncclCollConfig_t>(),
        ),
        (
            "ncclSimInfo_t",
            ncclSimInfo_t::FIELDS,
            size_of::<ncclSimInfo_t>(),
        ),
    ]
}

/// Returns the output of `abi.c`, compiled with the header in `include[0]`. The other folders hold
/// stand-ins for headers that it includes.
fn printed(include: &[&Path], name: &str) -> String {
    let mut numbers = String::new();
    for (constant, _) in types::CONSTANTS {
        numbers += &format!("  NUMBER({constant});\n");
    }
    let mut fields = String::new();
    for (name, list, _) in structs() {
        for (field, _, _) in list {
            fields += &format!("  FIELD({name}, {field});\n");
        }
        fields += &format!("  SIZE({name});\n");
    }
    let folder = out().join("abi");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("abi_numbers.h"), numbers).unwrap();
    fs::write(folder.join("abi_fields.h"), fields).unwrap();
    let program = folder.join(name);
    let mut compiler = Command::new("gcc");
    compiler
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(&folder);
    for folder in include {
        compiler.arg("-I").arg(folder);
    }
    let done = compiler
        .arg(root().join("nccl/tests/abi.c"))
        .arg("-o")
        .arg(&program)
        .output()
        .expect("gcc");
    assert!(
        done.status.success(),
        "{}",
        String::from_utf8_lossy(&done.stderr)
    );
    let run = Command::new(program).output().unwrap();
    assert!(run.status.success());
    String::from_utf8(run.stdout).unwrap()
}

#[test]
fn header_has_the_numbers_of_the_library() {
    let printed = printed(&[&root().join("include")], "ours");
    let ours = ours();
    assert!(ours.lines().count() > 110);
    let beginning: String = printed
        .lines()
        .take(ours.lines().count())
        .map(|line| format!("{line}\n"))
        .collect();
    assert_eq!(beginning, ours);
    let header = fs::read_to_string(root().join("include/nccl.h")).unwrap();
    for (name, value) in [
        (
            "CINCH_NCCL_VENDOR_ID",
            format!("{VENDOR_ID:#X}").replace("0X", "0x"),
        ),
        ("CINCH_NCCL_OPTION_CODEC", OPTION_CODEC.to_string()),
        ("CINCH_NCCL_OPTION_BLOCK", OPTION_BLOCK.to_string()),
        ("CINCH_NCCL_OPTION_OFF", OPTION_OFF.to_string()),
    ] {
        assert!(
            header.contains(&format!("#define {name} {value}")),
            "{name}"
        );
    }
}

#[test]
fn header_of_nvidia_has_the_same_numbers() {
    let Some(folder) = std::env::var_os("CINCH_TEST_NCCL_INCLUDE") else {
        println!("skipped: CINCH_TEST_NCCL_INCLUDE names no folder with NVIDIA's nccl.h");
        return;
    };
    // NVIDIA's header includes headers of CUDA, which these stand-ins replace.
    let stand_in = out().join("cuda-stand-in");
    fs::create_dir_all(&stand_in).unwrap();
    for (name, text) in [
        (
            "cuda_runtime.h",
            "#include <stddef.h>\ntypedef struct CUstream_st *cudaStream_t;\n\
             typedef struct CUevent_st *cudaEvent_t;\n#define CUDART_VERSION 0\n",
        ),
        ("cuda_fp16.h", ""),
        ("cuda_bf16.h", ""),
    ] {
        fs::write(stand_in.join(name), text).unwrap();
    }
    let theirs = printed(&[&PathBuf::from(folder), &stand_in], "theirs");
    assert_eq!(printed(&[&root().join("include")], "ours-again"), theirs);
}
