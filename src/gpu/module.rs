//! Modules, their kernels, and launches.

use super::{Context, Stream};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::cuda::{
    CUfunc_st, CUfunction, CUfunction_attribute, CUjit_option, CUlaunchConfig, CUmod_st, CUmodule,
    CuResult, Handle, programmatic_launch,
};
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::sync::Arc;

/// Largest number of bytes of a kernel's parameter.
pub const MAX_ARGUMENT_BYTES: usize = 4096;

/// First bytes of a cubin, which is an ELF file.
const ELF_MAGIC: &[u8] = b"\x7fELF";

/// Oldest PTX version of kernels that wait for earlier work of their stream, as a programmatic launch
/// requires.
const PROGRAMMATIC_PTX_VERSION: u32 = 90;
/// Oldest driver that keeps programmatic launches in graphs.
const PROGRAMMATIC_DRIVER_VERSION: u32 = 12_030;

/// When a kernel starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launch {
    /// Starts after all earlier work of the stream has ended.
    Serialized,
    /// Starts while earlier work is still ending (programmatic dependent launch), if the kernel and the
    /// driver support it. On an H200 this saves 0.2 us per small kernel in a graph, and 1 us in a stream.
    Programmatic,
}

/// Extents of a grid or of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dim3 {
    /// Extent in x, whose index changes fastest.
    pub x: u32,
    /// Extent in y.
    pub y: u32,
    /// Extent in z, whose index changes slowest.
    pub z: u32,
}

impl From<u32> for Dim3 {
    fn from(x: u32) -> Dim3 {
        Dim3 { x, y: 1, z: 1 }
    }
}

/// A CUDA module: code that is loaded on one GPU.
pub struct Module {
    context: Arc<Context>,
    handle: Handle<CUmod_st>,
    name: String,
}

impl Module {
    /// Loads all kernels of an image: a cubin, or PTX with a null byte at its end.
    ///
    /// Otherwise the driver loads a kernel at its first launch, after all other kernels have ended. It waits
    /// forever if a running kernel waits for that launch.
    ///
    /// # Errors
    /// Internal if the image is neither; unsupported, with the GPU, if the image is not for it; the driver's
    /// errors, with its compiler's output.
    pub fn load(context: &Arc<Context>, name: &str, image: &[u8]) -> Result<Arc<Module>> {
        if !image.starts_with(ELF_MAGIC) && image.last() != Some(&0) {
            return Err(Error::internal(format!(
                "kernels {name} are neither a cubin nor PTX that ends with a null byte"
            )));
        }
        let _bound = context.bind()?;
        let driver = context.driver();
        let mut log = [0u8; 2048];
        let (mut names, mut values) = log_options(&mut log);
        let mut handle: CUmodule = std::ptr::null_mut();
        // SAFETY: the image is PTX, whose null byte the check above found, or a cubin, whose ELF header and
        // section table state its length; `PackReader::unpack` returns as many bytes as the compiler wrote.
        // The options describe `log`, which outlives the call.
        let result = unsafe {
            driver.api().cuModuleLoadDataEx(
                &mut handle,
                image.as_ptr().cast(),
                names.len() as c_uint,
                names.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        driver
            .check("cuModuleLoadDataEx", result)
            .map_err(|error| {
                let output = String::from_utf8_lossy(
                    log.split(|&byte| byte == 0).next().unwrap_or_default(),
                );
                let (major, minor) = context.device().compute_capability;
                let output = match output.trim() {
                    "" => String::new(),
                    output => format!(" ({output})"),
                };
                error.context(format!(
                    "loading kernels {name} on {}, sm_{major}{minor}{output}",
                    context.device()
                ))
            })?;
        let module = Arc::new(Module {
            context: context.clone(),
            handle: Handle(handle),
            name: name.to_string(),
        });
        module.load_all()?;
        Ok(module)
    }

    /// Returns the context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Returns the kernel `name`.
    ///
    /// # Errors
    /// Internal if the module has no such kernel; the driver's errors.
    pub fn function(self: &Arc<Module>, name: &str) -> Result<Function> {
        let _bound = self.context.bind()?;
        let driver = self.context.driver();
        let text = CString::new(name)
            .map_err(|_| Error::invalid_argument(format!("{name:?} is no kernel's name")))?;
        let mut handle: CUfunction = std::ptr::null_mut();
        // SAFETY: `self` keeps the module, and the name is a C string; the driver writes one handle to a
        // local variable.
        let result = unsafe {
            driver
                .api()
                .cuModuleGetFunction(&mut handle, self.handle.0, text.as_ptr())
        };
        if result == CuResult::NOT_FOUND {
            return Err(Error::internal(format!(
                "kernels {} have no {name}",
                self.name
            )));
        }
        driver
            .check("cuModuleGetFunction", result)
            .map_err(|error| error.context(name))?;
        self.load_now(handle)?;
        let number = |attribute| self.attribute(handle, attribute);
        Ok(Function {
            module: self.clone(),
            handle: Handle(handle),
            name: name.to_string(),
            registers: number(CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local_bytes: number(CUfunction_attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            shared_bytes: number(CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            max_threads: number(CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
            can_start_early: number(CUfunction_attribute::CU_FUNC_ATTRIBUTE_PTX_VERSION)?
                >= PROGRAMMATIC_PTX_VERSION
                && driver.version() >= PROGRAMMATIC_DRIVER_VERSION,
        })
    }

    /// Loads every kernel if the driver can list them (CUDA 12.4). With an older driver, [`Module::function`]
    /// loads each kernel.
    fn load_all(&self) -> Result<()> {
        let driver = self.context.driver();
        let mut count: c_uint = 0;
        // SAFETY: `self` keeps the module; the driver writes one integer to a local variable.
        let queried = unsafe {
            driver
                .api()
                .cuModuleGetFunctionCount(&mut count, self.handle.0)
        };
        if queried == CuResult::FUNCTION_MISSING {
            return Ok(());
        }
        driver.check("cuModuleGetFunctionCount", queried)?;
        let mut functions = vec![std::ptr::null_mut(); count as usize];
        // SAFETY: `self` keeps the module; the driver writes at most `count` handles to the vector.
        driver.check("cuModuleEnumerateFunctions", unsafe {
            driver
                .api()
                .cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, self.handle.0)
        })?;
        functions
            .into_iter()
            .try_for_each(|function| self.load_now(function))
    }

    /// Makes the driver load one kernel now.
    fn load_now(&self, function: CUfunction) -> Result<()> {
        let driver = self.context.driver();
        // SAFETY: the function belongs to the module, which `self` keeps.
        match unsafe { driver.api().cuFuncLoad(function) } {
            // A driver without `cuFuncLoad` loads a kernel when the kernel's attributes are
            // queried.
            CuResult::FUNCTION_MISSING => self
                .attribute(
                    function,
                    CUfunction_attribute::CU_FUNC_ATTRIBUTE_BINARY_VERSION,
                )
                .map(drop),
            result => driver.check("cuFuncLoad", result),
        }
    }

    /// Returns an attribute of a kernel.
    fn attribute(&self, function: CUfunction, attribute: CUfunction_attribute) -> Result<u32> {
        let driver = self.context.driver();
        let mut value: c_int = 0;
        // SAFETY: the function belongs to the module, which `self` keeps; the driver writes one integer to a
        // local variable.
        driver.check("cuFuncGetAttribute", unsafe {
            driver
                .api()
                .cuFuncGetAttribute(&mut value, attribute, function)
        })?;
        Ok(value.unsigned_abs())
    }
}

/// Returns the options that make the driver write its compiler's errors into `log`.
fn log_options(log: &mut [u8]) -> ([CUjit_option; 2], [*mut c_void; 2]) {
    let buffer: *mut c_char = log.as_mut_ptr().cast();
    (
        [
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ],
        [
            buffer.cast(),
            // The driver reads this pointer as a number.
            std::ptr::without_provenance_mut(log.len()),
        ],
    )
}

impl Drop for Module {
    fn drop(&mut self) {
        let driver = self.context.driver();
        match self.context.bind() {
            // SAFETY: `load` loaded the module, and this destructor runs once, after the functions'
            // references are gone.
            Ok(_bound) => driver.log("cuModuleUnload", unsafe {
                driver.api().cuModuleUnload(self.handle.0)
            }),
            Err(_) => driver.log("cuModuleUnload", CuResult::CONTEXT_IS_DESTROYED),
        }
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernels {} on {}", self.name, self.context.device())
    }
}

/// A kernel of a [`Module`].
#[derive(Clone, Debug)]
pub struct Function {
    module: Arc<Module>,
    handle: Handle<CUfunc_st>,
    name: String,
    /// Registers that each thread uses.
    pub registers: u32,
    /// Bytes of stack and spills per thread.
    pub local_bytes: u32,
    /// Bytes of static shared memory per block. A launch adds its dynamic shared memory.
    pub shared_bytes: u32,
    /// Largest number of threads in a block.
    pub max_threads: u32,
    /// Whether kernel and driver support programmatic launches.
    can_start_early: bool,
}

impl Function {
    /// Returns the name of the kernel in its module.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the context in which the kernel runs.
    pub fn context(&self) -> &Arc<Context> {
        &self.module.context
    }

    /// Raises the limit of a launch's dynamic shared memory per block from 48 KiB to `bytes`.
    ///
    /// # Errors
    /// Invalid argument if the GPU has less for a block; the driver's errors.
    pub fn allow_shared(&self, bytes: u32) -> Result<()> {
        let context = self.context();
        let _bound = context.bind()?;
        let room = context.device().shared_bytes_per_block;
        if bytes.saturating_add(self.shared_bytes) > room {
            return Err(Error::invalid_argument(format!(
                "{}: {bytes} bytes of shared memory and {} of its own are more than the {room} \
                 that a block may have on {}",
                self.name,
                self.shared_bytes,
                context.device()
            )));
        }
        // SAFETY: `self` keeps the module of the function, and the other arguments are plain numbers.
        context.driver().check("cuFuncSetAttribute", unsafe {
            context.driver().api().cuFuncSetAttribute(
                self.handle.0,
                CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                bytes as c_int,
            )
        })
    }

    /// Returns how many blocks of `threads` threads and `shared` dynamic bytes one multiprocessor holds at
    /// once.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn blocks_per_multiprocessor(&self, threads: u32, shared: u32) -> Result<u32> {
        let context = self.context();
        let _bound = context.bind()?;
        let mut blocks: c_int = 0;
        let api = context.driver().api();
        // SAFETY: `self` keeps the module of the function; the driver writes one integer to a local variable.
        let result = unsafe {
            api.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut blocks,
                self.handle.0,
                threads as c_int,
                shared as usize,
            )
        };
        let name = "cuOccupancyMaxActiveBlocksPerMultiprocessor";
        context.driver().check(name, result)?;
        Ok(blocks.unsigned_abs())
    }

    /// Queues the kernel behind the work of `stream`. Its only parameter is `args`, by value, and each block
    /// has `shared` bytes of dynamic shared memory.
    ///
    /// # Errors
    /// Invalid usage if the stream belongs to another context; the driver's errors.
    ///
    /// # Safety
    /// `A` is the kernel's parameter type, and the kernel's accesses to the addresses in `args` are sound
    /// until it has ended.
    pub unsafe fn launch<A: Copy>(
        &self,
        grid: impl Into<Dim3>,
        block: impl Into<Dim3>,
        shared: u32,
        stream: &Stream,
        args: &A,
    ) -> Result<()> {
        // SAFETY: the caller keeps this function's contract, and a serialized launch adds no condition.
        unsafe { self.launch_with(Launch::Serialized, grid, block, shared, stream, args) }
    }

    /// Queues the kernel like [`Function::launch`], with the choice of its start.
    ///
    /// # Errors
    /// The errors of [`Function::launch`].
    ///
    /// # Safety
    /// The contract of [`Function::launch`] holds. In a programmatic launch, a kernel for sm_90 or newer
    /// waits for earlier work before it accesses memory (`wait_for_previous_kernel` in
    /// `kernels/ptx/grid.cuh`).
    pub unsafe fn launch_with<A: Copy>(
        &self,
        start: Launch,
        grid: impl Into<Dim3>,
        block: impl Into<Dim3>,
        shared: u32,
        stream: &Stream,
        args: &A,
    ) -> Result<()> {
        const {
            assert!(
                size_of::<A>() <= MAX_ARGUMENT_BYTES,
                "the driver takes no more"
            )
        };
        let context = self.context();
        if stream.context().handle() != context.handle() {
            return Err(Error::new(
                ErrorKind::InvalidUsage,
                format!(
                    "{}, loaded on {}, was to be launched on a stream of {}",
                    self.name,
                    context.device(),
                    stream.context().device()
                ),
            ));
        }
        let _bound = context.bind()?;
        let (grid, block) = (grid.into(), block.into());
        let mut parameters: [*mut c_void; 1] = [std::ptr::from_ref(args).cast_mut().cast()];
        let mut attribute = programmatic_launch();
        let programmatic = start == Launch::Programmatic && self.can_start_early;
        let config = CUlaunchConfig {
            gridDimX: grid.x,
            gridDimY: grid.y,
            gridDimZ: grid.z,
            blockDimX: block.x,
            blockDimY: block.y,
            blockDimZ: block.z,
            sharedMemBytes: shared,
            hStream: stream.handle(),
            attrs: &raw mut attribute,
            numAttrs: c_uint::from(programmatic),
        };
        // SAFETY: `self` and `stream` keep their driver objects. The caller guarantees the parameter's type,
        // and the driver copies it before it returns. `config` refers to `attribute`, which outlives the
        // call.
        let result = unsafe {
            context.driver().api().cuLaunchKernel(
                &config,
                self.handle.0,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        context
            .driver()
            .check("cuLaunchKernelEx", result)
            .map_err(|error| {
                error.context(format!(
                    "launching {} with a grid of {grid:?}, blocks of {block:?} and {shared} bytes",
                    self.name
                ))
            })
    }
}
