//! Compiles `kernels/entry/*.cu` into images that the library embeds: machine code and PTX.
//!
//! Each entry file is compiled for each target by compiler runs of their own, so an edit of one
//! file costs its runs alone. Images of up to 8 similar files are compressed together (LZMA), because
//! every library and the tool have a copy.
//! Without nvcc the library supports host memory only; the build log, `cinch info` and the error of
//! a call with GPU buffers report this. The README lists the variables ("Building with CUDA").

#[path = "build/nvcc.rs"]
mod nvcc;
#[path = "build/pack.rs"]
mod pack;

use nvcc::{Image, Nvcc, Target, default_targets, parse_archs};
use std::collections::BTreeMap;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=build");
    println!("cargo:rerun-if-changed=kernels");
    for name in [
        "CINCH_CUDA",
        "CINCH_CUDA_ARCHS",
        "CINCH_CUDA_LINES",
        "NVCC",
        "CUDA_HOME",
    ] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    println!("cargo:rustc-check-cfg=cfg(cinch_cuda)");
    if let Err(sentence) = kernels() {
        for line in sentence.lines() {
            println!("cargo::error={line}");
        }
        std::process::exit(1);
    }
}

/// Writes `OUT_DIR/kernels.rs`, which holds the kernels, or the reason why there are none.
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
    let lines = match variable("CINCH_CUDA_LINES")?.as_deref() {
        None | Some("0") => false,
        Some("1") => true,
        Some(other) => return Err(format!("CINCH_CUDA_LINES={other:?}: it takes 0 or 1")),
    };
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
        lines,
        tree,
    };
    build.run()
}

/// Paths from the package's root, and content hashes, of all files below `kernels/`. The files are
/// read before the first compilation, so an edit during the build triggers another build.
struct Tree {
    hashes: BTreeMap<PathBuf, u64>,
}

impl Tree {
    fn read(kernels: &Path) -> Result<Tree, String> {
        let mut hashes = BTreeMap::new();
        let mut folders = vec![kernels.to_path_buf()];
        while let Some(folder) = folders.pop() {
            let context = |error| format!("reading {}: {error}", folder.display());
            for entry in fs::read_dir(&folder).map_err(context)? {
                let path = entry.map_err(context)?.path();
                if path.is_dir() {
                    folders.push(path);
                } else {
                    let bytes = fs::read(&path).map_err(context)?;
                    let path = path.strip_prefix(manifest()).unwrap_or(&path);
                    hashes.insert(path.to_path_buf(), hash(&bytes));
                }
            }
        }
        Ok(Tree { hashes })
    }

    /// Returns the names of the entry files, without folder and extension.
    fn entries(&self) -> Vec<String> {
        self.hashes
            .keys()
            .filter(|path| path.parent() == Some(Path::new("kernels/entry")))
            .filter(|path| path.extension().is_some_and(|ending| ending == "cu"))
            .filter_map(|path| Some(path.file_stem()?.to_str()?.to_string()))
            .collect()
    }

    /// Returns one hash over the files that a compiler's dependency file lists; `None` if a file is
    /// missing.
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
    /// Whether to add source line information to the binary, for profilers and sanitizers. It more
    /// than doubles the binary's size.
    lines: bool,
    tree: Tree,
    cache: PathBuf,
}

impl Build {
    /// Compiles changed files for all targets, packs groups of them, as many in parallel as cargo
    /// allows, and writes the table of kernels.
    fn run(&self) -> Result<(), String> {
        let entries = self.tree.entries();
        let targets = self.targets.iter();
        let pairs: Vec<_> = targets
            .flat_map(|target| entries.iter().map(move |name| (name, target)))
            .collect();
        in_parallel(&pairs, |&(name, target)| self.entry(name, target))?;
        let groups = groups(&entries);
        let images: Vec<Image> = self.targets.iter().flat_map(Target::images).collect();
        let packs: Vec<_> = (0..groups.len())
            .flat_map(|group| images.iter().map(move |image| (group, image)))
            .collect();
        let packed = in_parallel(&packs, |&(group, image)| {
            let pack = self.pack(group, &groups[group], image);
            pack.map_err(|error| format!("packing kernels for {}: {error}", image.name()))
        })?;
        println!("cargo:rustc-cfg=cinch_cuda");
        self.table(&groups, &images, &packed)
    }

    /// Writes the table of kernels, whose packs are those of all images of each group in turn.
    fn table(
        &self,
        groups: &[Vec<&String>],
        images: &[Image],
        packed: &[Packed],
    ) -> Result<(), String> {
        let mut text = String::new();
        let mut hasher = DefaultHasher::new();
        // Writing to a string cannot fail.
        for (number, pack) in packed.iter().enumerate() {
            pack.hash.hash(&mut hasher);
            let _ = writeln!(
                text,
                "static PACK_{number}: KernelPack = KernelPack {{ len: {}, packed: \
                 include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{}\")) }};",
                pack.lens.iter().sum::<usize>(),
                pack.file
            );
        }
        text.push_str("static FILES: &[KernelFile] = &[\n");
        for (group, names) in groups.iter().enumerate() {
            for (place, name) in names.iter().enumerate() {
                let _ = writeln!(
                    text,
                    "    KernelFile {{ name: {name:?}, group: {group}, images: &["
                );
                for (at, image) in images.iter().enumerate() {
                    let number = group * images.len() + at;
                    let lens = &packed[number].lens;
                    let _ = writeln!(
                        text,
                        "        KernelImage {{ target: {}, at: {}, len: {}, pack: PACK_{number} }},",
                        image.source(),
                        lens[..place].iter().sum::<usize>(),
                        lens[place]
                    );
                }
                text.push_str("    ] },\n");
            }
        }
        let targets: Vec<_> = self.targets.iter().map(Target::names).collect();
        write_table(&format!(
            "/// Whether kernels were built.\npub const STATE: State = State::Built {{ nvcc: {:?}, \
             archs: {:?}, hash: {} }};\n{text}];\n",
            self.nvcc.version,
            targets.join(" "),
            hasher.finish(),
        ))
    }

    /// Compresses the images of a group's files for one target, one behind the other, into `OUT_DIR`,
    /// unless the cache has them.
    fn pack(&self, number: usize, names: &[&String], image: &Image) -> io::Result<Packed> {
        let mut images = Vec::new();
        let mut lens = Vec::with_capacity(names.len());
        for name in names {
            let one = pack::kept(&fs::read(out().join(kept_name(name, image)))?)?;
            images.extend_from_slice(&one);
            lens.push(one.len());
        }
        let content = hash((&images, pack::FORMAT));
        let key = hash((names, self.flags(), &self.nvcc.version));
        // The cache may be `OUT_DIR`, so its names begin otherwise.
        let stem = format!("pack{key:016x}.{}.", image.name());
        let file = format!("group{number}.{}.lzma", image.name());
        let cached = self.cache.join(format!("{stem}{content:016x}.lzma"));
        if fs::copy(&cached, out().join(&file)).is_err() {
            self.forget(&stem);
            fs::write(out().join(&file), pack::pack(&images, image.kind)?)?;
            put(&out().join(&file), &cached)?;
        }
        Ok(Packed {
            file,
            hash: content,
            lens,
        })
    }

    /// Puts the images of one entry file for one target into `OUT_DIR`. It compiles only if the file,
    /// its includes, the compiler or the flags changed.
    fn entry(&self, name: &str, target: &Target) -> Result<(), String> {
        let flags = self.flags();
        let images = target.images();
        let key = hash((&flags, &self.nvcc.version, pack::FORMAT));
        let stem = format!("{name}.{}.{key:016x}", target.names().replace(' ', "+"));
        let dependencies = self.cache.join(format!("{stem}.d"));
        let cached = |fingerprint: u64, image: &Image| {
            let file = format!("{stem}.{fingerprint:016x}.{}.lzma", image.name());
            self.cache.join(file)
        };
        let wanted = |image: &Image| out().join(kept_name(name, image));
        let copied = |fingerprint: u64, image: &Image| {
            fs::copy(cached(fingerprint, image), wanted(image)).is_ok()
        };
        if let Ok(text) = fs::read_to_string(&dependencies)
            && let Some(fingerprint) = self.tree.fingerprint(&text)
            && images.iter().all(|image| copied(fingerprint, image))
        {
            return Ok(());
        }

        let entry = format!("kernels/entry/{name}.cu");
        let context = |error: io::Error| format!("{entry}: keeping what was built: {error}");
        let list = out().join(format!("{name}.{}.d", images[0].name()));
        let mut source = PathBuf::from(&entry);
        for (number, image) in images.iter().enumerate() {
            let built = out().join(format!("{name}.{}", image.file_name()));
            let mut command = Command::new(&self.nvcc.path);
            // Paths are relative to the package's root, so that line tables do not contain folders
            // of the build machine.
            command.current_dir(manifest()).args(&flags);
            command.args(image.flags());
            if number == 0 {
                command.args(["-MD", "-MF"]).arg(&list);
            }
            let run = command
                .arg("-o")
                .args([&built, &source])
                .output()
                .map_err(|error| format!("running {}: {error}", self.nvcc.path.display()))?;
            if !run.status.success() {
                return Err(format!(
                    "{entry}: nvcc failed ({}); CINCH_CUDA=0 builds without kernels\n{}{}",
                    run.status,
                    String::from_utf8_lossy(&run.stdout),
                    String::from_utf8_lossy(&run.stderr)
                ));
            }
            let bytes = fs::read(&built).map_err(context)?;
            let kept = pack::keep(&bytes).map_err(context)?;
            fs::write(wanted(image), kept).map_err(context)?;
            if number > 0 {
                let _ = fs::remove_file(&source);
            }
            // Machine code is compiled from the target's PTX, if there is any.
            source = built;
        }
        let _ = fs::remove_file(&source);
        let text = fs::read_to_string(&list).map_err(context)?;
        let Some(fingerprint) = self.tree.fingerprint(&text) else {
            return Ok(()); // A file is new: cargo runs this build script again.
        };
        self.forget(&stem);
        for image in &images {
            put(&wanted(image), &cached(fingerprint, image)).map_err(context)?;
        }
        put(&list, &dependencies).map_err(context)
    }

    fn flags(&self) -> Vec<String> {
        // Host and device must produce equal bits. With -fmad=false a product and a sum are fused
        // only where the kernels' intrinsics request it.
        let mut flags: Vec<String> = [
            "-std=c++17",
            "-O3",
            "-fmad=false",
            "-Werror=all-warnings",
            "-Ikernels",
        ]
        .map(String::from)
        .into();
        if self.lines {
            flags.push("-lineinfo".into());
        }
        flags
    }

    /// Removes earlier results of the same entry file, or group, and target from the cache.
    fn forget(&self, stem: &str) {
        for entry in fs::read_dir(&self.cache).into_iter().flatten().flatten() {
            let old = entry.file_name();
            let old = old.to_string_lossy();
            // A part is of another build, which is about to rename it.
            if old.starts_with(stem) && !old.contains(".part") {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

/// The images of a group's files for one target.
struct Packed {
    /// Name of the file with the pack in `OUT_DIR`.
    file: String,
    /// Hash of the images.
    hash: u64,
    /// Length of each image in bytes.
    lens: Vec<usize>,
}

/// Largest number of files in a group. A process unpacks whole groups, several at once.
const GROUP: usize = 8;

/// Groups similar files, which a process loads together: those whose names have the same beginning up
/// to a `_`. Each of the other files is a group of its own.
fn groups(entries: &[String]) -> Vec<Vec<&String>> {
    let mut groups: Vec<Vec<&String>> = Vec::new();
    let kind = |name: &String| name.split_once('_').map(|(kind, _)| kind.to_string());
    for name in entries {
        match groups.last_mut() {
            Some(last)
                if kind(name).is_some() && kind(last[0]) == kind(name) && last.len() < GROUP =>
            {
                last.push(name);
            }
            _ => groups.push(vec![name]),
        }
    }
    groups
}

/// Calls `does` for all tasks, on as many threads as cargo allows, and returns the results in their
/// order, or all errors.
fn in_parallel<T: Sync, R: Send>(
    tasks: &[T],
    does: impl Fn(&T) -> Result<R, String> + Sync,
) -> Result<Vec<R>, String> {
    let jobs = env::var("NUM_JOBS").map_or(1, |jobs| jobs.parse().unwrap_or(1));
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut done = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(task) = tasks.get(number) else {
                return done;
            };
            done.push((number, does(task)));
        }
    };
    let mut done = Vec::new();
    let mut failures = Vec::new();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs.clamp(1, tasks.len().max(1)))
            .map(|_| scope.spawn(worker))
            .collect();
        for worker in workers {
            match worker.join() {
                Ok(results) => done.extend(results),
                Err(_) => failures.push("a building thread panicked".to_string()),
            }
        }
    });
    done.sort_by_key(|(number, _)| *number);
    let mut results = Vec::with_capacity(done.len());
    for (_, result) in done {
        match result {
            Ok(result) => results.push(result),
            Err(failure) => failures.push(failure),
        }
    }
    match failures[..] {
        [] => Ok(results),
        _ => Err(failures.join("\n")),
    }
}

/// Returns the name of an image of one file in `OUT_DIR`.
fn kept_name(entry: &str, image: &Image) -> String {
    format!("{entry}.{}.lzma", image.name())
}

/// Copies a file so that its name appears atomically, with complete contents.
fn put(from: &Path, to: &Path) -> io::Result<()> {
    let part = to.with_extension(format!("part{}", std::process::id()));
    fs::copy(from, &part)?;
    fs::rename(&part, to)
}

/// Returns the cache of compiled kernels: the checkout's target directory, if there is one. Each
/// profile, feature set and target directory has an `OUT_DIR` of its own, so a cache there would
/// serve only one of them.
fn cache_directory() -> PathBuf {
    let target = manifest().join("target");
    let cache = target.join("kernels");
    if target.is_dir() && fs::create_dir_all(&cache).is_ok() {
        cache
    } else {
        out()
    }
}

/// Writes a table without kernels; `why` states the reason.
fn host_only(why: &str) -> Result<(), String> {
    write_table(&format!(
        "/// Whether kernels were built.\npub const STATE: State = State::Missing {{ why: {why:?} }};\n\
         static FILES: &[KernelFile] = &[];\n"
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

/// Returns the value of an environment variable that is set and not empty.
fn variable(name: &str) -> Result<Option<String>, String> {
    match env::var(name) {
        Ok(value) => Ok(Some(value.trim().to_string()).filter(|value| !value.is_empty())),
        Err(env::VarError::NotPresent) => Ok(None),
        Err(env::VarError::NotUnicode(_)) => Err(format!("{name} is not UTF-8")),
    }
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}
