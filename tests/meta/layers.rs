//! Imports go down the layer table of `docs/layers.md`, never up, never sideways; and
//! `unsafe` stays in the modules that may use it.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Places that may use `unsafe`, as path prefixes below `src/`.
const UNSAFE: &[&str] = &[
    "sys/",
    "sync/",
    "cpu/",
    "gpu/",
    "mem/",
    "transport/",
    "gpu_links/",
    "engine/gpu",
    "capi/",
    // The tool queues calls on device memory, and calls the library that it compares with.
    "bin/cinch/bench/gpu/device.rs",
    "bin/cinch/bench/gpu/peer.rs",
    "bin/cinch/arrays.rs",
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn layers() -> HashMap<String, u32> {
    let text = fs::read_to_string(root().join("docs/layers.md")).unwrap();
    let mut layers = HashMap::new();
    for line in text.lines() {
        let cells: Vec<_> = line.split('|').map(str::trim).collect();
        if let [_, layer, modules, _] = cells[..]
            && let Ok(layer) = layer.parse()
        {
            layers.extend(
                modules
                    .split_whitespace()
                    .map(|module| (module.to_string(), layer)),
            );
        }
    }
    assert!(layers.len() >= 15, "the layer table was not found");
    layers
}

fn files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Source without comments and text, and without the item behind each `#[cfg(test)]`, where tests may
/// look upward: what comes after that item is the library's again.
fn code(text: &str) -> String {
    const TEST: &str = "#[cfg(test)]";
    let bare = bare(text);
    let (mut kept, mut rest) = (String::new(), bare.as_str());
    while let Some(at) = rest.find(TEST) {
        kept.push_str(&rest[..at]);
        rest = behind_item(&rest[at + TEST.len()..]);
    }
    kept + rest
}

/// What follows the item that `code` begins with: it ends with the first `;` or `}` outside of all
/// brackets, or in front of the bracket that closes what it is in. Its other attributes are part of it.
fn behind_item(code: &str) -> &str {
    let mut depth = 0;
    for (at, c) in code.char_indices() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' if depth == 0 => return &code[at..],
            ')' | ']' | '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 && (c == ';' || c == '}') {
            return &code[at + 1..];
        }
    }
    ""
}

/// Source without comments, and with strings and characters emptied: brackets in them open nothing.
fn bare(text: &str) -> String {
    let mut kept = String::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let word = kept
            .rsplit(|c: char| !c.is_alphanumeric() && c != '_')
            .next()
            .unwrap();
        let hashes = rest.chars().skip(1).take_while(|&c| c == '#').count();
        let raw = c == 'r' && ["", "b", "c"].contains(&word) && rest[1 + hashes..].starts_with('"');
        let skipped = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if raw {
            let end = format!("\"{}", "#".repeat(hashes));
            let begin = hashes + 2;
            rest[begin..]
                .find(&end)
                .map_or(rest.len(), |at| begin + at + end.len())
        } else if c == '"' {
            quoted(rest, '"')
        } else if c == '\'' && (rest[1..].starts_with('\\') || rest.chars().nth(2) == Some('\'')) {
            quoted(rest, '\'') // and no lifetime
        } else {
            kept.push(c);
            c.len_utf8()
        };
        rest = &rest[skipped..];
    }
    kept
}

/// How long the string or character is that `text` begins with.
fn quoted(text: &str, mark: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        if c == mark && !escaped {
            return at + 1;
        }
        escaped = c == '\\' && !escaped;
    }
    text.len()
}

/// First path segments behind every `crate::`, groups included.
fn imports(code: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        if at > 0 && code.as_bytes()[at - 1] == b'$' {
            continue; // a macro naming its own crate
        }
        let rest = &code[at + "crate::".len()..];
        let names: Vec<String> = match rest.strip_prefix('{') {
            None => vec![rest.to_string()],
            Some(group) => {
                let (mut depth, mut names, mut name) = (0, Vec::new(), String::new());
                for c in group.chars() {
                    match c {
                        '}' if depth == 0 => break,
                        ',' if depth == 0 => names.push(std::mem::take(&mut name)),
                        _ => {
                            depth += i32::from(c == '{') - i32::from(c == '}');
                            name.push(c);
                        }
                    }
                }
                names.push(name);
                names
            }
        };
        found.extend(names.iter().map(|name| {
            name.trim()
                .chars()
                .take_while(|c| c.is_alphanumeric() || *c == '_')
                .collect()
        }));
    }
    found
}

#[test]
fn imports_go_down() {
    let layers = layers();
    // What the crate root re-exports, by home module.
    let homes: HashMap<&str, &str> = [
        ("UniqueId", "bootstrap"),
        ("Communicator", "comm"),
        ("Report", "comm"),
        ("Config", "config"),
        ("Error", "error"),
        ("ErrorKind", "error"),
        ("Result", "error"),
        ("Algorithm", "types"),
        ("CodecSpec", "types"),
        ("Collective", "types"),
        ("DType", "types"),
        ("ReduceOp", "types"),
        ("VERSION", "types"),
    ]
    .into();
    let source = root().join("src");
    let mut all = Vec::new();
    files(&source, &mut all);
    let mut broken = Vec::new();
    let mut checked = 0;
    for path in all {
        let relative = path
            .strip_prefix(&source)
            .unwrap()
            .to_string_lossy()
            .replace('\\', "/");
        let module = relative.split(['/', '.']).next().unwrap().to_string();
        // Tests may look upward.
        let tests = relative.ends_with("_tests.rs") || relative.contains("/conformance/");
        if tests || ["lib", "manual", "bin"].contains(&module.as_str()) {
            continue;
        }
        let own = *layers
            .get(&module)
            .unwrap_or_else(|| panic!("{relative}: {module} has no layer"));
        for import in imports(&code(&fs::read_to_string(&path).unwrap())) {
            let import = homes
                .get(import.as_str())
                .map_or(import.clone(), |home| home.to_string());
            if import == module || import.is_empty() {
                continue;
            }
            checked += 1;
            match layers.get(&import) {
                // Layer 0 is the vocabulary: types name errors and errors name types.
                Some(&layer) if layer < own || own == 0 => {}
                Some(&layer) => broken.push(format!(
                    "{relative} (layer {own}) imports {import} (layer {layer})"
                )),
                None => broken.push(format!("{relative} imports {import}, which has no layer")),
            }
        }
    }
    assert!(checked > 10, "only {checked} imports were found");
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// Returns the files that are in a circle of imports, or import one that is.
fn in_circles(imports: &HashMap<String, Vec<String>>) -> Vec<&str> {
    let mut left: Vec<&str> = imports.keys().map(String::as_str).collect();
    loop {
        let before = left.clone();
        left.retain(|file| {
            imports[*file]
                .iter()
                .any(|name| before.contains(&name.as_str()))
        });
        if left.len() == before.len() {
            left.sort();
            return left;
        }
    }
}

#[test]
fn files_of_the_drop_in_import_in_no_circle() {
    let mut all = Vec::new();
    files(&root().join("nccl/src"), &mut all);
    let mut graph = HashMap::new();
    for path in all {
        let file = path.file_stem().unwrap().to_string_lossy().into_owned();
        let mut names = imports(&code(&fs::read_to_string(&path).unwrap()));
        names.retain(|name| *name != file);
        graph.insert(file, names);
    }
    graph.remove("lib");
    assert!(graph.len() > 20 && graph["group"].contains(&"connect_job".to_string()));
    let broken = in_circles(&graph);
    assert!(broken.is_empty(), "a circle of imports among {broken:?}");
    graph.get_mut("connect_job").unwrap().push("group".into());
    assert!(in_circles(&graph).contains(&"connect_job"));
}

#[test]
fn unsafe_stays_in_its_places() {
    let source = root().join("src");
    let mut all = Vec::new();
    files(&source, &mut all);
    let mut broken = Vec::new();
    for path in all {
        let relative = path
            .strip_prefix(&source)
            .unwrap()
            .to_string_lossy()
            .replace('\\', "/");
        let simd_of_codec = (relative.starts_with("codec/") || relative.starts_with("reduce/"))
            && relative.contains("simd");
        if simd_of_codec || UNSAFE.iter().any(|place| relative.starts_with(place)) {
            continue;
        }
        let code = code(&fs::read_to_string(&path).unwrap());
        for word in ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern"] {
            if code.contains(word) {
                broken.push(format!("{relative}: {word}"));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn the_test_sees_what_it_looks_for() {
    let found =
        imports("use crate::{error::{Error, Result}, comm::Communicator};\ncrate::capi::x();");
    assert_eq!(found, ["error", "comm", "capi"]);
    assert!(!code("fn a() {} // crate::capi\n#[cfg(test)]\nuse crate::capi;").contains("capi"));
    let text = r##"
        #[cfg(test)]
        #[path = "}"]
        mod tests; use crate::one;
        #[cfg(test)]
        fn under<'a>(_: &'a [u8; 2]) -> char { let _ = ("\"}", r#""}"#); if true { '}' } else { '\'' } }
        fn two() { crate::two(); #[cfg(test)] crate::capi::x(); crate::three() }
        /* crate::capi */ const _: &[u8] = br"\"; const FOUR: &str = "// \\"; use crate::four;
        #[cfg(test)]
        impl Five { fn x() { crate::capi::x() } }
        use crate::five;"##;
    assert_eq!(
        imports(&code(text)),
        ["one", "two", "three", "four", "five"]
    );
}
