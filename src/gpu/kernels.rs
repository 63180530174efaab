//! The kernels that the build embedded, and whether it did.

use super::{Context, Module};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::cuda::CuContext;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Whether kernels were built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// They were.
    Built {
        /// Version of the compiler.
        nvcc: &'static str,
        /// `sm_90` is machine code, `compute_80` is code that the driver compiles for newer GPUs.
        archs: &'static str,
    },
    /// They were not: this build works on host memory alone.
    Missing {
        /// The reason, as a clause.
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

/// What became of one file of `kernels/entry/`.
#[derive(Clone, Copy, Debug)]
pub struct Fatbin {
    /// The file's name without ending.
    pub name: &'static str,
    /// A fat binary: code for several kinds of GPU.
    pub bytes: &'static [u8],
}

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// All of them, in order of their names; none if [`STATE`] is [`State::Missing`].
pub fn fatbins() -> &'static [Fatbin] {
    FATBINS
}

/// The modules that are loaded, by context and name; one table beside each driver.
#[derive(Debug, Default)]
pub(super) struct Cache(Mutex<HashMap<(CuContext, &'static str), Weak<Module>>>);

/// Loads the kernels of `kernels/entry/NAME.cu` on a GPU, or returns them where somebody in this
/// process still has them there.
///
/// # Errors
/// Unsupported, with the reason, if this build has no kernels; internal if there is no such file;
/// those of [`Module::load`].
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
    let key = (context.handle(), fatbin.name);
    let cache = || {
        // A panic elsewhere leaves the table whole.
        let cache = &context.driver().modules.0;
        cache.lock().unwrap_or_else(PoisonError::into_inner)
    };
    if let Some(module) = cache().get(&key).and_then(Weak::upgrade) {
        return Ok(module);
    }
    // Without the lock, so that several GPUs load at once; two that load the same cost time only.
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
    fn what_was_built_is_embedded() {
        match STATE {
            State::Built { nvcc, archs } => {
                assert!(nvcc.starts_with(|c: char| c.is_ascii_digit()), "{nvcc}");
                assert!(
                    archs.contains("sm_") || archs.contains("compute_"),
                    "{archs}"
                );
                let probe = fatbins().iter().find(|fatbin| fatbin.name == "probe");
                let bytes = probe.expect("kernels/entry/probe.cu").bytes;
                // The magic number of a fat binary.
                assert_eq!(bytes[..4], 0xba55_ed50_u32.to_le_bytes());
                assert!(bytes.as_ptr().addr().is_multiple_of(64));
            }
            State::Missing { why } => {
                assert!(fatbins().is_empty() && !why.is_empty());
            }
        }
    }
}
