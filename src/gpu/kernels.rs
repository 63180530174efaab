//! Kernels that the build embedded in this library.

mod image;

pub use image::{
    ImageKind, ImageScope, ImageTarget, KernelImage, KernelPack, PackReader, UnpackedImage, choose,
};

use super::{Context, Device, Module};
use crate::error::{Error, ErrorKind, Result};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Outcome of building the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The build embedded kernels.
    Built {
        /// Version of the nvcc that compiled the kernels.
        nvcc: &'static str,
        /// Targets: `sm_90` is machine code, `compute_80` is PTX, which the driver compiles for newer GPUs.
        archs: &'static str,
        /// Hash of all kernels.
        hash: u64,
    },
    /// The build has no kernels, so it works on host memory alone.
    Missing {
        /// Why the build has no kernels, as a clause for error messages.
        why: &'static str,
    },
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            State::Built { nvcc, archs, .. } => write!(f, "built by nvcc {nvcc} for {archs}"),
            State::Missing { why } => write!(f, "not built: {why}"),
        }
    }
}

/// The compiled form of one file of `kernels/entry/`.
#[derive(Clone, Copy, Debug)]
pub struct KernelFile {
    /// Name of the file without its extension.
    pub name: &'static str,
    /// Number of its group: for each target, the images of a group's files are in one pack, in the order of [`files`].
    pub group: usize,
    /// Machine code and PTX of the build's targets.
    pub images: &'static [KernelImage],
}

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// Returns all compiled files in the order of their names; none if [`STATE`] is [`State::Missing`].
pub fn files() -> &'static [KernelFile] {
    FILES
}

/// Returns the image of `file` that a GPU runs. `archs` names the targets of the build.
///
/// # Errors
/// Unsupported, with the GPU and the targets, if it can run none.
fn image_for<'a>(file: &'a KernelFile, device: &Device, archs: &str) -> Result<&'a KernelImage> {
    let (major, minor) = device.compute_capability;
    choose(file.images, device.compute_capability).ok_or_else(|| {
        Error::new(
            ErrorKind::Unsupported,
            format!(
                "{device} has compute capability {major}.{minor}, and this build of cinch has kernels for {archs} \
                 only; CINCH_CUDA_ARCHS={major}{minor} builds them for it"
            ),
        )
    })
}

/// Loaded modules, by the address of their context's handle and by name. Each [`Driver`](super::Driver) has
/// one cache.
#[derive(Debug, Default)]
pub(super) struct Cache(Mutex<HashMap<(usize, &'static str), Weak<Module>>>);

/// Loads the kernels of `kernels/entry/NAME.cu` on a GPU, or returns the module that this process still has
/// there.
///
/// # Errors
/// Unsupported, with the reason, if this build has no kernels, or none for this GPU; internal if there is no
/// such file; the errors of [`Module::load`].
pub fn load(context: &Arc<Context>, name: &str) -> Result<Arc<Module>> {
    let archs = match STATE {
        State::Built { archs, .. } => archs,
        State::Missing { why } => {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "this build of cinch has no GPU kernels: {why}; see \"Building with CUDA\" in \
                     README.md"
                ),
            ));
        }
    };
    let file = files()
        .iter()
        .find(|file| file.name == name)
        .ok_or_else(|| Error::internal(format!("no file kernels/entry/{name}.cu was built")))?;
    let modules = load_files(context, &[file], archs)?;
    let module = modules.into_iter().next();
    module.ok_or_else(|| Error::internal(format!("{name} was not loaded")))
}

/// Loads some files of one group, in the order of [`files`], as [`load`] does, and unpacks the group once.
///
/// # Errors
/// As for [`load`].
pub fn load_group(
    context: &Arc<Context>,
    files: &[&'static KernelFile],
) -> Result<Vec<Arc<Module>>> {
    match STATE {
        State::Built { archs, .. } => load_files(context, files, archs),
        State::Missing { .. } => Ok(Vec::new()),
    }
}

/// Divides the files for which `wanted` is true into parts, which threads load side by side: groups of machine code, and
/// single files of PTX, which the driver compiles for longer than it takes to unpack their group.
pub fn parts(context: &Context, wanted: impl Fn(&str) -> bool) -> Vec<Vec<&'static KernelFile>> {
    let mut parts: Vec<Vec<&KernelFile>> = Vec::new();
    for file in files().iter().filter(|file| wanted(file.name)) {
        let image = choose(file.images, context.device().compute_capability);
        let is_code = image.is_some_and(|image| image.target.kind == ImageKind::Code);
        match parts.last_mut() {
            Some(part) if is_code && part[0].group == file.group => part.push(file),
            _ => parts.push(vec![file]),
        }
    }
    parts
}

/// Loads files of one group, in their order. `archs` names the targets of the build.
fn load_files(
    context: &Arc<Context>,
    files: &[&'static KernelFile],
    archs: &str,
) -> Result<Vec<Arc<Module>>> {
    let cache = || {
        // A panic of another thread cannot leave a partial change: each is one insertion or removal.
        let cache = &context.driver().modules.0;
        cache.lock().unwrap_or_else(PoisonError::into_inner)
    };
    let mut reader: Option<PackReader> = None;
    let mut modules = Vec::with_capacity(files.len());
    for file in files {
        let key = (context.handle().addr(), file.name);
        if let Some(module) = cache().get(&key).and_then(Weak::upgrade) {
            modules.push(module);
            continue;
        }
        // The module is loaded without the lock, so that several GPUs load at the same time. Two threads that
        // load one module only lose time.
        let image = image_for(file, context.device(), archs)?;
        let mut unpack = || match &mut reader {
            Some(reader) => reader.unpack(image),
            None => reader.insert(PackReader::new(image)?).unpack(image),
        };
        let unpacked = unpack().map_err(|error| error.context(file.name))?;
        let module = Module::load(context, file.name, unpacked.bytes())?;
        let mut cache = cache();
        cache.retain(|_, module| module.strong_count() > 0);
        cache.insert(key, Arc::downgrade(&module));
        modules.push(module);
    }
    Ok(modules)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::Driver;
    use crate::sys::cuda::mock::MockMachine;
    use std::ffi::CStr;

    #[test]
    fn gpu_without_image_is_named_with_targets_of_build() {
        let driver = Driver::with(Box::new(MockMachine::new(1).process())).unwrap();
        let file = KernelFile {
            name: "probe",
            group: 0,
            images: &[],
        };
        let device = Device::at(&driver, 0).unwrap();
        let error = image_for(&file, &device, "sm_100 compute_100").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        for part in ["GPU 0 (Simulated GPU", "9.0", "sm_100 compute_100"] {
            assert!(error.message().contains(part), "{error}");
        }
    }

    #[test]
    fn parts_have_each_wanted_file_once_and_one_group() {
        let driver = Driver::with(Box::new(MockMachine::new(1).process())).unwrap();
        let context = Context::primary(&Device::at(&driver, 0).unwrap()).unwrap();
        let is_wanted = |name: &str| name != "probe";
        let parts = parts(&context, is_wanted);
        for part in &parts {
            assert!(!part.is_empty() && part.iter().all(|file| file.group == part[0].group));
        }
        let found: Vec<&str> = parts.iter().flatten().map(|file| file.name).collect();
        let names = files().iter().map(|file| file.name);
        let wanted: Vec<&str> = names.filter(|name| is_wanted(name)).collect();
        assert_eq!(found, wanted);
    }

    #[test]
    fn built_kernels_are_embedded() {
        match STATE {
            State::Built { nvcc, archs, .. } => {
                assert!(nvcc.starts_with(|c: char| c.is_ascii_digit()), "{nvcc}");
                assert!(
                    archs.contains("sm_") || archs.contains("compute_"),
                    "{archs}"
                );
                for file in files() {
                    let targets: Vec<String> = file
                        .images
                        .iter()
                        .map(|image| image.target.to_string())
                        .collect();
                    let mut wanted: Vec<&str> = archs.split(' ').collect();
                    wanted.sort_by_key(|name| targets.iter().position(|target| target == name));
                    assert_eq!(targets, wanted, "{}", file.name);
                    for image in file.images {
                        let unpacked = image.unpack().unwrap();
                        match image.target.kind {
                            ImageKind::Code => assert!(unpacked.bytes().starts_with(b"\x7fELF")),
                            ImageKind::Ptx => {
                                let text = CStr::from_bytes_with_nul(unpacked.bytes()).unwrap();
                                assert!(text.to_str().unwrap().contains(".entry"));
                            }
                        }
                    }
                }
                assert!(files().iter().any(|file| file.name == "probe"));
            }
            State::Missing { why } => {
                assert!(files().is_empty() && !why.is_empty());
            }
        }
    }
}
