//! Tests the C header and the C exports. `include/cinch.h` must equal the output of cbindgen for `src/capi`
//! and the tables of algorithms and transports. Every export must be guarded against panics, documented, and
//! present in the header and the shared library.
//!
//! `CINCH_UPDATE_HEADER=1 cargo test --test meta header` rewrites the header.

use crate::c_library;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// Files of `src/capi` with exports, in the order of the header.
const FILES: &[&str] = &[
    "error",
    "types",
    "id",
    "config",
    "handle",
    "comm",
    "collectives",
    "group",
    "op",
    "report",
    "statistics",
    "stats",
    "call",
    "describe",
    "request",
    "codec",
    "feedback",
    "adapt",
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn sources() -> Vec<(PathBuf, String)> {
    let directory = root().join("src/capi");
    let mut sources: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_file())
        .map(|path| (path.clone(), fs::read_to_string(path).unwrap()))
        .collect();
    sources.sort();
    sources
}

/// An `extern "C"` function in the source.
#[derive(Debug)]
struct Export {
    name: String,
    /// Documentation and attributes above the function.
    above: String,
    /// Signature and body, up to the next item.
    body: String,
}

/// Returns the exports in the text of a file: a function for each line with `extern "C" fn`.
fn exports(text: &str) -> Vec<Export> {
    let text = text.split("#[cfg(test)]").next().unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let Some((_, rest)) = line.split_once("extern \"C\" fn ") else {
            continue;
        };
        let name = rest.split('(').next().unwrap().to_string();
        let first = lines[..at]
            .iter()
            .rposition(|line| line.is_empty() || *line == "}")
            .map_or(0, |before| before + 1);
        let end = lines[at..]
            .iter()
            .position(|line| *line == "}")
            .map_or(lines.len(), |length| at + length);
        found.push(Export {
            name,
            above: lines[first..at].join("\n"),
            body: lines[at..end].join("\n"),
        });
    }
    found
}

/// Returns a message about the first rule that an export breaks, or `None`.
fn fault(export: &Export) -> Option<String> {
    let Export { name, above, body } = export;
    let guards = [
        format!("{{\n    guard!(\"{name}\", {{\n"),
        format!("{{\n    guard!(\"{name}\", text {{\n"),
    ];
    let guarded = guards
        .iter()
        .filter_map(|guard| body.split_once(guard.as_str()))
        // The panic guard must enclose the whole body, so its closing line must be the function's
        // last line.
        .any(|(_, rest)| rest.ends_with("\n    })") && rest.matches("\n    }").count() == 1);
    if !guarded {
        Some(format!(
            "{name} is not wrapped whole by guard!(\"{name}\", ..)"
        ))
    } else if !above.contains("#[unsafe(no_mangle)]") {
        Some(format!("{name} is not exported"))
    } else if !above.starts_with("///") {
        Some(format!("{name} has no documentation"))
    } else if !name.starts_with("cinch_") {
        Some(format!("{name} lacks the prefix"))
    } else {
        None
    }
}

/// Enums of the header whose constants come from a table in `src/types/algorithm.rs`: name of the
/// enum, prefix of its constants, and name of the table.
const TABLES: &[(&str, &str, &str)] = &[
    ("cinch_algorithm_t", "CINCH_ALGORITHM_", "Algorithm"),
    ("cinch_transport_t", "CINCH_TRANSPORT_", "TransportKind"),
];

/// Returns `src/capi/types.rs` with the constants of [`TABLES`]. Each constant is the table's number plus 2.
fn types_with_constants() -> String {
    let read = |path: &str| fs::read_to_string(root().join(path)).unwrap();
    let (mut types, tables) = (read("src/capi/types.rs"), read("src/types/algorithm.rs"));
    for (name, prefix, table) in TABLES {
        let (_, rest) = tables
            .split_once(&format!("    {table} {{\n"))
            .expect(table);
        let (lines, _) = rest.split_once("\n    }\n").expect(table);
        let constants: Vec<String> = lines.lines().map(|line| constant(prefix, line)).collect();
        let head = types.find(&format!("pub enum {name} {{")).expect(name);
        let end = head + types[head..].find("\n}\n").expect(name);
        types.insert_str(end, &format!("\n{}", constants.join("\n")));
    }
    types
}

/// Translates a line of a table, `Ring = 0, "ring";` or a doc comment, into a line of the enum.
fn constant(prefix: &str, line: &str) -> String {
    let Some((number, name)) = line
        .split_once(" = ")
        .and_then(|(_, rest)| rest.split_once(", "))
        .filter(|_| !line.trim_start().starts_with("///"))
    else {
        return line.into();
    };
    let number: u32 = number.parse().unwrap();
    let name = name.trim_matches(['"', ';']).to_uppercase();
    format!("{prefix}{name} = {},", number + 2)
}

fn header() -> String {
    // Tests run in parallel in this process, so each call writes a file with a unique name.
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    let name = format!("cinch-types-{}-{call}.rs", std::process::id());
    let types = std::env::temp_dir().join(name);
    fs::write(&types, types_with_constants()).unwrap();
    let mut builder = cbindgen::Builder::new()
        .with_config(cbindgen::Config::from_file(root().join("cbindgen.toml")).unwrap());
    for file in FILES {
        builder = builder.with_src(match *file {
            "types" => types.clone(),
            _ => root().join("src/capi").join(format!("{file}.rs")),
        });
    }
    let mut bytes = Vec::new();
    builder.generate().unwrap().write(&mut bytes);
    fs::remove_file(types).unwrap();
    String::from_utf8(bytes).unwrap()
}

#[test]
fn the_committed_header_is_up_to_date() {
    let path = root().join("include/cinch.h");
    let made = header();
    if std::env::var_os("CINCH_UPDATE_HEADER").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, &made).unwrap();
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    for (number, (made, committed)) in made.lines().zip(committed.lines()).enumerate() {
        assert_eq!(
            made,
            committed,
            "include/cinch.h differs from src/capi at line {}; run \
             CINCH_UPDATE_HEADER=1 cargo test --test meta header",
            number + 1
        );
    }
    assert_eq!(
        made.len(),
        committed.len(),
        "include/cinch.h has another end"
    );
}

#[test]
fn every_export_is_guarded_documented_and_in_the_header() {
    let header = header();
    let mut faults = Vec::new();
    let mut seen = 0;
    for (path, text) in sources() {
        for export in exports(&text) {
            seen += 1;
            faults.extend(fault(&export));
            if !header.contains(&format!(" {}(", export.name))
                && !header.contains(&format!("*{}(", export.name))
            {
                let path = path.display();
                faults.push(format!("{} of {path} is not in the header", export.name));
            }
        }
    }
    assert!(seen >= 30, "only {seen} exports were found");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn shared_library_exports_exactly_the_functions_of_capi() {
    let library = c_library::build().join("libcinch.so");
    let listing = match Command::new("nm")
        .arg("-D")
        .arg("--defined-only")
        .arg(&library)
        .output()
    {
        Ok(output) => output,
        Err(error) => return println!("SKIPPED: nm does not start: {error}"),
    };
    assert!(listing.status.success(), "{listing:?}");
    let mut symbols: Vec<String> = String::from_utf8(listing.stdout)
        .unwrap()
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .map(str::to_string)
        .collect();
    let mut wanted: Vec<String> = sources()
        .iter()
        .flat_map(|(_, text)| exports(text))
        .map(|export| export.name)
        .collect();
    symbols.sort();
    wanted.sort();
    assert_eq!(symbols, wanted);
    let dynamic = Command::new("readelf").arg("-d").arg(&library).output();
    let dynamic = String::from_utf8(dynamic.expect("readelf").stdout).unwrap();
    assert!(dynamic.contains("soname: [libcinch.so.0]"), "{dynamic}");
}

#[test]
fn faults_of_a_sample_export_are_found() {
    let good = "/// Does.\n#[unsafe(no_mangle)]\npub extern \"C\" fn cinch_f() -> u32 {\n    \
                guard!(\"cinch_f\", {\n        Ok(())\n    })\n}\n";
    let judge = |text: &str| exports(text).iter().find_map(fault);
    assert_eq!(exports(good).len(), 1);
    assert_eq!(judge(good), None);
    for (from, to, said) in [
        ("guard!(\"cinch_f\"", "guard!(\"cinch_g\"", "guard"),
        ("    guard!", "    let x = 1;\n    guard!", "guard"),
        ("    })\n}", "    });\n    7\n}", "guard"),
        (
            "    guard!(\"cinch_f\", {\n        Ok(())\n    })",
            "    0",
            "guard",
        ),
        ("#[unsafe(no_mangle)]\n", "", "not exported"),
        ("/// Does.\n", "", "documentation"),
    ] {
        let fault = judge(&good.replace(from, to)).unwrap_or_default();
        assert!(fault.contains(said), "{from:?} -> {to:?}: {fault:?}");
    }
}
