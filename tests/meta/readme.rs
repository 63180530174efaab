//! Tests that the README and `docs/` agree with the source tree. The C example must equal the file that other
//! tests run, and the table of settings must equal the generated one. Links must lead to files, and the plot
//! must show the committed measurements.

use cinch::Config;
use cinch::config::{KNOBS, Sharing};
use std::path::Path;
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Returns the first block of C code in a Markdown text.
fn c_block(readme: &str) -> &str {
    let start = readme.find("```c\n").expect("a C block") + "```c\n".len();
    let end = readme[start..].find("```").expect("the end of the C block");
    &readme[start..start + end]
}

#[test]
fn c_example_of_readme_is_the_file() {
    let (readme, file) = (read("README.md"), read("examples/c/host_all_reduce.c"));
    assert!(
        c_block(&readme) == file,
        "the C block of README.md differs from examples/c/host_all_reduce.c; copy the file there:\n{file}"
    );
}

#[test]
fn c_example_of_readme_compiles() {
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

/// Lines directly before and after the generated table of settings.
const TABLE: [&str; 2] = [
    "<!-- The test `meta` writes this table; CINCH_UPDATE_SETTINGS=1 updates it. -->\n",
    "<!-- End of the table. -->\n",
];

/// Returns the table of all settings as Markdown.
fn table_of_settings() -> String {
    let default = Config::default();
    let mut table = String::from(
        "\n| variable | takes | default | all ranks alike | what it does |\n\
         | --- | --- | --- | --- | --- |\n",
    );
    for knob in KNOBS {
        let shown = match (knob.show)(&default) {
            value if value.is_empty() => "unset".to_string(),
            value => value,
        };
        let alike = match knob.shared {
            Sharing::No => "",
            Sharing::Always => "yes",
            Sharing::HostMemory => "on host memory",
            Sharing::HostLinks => "on host memory or several hosts",
            Sharing::Gpus => "on GPUs",
            Sharing::Effect => "in effect",
        };
        let (name, range, help) = (knob.name, knob.range(), knob.help);
        table += &format!("| `{name}` | {range} | {shown} | {alike} | {help} |\n");
    }
    table + "\n"
}

#[test]
fn table_of_settings_is_generated() {
    const PAGE: &str = "docs/settings.md";
    let page = read(PAGE);
    let [before, after] = TABLE;
    let (head, rest) = page.split_once(before).expect("the line before the table");
    let (_, tail) = rest.split_once(after).expect("the line behind the table");
    let generated = [head, before, &table_of_settings(), after, tail].concat();
    if std::env::var_os("CINCH_UPDATE_SETTINGS").is_some() {
        std::fs::write(root().join(PAGE), &generated).unwrap();
        return;
    }
    assert!(
        page == generated,
        "the table of {PAGE} is out of date; update it with \
         CINCH_UPDATE_SETTINGS=1 cargo test --test meta settings"
    );
}

/// Returns the targets of Markdown links to files, without anchors; links to web addresses are left
/// out.
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
fn link_of_a_page_leads_to_a_file() {
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
fn page_is_in_the_summary() {
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
fn pictures_are_drawn_from_the_rows() {
    for script in ["benches/plot.py", "scripts/trace-rdma"] {
        let done = Command::new("python3")
            .arg(root().join(script))
            .arg("--check")
            .output()
            .expect("python3");
        let errors = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{script}: {errors}");
    }
}
