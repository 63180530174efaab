//! Which GPU a communicator is on, and what an address on it must be.

use crate::error::{Error, ErrorKind, Result};
use crate::gpu::{Context, Device, Driver, Space, Stream};
use crate::mem::DeviceBuffers;
use crate::sys::cuda::{CuContext, CuDevice, CuStream};
use crate::types::DeviceChoice;
use std::sync::Arc;

/// The primary context of the GPU that a setting names. What is current on this thread stays.
///
/// # Errors
/// Unsupported without a driver; invalid argument if there is no such GPU; those of the driver.
pub fn open(choice: DeviceChoice) -> Result<Arc<Context>> {
    let driver = Driver::load()?;
    Context::primary(&chosen(&driver, choice)?)
}

/// The GPU that a setting names.
///
/// # Errors
/// Invalid usage if the setting is host memory; as [`open`] otherwise.
pub fn chosen(driver: &Arc<Driver>, choice: DeviceChoice) -> Result<Device> {
    match choice {
        DeviceChoice::Host => Err(Error::invalid_usage(
            "CINCH_DEVICE=host names no GPU; cuda and cuda:N do",
        )),
        DeviceChoice::Cuda(number) => Device::at(driver, number),
        DeviceChoice::Current => match current(driver)? {
            Some(handle) => driver
                .devices()?
                .into_iter()
                .find(|device| device.handle() == handle)
                .ok_or_else(|| Error::internal("the current context is of an unknown GPU")),
            None => Device::at(driver, 0),
        },
    }
}

/// The GPU of this thread's current context, if it has one.
fn current(driver: &Arc<Driver>) -> Result<Option<CuDevice>> {
    let mut context = CuContext::default();
    // SAFETY: writes one handle.
    driver.check("cuCtxGetCurrent", unsafe {
        driver.api().cuCtxGetCurrent(&mut context)
    })?;
    if context == CuContext::default() {
        return Ok(None);
    }
    let mut device: CuDevice = 0;
    // SAFETY: a context is current; writes one handle.
    driver.check("cuCtxGetDevice", unsafe {
        driver.api().cuCtxGetDevice(&mut device)
    })?;
    Ok(Some(device))
}

/// Whether calls with these buffers are recorded into a graph instead of run.
///
/// # Errors
/// Invalid usage if a capture has failed and not been ended; those of the driver.
pub fn is_capturing(context: &Arc<Context>, buffers: &DeviceBuffers<'_>) -> Result<bool> {
    // SAFETY: live while the buffers are, by their contract; the value does not outlive them.
    let stream = unsafe { Stream::borrowed(context, CuStream(buffers.stream())) };
    stream.is_capturing()
}

/// Refuses an address that kernels of the GPU of `context` may not use. `what` names the buffer.
///
/// # Errors
/// Invalid argument, saying where the address points instead; those of the driver.
pub fn check_address(context: &Context, what: impl Fn() -> String, address: u64) -> Result<()> {
    let own = context.device();
    let found = context.driver().pointer(address)?;
    let wrong = |why: String| {
        Err(Error::new(
            ErrorKind::InvalidArgument,
            format!(
                "{} at {address:#x} {why}; this communicator is on {own}",
                what()
            ),
        ))
    };
    match found.space {
        Space::Pageable | Space::Pinned => wrong("is host memory".into()),
        Space::Managed => wrong("is managed memory, which may move while kernels use it".into()),
        Space::Device => match found.ordinal {
            Some(ordinal) if ordinal != own.ordinal() => {
                wrong(format!("is memory of GPU {ordinal}"))
            }
            _ => Ok(()),
        },
    }
}

/// Refuses an address at which kernels of the GPU of `context` find no number: that of pageable
/// memory. `what` names it.
///
/// # Errors
/// As [`check_address`].
pub fn check_factor(context: &Context, what: impl Fn() -> String, address: u64) -> Result<()> {
    match context.driver().pointer(address)?.space {
        Space::Pinned | Space::Managed => Ok(()),
        Space::Pageable | Space::Device => check_address(context, what, address),
    }
}
