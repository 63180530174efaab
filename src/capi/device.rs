//! Arrays on GPUs: which one an address belongs to, and what this process keeps loaded there.

use crate::arrays::Layout;
use crate::arrays::{CodecKernels, DeviceCodec, Elements, HostCopier};
use crate::error::{Error, Result};
use crate::gpu::{Context, Device, Driver, Space, Stream};
use crate::sys::cuda::CuStream;
use crate::types::{CodecSpec, DType};
use std::ffi::c_void;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// How long a packed copy waits for the stream that it is queued on.
const COPY_TIMEOUT: Duration = Duration::from_secs(60);

/// What is kept of one GPU as long as the process lives.
pub(super) struct GpuCodecs {
    kernels: Arc<CodecKernels>,
    copier: OnceLock<HostCopier>,
}

/// The GPUs that anybody used.
static GPUS: Mutex<Vec<Arc<GpuCodecs>>> = Mutex::new(Vec::new());

impl GpuCodecs {
    fn at(driver: &Arc<Driver>, ordinal: u32) -> Result<Arc<GpuCodecs>> {
        // Held while kernels are loaded, so that they are once.
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

    /// # Safety
    /// A live stream of this GPU, or a default one.
    unsafe fn stream(&self, stream: *mut c_void) -> Stream {
        // SAFETY: as ours; the value does not outlive the call.
        unsafe { Stream::borrowed(self.kernels.context(), CuStream(stream.addr())) }
    }

    /// # Safety
    /// As [`DeviceCodec::encode`], and a live stream.
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
        // SAFETY: as ours.
        unsafe { codec.encode(elements, draw, wire, &self.stream(stream)) }
    }

    /// # Safety
    /// As [`DeviceCodec::decode`], and a live stream.
    pub(super) unsafe fn decode(
        &self,
        spec: CodecSpec,
        layout: Layout,
        wire: (u64, usize),
        elements: Elements,
        stream: *mut c_void,
    ) -> Result<()> {
        let codec = DeviceCodec::new(&self.kernels, spec, layout)?;
        // SAFETY: as ours.
        unsafe { codec.decode(wire, elements, &self.stream(stream)) }
    }

    fn copier(&self) -> Result<&HostCopier> {
        if let Some(copier) = self.copier.get() {
            return Ok(copier);
        }
        let made = HostCopier::new(self.kernels.context(), 0, COPY_TIMEOUT)?;
        // Somebody else's, if he was faster.
        Ok(self.copier.get_or_init(|| made))
    }
}

/// The number of the GPU whose memory is at `address`; `None` is host memory. Where there is no
/// driver, nothing is on a GPU.
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

/// The GPU that these arrays, as name, address and bytes, are on, if they are on one.
pub(super) fn gpu_of(
    arrays: &[(&str, usize, usize)],
    stream: *mut c_void,
) -> Result<Option<Arc<GpuCodecs>>> {
    let driver = Driver::in_use();
    let mut places = Vec::with_capacity(arrays.len());
    for &(name, address, _) in arrays.iter().filter(|(_, _, bytes)| *bytes > 0) {
        places.push((name, ordinal_of(driver.as_ref(), name, address)?));
    }
    let on_host = || match stream.is_null() {
        true => Ok(None),
        false => Err(Error::invalid_argument(format!(
            "stream {stream:?} for arrays in host memory, which need none: pass NULL"
        ))),
    };
    let (Some(&(first, place)), Some(driver)) = (places.first(), &driver) else {
        return on_host();
    };
    let tell = |place: Option<u32>| match place {
        Some(ordinal) => format!("memory of GPU {ordinal}"),
        None => "host memory".into(),
    };
    if let Some((other, there)) = places.iter().find(|(_, there)| *there != place) {
        return Err(Error::invalid_argument(format!(
            "{first} is {} and {other} is {}; both are on the host or on one GPU (cinch_copy goes \
             between them)",
            tell(place),
            tell(*there)
        )));
    }
    match place {
        Some(ordinal) => GpuCodecs::at(driver, ordinal).map(Some),
        None => on_host(),
    }
}

/// Refuses memory of a GPU where the host itself reads it.
pub(super) fn refuse(name: &str, address: usize, instead: &str) -> Result<()> {
    match ordinal_of(Driver::in_use().as_ref(), name, address)? {
        None => Ok(()),
        Some(ordinal) => Err(Error::invalid_argument(format!(
            "{name} at {address:#x} is memory of GPU {ordinal}; {instead}"
        ))),
    }
}

/// Copies between the host and a GPU.
///
/// # Safety
/// `bytes` bytes that may be read at `src` and written at `dst`, and a live stream of the GPU.
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
                "src and dst are both host memory; one of them is to be memory of a GPU",
            ));
        }
        (Some(from), Some(to)) => {
            return Err(Error::invalid_argument(format!(
                "src is memory of GPU {from} and dst of GPU {to}; one of them is to be host memory"
            )));
        }
    };
    let gpu = GpuCodecs::at(&driver, ordinal)?;
    let copier = gpu.copier()?;
    // SAFETY: as ours; the host's side lives through the call and is the caller's alone.
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
