//! The drop-in must export exactly the symbols of NVIDIA's library.

use super::{library, root};
use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

/// Returns the names in `nccl/symbols.txt`.
fn wanted() -> BTreeSet<String> {
    fs::read_to_string(root().join("nccl/symbols.txt"))
        .unwrap()
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(String::from)
        .collect()
}

/// Returns the names that the library exports, from the output of `readelf`.
fn exported() -> BTreeSet<String> {
    let output = Command::new("readelf")
        .args(["--dyn-syms", "--wide"])
        .arg(library().join("libnccl.so.2"))
        .output()
        .expect("readelf (package binutils)");
    assert!(output.status.success());
    String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let [_, _, _, _, binding, visibility, section, name] = fields[..] else {
                return None;
            };
            let ours = binding != "LOCAL" && section != "UND" && section != "Ndx";
            (ours && visibility != "HIDDEN").then(|| name.to_string())
        })
        .collect()
}

#[test]
fn exports_equal_those_of_nvidia() {
    let (wanted, exported) = (wanted(), exported());
    assert_eq!(wanted.len(), 193);
    let missing: Vec<_> = wanted.difference(&exported).collect();
    let more: Vec<_> = exported.difference(&wanted).collect();
    assert!(
        missing.is_empty() && more.is_empty(),
        "missing: {missing:?}\nmore: {more:?}"
    );
}

#[test]
fn soname_is_that_of_nccl() {
    let output = Command::new("readelf")
        .arg("-d")
        .arg(library().join("libnccl.so.2"))
        .output()
        .expect("readelf (package binutils)");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("soname: [libnccl.so.2]"), "{text}");
    // Preloading must load neither a CUDA library nor libcinch.
    assert!(
        !text.contains("libcu") && !text.contains("libcinch"),
        "{text}"
    );
}
