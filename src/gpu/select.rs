//! Selects the GPU that a setting names, and checks that addresses belong to it.

use super::{Context, Device, Driver, Space};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::cuda::{CUcontext, CUdevice};
use crate::types::DeviceChoice;
use std::sync::Arc;

/// Opens the primary context of the GPU that a setting names. This thread's current context stays current.
///
/// # Errors
/// Unsupported without a driver; invalid argument if there is no such GPU; the driver's errors.
pub fn open(choice: DeviceChoice) -> Result<Arc<Context>> {
    let driver = Driver::load()?;
    Context::primary(&chosen(&driver, choice)?)
}

/// Returns the GPU that a setting names.
///
/// # Errors
/// Invalid usage if the setting is host memory; otherwise see [`open`].
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

/// Returns the GPU of this thread's current context, if it has one.
fn current(driver: &Arc<Driver>) -> Result<Option<CUdevice>> {
    let mut context: CUcontext = std::ptr::null_mut();
    // SAFETY: the driver writes one handle to a local variable.
    driver.check("cuCtxGetCurrent", unsafe {
        driver.api().cuCtxGetCurrent(&mut context)
    })?;
    if context.is_null() {
        return Ok(None);
    }
    let mut device: CUdevice = 0;
    // SAFETY: a context is current; the driver writes one handle to a local variable.
    driver.check("cuCtxGetDevice", unsafe {
        driver.api().cuCtxGetDevice(&mut device)
    })?;
    Ok(Some(device))
}

/// Rejects an address that kernels of `context`'s GPU may not use. `what` names the buffer in the error.
///
/// # Errors
/// Invalid argument with the place that the address points to; the driver's errors.
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

/// Rejects an address from which kernels of `context`'s GPU cannot read a scalar, such as pageable memory.
/// `what` names the scalar in the error.
///
/// # Errors
/// See [`check_address`].
pub fn check_factor(context: &Context, what: impl Fn() -> String, address: u64) -> Result<()> {
    match context.driver().pointer(address)?.space {
        Space::Pinned | Space::Managed => Ok(()),
        Space::Pageable | Space::Device => check_address(context, what, address),
    }
}
