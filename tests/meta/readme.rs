//! The README says what is so: its C example is the file that is compiled and run elsewhere, it
//! compiles as printed, and its table of settings is the library's.

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
        read("README.md").contains(&table),
        "the table of settings in README.md is not the library's, which is:\n{table}"
    );
}
