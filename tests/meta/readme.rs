//! README and `docs/` agree with the tree: the C example is the file that other tests run, the table of
//! settings is the library's, links lead somewhere, the picture is drawn from committed rows.

use cinch::Config;
use cinch::config::KNOBS;
use std::path::Path;
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The first ```c block.
fn c_block(readme: &str) -> &str {
    let start = readme.find("```c\n").expect("a C block") + "```c\n".len();
    let end = readme[start..].find("```").expect("the end of the C block");
    &readme[start..start + end]
}

#[test]
fn the_c_example_is_the_file() {
    let (readme, file) = (read("README.md"), read("examples/allreduce.c"));
    assert!(
        c_block(&readme) == file,
        "the C block of README.md differs from examples/allreduce.c; copy the file there:\n{file}"
    );
}

#[test]
fn the_c_example_compiles_as_printed() {
    let source = Path::new(env!("CARGO_TARGET_TMPDIR")).join("readme.c");
    std::fs::write(&source, c_block(&read("README.md"))).unwrap();
    let strict = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic"];
    let done = Command::new("cc")
        .args(strict)
        .args(["-fsyntax-only", "-I"])
        .arg(root().join("include"))
        .arg(&source)
        .output()
        .expect("a C compiler");
    assert!(
        done.status.success(),
        "{}",
        String::from_utf8_lossy(&done.stderr)
    );
}

#[test]
fn the_table_of_settings_is_the_librarys() {
    let default = Config::default();
    let table: String = KNOBS
        .iter()
        .map(|knob| {
            let shown = match (knob.show)(&default) {
                value if value.is_empty() => "unset".to_string(),
                value => value,
            };
            format!(
                "| `{}` | {} | {shown} | {} |\n",
                knob.name, knob.range, knob.help
            )
        })
        .collect();
    assert!(
        read("docs/settings.md").contains(&table),
        "the table of settings in docs/settings.md is not the library's, which is:\n{table}"
    );
}

/// Targets of the Markdown links of `text`, without anchors and addresses of the web.
fn links(text: &str) -> Vec<&str> {
    text.split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next())
        .filter(|link| !link.contains("://"))
        .filter_map(|link| link.split('#').next())
        .filter(|link| !link.is_empty())
        .collect()
}

#[test]
fn links_of_the_pages_lead_to_files() {
    let pages = std::fs::read_dir(root().join("docs")).unwrap();
    let pages = pages.map(|entry| entry.unwrap().path());
    let top = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"].map(|name| root().join(name));
    let mut checked = 0;
    for page in pages.chain(top) {
        if page.extension().is_none_or(|extension| extension != "md") {
            continue;
        }
        let text = std::fs::read_to_string(&page).unwrap();
        for link in links(&text) {
            let target = page.parent().unwrap().join(link);
            assert!(target.exists(), "{}: no file {link}", page.display());
            checked += 1;
        }
    }
    assert!(checked > 30, "only {checked} links were found");
}

#[test]
fn every_page_is_in_the_summary() {
    let summary = read("docs/SUMMARY.md");
    let listed = links(&summary);
    for entry in std::fs::read_dir(root().join("docs")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name.ends_with(".md") && name != "SUMMARY.md" {
            assert!(
                listed.contains(&name.as_str()),
                "docs/SUMMARY.md lacks {name}"
            );
        }
    }
}

#[test]
fn readme_and_changelog_stay_short() {
    for (file, limit) in [("README.md", 150), ("CHANGELOG.md", 60)] {
        let lines = read(file).lines().count();
        assert!(
            lines <= limit,
            "{file} has {lines} lines, more than {limit}"
        );
    }
}

#[test]
fn the_picture_is_drawn_from_the_rows() {
    let done = Command::new("python3")
        .arg(root().join("benches/plot.py"))
        .arg("--check")
        .output()
        .expect("python3");
    assert!(
        done.status.success(),
        "{}",
        String::from_utf8_lossy(&done.stderr)
    );
}
