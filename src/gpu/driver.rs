//! The driver: loaded once for the process, or a simulation of it.

use super::{Device, ipc, kernels};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::cuda::{Api, CuResult, Loaded, available_since};
use crate::sys::fork_safe::ForkSafeOnce;
use crate::sys::log::{Level, line};
use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

/// The CUDA driver, initialised.
pub struct Driver {
    api: Box<dyn Api>,
    version: u32,
    identity: u64,
    pub(super) ipc: ipc::Registry,
    pub(super) modules: kernels::Cache,
}

/// The driver's library.
const LIBRARY: &CStr = c"libcuda.so.1";

impl Driver {
    /// The driver of this machine, loaded by the first call of the process; later calls return
    /// what the first one found.
    ///
    /// # Errors
    /// Unsupported if there is no driver, or it is too old, or it finds no device; system if it
    /// does not start.
    pub fn load() -> Result<Arc<Driver>> {
        static DRIVER: ForkSafeOnce<Result<Arc<Driver>>> = ForkSafeOnce::new();
        DRIVER
            .get_or_init(|| Driver::with(Box::new(Loaded::open(LIBRARY)?)))
            .clone()
    }

    /// The driver of this machine, if anybody in this process uses it: where nobody does, nothing is
    /// in a GPU's memory, and asking is not worth starting it.
    pub fn in_use() -> Option<Arc<Driver>> {
        let open = Loaded::is_open(LIBRARY);
        open.then(Driver::load).and_then(Result::ok)
    }

    /// The driver behind `api`.
    ///
    /// # Errors
    /// Those of its initialisation.
    pub fn with(api: Box<dyn Api>) -> Result<Arc<Driver>> {
        let mut driver = Driver {
            api,
            version: 0,
            // Seeded by the system for each process.
            identity: RandomState::new().hash_one("cinch driver"),
            ipc: ipc::Registry::default(),
            modules: kernels::Cache::default(),
        };
        // SAFETY: no arguments but flags, which must be 0.
        driver.check("cuInit", unsafe { driver.api.cuInit(0) })?;
        let mut version: c_int = 0;
        // SAFETY: writes one integer.
        driver.check("cuDriverGetVersion", unsafe {
            driver.api.cuDriverGetVersion(&mut version)
        })?;
        driver.version = version.unsigned_abs();
        Ok(Arc::new(driver))
    }

    /// The functions, for whoever keeps their contracts.
    pub(crate) fn api(&self) -> &dyn Api {
        &*self.api
    }

    /// The newest CUDA version that the driver supports, as 1000 * major + 10 * minor.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// A number that no other process's driver has: a process number would come again, and is
    /// another one in each container.
    pub(super) fn identity(&self) -> u64 {
        self.identity
    }

    /// The GPUs that this process may use, in the driver's order.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn devices(self: &Arc<Driver>) -> Result<Vec<Device>> {
        (0..self.device_count()?)
            .map(|ordinal| Device::at(self, ordinal))
            .collect()
    }

    /// Whether the driver has ended, as it does with the process before static objects of the program do,
    /// and with it all that ran.
    pub fn has_ended(&self) -> bool {
        let mut count: c_int = 0;
        // SAFETY: writes one integer.
        let result = unsafe { self.api.cuDeviceGetCount(&mut count) };
        result == CuResult::DEINITIALIZED
    }

    /// How many GPUs this process may use.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn device_count(&self) -> Result<u32> {
        let mut count: c_int = 0;
        // SAFETY: writes one integer.
        self.check("cuDeviceGetCount", unsafe {
            self.api.cuDeviceGetCount(&mut count)
        })?;
        Ok(count.unsigned_abs())
    }

    /// `Ok` for success, otherwise the error of `function`, with the driver's own words.
    pub(crate) fn check(&self, function: &str, result: CuResult) -> Result<()> {
        match result {
            CuResult::SUCCESS => Ok(()),
            failed => Err(self.error(function, failed)),
        }
    }

    /// For destructors, which cannot fail: a line in the log. A process that ends may already have
    /// lost the driver, and its memory with it: that is no news.
    pub(crate) fn log(&self, function: &str, result: CuResult) {
        if !matches!(
            result,
            CuResult::SUCCESS | CuResult::DEINITIALIZED | CuResult::CONTEXT_IS_DESTROYED
        ) {
            let error = self.error(function, result);
            line(Level::Warn, format_args!("while cleaning up: {error}"));
        }
    }

    fn error(&self, function: &str, result: CuResult) -> Error {
        if result == CuResult::FUNCTION_MISSING {
            let (major, minor) = (self.version / 1000, self.version % 1000 / 10);
            return Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the driver ({}, CUDA {major}.{minor}) is too old for {function}, which came \
                     with CUDA {}",
                    self.api.source(),
                    available_since(function)
                ),
            );
        }
        let name = self.text(result, false);
        let text = self.text(result, true);
        Error::new(
            kind(result),
            format!("{function}: {name} ({}): {text}", result.0),
        )
    }

    /// The driver's name of a code, or its explanation.
    fn text(&self, result: CuResult, explain: bool) -> String {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: both write one pointer, to a C string that lives as long as the driver.
        let asked = unsafe {
            if explain {
                self.api.cuGetErrorString(result, &mut text)
            } else {
                self.api.cuGetErrorName(result, &mut text)
            }
        };
        if asked != CuResult::SUCCESS || text.is_null() {
            return "a code that the driver has no words for".into();
        }
        // SAFETY: as above.
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned()
    }
}

/// Where a failure comes from, as far as its code says.
fn kind(result: CuResult) -> ErrorKind {
    match result {
        CuResult::INVALID_VALUE | CuResult::INVALID_DEVICE => ErrorKind::InvalidArgument,
        CuResult::INVALID_CONTEXT
        | CuResult::INVALID_HANDLE
        | CuResult::HOST_MEMORY_ALREADY_REGISTERED
        | CuResult::HOST_MEMORY_NOT_REGISTERED => ErrorKind::InvalidUsage,
        CuResult(900..=909) => ErrorKind::InvalidUsage, // stream capture
        CuResult::NO_DEVICE
        | CuResult::STUB_LIBRARY
        | CuResult::NO_BINARY_FOR_GPU
        | CuResult::PEER_ACCESS_UNSUPPORTED
        | CuResult::UNSUPPORTED_PTX_VERSION
        | CuResult::NOT_SUPPORTED
        | CuResult::SYSTEM_DRIVER_MISMATCH => ErrorKind::Unsupported,
        _ => ErrorKind::System,
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver")
            .field("source", &self.api.source())
            .field("version", &self.version)
            .finish()
    }
}
