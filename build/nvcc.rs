//! Finds nvcc and parses the architectures to compile for.

use super::{manifest, variable};
use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The oldest supported compiler version: it must support C++17 and sm_90.
const OLDEST_NVCC: (u32, u32) = (12, 0);
/// The lowest supported architecture: older ones have no bf16 arithmetic and no asynchronous copy.
const LOWEST_ARCH: u32 = 80;

/// An architecture to compile for: machine code, PTX, or both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    arch: String,
    code: bool,
    ptx: bool,
}

impl From<(&str, bool, bool)> for Target {
    fn from((arch, code, ptx): (&str, bool, bool)) -> Target {
        let arch = arch.into();
        Target { arch, code, ptx }
    }
}

impl Target {
    /// Returns the images that the compiler makes for this target, PTX first: it is compiled to
    /// the machine code.
    pub fn images(&self) -> Vec<Image> {
        let image = |kind| Image {
            arch: self.arch.clone(),
            kind,
        };
        let mut images = Vec::new();
        if self.ptx {
            images.push(image(Kind::Ptx));
        }
        if self.code {
            images.push(image(Kind::Code));
        }
        images
    }

    /// Returns the names of the target's images, such as `sm_80 compute_80`.
    pub fn names(&self) -> String {
        let names = self.images().into_iter().rev().map(|image| image.name());
        names.collect::<Vec<_>>().join(" ")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Machine code: a cubin.
    Code,
    /// PTX, which the driver compiles.
    Ptx,
}

/// An output of the compiler: code of one kind for one architecture.
pub struct Image {
    arch: String,
    pub kind: Kind,
}

impl Image {
    /// Returns the compiler's name of the image's target: `sm_90`, `compute_80`.
    pub fn name(&self) -> String {
        let arch = &self.arch;
        match self.kind {
            Kind::Code => format!("sm_{arch}"),
            Kind::Ptx => format!("compute_{arch}"),
        }
    }

    /// Returns the name of a file with this image. The compiler goes by its extension.
    pub fn file_name(&self) -> String {
        match self.kind {
            Kind::Code => format!("{}.cubin", self.name()),
            Kind::Ptx => format!("{}.ptx", self.name()),
        }
    }

    /// Returns the compiler options that make this image.
    pub fn flags(&self) -> [String; 2] {
        let gencode = format!("-gencode=arch=compute_{},code={}", self.arch, self.name());
        let kind = match self.kind {
            Kind::Code => "-cubin",
            Kind::Ptx => "-ptx",
        };
        [gencode, kind.into()]
    }

    /// Returns the Rust source of the image's `ImageTarget` in `src/gpu/kernels/image.rs`.
    pub fn source(&self) -> String {
        let digits = self.arch.trim_end_matches(['a', 'f']);
        let number: u32 = digits.parse().unwrap_or(0);
        let scope = match &self.arch[digits.len()..] {
            "a" => "Exact",
            "f" => "Family",
            _ => "Newer",
        };
        format!(
            "ImageTarget {{ kind: ImageKind::{:?}, capability: ({}, {}), scope: ImageScope::{scope} }}",
            self.kind,
            number / 10,
            number % 10
        )
    }
}

/// Returns the default targets. A release gets all supported architectures. Other builds get one
/// architecture, for short builds, and PTX for other GPUs.
pub fn default_targets() -> Vec<Target> {
    if env::var("PROFILE").is_ok_and(|profile| profile == "release") {
        return release_targets();
    }
    [("90", true, false), ("80", false, true)]
        .map(Target::from)
        .into()
}

fn release_targets() -> Vec<Target> {
    [
        ("80", true, true),
        ("90", true, false),
        ("100", true, false),
    ]
    .map(Target::from)
    .into()
}

/// Parses a `CINCH_CUDA_ARCHS` value such as `80+ptx,90`.
pub fn parse_archs(text: &str) -> Result<Vec<Target>, String> {
    if text == "release" {
        return Ok(release_targets());
    }
    let wrong = |why: &str| {
        format!(
            "CINCH_CUDA_ARCHS={text:?}: {why}; it takes numbers from {LOWEST_ARCH}, with commas \
             between, each with +ptx behind it to keep its PTX too: 90, or 80+ptx,90; or release"
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

/// A compiler that was found, and its version.
pub struct Nvcc {
    pub path: PathBuf,
    pub version: String,
    archs: Vec<String>,
}

impl Nvcc {
    /// Searches for a compiler in `NVCC`, `CUDA_HOME`, `PATH` and `target/cuda` (filled by
    /// `scripts/setup`), in this order. If a variable names a place without nvcc, this is an error.
    pub fn find() -> Result<Nvcc, String> {
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
                // PATH is watched only if no compiler was found. Otherwise the library would be
                // rebuilt from each shell with another PATH.
                println!("cargo:rerun-if-env-changed=PATH");
                Err("there is no nvcc in NVCC, CUDA_HOME, PATH or target/cuda".into())
            }
        }
    }

    fn at(path: &Path) -> Result<Nvcc, String> {
        let text = output(Command::new(path).arg("--version"))?;
        // Parses the version from a line such as "Cuda compilation tools, release 13.0, V13.0.88".
        let version = text
            .split_once(", V")
            .and_then(|(_, rest)| rest.split_whitespace().next())
            .ok_or_else(|| format!("{} prints no version: {text}", path.display()))?;
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
            archs,
        })
    }

    fn knows(&self, target: &Target) -> bool {
        // nvcc's list omits the variants of an architecture, such as 90a.
        let arch = target.arch.trim_end_matches(['a', 'f']);
        self.archs.iter().any(|known| known == arch)
    }

    /// Returns `targets`, or an error that names the target that this compiler lacks.
    pub fn check(&self, targets: Vec<Target>) -> Result<Vec<Target>, String> {
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

    /// Returns the targets that this compiler supports, and warns of the others.
    pub fn known(&self, targets: Vec<Target>) -> Vec<Target> {
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

/// Runs a command and returns its output, or an error if it fails.
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
