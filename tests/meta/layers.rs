//! Tests that imports of `src/` follow the layer table of `docs/layers.md`: a module may import
//! lower layers only. `unsafe` may appear only in the modules listed here.

use crate::source::{code, root, sources};
use std::collections::HashMap;
use std::fs;

/// Path prefixes of the files that may use `unsafe`.
const UNSAFE: &[&str] = &[
    "src/sys/",
    "src/sync/",
    "src/cpu/",
    "src/gpu/",
    "src/mem/",
    "src/transport/",
    "src/gpu_links/",
    "src/arrays/",
    "src/engine/gpu",
    "src/capi/",
    // The tool calls the library on device memory and calls NCCL for comparison.
    "cli/src/arrays.rs",
    "cli/src/bench/gpu/queue.rs",
    "cli/src/bench/gpu/nccl.rs",
    "cli/src/bench/gpu/peer.rs",
];

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

/// Returns the first path segment behind every `crate::`, also within braces.
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
    // Names that the crate root re-exports, each with the module that defines it.
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
    let mut broken = Vec::new();
    let mut checked = 0;
    for file in sources(&["src"], &[".rs"]) {
        let relative = file.path.strip_prefix("src/").unwrap();
        let module = relative.split(['/', '.']).next().unwrap().to_string();
        // Tests may import higher layers.
        if file.is_test() || ["lib", "manual"].contains(&module.as_str()) {
            continue;
        }
        let own = *layers
            .get(&module)
            .unwrap_or_else(|| panic!("{relative}: {module} has no layer"));
        for import in imports(&code(&file.text)) {
            let import = homes
                .get(import.as_str())
                .map_or(import.clone(), |home| home.to_string());
            if import == module || import.is_empty() {
                continue;
            }
            checked += 1;
            match layers.get(&import) {
                // Modules of layer 0 may import each other: types name errors and errors name
                // types.
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

/// Returns the files that are in a circle of imports, or that import a file in a circle.
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
    let mut graph = HashMap::new();
    for source in sources(&["nccl/src"], &[".rs"]) {
        let file = source.path.rsplit('/').next().unwrap();
        let file = file.strip_suffix(".rs").unwrap().to_string();
        let mut names = imports(&code(&source.text));
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
    let mut broken = Vec::new();
    for file in sources(&["src", "cli/src"], &[".rs"]) {
        let relative = &file.path;
        let simd_of_codec = (relative.starts_with("src/codec/")
            || relative.starts_with("src/reduce/"))
            && relative.contains("simd");
        if simd_of_codec || UNSAFE.iter().any(|place| relative.starts_with(place)) {
            continue;
        }
        let code = code(&file.text);
        for word in ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern"] {
            if code.contains(word) {
                broken.push(format!("{relative}: {word}"));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn imports_of_a_sample_source_are_found() {
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

/// Folders whose code must read [`Caps`](cinch::transport::Caps) and `CodecInfo` instead of
/// distinguishing transports and codecs by name.
const WITHOUT_KINDS: &[&str] = &["src/engine", "src/plan", "src/comm"];

/// Returns the variants of the enum `of` that `code` names, also in `use` items. Constants and functions do
/// not count.
fn variants(code: &str, of: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices(&format!("{of}::")) {
        let rest = &code[at + of.len() + 2..];
        let name: String = rest
            .chars()
            .take_while(|c| c.is_alphanumeric() || *c == '_')
            .collect();
        let is_variant = name.starts_with(char::is_uppercase) && name.contains(char::is_lowercase);
        if is_variant || rest.starts_with(['{', '*']) {
            found.push(format!("{of}::{name}"));
        }
    }
    found
}

/// A new transport or codec must not need an edit in these folders.
#[test]
fn engine_plan_and_comm_name_no_transport_and_no_codec() {
    let files = sources(WITHOUT_KINDS, &[".rs"]);
    let files: Vec<_> = files.iter().filter(|file| !file.is_test()).collect();
    assert!(files.len() > 50, "only {} files were found", files.len());
    let mut named = Vec::new();
    for file in files {
        let code = code(&file.text);
        for of in ["TransportKind", "CodecKind"] {
            let found = variants(&code, of).into_iter();
            named.extend(found.map(|name| format!("{}: {name}", file.path)));
        }
    }
    assert!(named.is_empty(), "{}", named.join("\n"));
    assert_eq!(
        variants("a(K::Tcp, K::ALL, K::name) use K::{A}", "K"),
        ["K::Tcp", "K::"]
    );
}
