//! Reads the files of the tree for the checks in this folder.

use std::fs;
use std::path::{Path, PathBuf};

/// Returns the root of the checkout.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A file of the tree with its path relative to the root.
pub struct Source {
    pub path: String,
    pub text: String,
}

impl Source {
    /// Returns whether the file contains only tests.
    pub fn is_test(&self) -> bool {
        let path = &self.path;
        path.starts_with("tests/")
            || path.contains("/tests/")
            || path.contains("_tests/")
            || path.contains("/conformance")
            || path.ends_with("_tests.rs")
            || path.ends_with("/tests.rs")
    }
}

/// Returns the files below `folders` whose names end in one of `endings`, sorted by path. Build
/// output is omitted.
pub fn sources(folders: &[&str], endings: &[&str]) -> Vec<Source> {
    let mut paths = Vec::new();
    for folder in folders {
        collect(&root().join(folder), &mut paths);
    }
    paths.sort();
    paths
        .into_iter()
        .filter(|path| {
            let name = path.to_string_lossy();
            endings.iter().any(|ending| name.ends_with(ending))
        })
        .map(|path| Source {
            path: path
                .strip_prefix(root())
                .unwrap()
                .to_string_lossy()
                .into_owned(),
            text: fs::read_to_string(&path).unwrap_or_default(),
        })
        .collect()
}

fn collect(path: &Path, found: &mut Vec<PathBuf>) {
    if path.is_file() {
        return found.push(path.to_path_buf());
    }
    let Ok(entries) = fs::read_dir(path) else {
        return;
    };
    for entry in entries {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if !["target", "node_modules"].contains(&name.as_str()) && !name.starts_with('.') {
            collect(&path, found);
        }
    }
}

/// Returns the source without comments, without the text of literals, and without the item behind
/// each `#[cfg(test)]`. Tests may import higher layers.
pub fn code(text: &str) -> String {
    const TEST: &str = "#[cfg(test)]";
    let bare = bare(text);
    let (mut kept, mut rest) = (String::new(), bare.as_str());
    while let Some(at) = rest.find(TEST) {
        kept.push_str(&rest[..at]);
        rest = behind_item(&rest[at + TEST.len()..]);
    }
    kept + rest
}

/// Returns the code after the item at the beginning of `code`. An item ends with the first `;` or
/// `}` outside of all brackets, or before the bracket that closes its parent.
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

/// Returns the source without comments and with empty string and character literals, so that
/// brackets in these are not counted. Line breaks remain.
pub fn bare(text: &str) -> String {
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
            rest = &rest[c.len_utf8()..];
            continue;
        };
        kept.extend(rest[..skipped].matches('\n'));
        rest = &rest[skipped..];
    }
    kept
}

/// Returns the length of the string or character literal at the beginning of `text`.
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
