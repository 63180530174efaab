//! Tests that includes of `kernels/` follow the second table of `docs/layers.md`. No file may include a file
//! of a higher layer, and files of a layer may not include each other in a circle.

use crate::source::{root, sources};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;

/// Returns the layer of each folder or file, from the table whose header has the column `folder`.
fn layers() -> HashMap<String, usize> {
    let text = fs::read_to_string(root().join("docs/layers.md")).unwrap();
    let rows = text.lines().skip_while(|line| !line.contains("| folder |"));
    let rows = rows.skip(2).take_while(|line| line.starts_with('|'));
    let names = rows.filter_map(|row| row.split('|').nth(1));
    let mut names: Vec<String> = names
        .map(|name| name.trim().trim_matches('`').trim_end_matches('/').into())
        .collect();
    names.reverse();
    names
        .into_iter()
        .enumerate()
        .map(|(layer, name)| (name, layer))
        .collect()
}

/// Returns the table entry of a path below `kernels/`: its folder, or the file itself.
fn table_entry(path: &str) -> &str {
    path.split('/').next().unwrap_or(path)
}

/// Returns the quoted includes of a source. Their paths are relative to `kernels/`.
fn includes(source: &str) -> Vec<String> {
    let lines = source.lines().filter_map(|line| {
        let rest = line.trim_start().strip_prefix("#include")?;
        rest.trim_start().strip_prefix('"')?.split('"').next()
    });
    lines.map(str::to_string).collect()
}

/// Returns the includes of each file below `kernels/`.
fn tree() -> BTreeMap<String, Vec<String>> {
    let files = sources(&["kernels"], &[".cu", ".cuh", ".h"]).into_iter();
    files
        .map(|file| {
            let path = file.path.strip_prefix("kernels/").unwrap().to_string();
            (path, includes(&file.text))
        })
        .collect()
}

/// Returns a message for each include that violates the order of `layers`.
fn violations(
    layers: &HashMap<String, usize>,
    tree: &BTreeMap<String, Vec<String>>,
) -> Vec<String> {
    let layer = |path: &str| layers.get(table_entry(path)).copied();
    let mut broken = Vec::new();
    for (file, includes) in tree {
        let Some(own) = layer(file) else {
            broken.push(format!("{file}: {} has no layer", table_entry(file)));
            continue;
        };
        for include in includes {
            match layer(include) {
                Some(other) if other <= own && tree.contains_key(include) => {}
                Some(_) if tree.contains_key(include) => {
                    broken.push(format!("{file} includes {include}, which is above it"));
                }
                _ => broken.push(format!("{file} includes {include}, which is not there")),
            }
        }
    }
    // Repeatedly removes files whose includes have all been removed. Files that remain include each
    // other in a circle.
    let mut left: BTreeSet<&String> = tree.keys().collect();
    loop {
        let free = |file: &&String| !tree[*file].iter().any(|include| left.contains(include));
        let taken: Vec<&String> = left.iter().copied().filter(free).collect();
        if taken.is_empty() {
            break;
        }
        left.retain(|file| !taken.contains(file));
    }
    if !left.is_empty() {
        broken.push(format!("these files include each other: {left:?}"));
    }
    broken
}

#[test]
fn kernel_includes_go_down() {
    let (layers, tree) = (layers(), tree());
    assert!(layers.len() >= 10, "docs/layers.md has no table of folders");
    let checked: usize = tree.values().map(Vec::len).sum();
    assert!(checked > 100, "only {checked} includes were found");
    let broken = violations(&layers, &tree);
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn kernel_include_upward_or_in_a_circle_is_found() {
    let layers: HashMap<String, usize> = [("low".into(), 0), ("high".into(), 1)].into();
    let check = |files: &[(&str, &str)]| {
        let files = files.iter().map(|(name, source)| {
            let name = name.to_string();
            (name, includes(source))
        });
        violations(&layers, &files.collect())
    };
    let down = "#include <stdint.h>\n  #include \"low/a.cuh\"\n// #include \"high/c.cuh\"";
    assert!(check(&[("low/a.cuh", ""), ("high/b.cuh", down)]).is_empty());
    let up = "#include \"high/b.cuh\"";
    assert_eq!(check(&[("low/a.cuh", up), ("high/b.cuh", "")]).len(), 1);
    assert_eq!(
        check(&[("low/a.cuh", "#include \"low/gone.cuh\"")]).len(),
        1
    );
    assert_eq!(check(&[("other/a.cuh", "")]).len(), 1);
    let (a, b) = ("#include \"low/b.cuh\"", "#include \"low/a.cuh\"");
    assert_eq!(check(&[("low/a.cuh", a), ("low/b.cuh", b)]).len(), 1);
}
