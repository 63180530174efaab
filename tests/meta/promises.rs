//! Tests that the tests that docs/promises.md names exist.

use crate::source::root;
use std::fs;

/// Returns whether `source` has a test of this name that runs by default.
fn is_test(source: &str, name: &str) -> bool {
    let Some(at) = source.find(&format!("fn {name}()")) else {
        return false;
    };
    let before = source[..at].trim_end().lines().rev();
    let attributes: Vec<&str> = before
        .take_while(|line| line.trim_start().starts_with("#["))
        .collect();
    attributes.iter().any(|line| line.contains("#[test]"))
        && !attributes.iter().any(|line| line.contains("ignore"))
}

#[test]
fn every_promise_names_tests_that_exist() {
    let text = fs::read_to_string(root().join("docs/promises.md")).unwrap();
    let mut missing = Vec::new();
    let mut rows = 0;
    for line in text.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, promise, _, tests, _] = cells[..] else {
            if line.starts_with('|') {
                missing.push(format!("a row has other cells: {line}"));
            }
            continue;
        };
        if promise == "promise" || promise.starts_with("---") {
            continue;
        }
        rows += 1;
        let named: Vec<(&str, &str)> = tests
            .split('`')
            .filter_map(|part| part.split_once(": "))
            .collect();
        if named.is_empty() {
            missing.push(format!("{promise}: no test is named"));
        }
        for (path, name) in named {
            let source = fs::read_to_string(root().join(path)).unwrap_or_default();
            let is_there = match path.ends_with(".rs") {
                true => is_test(&source, name),
                false => source.contains(name),
            };
            if !is_there {
                missing.push(format!("{promise}: {path} has no {name}"));
            }
        }
    }
    assert!(rows >= 15, "only {rows} promises were found");
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}
