//! Compares structs and constants with the installed header, as bindgen reads it.

use super::types::{CONSTANTS, layouts};
use std::collections::HashMap;
use std::process::Command;

const HEADER: &str = "/usr/include/infiniband/verbs.h";

/// Union members that this library does not define, because another member covers the same bytes.
const UNUSED_MEMBERS: &[(&str, &str)] = &[("ibv_gid", "global")];

/// Returns the option for the C compiler's own headers: libclang alone has no `<stddef.h>`.
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

/// Returns bindgen's output for the header. If the header or libclang is missing, prints this and
/// returns `None`.
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
    // bindgen panics if it finds no libclang.
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

/// Parses the number in a line such as `["Size of ibv_wc"][::std::mem::size_of::<ibv_wc>() -
/// 48usize];`.
fn number(line: &str) -> usize {
    let digits = line
        .rsplit(" - ")
        .next()
        .and_then(|rest| rest.split("usize").next());
    digits
        .and_then(|digits| digits.parse().ok())
        .unwrap_or_else(|| panic!("{line}"))
}

/// Returns the numbers in bindgen's layout tests, keyed by names such as `Size of ibv_wc` or
/// `Offset of field: ibv_wc::status`.
fn layout_numbers(bindings: &str) -> HashMap<&str, usize> {
    // bindgen may break a line behind the name or the minus sign, so the text is split at names,
    // not at lines.
    let mut numbers = HashMap::new();
    for part in bindings.split("[\"").skip(1) {
        let (Some((name, rest)), true) = (part.split_once("\"]"), part.contains("usize]")) else {
            continue;
        };
        let Some((expression, _)) = rest.split_once("usize]") else {
            continue;
        };
        let flat = expression.split_whitespace().collect::<Vec<_>>().join(" ") + "usize";
        numbers.insert(name, number(&flat));
    }
    numbers
}

/// Returns values of enum members by their C name, without bindgen's prefix.
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
fn sizes_offsets_and_values_equal_the_header() {
    let Some(bindings) = bindings() else {
        return;
    };
    let (numbers, values) = (layout_numbers(&bindings), values(&bindings));
    let mut wrong = Vec::new();
    // Each entry has the name, this library's value, and the header's value.
    let mut compared: Vec<(String, i64, Option<i64>)> = Vec::new();
    for layout in layouts() {
        let mut compare = |what: String, ours: usize| {
            let theirs = numbers.get(what.as_str()).map(|theirs| *theirs as i64);
            compared.push((what, ours as i64, theirs));
        };
        compare(format!("Size of {}", layout.name), layout.size);
        compare(format!("Alignment of {}", layout.name), layout.align);
        for (field, offset) in &layout.fields {
            // Padding for the rest of a union, and anonymous unions, have no name in the header.
            if !field.starts_with("_rest") && !field.starts_with("__bindgen_anon") {
                compare(
                    format!("Offset of field: {}::{field}", layout.name),
                    *offset,
                );
            }
        }
        // Checks that no field of the header is missing here.
        let prefix = format!("Offset of field: {}::", layout.name);
        for name in numbers.keys().filter_map(|what| what.strip_prefix(&prefix)) {
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

/// Compares the offsets of members of anonymous unions, which bindgen does not report.
#[test]
fn union_members_have_the_compilers_offsets() {
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
