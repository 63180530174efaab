//! Codec calls on arrays in GPU memory: the GPU of an address, and the kernels loaded there.

use crate::arrays::Layout;
use crate::arrays::{CodecKernels, DeviceCodec, Elements, HostCopier};
use crate::error::{Error, Result};
use crate::gpu::{Context, Device, Driver, Space, Stream};
use crate::types::{CodecSpec, DType};
use std::ffi::c_void;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// Timeout of a packed copy that waits for its stream.
const COPY_TIMEOUT: Duration = Duration::from_secs(60);

/// Kernels and copy buffers of one GPU, kept until the process ends.
pub(super) struct GpuCodecs {
    kernels: Arc<CodecKernels>,
    copier: OnceLock<HostCopier>,
}

/// GPUs on which this process has called a codec.
static GPUS: Mutex<Vec<Arc<GpuCodecs>>> = Mutex::new(Vec::new());

impl GpuCodecs {
    /// Returns the kernels of the GPU `ordinal`; the first call loads them.
    fn at(driver: &Arc<Driver>, ordinal: u32) -> Result<Arc<GpuCodecs>> {
        // The lock is held during the load, so that two threads do not load the kernels twice.
        let mut all = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
        let context = Context::primary(&Device::at(driver, ordinal)?)?;
        let same = |gpu: &&Arc<GpuCodecs>| gpu.kernels.context().handle() == context.handle();
        if let Some(known) = all.iter().find(same) {
            return Ok(known.clone());
        }
        let gpu = Arc::new(GpuCodecs {
            kernels: Arc::new(CodecKernels::new(&context)?),
            copier: OnceLock::new(),
        });
        all.push(gpu.clone());
        Ok(gpu)
    }

    /// Returns the stream that the program passed.
    ///
    /// # Safety
    /// `stream` exists on this GPU until the call returns; NULL is its default stream.
    unsafe fn stream(&self, stream: *mut c_void) -> Stream {
        // SAFETY: the caller's contract; no caller keeps the value beyond its call.
        unsafe { Stream::borrowed(self.kernels.context(), stream.cast()) }
    }

    /// Encodes `elements` into `wire` on `stream`.
    ///
    /// # Safety
    /// See [`DeviceCodec::encode`]; `stream` exists on this GPU.
    pub(super) unsafe fn encode(
        &self,
        spec: CodecSpec,
        layout: Layout,
        elements: Elements,
        draw: u64,
        wire: (u64, usize),
        stream: *mut c_void,
    ) -> Result<()> {
        let codec = DeviceCodec::new(&self.kernels, spec, layout)?;
        // SAFETY: the caller's contract.
        unsafe { codec.encode(elements, draw, wire, &self.stream(stream)) }
    }

    /// Decodes `wire` into `elements` on `stream`.
    ///
    /// # Safety
    /// See [`DeviceCodec::decode`]; `stream` exists on this GPU.
    pub(super) unsafe fn decode(
        &self,
        spec: CodecSpec,
        layout: Layout,
        wire: (u64, usize),
        elements: Elements,
        stream: *mut c_void,
    ) -> Result<()> {
        let codec = DeviceCodec::new(&self.kernels, spec, layout)?;
        // SAFETY: the caller's contract.
        unsafe { codec.decode(wire, elements, &self.stream(stream)) }
    }

    /// Returns the copier of this GPU; the first call creates it.
    fn copier(&self) -> Result<&HostCopier> {
        if let Some(copier) = self.copier.get() {
            return Ok(copier);
        }
        let made = HostCopier::new(self.kernels.context(), 0, COPY_TIMEOUT)?;
        // Another thread may have stored its own first, which is then used.
        Ok(self.copier.get_or_init(|| made))
    }
}

/// Returns the GPU whose memory is at `address`; `None` is host memory. Without a driver all memory is
/// host memory.
///
/// # Errors
/// Invalid argument for managed memory.
fn ordinal_of(driver: Option<&Arc<Driver>>, name: &str, address: usize) -> Result<Option<u32>> {
    let (Some(driver), true) = (driver, address != 0) else {
        return Ok(None);
    };
    let found = driver.pointer(address as u64)?;
    match found.space {
        Space::Pageable | Space::Pinned => Ok(None),
        Space::Device => Ok(found.ordinal),
        Space::Managed => Err(Error::invalid_argument(format!(
            "{name} at {address:#x} is managed memory, which may move while kernels use it"
        ))),
    }
}

/// Returns the GPU that holds all `arrays`, given as name, address and bytes; `None` is host memory.
///
/// # Errors
/// Invalid argument if they are in different places, or in host memory with a stream.
pub(super) fn gpu_of(
    arrays: &[(&str, usize, usize)],
    stream: *mut c_void,
) -> Result<Option<Arc<GpuCodecs>>> {
    let driver = Driver::in_use();
    let mut places = Vec::with_capacity(arrays.len());
    for &(name, address, _) in arrays.iter().filter(|(_, _, bytes)| *bytes > 0) {
        places.push((name, ordinal_of(driver.as_ref(), name, address)?));
    }
    let on_host = || {
        if stream.is_null() {
            return Ok(None);
        }
        Err(Error::invalid_argument(format!(
            "stream {stream:?} for arrays in host memory, which need none: pass NULL"
        )))
    };
    let (Some(&(first, place)), Some(driver)) = (places.first(), &driver) else {
        return on_host();
    };
    let describe = |place: Option<u32>| match place {
        Some(ordinal) => format!("memory of GPU {ordinal}"),
        None => "host memory".into(),
    };
    if let Some((other, there)) = places.iter().find(|(_, there)| *there != place) {
        return Err(Error::invalid_argument(format!(
            "{first} is {} and {other} is {}; both are on the host or on one GPU (cinch_copy goes \
             between them)",
            describe(place),
            describe(*there)
        )));
    }
    match place {
        Some(ordinal) => GpuCodecs::at(driver, ordinal).map(Some),
        None => on_host(),
    }
}

/// Refuses GPU memory at `address`, which the host is to read.
///
/// # Errors
/// Invalid argument if it is GPU memory; `instead` is what the program should do.
pub(super) fn refuse(name: &str, address: usize, instead: &str) -> Result<()> {
    match ordinal_of(Driver::in_use().as_ref(), name, address)? {
        None => Ok(()),
        Some(ordinal) => Err(Error::invalid_argument(format!(
            "{name} at {address:#x} is memory of GPU {ordinal}; {instead}"
        ))),
    }
}

/// Copies `bytes` bytes between host memory and a GPU, encoded on the way.
///
/// # Errors
/// Invalid argument unless exactly one side is GPU memory.
///
/// # Safety
/// `src` is readable and `dst` writable for `bytes` bytes; `stream` exists on the GPU.
pub(super) unsafe fn copy(
    spec: CodecSpec,
    dtype: DType,
    draw: u64,
    src: *const c_void,
    dst: *mut c_void,
    bytes: usize,
    stream: *mut c_void,
) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let driver = Driver::load()?;
    let from = ordinal_of(Some(&driver), "src", src.addr())?;
    let to = ordinal_of(Some(&driver), "dst", dst.addr())?;
    let ordinal = match (from, to) {
        (Some(ordinal), None) | (None, Some(ordinal)) => ordinal,
        (None, None) => {
            return Err(Error::invalid_argument(
                "src and dst are both host memory; one of them must be memory of a GPU",
            ));
        }
        (Some(from), Some(to)) => {
            return Err(Error::invalid_argument(format!(
                "src is memory of GPU {from} and dst of GPU {to}; one of them must be host memory"
            )));
        }
    };
    let gpu = GpuCodecs::at(&driver, ordinal)?;
    let copier = gpu.copier()?;
    // SAFETY: the caller's contract; the program does not touch the host array during the call.
    unsafe {
        let stream = gpu.stream(stream);
        if to.is_some() {
            let host = std::slice::from_raw_parts(src.cast(), bytes);
            copier.to_device(spec, dtype, draw, host, dst.addr() as u64, &stream)
        } else {
            let host = std::slice::from_raw_parts_mut(dst.cast(), bytes);
            copier.to_host(spec, dtype, draw, src.addr() as u64, host, &stream)
        }
    }
}
