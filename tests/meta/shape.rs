//! Tests the shape of the code: a type name has one meaning, functions are short, and files do not
//! import each other in circles.

use crate::source::{Source, code, sources};
use std::collections::{BTreeMap, BTreeSet};

/// Largest number of type names that may be defined in several places.
const MOST_SHARED_NAMES: usize = 17;
/// Largest number of lines in the body of a function.
const LONGEST_FUNCTION: usize = 80;
/// Deepest allowed nesting of control flow in a function.
const DEEPEST_NESTING: usize = 4;

/// Folders whose subfolders implement one trait. Each subfolder may define a type of an equal name.
const SIBLINGS: &[&str] = &["src/codec", "src/transport", "src/schedule"];

fn library() -> Vec<Source> {
    let mut files = sources(&["src", "cli/src", "nccl/src", "capi/src"], &[".rs"]);
    files.retain(|file| !file.is_test());
    files
}

/// Returns the names of types that a file defines outside of tests.
fn types(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    for line in code(text).lines() {
        let indented = line.starts_with(' ');
        if line.trim_start().starts_with('$') {
            continue; // a macro's `$enum` names no type
        }
        let mut words = line
            .split(|c: char| !c.is_alphanumeric() && c != '_')
            .filter(|word| {
                !word.is_empty() && !["pub", "crate", "super", "in", "unsafe"].contains(word)
            });
        let (Some(kind), Some(name)) = (words.next(), words.next()) else {
            continue;
        };
        // An indented `type` is an associated type, which defines no new name.
        let defines =
            ["struct", "enum", "trait", "union"].contains(&kind) || kind == "type" && !indented;
        if defines && name.starts_with(char::is_uppercase) {
            names.push(name.to_string());
        }
    }
    names
}

/// Returns the entry of [`SIBLINGS`] that contains `path` and the subfolder of `path` in it, or
/// `None`.
fn sibling(path: &str) -> Option<(&'static str, &str)> {
    let parent = SIBLINGS
        .iter()
        .find(|parent| path.starts_with(&format!("{parent}/")))?;
    let rest = &path[parent.len() + 1..];
    Some((parent, rest.split('/').next().unwrap()))
}

#[test]
fn type_names_have_one_meaning() {
    let mut homes: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for file in library() {
        for name in types(&file.text) {
            homes.entry(name).or_default().push(file.path.clone());
        }
    }
    let total = homes.len();
    let shared: Vec<String> = homes
        .into_iter()
        .filter(|(_, paths)| {
            let siblings: BTreeSet<_> = paths.iter().map(|path| sibling(path)).collect();
            let one_trait = siblings.len() == paths.len()
                && siblings.iter().all(|place| {
                    place.is_some_and(|(parent, _)| {
                        sibling(&paths[0]).is_some_and(|(first, _)| first == parent)
                    })
                });
            paths.len() > 1 && !one_trait
        })
        .map(|(name, paths)| format!("{name}: {}", paths.join(" ")))
        .collect();
    println!(
        "{} of {total} type names exist more than once",
        shared.len()
    );
    assert!(total > 300, "only {total} types were found");
    assert!(
        shared.len() <= MOST_SHARED_NAMES,
        "{} of {total} type names exist more than once, at most {MOST_SHARED_NAMES} may:\n{}",
        shared.len(),
        shared.join("\n")
    );
}

/// A function: its file and name, the number of lines of its body, and its deepest nesting of
/// control flow.
struct Function {
    place: String,
    lines: usize,
    nesting: usize,
}

/// Returns the functions of a file outside of tests.
fn functions(path: &str, text: &str) -> Vec<Function> {
    let code = code(text);
    let mut found = Vec::new();
    // Stack of open braces. Each entry holds the function that begins there, if any, and whether
    // the brace opens control flow.
    let mut open: Vec<(Option<(String, usize)>, bool)> = Vec::new();
    let mut deepest: Vec<usize> = Vec::new();
    let (mut head, mut line) = (String::new(), 1);
    for c in code.chars() {
        match c {
            '{' => {
                let name = function_name(&head);
                let control = name.is_none() && is_control(&head);
                if let Some(name) = name {
                    deepest.push(0);
                    open.push((Some((name, line)), false));
                } else {
                    open.push((None, control));
                    let begin = open.iter().rposition(|(name, _)| name.is_some());
                    if let (Some(begin), Some(most)) = (begin, deepest.last_mut()) {
                        let depth = open[begin..].iter().filter(|(_, control)| *control).count();
                        *most = depth.max(*most);
                    }
                }
                head.clear();
            }
            '}' => {
                if let Some((Some((name, begin)), _)) = open.pop() {
                    found.push(Function {
                        place: format!("{path}: {name}"),
                        lines: (line - begin).saturating_sub(1),
                        nesting: deepest.pop().unwrap_or(0),
                    });
                }
                head.clear();
            }
            ';' => head.clear(),
            _ => head.push(c),
        }
        line += usize::from(c == '\n');
    }
    found
}

/// Returns the name of the function if the text `head` before a brace ends with a function
/// signature.
fn function_name(head: &str) -> Option<String> {
    let at = head
        .match_indices("fn ")
        .filter(|(at, _)| !head[..*at].ends_with(|c: char| c.is_alphanumeric() || c == '_'))
        .map(|(at, _)| at)
        .last()?;
    let name: String = head[at + 3..]
        .chars()
        .take_while(|c| c.is_alphanumeric() || *c == '_')
        .collect();
    (!name.is_empty()).then_some(name)
}

/// Returns whether the brace after the text `head` opens a block of control flow.
fn is_control(head: &str) -> bool {
    let words: Vec<&str> = head
        .split(|c: char| !c.is_alphanumeric() && c != '_')
        .filter(|word| !word.is_empty())
        .collect();
    ["if", "match", "for", "while", "loop", "else"]
        .iter()
        .any(|keyword| words.contains(keyword))
        && !words.contains(&"impl")
}

#[test]
fn functions_are_short_and_flat() {
    let mut all = Vec::new();
    for file in library() {
        all.extend(functions(&file.path, &file.text));
    }
    assert!(all.len() > 2000, "only {} functions were found", all.len());
    let longest = all.iter().max_by_key(|function| function.lines).unwrap();
    let deepest = all.iter().max_by_key(|function| function.nesting).unwrap();
    println!("longest: {} lines, {}", longest.lines, longest.place);
    println!("deepest: nesting {}, {}", deepest.nesting, deepest.place);
    let beyond: Vec<String> = all
        .iter()
        .filter(|function| function.lines > LONGEST_FUNCTION || function.nesting > DEEPEST_NESTING)
        .map(|function| {
            let Function {
                place,
                lines,
                nesting,
            } = function;
            format!("{place}: {lines} lines, nesting {nesting}")
        })
        .collect();
    assert!(
        beyond.is_empty(),
        "{} functions:\n{}",
        beyond.len(),
        beyond.join("\n")
    );
}

/// Returns the file that the path `import` leads to from the module of file `from`.
fn target(files: &BTreeSet<String>, from: &str, import: &str) -> Option<String> {
    let base = from.split("src/").next().unwrap().to_string() + "src/";
    let module = from
        .strip_prefix(&base)?
        .trim_end_matches(".rs")
        .trim_end_matches("/mod");
    let mut place: Vec<&str> = if module == "lib" || module == "main" {
        Vec::new()
    } else {
        module.split('/').collect()
    };
    let mut segments = import.split("::").peekable();
    match segments.next()? {
        "crate" => place.clear(),
        "self" => {}
        "super" => {
            place.pop();
            while segments.peek() == Some(&"super") {
                segments.next();
                place.pop();
            }
        }
        _ => return None,
    }
    let mut last = None;
    for segment in segments {
        place.push(segment);
        let joined = place.join("/");
        let file = [
            format!("{base}{joined}.rs"),
            format!("{base}{joined}/mod.rs"),
        ]
        .into_iter()
        .find(|file| files.contains(file));
        match file {
            Some(file) => last = Some(file),
            None => break,
        }
    }
    last
}

/// Returns the paths of all `use` items, with braces expanded: `use a::{b, c::d}` gives `a::b` and
/// `a::c::d`.
fn uses(code: &str) -> Vec<String> {
    let mut found = Vec::new();
    for item in code.split(';') {
        let Some(at) = item.rfind("use ") else {
            continue;
        };
        if item[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_') {
            continue;
        }
        expand("", item[at + 4..].trim(), &mut found);
    }
    found
}

fn expand(prefix: &str, text: &str, found: &mut Vec<String>) {
    let text = text.trim();
    match text.split_once('{') {
        None => found.push(format!("{prefix}{}", text.split(" as ").next().unwrap())),
        Some((head, rest)) => {
            let inner = rest.strip_suffix('}').unwrap_or(rest);
            let (mut depth, mut begin) = (0, 0);
            for (at, c) in inner.char_indices() {
                depth += i32::from(c == '{') - i32::from(c == '}');
                if c == ',' && depth == 0 {
                    expand(&format!("{prefix}{head}"), &inner[begin..at], found);
                    begin = at + 1;
                }
            }
            if !inner[begin..].trim().is_empty() {
                expand(&format!("{prefix}{head}"), &inner[begin..], found);
            }
        }
    }
}

/// Returns the circles: sets of files that import each other, directly or through others. A
/// folder's own file (`mod.rs`, `lib.rs`, `main.rs`) declares its children, so imports from and of
/// it do not count.
fn circles(files: &[Source]) -> Vec<Vec<String>> {
    let names: BTreeSet<String> = files.iter().map(|file| file.path.clone()).collect();
    let parent = |path: &str| {
        ["/mod.rs", "/lib.rs", "/main.rs"]
            .iter()
            .any(|name| path.ends_with(name))
    };
    let mut arrows: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for file in files.iter().filter(|file| !parent(&file.path)) {
        let to = uses(&code(&file.text))
            .iter()
            .filter_map(|import| target(&names, &file.path, import))
            .filter(|to| *to != file.path && !parent(to))
            .collect();
        arrows.insert(&file.path, to);
    }
    let reachable = |from: &str| {
        let mut seen = BTreeSet::new();
        let mut left = vec![from.to_string()];
        while let Some(at) = left.pop() {
            for to in arrows.get(at.as_str()).into_iter().flatten() {
                if seen.insert(to.clone()) {
                    left.push(to.clone());
                }
            }
        }
        seen
    };
    let reach: BTreeMap<&str, BTreeSet<String>> =
        arrows.keys().map(|&path| (path, reachable(path))).collect();
    let mut found = BTreeSet::new();
    for (&path, seen) in &reach {
        if seen.contains(path) {
            let circle: Vec<String> = seen
                .iter()
                .filter(|other| {
                    reach
                        .get(other.as_str())
                        .is_some_and(|back| back.contains(path))
                })
                .cloned()
                .collect();
            found.insert(circle);
        }
    }
    found.into_iter().collect()
}

#[test]
fn files_form_no_circles() {
    let circles = circles(&library());
    println!("{} circles between files", circles.len());
    assert!(
        circles.is_empty(),
        "{} circles between files:\n{}",
        circles.len(),
        circles
            .iter()
            .map(|circle| circle.join(" "))
            .collect::<Vec<_>>()
            .join("\n")
    );
}

#[test]
fn violations_of_shape_in_samples_are_found() {
    let text =
        "struct A;\nimpl X { type B = u8; }\n#[cfg(test)]\nmod t { struct C; }\ntype D = u8;";
    assert_eq!(types(text), ["A", "D"]);
    let text = "fn f() {\n  if a {\n    for b in c {\n      x(|| { y });\n    }\n  }\n}\n";
    let found = functions("x.rs", text);
    assert_eq!((found.len(), found[0].lines, found[0].nesting), (1, 5, 2));
    let file = |path: &str, text: &str| Source {
        path: path.into(),
        text: text.into(),
    };
    let files = [
        file("src/m/mod.rs", "mod a; mod b; pub use a::A;"),
        file("src/m/a.rs", "use super::{b::B, c::C};"),
        file("src/m/b.rs", "use crate::m::a::A;"),
        file("src/m/c.rs", "use super::D;"),
    ];
    assert_eq!(circles(&files), [["src/m/a.rs", "src/m/b.rs"]]);
}
