//! Kernels that the build embedded in this library.

use super::{Context, Module};
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
            State::Built { nvcc, archs } => write!(f, "built by nvcc {nvcc} for {archs}"),
            State::Missing { why } => write!(f, "not built: {why}"),
        }
    }
}

/// The compiled form of one file of `kernels/entry/`.
#[derive(Clone, Copy, Debug)]
pub struct Fatbin {
    /// Name of the file without its extension.
    pub name: &'static str,
    /// The fat binary: code for several architectures.
    pub bytes: &'static [u8],
}

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// Returns all fat binaries in the order of their names; none if [`STATE`] is [`State::Missing`].
pub fn fatbins() -> &'static [Fatbin] {
    FATBINS
}

/// Loaded modules, by the address of their context's handle and by name. Each [`Driver`](super::Driver) has
/// one cache.
#[derive(Debug, Default)]
pub(super) struct Cache(Mutex<HashMap<(usize, &'static str), Weak<Module>>>);

/// Loads the kernels of `kernels/entry/NAME.cu` on a GPU, or returns the module that this process still has
/// there.
///
/// # Errors
/// Unsupported, with the reason, if this build has no kernels; internal if there is no such file; the errors of
/// [`Module::load`].
pub fn load(context: &Arc<Context>, name: &str) -> Result<Arc<Module>> {
    if let State::Missing { why } = STATE {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "this build of cinch has no GPU kernels: {why}; see \"Building with CUDA\" in README.md"
            ),
        ));
    }
    let fatbin = fatbins()
        .iter()
        .find(|fatbin| fatbin.name == name)
        .ok_or_else(|| Error::internal(format!("no file kernels/entry/{name}.cu was built")))?;
    let key = (context.handle().addr(), fatbin.name);
    let cache = || {
        // A panic of another thread cannot leave a partial change: each is one insertion or removal.
        let cache = &context.driver().modules.0;
        cache.lock().unwrap_or_else(PoisonError::into_inner)
    };
    if let Some(module) = cache().get(&key).and_then(Weak::upgrade) {
        return Ok(module);
    }
    // The module is loaded without the lock, so that several GPUs load at the same time. Two threads that
    // load one module only lose time.
    let module = Module::load(context, name, fatbin.bytes)?;
    let mut cache = cache();
    cache.retain(|_, module| module.strong_count() > 0);
    cache.insert(key, Arc::downgrade(&module));
    Ok(module)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_kernels_are_embedded() {
        match STATE {
            State::Built { nvcc, archs } => {
                assert!(nvcc.starts_with(|c: char| c.is_ascii_digit()), "{nvcc}");
                assert!(
                    archs.contains("sm_") || archs.contains("compute_"),
                    "{archs}"
                );
                let probe = fatbins().iter().find(|fatbin| fatbin.name == "probe");
                let bytes = probe.expect("kernels/entry/probe.cu").bytes;
                // Every CUDA fat binary begins with this magic number.
                assert_eq!(bytes[..4], 0xba55_ed50_u32.to_le_bytes());
                assert!(bytes.as_ptr().addr().is_multiple_of(64));
            }
            State::Missing { why } => {
                assert!(fatbins().is_empty() && !why.is_empty());
            }
        }
    }
}
