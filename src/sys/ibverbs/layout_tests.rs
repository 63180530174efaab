//! Our structs and constants against bindgen's reading of the installed header.

use super::types::{CONSTANTS, layouts};
use std::collections::HashMap;
use std::process::Command;

const HEADER: &str = "/usr/include/infiniband/verbs.h";

/// Members of unions that are another way to look at one that is here.
const UNUSED_MEMBERS: &[(&str, &str)] = &[("ibv_gid", "global")];

/// Where the C compiler has `<stddef.h>`: libclang alone has none.
fn compiler_includes() -> Vec<String> {
    let output = Command::new("cc").arg("-print-file-name=include").output();
    match output {
        Ok(output) if output.status.success() => {
            let path = String::from_utf8_lossy(&output.stdout).trim().to_string();
            vec!["-isystem".into(), path]
        }
        _ => Vec::new(),
    }
}

/// What bindgen makes of the header; `None`, with the reason printed, where it cannot be had.
fn bindings() -> Option<String> {
    if !std::path::Path::new(HEADER).exists() {
        println!("SKIPPED: no {HEADER} (package libibverbs-dev)");
        return None;
    }
    let generate = || {
        bindgen::Builder::default()
            .header(HEADER)
            .clang_args(compiler_includes())
            .allowlist_item("_?ibv_.*|IBV_.*")
            .layout_tests(true)
            .generate()
    };
    // bindgen panics where it finds no libclang.
    match std::panic::catch_unwind(generate) {
        Ok(bindings) => Some(bindings.expect("the header can be read").to_string()),
        Err(why) => {
            let why = why.downcast_ref::<String>().map_or("", String::as_str);
            assert!(why.contains("libclang"), "{why}");
            println!("SKIPPED: no libclang (package libclang1): {why}");
            None
        }
    }
}

/// The number that a line says: `["Size of ibv_wc"][::std::mem::size_of::<ibv_wc>() - 48usize];`
fn number(line: &str) -> usize {
    let digits = line
        .rsplit(" - ")
        .next()
        .and_then(|rest| rest.split("usize").next());
    digits
        .and_then(|digits| digits.parse().ok())
        .unwrap_or_else(|| panic!("{line}"))
}

/// What is said about layouts, by what it is said of: `Size of ibv_wc`, `Offset of field:
/// ibv_wc::status`.
fn said(bindings: &str) -> HashMap<&str, usize> {
    // Long lines are broken behind the name or the minus; one line each again.
    let mut said = HashMap::new();
    for part in bindings.split("[\"").skip(1) {
        let (Some((name, rest)), true) = (part.split_once("\"]"), part.contains("usize]")) else {
            continue;
        };
        let Some((expression, _)) = rest.split_once("usize]") else {
            continue;
        };
        let flat = expression.split_whitespace().collect::<Vec<_>>().join(" ") + "usize";
        said.insert(name, number(&flat));
    }
    said
}

/// Values of enum members, by their C name; bindgen puts the enum's name before it.
fn values(bindings: &str) -> HashMap<String, i64> {
    let mut values = HashMap::new();
    for line in bindings.lines() {
        let Some(rest) = line.trim().strip_prefix("pub const ") else {
            continue;
        };
        let (Some((name, _)), Some((_, value))) = (rest.split_once(':'), rest.split_once(" = "))
        else {
            continue;
        };
        if let (Some(at), Ok(value)) = (name.find("IBV_"), value.trim_end_matches(';').parse()) {
            values.insert(name[at..].to_string(), value);
        }
    }
    values
}

#[test]
fn every_size_offset_and_value_is_the_header_s() {
    let Some(bindings) = bindings() else {
        return;
    };
    let (said, values) = (said(&bindings), values(&bindings));
    let mut wrong = Vec::new();
    // What, ours, theirs.
    let mut compared: Vec<(String, i64, Option<i64>)> = Vec::new();
    for layout in layouts() {
        let mut compare = |what: String, ours: usize| {
            let theirs = said.get(what.as_str()).map(|theirs| *theirs as i64);
            compared.push((what, ours as i64, theirs));
        };
        compare(format!("Size of {}", layout.name), layout.size);
        compare(format!("Alignment of {}", layout.name), layout.align);
        for (field, offset) in &layout.fields {
            // Room that a union takes up, and anonymous unions, have no name to ask for.
            if !field.starts_with("_rest") && !field.starts_with("__bindgen_anon") {
                compare(
                    format!("Offset of field: {}::{field}", layout.name),
                    *offset,
                );
            }
        }
        // No field of the header's is missing here.
        let prefix = format!("Offset of field: {}::", layout.name);
        for name in said.keys().filter_map(|what| what.strip_prefix(&prefix)) {
            let unused = UNUSED_MEMBERS.contains(&(layout.name, name));
            if !unused && !layout.fields.iter().any(|(field, _)| *field == name) {
                wrong.push(format!("{}::{name} is missing here", layout.name));
            }
        }
    }
    for (name, ours) in CONSTANTS {
        compared.push(((*name).into(), *ours, values.get(*name).copied()));
    }
    for (what, ours, theirs) in &compared {
        if *theirs != Some(*ours) {
            wrong.push(format!("{what}: {ours} here, {theirs:?} in the header"));
        }
    }
    let compared = compared.len();
    println!("{compared} sizes, offsets and values compared");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(compared > 250, "only {compared} were compared");
}

/// What bindgen cannot be asked: where the members of anonymous unions lie.
#[test]
fn unions_lie_where_the_compiler_puts_them() {
    let Some(directory) = std::path::Path::new(HEADER)
        .exists()
        .then(std::env::temp_dir)
    else {
        return println!("SKIPPED: no {HEADER} (package libibverbs-dev)");
    };
    let source = directory.join(format!("cinch-verbs-{}.c", std::process::id()));
    let program = source.with_extension("");
    std::fs::write(
        &source,
        "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\n\
         int main(void) { printf(\"%zu %zu %zu %zu %zu\\n\", offsetof(struct ibv_send_wr, imm_data),\n\
         offsetof(struct ibv_send_wr, wr.rdma.rkey), offsetof(struct ibv_send_wr, bind_mw),\n\
         offsetof(struct ibv_wc, imm_data), offsetof(union ibv_gid, raw)); }\n",
    )
    .unwrap();
    let compiled = Command::new("cc")
        .arg(&source)
        .arg("-o")
        .arg(&program)
        .status();
    assert!(compiled.unwrap().success());
    let output = Command::new(&program).output().unwrap();
    let theirs: Vec<usize> = String::from_utf8_lossy(&output.stdout)
        .split_whitespace()
        .map(|number| number.parse().unwrap())
        .collect();
    use super::types::*;
    use std::mem::offset_of;
    let ours = [
        offset_of!(IbvSendWr, imm_data),
        offset_of!(IbvSendWr, rdma) + offset_of!(IbvSendWrRdma, rkey),
        offset_of!(IbvSendWr, bind_mw),
        offset_of!(IbvWc, imm_data),
        offset_of!(IbvGid, raw),
    ];
    let _ = (
        std::fs::remove_file(&source),
        std::fs::remove_file(&program),
    );
    assert_eq!(theirs, ours);
}
