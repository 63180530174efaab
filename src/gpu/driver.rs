//! The driver, loaded once per process, or its mock.

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

/// Name of the driver's library.
const LIBRARY: &CStr = c"libcuda.so.1";

impl Driver {
    /// Loads and initialises the machine's driver. The first call of the process does the work; later calls
    /// return its outcome.
    ///
    /// # Errors
    /// Unsupported if the driver is missing or too old, or finds no device; system if it does not start.
    pub fn load() -> Result<Arc<Driver>> {
        static DRIVER: ForkSafeOnce<Result<Arc<Driver>>> = ForkSafeOnce::new();
        DRIVER
            .get_or_init(|| Driver::with(Box::new(Loaded::open(LIBRARY)?)))
            .clone()
    }

    /// Returns the driver if this process has opened its library already. Otherwise no address of the process
    /// can be a GPU's, and starting the driver would only cost time.
    pub fn in_use() -> Option<Arc<Driver>> {
        let open = Loaded::is_open(LIBRARY);
        open.then(Driver::load).and_then(Result::ok)
    }

    /// Initialises the driver behind `api`.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn with(api: Box<dyn Api>) -> Result<Arc<Driver>> {
        let mut driver = Driver {
            api,
            version: 0,
            // The system seeds the hash for each process.
            identity: RandomState::new().hash_one("cinch driver"),
            ipc: ipc::Registry::default(),
            modules: kernels::Cache::default(),
        };
        // SAFETY: the only argument is flags, which must be 0.
        driver.check("cuInit", unsafe { driver.api.cuInit(0) })?;
        let mut version: c_int = 0;
        // SAFETY: the driver writes one integer to a local variable.
        driver.check("cuDriverGetVersion", unsafe {
            driver.api.cuDriverGetVersion(&mut version)
        })?;
        driver.version = version.unsigned_abs();
        Ok(Arc::new(driver))
    }

    /// Returns the driver's functions.
    pub(crate) fn api(&self) -> &dyn Api {
        &*self.api
    }

    /// Returns the newest CUDA version that the driver supports, as 1000 * major + 10 * minor.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Returns a random number that identifies this process's driver. A process id would not do: systems reuse
    /// ids, and every container counts its own.
    pub(super) fn identity(&self) -> u64 {
        self.identity
    }

    /// Returns the GPUs that this process may use, in the driver's order.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn devices(self: &Arc<Driver>) -> Result<Vec<Device>> {
        (0..self.device_count()?)
            .map(|ordinal| Device::at(self, ordinal))
            .collect()
    }

    /// Returns whether the driver has shut down, and all GPU work with it. At process exit it shuts down
    /// before the program's static objects are destroyed.
    pub fn has_ended(&self) -> bool {
        let mut count: c_int = 0;
        // SAFETY: the driver writes one integer to a local variable.
        let result = unsafe { self.api.cuDeviceGetCount(&mut count) };
        result == CuResult::DEINITIALIZED
    }

    /// Returns the number of GPUs that this process may use.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn device_count(&self) -> Result<u32> {
        let mut count: c_int = 0;
        // SAFETY: the driver writes one integer to a local variable.
        self.check("cuDeviceGetCount", unsafe {
            self.api.cuDeviceGetCount(&mut count)
        })?;
        Ok(count.unsigned_abs())
    }

    /// Turns a result code of `function` into an error with the driver's name and explanation of the code.
    pub(crate) fn check(&self, function: &str, result: CuResult) -> Result<()> {
        match result {
            CuResult::SUCCESS => Ok(()),
            failed => Err(self.error(function, failed)),
        }
    }

    /// Logs a failure in a destructor, which cannot return it. At process exit the driver may have shut down
    /// and freed everything already, so that outcome is not logged.
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

    /// Returns the driver's name of a code, or its explanation.
    fn text(&self, result: CuResult, explain: bool) -> String {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: both functions write one pointer, to a C string that lasts until the driver is unloaded,
        // which is never.
        let queried = unsafe {
            if explain {
                self.api.cuGetErrorString(result, &mut text)
            } else {
                self.api.cuGetErrorName(result, &mut text)
            }
        };
        if queried != CuResult::SUCCESS || text.is_null() {
            return "a code that the driver has no words for".into();
        }
        // SAFETY: the driver returned a C string that is never freed.
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned()
    }
}

/// Returns the kind of error that a code belongs to.
fn kind(result: CuResult) -> ErrorKind {
    match result {
        CuResult::INVALID_VALUE | CuResult::INVALID_DEVICE => ErrorKind::InvalidArgument,
        CuResult::INVALID_CONTEXT
        | CuResult::INVALID_HANDLE
        | CuResult::HOST_MEMORY_ALREADY_REGISTERED
        | CuResult::HOST_MEMORY_NOT_REGISTERED => ErrorKind::InvalidUsage,
        capture if capture.is_capture_error() => ErrorKind::InvalidUsage,
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
