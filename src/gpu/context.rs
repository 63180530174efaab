//! A GPU's primary context, which frameworks in the same process use too.

use super::{Device, Driver};
use crate::error::Result;
use crate::sys::cuda::{CuContext, CuResult, capture_mode, limit};
use std::cell::Cell;
use std::ffi::c_uint;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

thread_local! {
    /// The driver and the context that the library has bound on this thread.
    static BOUND: Cell<Option<(*const Driver, CuContext)>> = const { Cell::new(None) };
}

/// The primary context of a GPU, kept alive.
pub struct Context {
    device: Device,
    handle: CuContext,
}

impl Context {
    /// The primary context of `device`; created where nobody in the process has it yet, which
    /// takes some tenths of a second.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn primary(device: &Device) -> Result<Arc<Context>> {
        let driver = device.driver();
        let _relaxed = Relaxed::enter(driver)?;
        let mut handle = CuContext::default();
        // SAFETY: writes one handle.
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
            handle,
        }))
    }

    /// Its GPU.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Its driver.
    pub fn driver(&self) -> &Arc<Driver> {
        self.device.driver()
    }

    /// The driver's handle of it.
    pub fn handle(&self) -> CuContext {
        self.handle
    }

    /// Makes it the calling thread's current context until the returned value is dropped, which
    /// puts back what was current before.
    ///
    /// While it is bound, a stream capture of the caller forbids this thread nothing: what the
    /// library does beside a capture (allocating, asking events) is not part of it.
    ///
    /// Doing it again meanwhile costs nothing: a call of a communicator binds its context once.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn bind(&self) -> Result<Bound<'_>> {
        let driver = self.driver();
        let own = (Arc::as_ptr(driver), self.handle);
        let before = BOUND.get();
        if before == Some(own) {
            return Ok(Bound(None));
        }
        let relaxed = Relaxed::enter(driver)?;
        // SAFETY: the handle is of a context that `self` keeps.
        driver.check("cuCtxPushCurrent", unsafe {
            driver.api().cuCtxPushCurrent(self.handle)
        })?;
        BOUND.set(Some(own));
        Ok(Bound(Some(Pushed {
            context: self,
            before,
            _relaxed: relaxed,
        })))
    }

    /// Lets kernels of the context use `bytes` of stack a thread, if they may use less now. The
    /// driver would otherwise grow it at the first launch that needs more, and wait for all other
    /// kernels to end before it does: for ever, if one of them waits for that launch.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn raise_stack(&self, bytes: usize) -> Result<()> {
        let _bound = self.bind()?;
        let driver = self.driver();
        let mut now: usize = 0;
        // SAFETY: writes one integer.
        driver.check("cuCtxGetLimit", unsafe {
            driver.api().cuCtxGetLimit(&mut now, limit::STACK_SIZE)
        })?;
        if now >= bytes {
            return Ok(());
        }
        // SAFETY: plain numbers.
        driver.check("cuCtxSetLimit", unsafe {
            driver.api().cuCtxSetLimit(limit::STACK_SIZE, bytes)
        })
    }

    /// Lets kernels of this context read and write all memory of `peer`, now and later, if the
    /// machine can; returns whether it can. Doing it again changes nothing, and it is never
    /// undone: others in the process may rely on it.
    ///
    /// That the machine says yes does not prove that data arrives: `probe::check_peer` does.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn enable_peer(&self, peer: &Context) -> Result<bool> {
        if self.handle == peer.handle {
            return Ok(true);
        }
        if !self.device.can_access(&peer.device)? {
            return Ok(false);
        }
        let _bound = self.bind()?;
        let driver = self.driver();
        // SAFETY: a live context.
        match unsafe { driver.api().cuCtxEnablePeerAccess(peer.handle, 0) } {
            CuResult::SUCCESS | CuResult::PEER_ACCESS_ALREADY_ENABLED => Ok(true),
            CuResult::PEER_ACCESS_UNSUPPORTED => Ok(false),
            result => driver
                .check("cuCtxEnablePeerAccess", result)
                .map(|()| true)
                .map_err(|error| error.context(format!("from {} to {}", self.device, peer.device))),
        }
    }

    /// Bytes of device memory that are free, and that there are.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn memory(&self) -> Result<(usize, usize)> {
        let _bound = self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two integers.
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
        // SAFETY: retained once by `primary`, released once here.
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

/// A context that is current on this thread for as long as this lives.
pub struct Bound<'a>(#[expect(dead_code)] Option<Pushed<'a>>);

/// One that was not before.
struct Pushed<'a> {
    context: &'a Context,
    /// What was bound.
    before: Option<(*const Driver, CuContext)>,
    _relaxed: Relaxed<'a>,
}

impl Drop for Pushed<'_> {
    fn drop(&mut self) {
        BOUND.set(self.before);
        let driver = self.context.driver();
        let mut popped = CuContext::default();
        // SAFETY: pushed by `bind` on this thread; guards are dropped in reverse order.
        driver.log("cuCtxPopCurrent", unsafe {
            driver.api().cuCtxPopCurrent(&mut popped)
        });
    }
}

/// For as long as this lives, stream captures forbid this thread nothing: neither its own, nor those
/// of others, which what it does might else put an end to.
pub(super) struct Relaxed<'a> {
    driver: &'a Driver,
    /// The mode to put back.
    mode: c_uint,
    /// It is the thread's.
    thread: PhantomData<*const ()>,
}

impl<'a> Relaxed<'a> {
    /// # Errors
    /// Those of the driver.
    pub fn enter(driver: &'a Driver) -> Result<Relaxed<'a>> {
        let (mode, exchanged) = Relaxed::exchange(driver);
        driver.check("cuThreadExchangeStreamCaptureMode", exchanged)?;
        Ok(Relaxed::putting_back(mode, driver))
    }

    /// The same where nothing can be done about an error, which is logged.
    pub fn to_drop(driver: &'a Driver) -> Option<Relaxed<'a>> {
        let (mode, exchanged) = Relaxed::exchange(driver);
        driver.log("cuThreadExchangeStreamCaptureMode", exchanged);
        (exchanged == CuResult::SUCCESS).then(|| Relaxed::putting_back(mode, driver))
    }

    /// The mode before.
    fn exchange(driver: &Driver) -> (c_uint, CuResult) {
        let mut mode: c_uint = capture_mode::RELAXED;
        // SAFETY: reads and writes one integer; the mode is the thread's own.
        let exchanged = unsafe { driver.api().cuThreadExchangeStreamCaptureMode(&mut mode) };
        (mode, exchanged)
    }

    fn putting_back(mode: c_uint, driver: &'a Driver) -> Relaxed<'a> {
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
        // SAFETY: reads and writes one integer.
        self.driver
            .log("cuThreadExchangeStreamCaptureMode", unsafe {
                self.driver
                    .api()
                    .cuThreadExchangeStreamCaptureMode(&mut mode)
            });
    }
}
