//! Runs a program with the drop-in libnccl preloaded, and finds which libnccl a process has mapped.

use super::launch::not_started;
use object::{Object, ObjectSymbol};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Duration;

/// Paths of the drop-in relative to the tool's folder, for installations and for cargo's build
/// folder.
const PLACES: [&str; 5] = [
    "libnccl.so.2",
    "../lib/cinch/nccl-compat/libnccl.so.2",
    "../lib64/cinch/nccl-compat/libnccl.so.2",
    "../lib/libnccl.so.2",
    "libnccl.so",
];

/// A text that only cinch's libraries contain: the name of a setting.
const MARK: &[u8] = b"CINCH_CODEC_RULES";

/// A symbol that every libnccl exports, but libcinch does not.
const EXPORT: &str = "ncclGetUniqueId";

/// Variables in which some programs expect the path of the libnccl to open.
pub const PATHS: [&str; 2] = ["VLLM_NCCL_SO_PATH", "SGLANG_NCCL_SO_PATH"];

/// Interval between two scans of /proc for processes.
const SEARCH_INTERVAL: Duration = Duration::from_millis(10);

/// Returns whether `file` is an ELF object that exports the symbol `name`.
fn exports(file: &[u8], name: &str) -> bool {
    object::File::parse(file).is_ok_and(|file| {
        let mut symbols = file.dynamic_symbols();
        symbols.any(|symbol| symbol.is_definition() && symbol.name() == Ok(name))
    })
}

/// Finds the drop-in at `given`, or beside the tool if no path is given.
///
/// # Errors
/// Returns an error message with the paths that were tried, or if the file is another library.
pub fn find(given: Option<&Path>) -> Result<PathBuf, String> {
    let tried: Vec<PathBuf> = match given {
        Some(path) => vec![path.to_path_buf()],
        None => {
            let tool = std::env::current_exe()
                .map_err(|error| format!("cannot find the path of this tool: {error}"))?;
            let folder = tool.parent().unwrap_or(Path::new("/"));
            PLACES.iter().map(|place| folder.join(place)).collect()
        }
    };
    let Some(found) = tried.iter().find(|path| path.is_file()) else {
        let tried: Vec<String> = tried
            .iter()
            .map(|path| path.display().to_string())
            .collect();
        return Err(format!(
            "the drop-in libnccl was not found; tried {}. Build it (cargo build --release -p \
             cinch-nccl), or give its path: --preload=PATH",
            tried.join(", ")
        ));
    };
    let found = fs::canonicalize(found).map_err(|error| format!("{}: {error}", found.display()))?;
    if found
        .as_os_str()
        .as_encoded_bytes()
        .iter()
        .any(|byte| b" :".contains(byte))
    {
        return Err(format!(
            "{}: LD_PRELOAD separates libraries by blanks and colons, so a path must have none; \
             copy the library elsewhere",
            found.display()
        ));
    }
    match is_ours(&found) {
        Ok(true) => Ok(found),
        Ok(false) => Err(format!(
            "{} is not cinch's libnccl, which exports {EXPORT}",
            found.display()
        )),
        Err(error) => Err(format!("{}: {error}", found.display())),
    }
}

/// Returns the environment variables that make a program use `library`. Libraries that are already
/// preloaded come after `library`.
pub fn variables(library: &Path, earlier: Option<OsString>) -> Vec<(String, OsString)> {
    let mut preload = library.as_os_str().to_owned();
    if let Some(earlier) = earlier.filter(|earlier| !earlier.is_empty()) {
        preload.push(":");
        preload.push(earlier);
    }
    let mut variables = vec![("LD_PRELOAD".to_string(), preload)];
    variables.extend(PATHS.map(|name| (name.to_string(), library.as_os_str().to_owned())));
    variables
}

/// Replaces this process by the program (`exec`), with the drop-in preloaded.
///
/// # Errors
/// Returns an error message if the program cannot be started; otherwise does not return.
pub fn become_program(command: &[OsString], library: &Path) -> Result<i32, String> {
    let program = command.first().ok_or("no program was given")?;
    let error = Command::new(program)
        .args(&command[1..])
        .envs(variables(library, std::env::var_os("LD_PRELOAD")))
        .exec();
    Err(not_started(program, &error))
}

/// A process, and the libnccl files that it has mapped.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    name: String,
    libraries: Vec<PathBuf>,
}

/// Prints the libnccl files that `pid` and its descendants have mapped. Returns whether at least
/// one process has mapped cinch's libnccl and none has mapped another. A program may open another
/// libnccl by its path and call it, whatever is preloaded.
///
/// # Errors
/// Returns an error message if there is no such process or it belongs to another user.
pub fn show_process(pid: u32, out: &mut dyn Write) -> Result<bool, String> {
    let mut seen = BTreeMap::new();
    let failed = |error| format!("cannot inspect process {pid}: {error}");
    seen.insert(pid, look(pid).map_err(failed)?);
    for child in descendants(pid) {
        if let Ok(found) = look(child) {
            seen.insert(child, found);
        }
    }
    show(&seen, out).map_err(|error| error.to_string())
}

/// Runs a program with the drop-in preloaded, and prints the libnccl files that it and its
/// descendants mapped. Returns the result of [`show_process`] and the program's exit status.
///
/// # Errors
/// Returns an error message if the program cannot be started.
pub fn show_program(
    command: &[OsString],
    library: &Path,
    out: &mut dyn Write,
) -> Result<(bool, ExitStatus), String> {
    let program = command.first().ok_or("no program was given")?;
    let mut child = Command::new(program)
        .args(&command[1..])
        .envs(variables(library, std::env::var_os("LD_PRELOAD")))
        .spawn()
        .map_err(|error| not_started(program, &error))?;
    let mut seen: BTreeMap<u32, Seen> = BTreeMap::new();
    let status = loop {
        for pid in std::iter::once(child.id()).chain(descendants(child.id())) {
            // A process that has just ended cannot be read; its last recorded entry is kept.
            let Ok(now) = look(pid) else { continue };
            let entry = seen.entry(pid).or_insert_with(|| Seen {
                name: String::new(),
                libraries: Vec::new(),
            });
            entry.name = now.name;
            for library in now.libraries {
                if !entry.libraries.contains(&library) {
                    entry.libraries.push(library);
                }
            }
        }
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) => std::thread::sleep(SEARCH_INTERVAL),
            Err(error) => return Err(format!("cannot wait for {}: {error}", program.display())),
        }
    };
    let ours = show(&seen, out).map_err(|error| error.to_string())?;
    Ok((ours, status))
}

fn show(seen: &BTreeMap<u32, Seen>, out: &mut dyn Write) -> io::Result<bool> {
    let (mut ours, mut both, mut others) = (0, 0, 0);
    for (pid, process) in seen {
        let (mut has_ours, mut has_others) = (false, false);
        for library in &process.libraries {
            let (what, size) = match (is_ours(library), fs::metadata(library)) {
                (Ok(true), Ok(file)) => ("cinch", file.size()),
                (Ok(false), Ok(file)) => ("another", file.size()),
                _ => ("gone since", 0),
            };
            has_ours |= what == "cinch";
            has_others |= what != "cinch";
            writeln!(
                out,
                "{pid} {}: {what} {} ({:.1} MB)",
                process.name,
                library.display(),
                size as f64 / 1e6
            )?;
        }
        match (has_ours, has_others) {
            (true, false) => ours += 1,
            (true, true) => both += 1,
            (false, true) => others += 1,
            (false, false) => {}
        }
        if has_ours && has_others {
            writeln!(
                out,
                "{pid} {}: has both, so it may call the other library",
                process.name
            )?;
        }
    }
    let without = seen.len() - ours - both - others;
    writeln!(
        out,
        "{ours} processes run on cinch's libnccl, {both} have it and another, {others} on another \
         alone, {without} on none"
    )?;
    Ok(ours > 0 && both == 0 && others == 0)
}

fn look(pid: u32) -> io::Result<Seen> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let name = fs::read_to_string(format!("/proc/{pid}/comm"))?;
    Ok(Seen {
        name: name.trim().into(),
        libraries: mapped(&maps),
    })
}

/// Returns the libnccl files in the text of /proc/PID/maps, in the order of their addresses.
fn mapped(maps: &str) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for line in maps.lines() {
        // A line holds address, permissions, offset, device, inode, and a path that may contain
        // blanks.
        let Some(at) = line.find('/') else { continue };
        let path = Path::new(line[at..].trim_end_matches(" (deleted)"));
        let name = path.file_name().map(|name| name.to_string_lossy());
        let is_nccl = name.is_some_and(|name| {
            name.strip_prefix("libnccl.so")
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        });
        if is_nccl && found.last().is_none_or(|last| last != path) {
            found.push(path.into());
        }
    }
    found.dedup();
    found
}

/// Returns all descendants of process `pid`.
fn descendants(pid: u32) -> Vec<u32> {
    let Ok(all) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    let parents: Vec<(u32, u32)> = all
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(|one| Some((one, parent(one)?)))
        .collect();
    let mut found = vec![pid];
    let mut at = 0;
    while at < found.len() {
        let children = parents.iter().filter(|(_, parent)| *parent == found[at]);
        let children: Vec<u32> = children.map(|(child, _)| *child).collect();
        found.extend(children);
        at += 1;
    }
    found.split_off(1)
}

fn parent(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may contain any characters. The state and the parent follow the last
    // parenthesis.
    let rest = &stat[stat.rfind(')')? + 1..];
    rest.split_whitespace().nth(1)?.parse().ok()
}

/// Returns whether a file is cinch's drop-in libnccl.
///
/// # Errors
/// Returns the error of reading the file.
pub fn is_ours(path: &Path) -> io::Result<bool> {
    let bytes = fs::read(path)?;
    Ok(exports(&bytes, EXPORT) && bytes.windows(MARK.len()).any(|window| window == MARK))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compiles C source text to a shared object.
    fn compiled(folder: &Path, name: &str, text: &str) -> PathBuf {
        let (source, library) = (folder.join("source.c"), folder.join(name));
        fs::write(&source, text).unwrap();
        let mut compile = Command::new("cc");
        compile.args(["-shared", "-fPIC", "-o"]);
        let status = compile.args([&library, &source]).status();
        assert!(status.unwrap().success());
        library
    }

    #[test]
    fn maps_are_read_as_the_kernel_writes_them() {
        let maps = "\
55d0-55d1 r--p 00000000 08:01 12 /usr/bin/python3.11
7f00-7f01 r--p 00000000 08:01 34 /opt/my libs/libnccl.so.2
7f01-7f02 r-xp 00001000 08:01 34 /opt/my libs/libnccl.so.2
7f03-7f04 rw-p 00000000 00:00 0
7f05-7f06 r--p 00000000 08:01 56 /usr/lib/libnccl.so.2.28.9 (deleted)
7f07-7f08 r--p 00000000 08:01 78 /usr/lib/libnccl-net.so
7f09-7f0a r--p 00000000 08:01 90 /usr/lib/libncclx.so
7ffd-7ffe rw-p 00000000 00:00 0 [stack]
";
        assert_eq!(
            mapped(maps),
            [
                PathBuf::from("/opt/my libs/libnccl.so.2"),
                PathBuf::from("/usr/lib/libnccl.so.2.28.9")
            ]
        );
    }

    #[test]
    fn find_refuses_files_that_are_not_the_drop_in() {
        let error = find(Some(Path::new("/no/such/libnccl.so.2"))).unwrap_err();
        assert!(error.contains("/no/such/libnccl.so.2"), "{error}");
        // The libraries are: another libnccl, cinch's library that is no drop-in, the drop-in, and
        // two drop-ins at paths that the loader cannot take.
        let folder = std::env::temp_dir().join(format!("cinch-preload-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let export = format!("int {EXPORT}(void) {{ return 0; }}\n");
        let import = format!("int {EXPORT}(void); int call(void) {{ return {EXPORT}(); }}\n");
        let mark = format!("char mark[] = \"{}\";\n", MARK.escape_ascii());
        for (name, text, said) in [
            ("other.so", export.clone(), "is not cinch's libnccl"),
            (
                "libcinch.so",
                mark.clone() + &import,
                "is not cinch's libnccl",
            ),
            ("libnccl.so.2", mark.clone() + &export, ""),
            ("lib nccl.so.2", mark.clone() + &export, "blanks"),
            ("a:b.so", mark + &export, "colons"),
        ] {
            let library = compiled(&folder, name, &text);
            let error = find(Some(&library)).err().unwrap_or_default();
            assert!(
                error.contains(said) && error.is_empty() == said.is_empty(),
                "{error}"
            );
        }
        let cut = folder.join("cut.so");
        let whole = fs::read(folder.join("libnccl.so.2")).unwrap();
        for length in [0, 8, 63, 64, whole.len() / 2] {
            fs::write(&cut, &whole[..length]).unwrap();
            assert!(find(Some(&cut)).is_err(), "{length}");
        }
        fs::remove_dir_all(&folder).unwrap();
    }

    /// Preloading maps cinch's libnccl even into a process that opens another one by its path.
    #[test]
    fn process_with_both_libraries_does_not_count_as_cinch() {
        let folder = std::env::temp_dir().join(format!("cinch-both-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let export = format!("int {EXPORT}(void) {{ return 0; }}\n");
        let mark = format!("char mark[] = \"{}\";\n", MARK.escape_ascii());
        let ours = compiled(&folder, "libnccl.so.2", &(mark + &export));
        let others = compiled(&folder, "libnccl.so.2.28.9", &export);
        let shown = |libraries: &[&PathBuf]| {
            let process = Seen {
                name: "python".into(),
                libraries: libraries.iter().map(|&path| path.clone()).collect(),
            };
            let mut text = Vec::new();
            let all = show(&BTreeMap::from([(7, process)]), &mut text).unwrap();
            (all, String::from_utf8(text).unwrap())
        };
        assert!(shown(&[&ours]).0);
        let (all, text) = shown(&[&ours, &others]);
        assert!(!all && text.contains("7 python: has both"), "{text}");
        assert!(text.contains("0 processes run on cinch's libnccl, 1 have it and another"));
        for path in [ours, others] {
            assert!(text.contains(&path.display().to_string()), "{text}");
        }
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn variables_keep_libraries_that_were_preloaded() {
        let all = variables(Path::new("/x/libnccl.so.2"), Some("/y.so".into()));
        assert_eq!(
            all[0],
            ("LD_PRELOAD".into(), "/x/libnccl.so.2:/y.so".into())
        );
        assert!(all[1..].iter().all(|(_, path)| path == "/x/libnccl.so.2"));
        assert_eq!(all.len(), 3);
    }

    #[test]
    fn descendants_are_found() {
        let mut child = Command::new("sh")
            .args(["-c", "sleep 30 & wait"])
            .process_group(0)
            .spawn()
            .unwrap();
        let mut grandchildren = Vec::new();
        for _ in 0..1000 {
            grandchildren = descendants(child.id());
            if !grandchildren.is_empty() {
                break;
            }
            std::thread::sleep(SEARCH_INTERVAL);
        }
        let all = descendants(std::process::id());
        let group = nix::unistd::Pid::from_raw(child.id() as i32);
        nix::sys::signal::killpg(group, nix::sys::signal::Signal::SIGKILL).unwrap();
        child.wait().unwrap();
        assert_eq!(grandchildren.len(), 1);
        assert!(all.contains(&child.id()) && all.contains(&grandchildren[0]));
    }
}
