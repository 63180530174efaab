//! `docs/adding.md` lists the files to change for a new codec, data type and so on. The test checks
//! that the files exist, and that they are few.

use crate::source::root;

/// Largest number of existing files that an addition may change, apart from its own files and the
/// docs.
const MOST: usize = 6;
const NUMBERS: [&str; MOST + 1] = ["no", "one", "two", "three", "four", "five", "six"];

/// Returns the title and text of each section.
fn sections(page: &str) -> Vec<(&str, &str)> {
    let parts = page.split("\n## ").skip(1);
    parts.filter_map(|part| part.split_once('\n')).collect()
}

/// Returns the number, written as a word, in a sentence such as "changes two files outside".
fn stated(text: &str) -> Option<&str> {
    let (before, _) = text.split_once(" files outside")?;
    before.split_whitespace().last()
}

/// Returns the path at the beginning of each numbered step of a section.
fn files(text: &str) -> Vec<&str> {
    let steps = text.lines().filter_map(|line| {
        let (number, step) = line.split_once(". `")?;
        number.parse::<u32>().ok()?;
        step.split('`').next()
    });
    steps.collect()
}

#[test]
fn stated_numbers_of_files_are_within_the_limit() {
    let page = std::fs::read_to_string(root().join("docs/adding.md")).unwrap();
    let mut axes = Vec::new();
    for (axis, text) in sections(&page) {
        if let Some(number) = stated(text) {
            assert!(
                NUMBERS.contains(&number),
                "{axis}: {number} files; at most {MOST}"
            );
            axes.push(axis);
        }
    }
    assert!(axes.len() >= 3, "only {axes:?} state their files");
}

#[test]
fn files_of_a_data_type_exist_and_are_counted() {
    let page = std::fs::read_to_string(root().join("docs/adding.md")).unwrap();
    let sections = sections(&page);
    let section = sections.iter().find(|(axis, _)| *axis == "A data type");
    let (_, text) = section.expect("a section about data types");
    let files = files(text);
    for file in &files {
        assert!(root().join(file).is_file(), "{file} does not exist");
    }
    assert_eq!(stated(text), NUMBERS.get(files.len()).copied(), "{files:?}");
}
