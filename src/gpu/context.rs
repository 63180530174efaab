//! The primary context of a GPU, which this library shares with frameworks in the process.

use super::{Device, Driver};
use crate::error::Result;
use crate::sys::cuda::{CUcontext, CUctx_st, CUlimit, CUstreamCaptureMode, CuResult, Handle};
use std::cell::Cell;
use std::ffi::c_uint;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

thread_local! {
    /// Driver and context that this library has made current on the thread; `None` if it has made
    /// none current.
    static BOUND: Cell<Option<(*const Driver, CUcontext)>> = const { Cell::new(None) };
}

/// A reference to the primary context of a GPU, which keeps it open.
pub struct Context {
    device: Device,
    handle: Handle<CUctx_st>,
}

impl Context {
    /// Opens the primary context of `device`. The first opening in a process creates it, which takes some
    /// tenths of a second.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn primary(device: &Device) -> Result<Arc<Context>> {
        let driver = device.driver();
        let _relaxed = Relaxed::enter(driver)?;
        let mut handle: CUcontext = std::ptr::null_mut();
        // SAFETY: the driver gave the device, and writes one handle to a local variable.
        let result = unsafe {
            driver
                .api()
                .cuDevicePrimaryCtxRetain(&mut handle, device.handle())
        };
        driver
            .check("cuDevicePrimaryCtxRetain", result)
            .map_err(|error| error.context(format!("opening {device}")))?;
        Ok(Arc::new(Context {
            device: device.clone(),
            handle: Handle(handle),
        }))
    }

    /// Returns the GPU whose primary context this is.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the CUDA driver through which the context was opened.
    pub fn driver(&self) -> &Arc<Driver> {
        self.device.driver()
    }

    /// Returns the driver's handle.
    pub fn handle(&self) -> CUcontext {
        self.handle.0
    }

    /// Makes this the calling thread's current context until the returned value is dropped, which restores the
    /// earlier context.
    ///
    /// Meanwhile the thread's capture mode is relaxed. Otherwise allocations and event queries of this
    /// library would invalidate a stream capture of the caller.
    ///
    /// Nested calls cost nothing: a collective call binds its context once.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn bind(&self) -> Result<Bound<'_>> {
        let driver = self.driver();
        let own = (Arc::as_ptr(driver), self.handle());
        let before = BOUND.get();
        if before == Some(own) {
            return Ok(Bound(None));
        }
        let relaxed = Relaxed::enter(driver)?;
        // SAFETY: `self` keeps the context open.
        driver.check("cuCtxPushCurrent", unsafe {
            driver.api().cuCtxPushCurrent(self.handle())
        })?;
        BOUND.set(Some(own));
        Ok(Bound(Some(Pushed {
            context: self,
            before,
            _relaxed: relaxed,
        })))
    }

    /// Raises the stack limit of a thread to `bytes`, unless it is higher already.
    ///
    /// Otherwise the driver grows the stack at the first launch that needs more, after all other kernels have
    /// ended. It waits forever if a running kernel waits for that launch.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn raise_stack(&self, bytes: usize) -> Result<()> {
        let _bound = self.bind()?;
        let driver = self.driver();
        let mut now: usize = 0;
        // SAFETY: the driver writes one integer to a local variable.
        driver.check("cuCtxGetLimit", unsafe {
            driver
                .api()
                .cuCtxGetLimit(&mut now, CUlimit::CU_LIMIT_STACK_SIZE)
        })?;
        if now >= bytes {
            return Ok(());
        }
        // SAFETY: the arguments are plain numbers.
        driver.check("cuCtxSetLimit", unsafe {
            driver
                .api()
                .cuCtxSetLimit(CUlimit::CU_LIMIT_STACK_SIZE, bytes)
        })
    }

    /// Enables peer access: kernels of this context may read and write all memory of `peer`. Returns whether
    /// the machine supports it. Peer access is never disabled, because other libraries in the process may
    /// rely on it.
    ///
    /// Success does not prove that data arrives: `probe::check_peer` does.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn enable_peer(&self, peer: &Context) -> Result<bool> {
        if self.handle() == peer.handle() {
            return Ok(true);
        }
        if !self.device.can_access(&peer.device)? {
            return Ok(false);
        }
        let _bound = self.bind()?;
        let driver = self.driver();
        // SAFETY: `peer` keeps its context open.
        match unsafe { driver.api().cuCtxEnablePeerAccess(peer.handle(), 0) } {
            CuResult::SUCCESS | CuResult::PEER_ACCESS_ALREADY_ENABLED => Ok(true),
            CuResult::PEER_ACCESS_UNSUPPORTED => Ok(false),
            result => driver
                .check("cuCtxEnablePeerAccess", result)
                .map(|()| true)
                .map_err(|error| error.context(format!("from {} to {}", self.device, peer.device))),
        }
    }

    /// Returns the free bytes and all bytes of device memory.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn memory(&self) -> Result<(usize, usize)> {
        let _bound = self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the driver writes two integers to local variables.
        self.driver().check("cuMemGetInfo", unsafe {
            self.driver().api().cuMemGetInfo(&mut free, &mut total)
        })?;
        Ok((free, total))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let driver = self.driver();
        let _relaxed = Relaxed::to_drop(driver);
        // SAFETY: `primary` retained the context once, and this destructor releases it once.
        driver.log("cuDevicePrimaryCtxRelease", unsafe {
            driver.api().cuDevicePrimaryCtxRelease(self.device.handle())
        });
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "context of {}", self.device)
    }
}

/// Guard: a context is current on this thread until the guard is dropped.
pub struct Bound<'a>(#[expect(dead_code)] Option<Pushed<'a>>);

/// A context that its guard has pushed, and will pop.
struct Pushed<'a> {
    context: &'a Context,
    /// Value of `BOUND` before the push.
    before: Option<(*const Driver, CUcontext)>,
    _relaxed: Relaxed<'a>,
}

impl Drop for Pushed<'_> {
    fn drop(&mut self) {
        BOUND.set(self.before);
        let driver = self.context.driver();
        let mut popped: CUcontext = std::ptr::null_mut();
        // SAFETY: `bind` pushed the context on this thread, and guards are dropped in reverse order.
        driver.log("cuCtxPopCurrent", unsafe {
            driver.api().cuCtxPopCurrent(&mut popped)
        });
    }
}

/// Guard: this thread's capture mode is relaxed until the guard is dropped. Until then, calls that a capture
/// of any thread would forbid are allowed, and do not invalidate that capture.
pub(super) struct Relaxed<'a> {
    driver: &'a Driver,
    /// Capture mode to restore. It is an integer, because the driver may return a mode that
    /// `CUstreamCaptureMode` lacks.
    mode: c_uint,
    /// Keeps the guard on its thread.
    thread: PhantomData<*const ()>,
}

impl<'a> Relaxed<'a> {
    /// Relaxes the calling thread's capture mode.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn enter(driver: &'a Driver) -> Result<Relaxed<'a>> {
        let (mode, exchanged) = Relaxed::exchange(driver);
        driver.check("cuThreadExchangeStreamCaptureMode", exchanged)?;
        Ok(Relaxed::restoring(mode, driver))
    }

    /// Relaxes the capture mode for a destructor, which can only log an error.
    pub fn to_drop(driver: &'a Driver) -> Option<Relaxed<'a>> {
        let (mode, exchanged) = Relaxed::exchange(driver);
        driver.log("cuThreadExchangeStreamCaptureMode", exchanged);
        (exchanged == CuResult::SUCCESS).then(|| Relaxed::restoring(mode, driver))
    }

    /// Sets relaxed mode, and returns the mode before.
    fn exchange(driver: &Driver) -> (c_uint, CuResult) {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_uint;
        // SAFETY: the driver reads and writes one integer of the enum's size.
        let exchanged = unsafe {
            driver
                .api()
                .cuThreadExchangeStreamCaptureMode((&raw mut mode).cast())
        };
        (mode, exchanged)
    }

    fn restoring(mode: c_uint, driver: &'a Driver) -> Relaxed<'a> {
        Relaxed {
            driver,
            mode,
            thread: PhantomData,
        }
    }
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        let mut mode = self.mode;
        // SAFETY: the driver reads and writes one integer of the enum's size.
        self.driver
            .log("cuThreadExchangeStreamCaptureMode", unsafe {
                self.driver
                    .api()
                    .cuThreadExchangeStreamCaptureMode((&raw mut mode).cast())
            });
    }
}
