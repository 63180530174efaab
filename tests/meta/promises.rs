//! Tests that the tests that docs/promises.md names exist.

use crate::source::root;
use std::fs;

#[test]
fn every_promise_names_tests_that_exist() {
    let text = fs::read_to_string(root().join("docs/promises.md")).unwrap();
    let mut missing = Vec::new();
    let mut rows = 0;
    for line in text.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, promise, _, tests, _] = cells[..] else {
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
                true => source.contains(&format!("fn {name}(")),
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
