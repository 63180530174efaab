//! Gives the shared library its soname, and compiles `kernels/entry/*.cu` into fat binaries that
//! the library embeds.
//!
//! Each entry file becomes one fat binary, by a compiler run of its own: an edit of one costs one
//! run. Without nvcc the library is built for host memory alone, and says so here, in `cinch info`
//! and in the error of a call with GPU buffers. What may be set: README, "Building with CUDA".

use std::collections::BTreeMap;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The oldest compiler that is tried: C++17 and sm_90.
const OLDEST_NVCC: (u32, u32) = (12, 0);
/// The first one with `-compress-mode`.
const COMPRESSING_NVCC: (u32, u32) = (12, 8);
/// Below it there is no bf16 arithmetic and no asynchronous copy.
const LOWEST_ARCH: u32 = 80;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=kernels");
    for name in ["CINCH_CUDA", "CINCH_CUDA_ARCHS", "NVCC", "CUDA_HOME"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    println!("cargo:rustc-check-cfg=cfg(cinch_cuda)");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcinch.so.0");
    if let Err(sentence) = kernels() {
        for line in sentence.lines() {
            println!("cargo::error={line}");
        }
        std::process::exit(1);
    }
}

/// Writes `OUT_DIR/kernels.rs`, with kernels or with the reason why there are none.
fn kernels() -> Result<(), String> {
    let required = match variable("CINCH_CUDA")?.as_deref() {
        None | Some("auto") => false,
        Some("require") => true,
        Some("0") => return host_only("it was built with CINCH_CUDA=0"),
        Some(other) => {
            return Err(format!("CINCH_CUDA={other:?}: it takes 0, auto or require"));
        }
    };
    let archs = variable("CINCH_CUDA_ARCHS")?;
    let asked = archs.as_deref().map(parse_archs).transpose()?;
    let nvcc = match Nvcc::find() {
        Ok(nvcc) => nvcc,
        Err(why) if required => {
            return Err(format!(
                "CINCH_CUDA=require, but {why}; run scripts/setup, which brings nvcc into \
                 target/cuda, or name one by NVCC or CUDA_HOME"
            ));
        }
        Err(why) => {
            println!(
                "cargo:warning=host memory only: {why}; scripts/setup brings nvcc, CINCH_CUDA=0 \
                 silences this"
            );
            return host_only(&why);
        }
    };
    println!("cargo:rerun-if-changed={}", nvcc.path.display());
    let targets = match asked {
        Some(asked) => nvcc.check(asked)?,
        None => nvcc.known(default_targets()),
    };
    let tree = Tree::read(&manifest().join("kernels"))?;
    let build = Build {
        cache: cache_directory(),
        nvcc,
        targets,
        tree,
    };
    build.run()
}

/// One `-gencode`: machine code of an architecture, its PTX, or both.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Target {
    arch: String,
    code: bool,
    ptx: bool,
}

impl Target {
    fn flag(&self) -> String {
        let arch = &self.arch;
        let kinds = match (self.code, self.ptx) {
            (true, true) => format!("[sm_{arch},compute_{arch}]"),
            (true, false) => format!("sm_{arch}"),
            (false, _) => format!("compute_{arch}"),
        };
        format!("-gencode=arch=compute_{arch},code={kinds}")
    }

    fn names(&self) -> String {
        let arch = &self.arch;
        match (self.code, self.ptx) {
            (true, true) => format!("sm_{arch} compute_{arch}"),
            (true, false) => format!("sm_{arch}"),
            (false, _) => format!("compute_{arch}"),
        }
    }
}

/// What is built where nothing is asked for: all supported chips in a release, one in between to
/// keep builds short; PTX for chips that are newer than this file.
fn default_targets() -> Vec<Target> {
    let release = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let target = |arch: &str, code, ptx| Target {
        arch: arch.into(),
        code,
        ptx,
    };
    if release {
        vec![
            target("80", true, true),
            target("90", true, false),
            target("100", true, false),
        ]
    } else {
        vec![target("90", true, false), target("80", false, true)]
    }
}

/// Parses a `CINCH_CUDA_ARCHS` value such as `80+ptx,90`.
fn parse_archs(text: &str) -> Result<Vec<Target>, String> {
    let wrong = |why: &str| {
        format!(
            "CINCH_CUDA_ARCHS={text:?}: {why}; it takes numbers from {LOWEST_ARCH}, with commas \
             between, each with +ptx behind it to keep its PTX too: 90, or 80+ptx,90"
        )
    };
    let mut targets: Vec<Target> = Vec::new();
    for part in text.split(',') {
        let part = part.trim();
        let (arch, ptx) = match part.strip_suffix("+ptx") {
            Some(arch) => (arch, true),
            None => (part, false),
        };
        let digits = arch.strip_suffix(['a', 'f']).unwrap_or(arch);
        match digits.parse::<u32>() {
            Ok(number) if number >= LOWEST_ARCH && digits == number.to_string() => {}
            Ok(_) => return Err(wrong(&format!("{part:?} is too old or oddly written"))),
            Err(_) => return Err(wrong(&format!("{part:?} is no architecture"))),
        }
        if targets.iter().any(|target| target.arch == arch) {
            return Err(wrong(&format!("{arch} is there twice")));
        }
        targets.push(Target {
            arch: arch.into(),
            code: true,
            ptx,
        });
    }
    Ok(targets)
}

/// A compiler that can be used.
struct Nvcc {
    path: PathBuf,
    version: String,
    number: (u32, u32),
    archs: Vec<String>,
}

impl Nvcc {
    /// In `NVCC`, `CUDA_HOME`, `PATH` and where `scripts/setup` puts it, in this order; a place
    /// that was named and has none is an error rather than a reason to look on.
    fn find() -> Result<Nvcc, String> {
        if let Some(path) = variable("NVCC")? {
            return Nvcc::at(Path::new(&path)).map_err(|why| format!("NVCC={path}: {why}"));
        }
        if let Some(home) = variable("CUDA_HOME")? {
            let path = Path::new(&home).join("bin/nvcc");
            return Nvcc::at(&path).map_err(|why| format!("CUDA_HOME={home}: {why}"));
        }
        let paths = env::var_os("PATH").unwrap_or_default();
        let mut places: Vec<_> = env::split_paths(&paths).map(|at| at.join("nvcc")).collect();
        places.push(manifest().join("target/cuda/nvidia/cu13/bin/nvcc"));
        match places.iter().find(|path| path.is_file()) {
            Some(path) => Nvcc::at(path),
            None => {
                // Only here: elsewhere every shell with another PATH would rebuild the library.
                println!("cargo:rerun-if-env-changed=PATH");
                Err("there is no nvcc in NVCC, CUDA_HOME, PATH or target/cuda".into())
            }
        }
    }

    fn at(path: &Path) -> Result<Nvcc, String> {
        let text = output(Command::new(path).arg("--version"))?;
        // "Cuda compilation tools, release 13.0, V13.0.88"
        let version = text
            .split_once(", V")
            .and_then(|(_, rest)| rest.split_whitespace().next())
            .ok_or_else(|| format!("{} says no version: {text}", path.display()))?;
        let mut numbers = version.split('.').map(|part| part.parse().unwrap_or(0));
        let number = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        if number < OLDEST_NVCC {
            return Err(format!(
                "nvcc {version} at {} is older than {}.{}",
                path.display(),
                OLDEST_NVCC.0,
                OLDEST_NVCC.1
            ));
        }
        let listed = output(Command::new(path).arg("--list-gpu-arch"))?;
        let archs = listed
            .split_whitespace()
            .filter_map(|name| name.strip_prefix("compute_").map(str::to_string))
            .collect();
        Ok(Nvcc {
            path: path.to_path_buf(),
            version: version.to_string(),
            number,
            archs,
        })
    }

    fn knows(&self, target: &Target) -> bool {
        // The list leaves out the variants of an architecture, such as 90a.
        let arch = target.arch.trim_end_matches(['a', 'f']);
        self.archs.iter().any(|known| known == arch)
    }

    /// `targets`, or which of them this compiler lacks.
    fn check(&self, targets: Vec<Target>) -> Result<Vec<Target>, String> {
        match targets.iter().find(|target| !self.knows(target)) {
            None => Ok(targets),
            Some(target) => Err(format!(
                "CINCH_CUDA_ARCHS: nvcc {} does not know {}; it knows {}",
                self.version,
                target.arch,
                self.archs.join(", ")
            )),
        }
    }

    /// Those of `targets` that this compiler has; warns of the others.
    fn known(&self, targets: Vec<Target>) -> Vec<Target> {
        let (known, unknown): (Vec<_>, Vec<_>) =
            targets.into_iter().partition(|target| self.knows(target));
        for target in unknown {
            println!(
                "cargo:warning=nvcc {} does not know sm_{}: GPUs of that kind will compile the \
                 embedded PTX at their first use",
                self.version, target.arch
            );
        }
        known
    }
}

/// All files below `kernels/`, by their path from the package's root, with a hash of what is in
/// each: read before anything is compiled, so that an edit meanwhile is not taken for built.
struct Tree {
    hashes: BTreeMap<PathBuf, u64>,
}

impl Tree {
    fn read(kernels: &Path) -> Result<Tree, String> {
        let mut hashes = BTreeMap::new();
        let mut folders = vec![kernels.to_path_buf()];
        while let Some(folder) = folders.pop() {
            let told = |error| format!("reading {}: {error}", folder.display());
            for entry in fs::read_dir(&folder).map_err(told)? {
                let path = entry.map_err(told)?.path();
                if path.is_dir() {
                    folders.push(path);
                } else {
                    let bytes = fs::read(&path).map_err(told)?;
                    let path = path.strip_prefix(manifest()).unwrap_or(&path);
                    hashes.insert(path.to_path_buf(), hash(&bytes));
                }
            }
        }
        Ok(Tree { hashes })
    }

    /// Names of the entry files, without folder and ending.
    fn entries(&self) -> Vec<String> {
        self.hashes
            .keys()
            .filter(|path| path.parent() == Some(Path::new("kernels/entry")))
            .filter(|path| path.extension().is_some_and(|ending| ending == "cu"))
            .filter_map(|path| Some(path.file_stem()?.to_str()?.to_string()))
            .collect()
    }

    /// One number for the files that a compiler's dependency file names; `None` if one is gone.
    fn fingerprint(&self, dependencies: &str) -> Option<u64> {
        let root = manifest();
        let mut files: Vec<_> = dependencies
            .split([' ', '\n', '\\'])
            .map(|name| {
                Path::new(name)
                    .strip_prefix(&root)
                    .unwrap_or(Path::new(name))
            })
            .filter(|path| path.starts_with("kernels"))
            .collect();
        files.sort();
        files.dedup();
        let hashes: Option<Vec<_>> = files
            .iter()
            .map(|path| Some((path, self.hashes.get(*path)?)))
            .collect();
        hashes.map(hash)
    }
}

struct Build {
    nvcc: Nvcc,
    targets: Vec<Target>,
    tree: Tree,
    cache: PathBuf,
}

impl Build {
    /// Compiles what changed, as many files at once as cargo allows, and writes the table.
    fn run(&self) -> Result<(), String> {
        let entries = self.tree.entries();
        let jobs = env::var("NUM_JOBS").map_or(1, |jobs| jobs.parse().unwrap_or(1));
        // Fewer files than cores: nvcc works on several architectures of one.
        let threads = (jobs / entries.len().max(1)).clamp(1, self.targets.len());
        let next = AtomicUsize::new(0);
        let worker = || {
            let mut failures = Vec::new();
            while let Some(name) = entries.get(next.fetch_add(1, Ordering::Relaxed)) {
                failures.extend(self.entry(name, threads).err());
            }
            failures
        };
        let failures: Vec<String> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..jobs.clamp(1, entries.len().max(1)))
                .map(|_| scope.spawn(worker))
                .collect();
            workers
                .into_iter()
                .flat_map(|worker| {
                    worker
                        .join()
                        .unwrap_or_else(|_| vec!["a compiling thread panicked".into()])
                })
                .collect()
        });
        if !failures.is_empty() {
            return Err(failures.join("\n"));
        }
        println!("cargo:rustc-cfg=cinch_cuda");
        let targets: Vec<_> = self.targets.iter().map(Target::names).collect();
        let mut table = String::new();
        for name in &entries {
            let _ = writeln!(
                table,
                "    Fatbin {{ name: {name:?}, bytes: &Aligned(*include_bytes!(concat!(\
                 env!(\"OUT_DIR\"), \"/{name}.fatbin\"))).0 }},"
            );
        }
        write_table(&format!(
            "/// Whether kernels were built.\npub const STATE: State = State::Built {{ nvcc: {:?}, \
             archs: {:?} }};\nstatic FATBINS: &[Fatbin] = &[\n{table}];\n",
            self.nvcc.version,
            targets.join(" ")
        ))
    }

    /// Puts the fat binary of one entry file into `OUT_DIR`, compiled only where the file, what it
    /// includes, the compiler or its flags changed.
    fn entry(&self, name: &str, threads: usize) -> Result<(), String> {
        let flags = self.flags();
        let stem = format!("{name}.{:016x}", hash((&flags, &self.nvcc.version)));
        let dependencies = self.cache.join(format!("{stem}.d"));
        let cached =
            |fingerprint: u64| self.cache.join(format!("{stem}.{fingerprint:016x}.fatbin"));
        let wanted = out().join(format!("{name}.fatbin"));
        if let Ok(text) = fs::read_to_string(&dependencies)
            && let Some(fingerprint) = self.tree.fingerprint(&text)
            && fs::copy(cached(fingerprint), &wanted).is_ok()
        {
            return Ok(());
        }

        let list = out().join(format!("{name}.d"));
        let source = format!("kernels/entry/{name}.cu");
        // Paths from the package's root: line numbers in the binary name no build machine.
        let run = Command::new(&self.nvcc.path)
            .current_dir(manifest())
            .args(&flags)
            .args(["-MD", "-MF"])
            .arg(&list)
            .arg(format!("-t{threads}"))
            .args(["-fatbin", "-o"])
            .args([wanted.as_os_str(), source.as_ref()])
            .output()
            .map_err(|error| format!("running {}: {error}", self.nvcc.path.display()))?;
        if !run.status.success() {
            return Err(format!(
                "{source}: nvcc failed ({}); CINCH_CUDA=0 builds without kernels\n{}{}",
                run.status,
                String::from_utf8_lossy(&run.stdout),
                String::from_utf8_lossy(&run.stderr)
            ));
        }
        let told = |error: io::Error| format!("{source}: keeping what was built: {error}");
        let text = fs::read_to_string(&list).map_err(told)?;
        let Some(fingerprint) = self.tree.fingerprint(&text) else {
            return Ok(()); // A file appeared meanwhile; cargo comes back for it.
        };
        self.forget(&stem);
        put(&wanted, &cached(fingerprint)).map_err(told)?;
        put(&list, &dependencies).map_err(told)
    }

    fn flags(&self) -> Vec<String> {
        // -fmad=false: host and device give the same bits only if a kernel's own intrinsics alone
        // decide where products and sums are fused.
        let mut flags: Vec<String> = [
            "-std=c++17",
            "-O3",
            "-fmad=false",
            "-lineinfo",
            "-Werror=all-warnings",
            "-Ikernels",
        ]
        .map(String::from)
        .into();
        if self.nvcc.number >= COMPRESSING_NVCC {
            flags.push("-compress-mode=size".into());
        }
        flags.extend(self.targets.iter().map(Target::flag));
        flags
    }

    /// Removes earlier results from the cache.
    fn forget(&self, stem: &str) {
        for entry in fs::read_dir(&self.cache).into_iter().flatten().flatten() {
            let old = entry.file_name();
            if old.to_string_lossy().starts_with(stem) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

/// Copies under a name that appears at once, whole.
fn put(from: &Path, to: &Path) -> io::Result<()> {
    let part = to.with_extension(format!("part{}", std::process::id()));
    fs::copy(from, &part)?;
    fs::rename(&part, to)
}

/// Where compiled kernels outlive `OUT_DIR`, which every combination of profile, features and
/// target directory has of its own: the checkout's target directory if there is one.
fn cache_directory() -> PathBuf {
    let target = manifest().join("target");
    let cache = target.join("kernels");
    if target.is_dir() && fs::create_dir_all(&cache).is_ok() {
        cache
    } else {
        out()
    }
}

/// Writes a table without kernels.
fn host_only(why: &str) -> Result<(), String> {
    write_table(&format!(
        "/// Whether kernels were built.\npub const STATE: State = State::Missing {{ why: {why:?} }};\n\
         static FATBINS: &[Fatbin] = &[];\n"
    ))
}

fn write_table(text: &str) -> Result<(), String> {
    let path = out().join("kernels.rs");
    fs::write(&path, text).map_err(|error| format!("writing {}: {error}", path.display()))
}

fn manifest() -> PathBuf {
    env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default().into()
}

fn out() -> PathBuf {
    env::var_os("OUT_DIR").unwrap_or_default().into()
}

/// A variable that is set and not empty.
fn variable(name: &str) -> Result<Option<String>, String> {
    match env::var(name) {
        Ok(value) => Ok(Some(value.trim().to_string()).filter(|value| !value.is_empty())),
        Err(env::VarError::NotPresent) => Ok(None),
        Err(env::VarError::NotUnicode(_)) => Err(format!("{name} is not UTF-8")),
    }
}

/// What a command prints, if it succeeds.
fn output(command: &mut Command) -> Result<String, String> {
    let shown = command.get_program().to_string_lossy().into_owned();
    let run = command
        .output()
        .map_err(|error| format!("{shown} cannot be run: {error}"))?;
    if run.status.success() {
        Ok(String::from_utf8_lossy(&run.stdout).into_owned())
    } else {
        Err(format!(
            "{shown} failed: {}",
            String::from_utf8_lossy(&run.stderr).trim()
        ))
    }
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}
