//! Tests that retired words stay out of names and prose, and that no comment begins with a
//! reference to another comment.
//!
//! Each row of [`RETIRED`] names the standard term that replaces the word.

use crate::source::{Source, sources};

/// Files to which a row applies.
#[derive(Clone, Copy)]
enum Scope {
    /// Every file.
    Everywhere,
    /// Paths that begin with one of these.
    Under(&'static [&'static str]),
    /// Every path but those that begin with one of these.
    Except(&'static [&'static str]),
}

use Scope::{Everywhere, Except, Under};

/// Every path but those with SIMD or warp code, or PCIe links, where "lane" is the standard term.
const LANES: Scope = Except(&[
    "kernels/",
    "src/codec/",
    "src/sys/nvml/",
    "src/sys/pci/",
    "src/topology/",
    "src/reduce/",
    "src/arrays/",
    "src/cpu/",
    "tests/cuda_host/",
    "examples/train/",
    "benches/",
]);

/// Retired words, each with the term to use. A word matches a part of an identifier as well:
/// `seat` matches `seat_of` and `GpuSeat`. A word with a space matches consecutive parts.
const RETIRED: &[(&str, &str, Scope)] = &[
    ("lane", "channel", LANES),
    ("lanes", "channels", LANES),
    ("strand", "ring direction", Everywhere),
    ("strands", "rings per channel", Everywhere),
    ("seat", "GpuInfo, or a rank's place", Everywhere),
    ("seats", "GpuInfo, or ranks", Everywhere),
    ("card", "ConnectInfo", Everywhere),
    ("cards", "ConnectInfo", Everywhere),
    ("parcel", "FusedCall", Everywhere),
    ("parcels", "fused calls", Everywhere),
    ("shelf", "deferred free", Everywhere),
    ("shelve", "enqueue", Everywhere),
    ("farewell", "close", Everywhere),
    ("goodbye", "close", Everywhere),
    (
        "guest",
        "joining rank",
        Except(&["scripts/", "benches/guest.py", "tests/rdma", "docs/"]),
    ),
    (
        "guests",
        "joining ranks",
        Except(&["scripts/", "benches/guest.py", "tests/rdma", "docs/"]),
    ),
    ("meeting", "rendezvous", Everywhere),
    ("meetings", "rendezvous", Everywhere),
    ("stranger", "unauthenticated peer", Everywhere),
    ("strangers", "unauthenticated peers", Everywhere),
    ("house", "the component's name", Everywhere),
    ("says", "sends, reports, states", Everywhere),
    ("tells", "sends, reports", Everywhere),
    ("hears", "receives", Everywhere),
    // The option `--grace` of `cinch run` is an exception.
    (
        "grace",
        "<WHAT>_TIMEOUT",
        Except(&["cli/src/run.rs", "tests/processes/"]),
    ),
    ("glance", "deadline check", Everywhere),
    ("nap", "<WHAT>_INTERVAL", Everywhere),
    ("seldom", "<WHAT>_INTERVAL", Everywhere),
    ("hub", "root", Everywhere),
    ("leaf", "member", Under(&["src/bootstrap/"])),
    ("leaves", "members", Under(&["src/bootstrap/"])),
    ("star", "control plane", Under(&["src/", "docs/"])),
    ("refuge", "reconnect", Everywhere),
    ("outlast", "wait_closed", Everywhere),
    ("departed", "has_left", Everywhere),
    ("ledger", "CallOrderChecker", Everywhere),
    ("greeting", "PeerIdentity", Everywhere),
    ("greetings", "PeerIdentity", Everywhere),
    ("whereabouts", "MemoryHandle", Everywhere),
    ("findings", "PathReport", Everywhere),
    ("obstacle", "PathFailures", Everywhere),
    ("obstacles", "PathFailures", Everywhere),
    (
        "trial",
        "path probe",
        Under(&["src/gpu_links/", "src/mem/"]),
    ),
    ("by reference", "zero_copy", Under(&["src/engine/"])),
    ("passage", "ZeroCopyProgress", Everywhere),
    ("course", "message sizes", Everywhere),
    ("courses", "message sizes", Everywhere),
    (
        "bridge",
        "proxy channel",
        Under(&["src/engine/", "src/gpu_links/"]),
    ),
    ("carrier", "proxy thread", Everywhere),
    ("blob", "work buffer", Everywhere),
    ("blobs", "work buffers", Everywhere),
    ("laden", "has_pending", Everywhere),
    ("go by", "set_costs", Under(&["src/plan/", "src/comm/"])),
    ("imitate", "copy_limits", Everywhere),
    ("box", "peer buffer", Everywhere),
    ("boxes", "peer buffers", Everywhere),
    ("part with", "free_on_destroy", Under(&["nccl/"])),
    ("leave behind", "free_in_background", Under(&["nccl/"])),
];

/// Identifiers of Rust and SVG that contain a retired word.
const ALLOWED: &[&str] = &[
    "Box",
    "Boxed",
    "into_boxed_slice",
    "black_box",
    "boxed",
    "viewBox",
];

/// Words at the beginning of a comment that refer to something outside the comment.
const POINTING: &[&str] = &[
    "The same", "Of ", "Those", "That ", "What ", "Who ", "As above", "One ", "As ours",
];

/// Returns whether the file is checked: it is neither generated nor this file with its list.
fn is_checked(file: &Source) -> bool {
    !["tests/meta/words.rs", "include/"]
        .iter()
        .any(|path| file.path.starts_with(path))
}

fn checked() -> Vec<Source> {
    let mut files = sources(
        &[
            "src",
            "cli",
            "nccl",
            "capi",
            "kernels",
            "tests",
            "ffi-tests",
            "fuzz",
            "examples",
            "benches",
            "build",
            "build.rs",
        ],
        &[".rs", ".cu", ".cuh", ".h", ".c", ".cc", ".cpp", ".py"],
    );
    files.extend(sources(&["scripts", ".ci/run"], &[""]));
    files.extend(sources(&["docs"], &[".md"]));
    files.extend(
        [
            "README.md",
            "ARCHITECTURE.md",
            "CONTRIBUTING.md",
            "CHANGELOG.md",
        ]
        .iter()
        .flat_map(|name| sources(&[name], &[".md"])),
    );
    files.retain(is_checked);
    files
}

fn applies(scope: Scope, path: &str) -> bool {
    let begins = |paths: &[&str]| paths.iter().any(|place| path.starts_with(place));
    match scope {
        Everywhere => true,
        Under(paths) => begins(paths),
        Except(paths) => !begins(paths),
    }
}

/// Splits an identifier at underscores and humps, in lower case: `GpuSeat_of` is gpu, seat, of.
fn parts(token: &str) -> Vec<String> {
    let mut parts: Vec<String> = Vec::new();
    let mut last = '_';
    for c in token.chars() {
        let hump = c.is_uppercase() && !last.is_uppercase();
        if c != '_' {
            if last == '_' || hump || parts.is_empty() {
                parts.push(String::new());
            }
            parts.last_mut().unwrap().extend(c.to_lowercase());
        }
        last = c;
    }
    parts
}

/// Returns the retired words of a line, each with its replacement.
fn retired(path: &str, line: &str) -> Vec<(&'static str, &'static str)> {
    let words: Vec<String> = line
        .split(|c: char| !c.is_alphanumeric() && c != '_')
        .filter(|token| !token.is_empty() && !ALLOWED.contains(token))
        .flat_map(parts)
        .collect();
    RETIRED
        .iter()
        .filter(|(word, _, scope)| {
            let wanted: Vec<&str> = word.split(' ').collect();
            applies(*scope, path)
                && words
                    .windows(wanted.len())
                    .any(|window| window.iter().zip(&wanted).all(|(a, b)| a == b))
        })
        .map(|&(word, term, _)| (word, term))
        .collect()
}

/// Returns the text of a whole-line comment, or `None`.
fn comment<'a>(path: &str, line: &'a str) -> Option<&'a str> {
    let line = line.trim_start();
    let slashes = [".rs", ".cu", ".cuh", ".h", ".c", ".cc", ".cpp"];
    if slashes.iter().any(|ending| path.ends_with(ending)) {
        let text = line.strip_prefix("//")?;
        Some(text.trim_start_matches(['/', '!']).trim())
    } else if path.ends_with(".md") || line.starts_with("#!") {
        None
    } else {
        Some(line.strip_prefix('#')?.trim())
    }
}

/// Returns each comment that begins with a word of [`POINTING`], as (line number, first line).
fn pointing(file: &Source) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let mut inside = false;
    for (number, line) in file.text.lines().enumerate() {
        let text = comment(&file.path, line);
        // A blank comment line begins a paragraph, whose first words count again.
        let begins = !inside && text.is_some_and(|text| !text.is_empty());
        if begins
            && POINTING
                .iter()
                .any(|start| text.unwrap().starts_with(start))
        {
            found.push((number + 1, text.unwrap()));
        }
        inside = text.is_some_and(|text| !text.is_empty());
    }
    found
}

#[test]
fn words_that_are_retired_stay_out() {
    let mut found = Vec::new();
    for file in checked() {
        for (number, line) in file.text.lines().enumerate() {
            for (word, term) in retired(&file.path, line) {
                found.push(format!("{}:{}: {word} -> {term}", file.path, number + 1));
            }
        }
    }
    report(&found, "retired words");
}

#[test]
fn comments_that_point_at_others_stay_out() {
    let mut found = Vec::new();
    for file in checked() {
        for (number, text) in pointing(&file) {
            found.push(format!("{}:{number}: {text}", file.path));
        }
    }
    report(&found, "comments that begin by pointing");
}

/// Fails with the first hundred findings, if there are any.
fn report(found: &[String], what: &str) {
    println!("{} {what}", found.len());
    let shown: Vec<&str> = found.iter().take(100).map(String::as_str).collect();
    assert!(
        found.is_empty(),
        "{} {what}:\n{}",
        found.len(),
        shown.join("\n")
    );
}

#[test]
fn retired_words_in_samples_are_found() {
    assert_eq!(parts("GpuSeat_of2"), ["gpu", "seat", "of2"]);
    assert_eq!(parts("MAX_LANES"), ["max", "lanes"]);
    let words = |path, line| -> Vec<&str> {
        retired(path, line)
            .into_iter()
            .map(|(word, _)| word)
            .collect()
    };
    assert_eq!(
        words("src/mem/x.rs", "let lane = seat_of(x);"),
        ["lane", "seat"]
    );
    assert!(words("kernels/x.cuh", "lane").is_empty());
    assert_eq!(words("nccl/src/x.rs", "fn part_with()"), ["part with"]);
    assert!(words("src/mem/x.rs", "Box<dyn X> discard heartbeat").is_empty());
    let file = Source {
        path: "src/x.rs".into(),
        text: "/// Sends.\n/// The same.\n\n// The same of it.\n///\n/// One more.\n".into(),
    };
    let places: Vec<usize> = pointing(&file).into_iter().map(|(line, _)| line).collect();
    assert_eq!(places, [4, 6]);
}
