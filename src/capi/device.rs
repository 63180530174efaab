//! Codec calls on arrays in GPU memory: finds the GPU of an address, and loads the codec kernels
//! there.

use crate::arrays::GpuCodecs;
use crate::error::{Error, Result};
use crate::gpu::{Context, Device, Driver, Space};
use crate::types::{CodecSpec, DType};
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

/// The codec kernels of each GPU on which this process has used a codec.
static GPUS: Mutex<Vec<Arc<GpuCodecs>>> = Mutex::new(Vec::new());

/// Returns the codec kernels of the GPU `ordinal`, which stay loaded until the process ends. The first call
/// loads them.
fn codecs_at(driver: &Arc<Driver>, ordinal: u32) -> Result<Arc<GpuCodecs>> {
    // Holds the lock during the load, so that two threads do not load the kernels twice.
    let mut all = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let context = Context::primary(&Device::at(driver, ordinal)?)?;
    let same = |gpu: &&Arc<GpuCodecs>| gpu.context().handle() == context.handle();
    if let Some(known) = all.iter().find(same) {
        return Ok(known.clone());
    }
    let gpu = Arc::new(GpuCodecs::on(&context)?);
    all.push(gpu.clone());
    Ok(gpu)
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
        Some(ordinal) => codecs_at(driver, ordinal).map(Some),
        None => on_host(),
    }
}

/// Returns an error if `address`, from which the host is to read, is GPU memory.
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
    let gpu = codecs_at(&driver, ordinal)?;
    let stream = stream.addr();
    // SAFETY: the caller keeps `src` readable and `dst` writable for `bytes` bytes. The program
    // does not touch the host array during the call.
    unsafe {
        if to.is_some() {
            let host = std::slice::from_raw_parts(src.cast(), bytes);
            gpu.copy_to_device(spec, dtype, draw, host, dst.addr() as u64, stream)
        } else {
            let host = std::slice::from_raw_parts_mut(dst.cast(), bytes);
            gpu.copy_to_host(spec, dtype, draw, src.addr() as u64, host, stream)
        }
    }
}

/// Copies `bytes` bytes of host memory to arrays on GPUs, encoded on the way. Each array has a stream.
///
/// # Errors
/// Invalid argument unless `src` is host memory and all others are GPU memory.
///
/// # Safety
/// `src` is readable and each array writable for `bytes` bytes; each stream exists on the GPU of its array.
pub(super) unsafe fn copy_to_gpus(
    spec: CodecSpec,
    dtype: DType,
    draw: u64,
    src: *const c_void,
    bytes: usize,
    (dsts, streams): (&[*mut c_void], &[*mut c_void]),
) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    refuse(
        "src",
        src.addr(),
        "cinch_copy_to_gpus copies from host memory",
    )?;
    let driver = Driver::load()?;
    let mut gpus = Vec::with_capacity(dsts.len());
    for (at, dst) in dsts.iter().enumerate() {
        let name = format!("dsts[{at}]");
        let Some(ordinal) = ordinal_of(Some(&driver), &name, dst.addr())? else {
            return Err(Error::invalid_argument(format!(
                "{name} at {dst:p} is host memory; cinch_copy_to_gpus copies to GPUs"
            )));
        };
        gpus.push(codecs_at(&driver, ordinal)?);
    }
    let targets = gpus.iter().zip(dsts).zip(streams);
    let targets: Vec<(&GpuCodecs, u64, usize)> = targets
        .map(|((gpu, dst), stream)| (&**gpu, dst.addr() as u64, stream.addr()))
        .collect();
    // SAFETY: the caller keeps `src` readable for `bytes` bytes, and the arrays writable. The program does not
    // touch `src` during the call.
    unsafe {
        let host = std::slice::from_raw_parts(src.cast(), bytes);
        GpuCodecs::copy_to_devices(spec, dtype, draw, host, &targets)
    }
}
