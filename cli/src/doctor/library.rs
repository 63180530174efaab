//! Which libnccl.so.2 a program would load: LD_PRELOAD, then LD_LIBRARY_PATH, then the system's folders.

use super::check_result::CheckResult;
use super::{EnvironmentVariables, Scope};
use crate::preload;
use std::fs;
use std::path::{Path, PathBuf};

const AREA: &str = "libnccl";

/// File name by which programs load NCCL.
const NAME: &str = "libnccl.so.2";

/// Folders that the dynamic linker searches after those of /etc/ld.so.conf.
const SYSTEM: [&str; 6] = [
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
];

/// Origin of a libnccl.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NcclOrigin {
    Cinch,
    Other,
}

/// Checks what is preloaded, which library is found first, and the paths that some programs read.
pub fn check(scope: &Scope, variables: &EnvironmentVariables) -> Vec<CheckResult> {
    let mut results = Vec::new();
    let preloaded = preloaded(scope, variables, &mut results);
    results.push(match first(scope, variables) {
        None => CheckResult::ok(
            AREA,
            "search",
            format!("no {NAME} in the folders that the linker searches"),
        ),
        Some((path, kind)) => {
            let what = match kind {
                NcclOrigin::Cinch => "cinch's",
                NcclOrigin::Other => "another library",
            };
            let path = path.display().to_string();
            CheckResult::ok(
                AREA,
                "search",
                format!("the linker finds {path} first, {what}"),
            )
            .with("path", path)
            .with("is_cinch", kind == NcclOrigin::Cinch)
        }
    });
    results.extend(preload::PATHS.iter().filter_map(|name| {
        let path = variables.get(name)?;
        Some(of_path(
            scope,
            name,
            path,
            preloaded == Some(NcclOrigin::Cinch),
        ))
    }));
    results.push(CheckResult::ok(
        AREA,
        "programs",
        "programs with a search path of their own, such as PyTorch's wheels, find theirs: `cinch info --preload -- \
         PROGRAM` shows it",
    ));
    results
}

/// Checks each library of LD_PRELOAD. Returns what the first libnccl among them is.
fn preloaded(
    scope: &Scope,
    variables: &EnvironmentVariables,
    results: &mut Vec<CheckResult>,
) -> Option<NcclOrigin> {
    let text = variables.get("LD_PRELOAD").unwrap_or_default();
    let entries = text.split([':', ' ']).filter(|entry| !entry.is_empty());
    let mut first = None;
    for entry in entries {
        // Names without a slash are searched for, as any library.
        let path = scope.below_root(entry);
        if entry.contains('/') && !path.is_file() {
            results.push(CheckResult::error(
                AREA,
                "LD_PRELOAD",
                format!("{entry} does not exist, and the linker skips it"),
                "correct LD_PRELOAD; `cinch info --preload` prints what `cinch run --preload` would set",
            ));
            continue;
        }
        if !entry.contains("libnccl") {
            continue;
        }
        let kind = kind_of(&path);
        first = first.or(kind);
        results.push(match kind {
            Some(NcclOrigin::Cinch) => {
                CheckResult::ok(AREA, "LD_PRELOAD", format!("{entry} is cinch's"))
                    .with("path", entry)
            }
            _ => CheckResult::warning(
                AREA,
                "LD_PRELOAD",
                format!("{entry} is preloaded, and it is not cinch's"),
                "unset LD_PRELOAD, or name cinch's libnccl.so.2 first",
            )
            .with("path", entry),
        });
    }
    first
}

/// Checks a variable with the path of the libnccl that a program opens.
fn of_path(scope: &Scope, name: &str, path: &str, preloads_cinch: bool) -> CheckResult {
    match kind_of(&scope.below_root(path)) {
        None => CheckResult::error(
            AREA,
            name,
            format!("{path} is no libnccl"),
            format!("correct {name}, or unset it"),
        ),
        Some(NcclOrigin::Cinch) => CheckResult::ok(AREA, name, format!("{path} is cinch's")),
        Some(NcclOrigin::Other) if preloads_cinch => CheckResult::warning(
            AREA,
            name,
            format!(
                "{path} is another library than the preloaded one, and the program may call both"
            ),
            format!("unset {name}; `cinch run --preload` sets it"),
        ),
        Some(NcclOrigin::Other) => {
            CheckResult::ok(AREA, name, format!("{path} is another library"))
        }
    }
}

/// Returns the libnccl that the dynamic linker finds first for a program without a search path of its own.
fn first(scope: &Scope, variables: &EnvironmentVariables) -> Option<(PathBuf, NcclOrigin)> {
    let listed = variables.get("LD_LIBRARY_PATH").unwrap_or_default();
    let listed = listed.split([':', ';']).filter(|folder| !folder.is_empty());
    let configured = configured(scope);
    let folders = listed
        .map(str::to_string)
        .chain(configured)
        .chain(SYSTEM.map(str::to_string));
    folders
        .map(|folder| scope.below_root(&folder).join(NAME))
        .find_map(|path| Some((path.clone(), kind_of(&path)?)))
}

/// Returns the folders of the files in /etc/ld.so.conf.d, in the order of their names.
fn configured(scope: &Scope) -> Vec<String> {
    let folder = scope.root.join("etc/ld.so.conf.d");
    let entries = fs::read_dir(folder).into_iter().flatten();
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
    files.sort();
    let lines = |path: PathBuf| {
        let text = fs::read_to_string(path).unwrap_or_default();
        let lines = text
            .lines()
            .map(str::trim)
            .filter(|line| line.starts_with('/'));
        lines.map(str::to_string).collect::<Vec<_>>()
    };
    files.into_iter().flat_map(lines).collect()
}

/// Returns what a file is; `None` if it is no libnccl.
fn kind_of(path: &Path) -> Option<NcclOrigin> {
    match preload::is_ours(path) {
        Ok(true) => Some(NcclOrigin::Cinch),
        Ok(false) => Some(NcclOrigin::Other),
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::check_result::Severity;
    use super::super::tests::FakeRoot;
    use super::*;

    fn level(results: &[CheckResult], check: &str) -> Severity {
        results.iter().find(|it| it.check == check).unwrap().level
    }

    #[test]
    fn missing_and_foreign_preloads_are_found() {
        let root = FakeRoot::new("preload");
        root.write("opt/libnccl.so.2", "not an ELF file");
        let of = |value: &str| {
            let variables = EnvironmentVariables::of(&[("LD_PRELOAD", value)]);
            check(&root.scope(), &variables)
        };
        assert_eq!(
            level(&of("/opt/none/libnccl.so.2"), "LD_PRELOAD"),
            Severity::Error
        );
        assert_eq!(
            level(&of("/opt/libnccl.so.2"), "LD_PRELOAD"),
            Severity::Warning
        );
        let both = of("/opt/libnccl.so.2:/no/libother.so");
        let levels: Vec<_> = both.iter().filter(|it| it.check == "LD_PRELOAD").collect();
        assert_eq!(levels.len(), 2);
        assert!(
            of("libjemalloc.so.2")
                .iter()
                .all(|it| it.check != "LD_PRELOAD")
        );
    }

    #[test]
    fn first_library_follows_the_linkers_order() {
        let root = FakeRoot::new("search");
        let first_of = |paths: &str| {
            let variables = EnvironmentVariables::of(&[("LD_LIBRARY_PATH", paths)]);
            let found = first(&root.scope(), &variables);
            found.map(|(path, _)| path.strip_prefix(&root.0).unwrap().display().to_string())
        };
        assert_eq!(first_of(""), None);
        root.write("usr/lib64/libnccl.so.2", "x");
        assert_eq!(first_of("").unwrap(), "usr/lib64/libnccl.so.2");
        root.write("etc/ld.so.conf.d/a.conf", "# folders\n/opt/a\n");
        root.write("opt/a/libnccl.so.2", "x");
        assert_eq!(first_of("").unwrap(), "opt/a/libnccl.so.2");
        root.write("opt/b/libnccl.so.2", "x");
        assert_eq!(first_of("/none:/opt/b").unwrap(), "opt/b/libnccl.so.2");
    }

    #[test]
    fn paths_for_programs_must_be_a_library() {
        let root = FakeRoot::new("paths");
        root.write("opt/libnccl.so.2", "x");
        let of = |path: &str| {
            let variables = EnvironmentVariables::of(&[("VLLM_NCCL_SO_PATH", path)]);
            level(&check(&root.scope(), &variables), "VLLM_NCCL_SO_PATH")
        };
        assert_eq!(of("/none"), Severity::Error);
        assert_eq!(of("/opt/libnccl.so.2"), Severity::Ok);
    }
}
