//! Code on a GPU: modules, their kernels, and launches.

use super::{Context, Stream};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::cuda::{
    CuFunction, CuLaunchAttribute, CuLaunchConfig, CuModule, CuResult, function_attribute,
};
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::sync::Arc;

/// The largest struct that a kernel takes by value.
pub const MAX_ARGUMENT_BYTES: usize = 4096;

/// The oldest GPUs, as PTX counts them, that code is compiled for which waits for what is ahead of it;
/// and the oldest driver that keeps early starts in graphs, 12.3.
const OLDEST_THAT_WAITS: u32 = 90;
const OLDEST_DRIVER_FOR_EARLY_STARTS: u32 = 12_030;

/// When a kernel begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launch {
    /// Once all that is ahead of it in the stream has ended.
    Serialized,
    /// Where the GPU and its driver can, while that still ends (programmatic dependent launch): 0.2 us
    /// sooner in a graph of small kernels on an H200, and 1 us in a stream.
    Programmatic,
}

/// Extents of a grid or of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dim3 {
    /// Innermost.
    pub x: u32,
    /// Middle.
    pub y: u32,
    /// Outermost.
    pub z: u32,
}

impl From<u32> for Dim3 {
    fn from(x: u32) -> Dim3 {
        Dim3 { x, y: 1, z: 1 }
    }
}

/// Code that is loaded on one GPU.
pub struct Module {
    context: Arc<Context>,
    handle: CuModule,
    name: String,
}

impl Module {
    /// Loads a fat binary, all of it: a kernel that the driver loads later, at its first launch,
    /// may wait for all other kernels to end, for ever if one of them waits for it.
    ///
    /// # Errors
    /// Unsupported, with the GPU, if the binary has no code for it; those of the driver, with
    /// what its compiler says.
    pub fn load(context: &Arc<Context>, name: &str, image: &[u8]) -> Result<Arc<Module>> {
        let _bound = context.bind()?;
        let driver = context.driver();
        let mut log = [0u8; 2048];
        let (mut names, mut values) = log_options(&mut log);
        let mut handle = CuModule::default();
        // SAFETY: the image is a fat binary, which says its own length; the options describe a
        // buffer that outlives the call.
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
                let said = String::from_utf8_lossy(
                    log.split(|&byte| byte == 0).next().unwrap_or_default(),
                );
                let (major, minor) = context.device().compute_capability;
                let said = match said.trim() {
                    "" => String::new(),
                    said => format!(" ({said})"),
                };
                error.context(format!(
                    "loading kernels {name} on {}, sm_{major}{minor}{said}",
                    context.device()
                ))
            })?;
        let module = Arc::new(Module {
            context: context.clone(),
            handle,
            name: name.to_string(),
        });
        module.load_all()?;
        Ok(module)
    }

    /// Its context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The kernel of that name.
    ///
    /// # Errors
    /// Internal if there is none; those of the driver.
    pub fn function(self: &Arc<Module>, name: &str) -> Result<Function> {
        let _bound = self.context.bind()?;
        let driver = self.context.driver();
        let text = CString::new(name)
            .map_err(|_| Error::invalid_argument(format!("{name:?} is no kernel's name")))?;
        let mut handle = CuFunction::default();
        // SAFETY: a live module and a C string; writes one handle.
        let result = unsafe {
            driver
                .api()
                .cuModuleGetFunction(&mut handle, self.handle, text.as_ptr())
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
        self.force(handle)?;
        let number = |attribute| self.attribute(handle, attribute);
        Ok(Function {
            module: self.clone(),
            handle,
            name: name.to_string(),
            registers: number(function_attribute::NUM_REGS)?,
            local_bytes: number(function_attribute::LOCAL_SIZE_BYTES)?,
            shared_bytes: number(function_attribute::SHARED_SIZE_BYTES)?,
            max_threads: number(function_attribute::MAX_THREADS_PER_BLOCK)?,
            waits: number(function_attribute::PTX_VERSION)? >= OLDEST_THAT_WAITS
                && driver.version() >= OLDEST_DRIVER_FOR_EARLY_STARTS,
        })
    }

    /// Loads every kernel, where the driver can list them (CUDA 12.4); where not,
    /// [`Module::function`] loads each.
    fn load_all(&self) -> Result<()> {
        let driver = self.context.driver();
        let mut count: c_uint = 0;
        // SAFETY: a live module; writes one integer.
        let asked = unsafe {
            driver
                .api()
                .cuModuleGetFunctionCount(&mut count, self.handle)
        };
        if asked == CuResult::FUNCTION_MISSING {
            return Ok(());
        }
        driver.check("cuModuleGetFunctionCount", asked)?;
        let mut functions = vec![CuFunction::default(); count as usize];
        // SAFETY: a live module; writes at most `count` handles.
        driver.check("cuModuleEnumerateFunctions", unsafe {
            driver
                .api()
                .cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, self.handle)
        })?;
        functions.into_iter().try_for_each(|f| self.force(f))
    }

    /// Makes the driver load one kernel now.
    fn force(&self, function: CuFunction) -> Result<()> {
        let driver = self.context.driver();
        // SAFETY: a live function.
        match unsafe { driver.api().cuFuncLoad(function) } {
            // Older drivers load what they are asked about.
            CuResult::FUNCTION_MISSING => self
                .attribute(function, function_attribute::BINARY_VERSION)
                .map(drop),
            result => driver.check("cuFuncLoad", result),
        }
    }

    fn attribute(&self, function: CuFunction, attribute: c_int) -> Result<u32> {
        let driver = self.context.driver();
        let mut value: c_int = 0;
        // SAFETY: a live function; writes one integer.
        driver.check("cuFuncGetAttribute", unsafe {
            driver
                .api()
                .cuFuncGetAttribute(&mut value, attribute, function)
        })?;
        Ok(value.unsigned_abs())
    }
}

/// Options by which the driver writes its compiler's errors into `log`.
fn log_options(log: &mut [u8]) -> ([c_int; 2], [*mut c_void; 2]) {
    const ERROR_LOG_BUFFER: c_int = 5;
    const ERROR_LOG_BUFFER_SIZE_BYTES: c_int = 6;
    let buffer: *mut c_char = log.as_mut_ptr().cast();
    (
        [ERROR_LOG_BUFFER, ERROR_LOG_BUFFER_SIZE_BYTES],
        [
            buffer.cast(),
            // The driver takes the number in the pointer's place.
            std::ptr::without_provenance_mut(log.len()),
        ],
    )
}

impl Drop for Module {
    fn drop(&mut self) {
        let driver = self.context.driver();
        match self.context.bind() {
            // SAFETY: loaded by `load`, unloaded once; its functions hold it.
            Ok(_bound) => driver.log("cuModuleUnload", unsafe {
                driver.api().cuModuleUnload(self.handle)
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

/// A kernel.
#[derive(Clone, Debug)]
pub struct Function {
    module: Arc<Module>,
    handle: CuFunction,
    name: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of stack and spills of a thread.
    pub local_bytes: u32,
    /// Bytes of shared memory that a block has whatever the launch asks for.
    pub shared_bytes: u32,
    /// Threads that a block may have.
    pub max_threads: u32,
    /// Whether it can wait for what is ahead of it in its stream, and the driver starts it early.
    waits: bool,
}

impl Function {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The context that it runs in.
    pub fn context(&self) -> &Arc<Context> {
        &self.module.context
    }

    /// Lets launches ask for up to `bytes` of shared memory a block; without this 48 KiB.
    ///
    /// # Errors
    /// Invalid argument if the GPU does not have that much for a block.
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
        // SAFETY: a live function and plain numbers.
        context.driver().check("cuFuncSetAttribute", unsafe {
            context.driver().api().cuFuncSetAttribute(
                self.handle,
                function_attribute::MAX_DYNAMIC_SHARED_SIZE_BYTES,
                bytes as c_int,
            )
        })
    }

    /// How many blocks of `threads` threads and `shared` bytes one multiprocessor holds at once.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn blocks_per_multiprocessor(&self, threads: u32, shared: u32) -> Result<u32> {
        let context = self.context();
        let _bound = context.bind()?;
        let mut blocks: c_int = 0;
        let api = context.driver().api();
        // SAFETY: a live function; writes one integer.
        let result = unsafe {
            api.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut blocks,
                self.handle,
                threads as c_int,
                shared as usize,
            )
        };
        let name = "cuOccupancyMaxActiveBlocksPerMultiprocessor";
        context.driver().check(name, result)?;
        Ok(blocks.unsigned_abs())
    }

    /// Queues the kernel behind the work of `stream`, with `args` as its only parameter, by value,
    /// and `shared` bytes of shared memory a block.
    ///
    /// # Errors
    /// Invalid usage if the stream is of another GPU; those of the driver.
    ///
    /// # Safety
    /// `args` is the kernel's parameter type, and what the kernel does with the addresses in it is
    /// sound until it has ended.
    pub unsafe fn launch<A: Copy>(
        &self,
        grid: impl Into<Dim3>,
        block: impl Into<Dim3>,
        shared: u32,
        stream: &Stream,
        args: &A,
    ) -> Result<()> {
        // SAFETY: the caller's promise; it begins behind all that is ahead of it.
        unsafe { self.launch_with(Launch::Serialized, grid, block, shared, stream, args) }
    }

    /// The same, with a say in when the kernel begins.
    ///
    /// # Errors
    /// Those of [`Function::launch`].
    ///
    /// # Safety
    /// As for [`Function::launch`]. One that begins early waits for what is ahead of it before it
    /// touches memory, if it was compiled for sm_90 or newer (`wait_for_previous_kernel` in
    /// `kernels/ptx/grid.cuh`).
    pub unsafe fn launch_with<A: Copy>(
        &self,
        begin: Launch,
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
        let attributes: &[CuLaunchAttribute] = match begin {
            Launch::Programmatic if self.waits => &[CuLaunchAttribute::EARLY_START],
            Launch::Programmatic | Launch::Serialized => &[],
        };
        let config = CuLaunchConfig {
            grid: [grid.x, grid.y, grid.z],
            block: [block.x, block.y, block.z],
            shared,
            stream: stream.handle(),
            attributes: attributes.as_ptr(),
            attribute_count: attributes.len() as c_uint,
        };
        // SAFETY: live handles; the driver copies the parameter, whose type is the kernel's by
        // the caller's word, before it returns.
        let result = unsafe {
            context.driver().api().cuLaunchKernel(
                &config,
                self.handle,
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
