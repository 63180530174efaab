//! Protection domains and registered memory.

use super::{Device, destroyed, made};
use crate::error::Result;
use crate::mem::Region;
use crate::sys::ibverbs::*;
use std::ffi::c_int;
use std::sync::Arc;

/// A protection domain: queue pairs access only memory that is registered in their own domain.
#[derive(Debug)]
pub(in super::super) struct Domain {
    pub(super) device: Arc<Device>,
    pub(super) raw: *mut IbvPd,
}

impl Domain {
    pub fn new(device: &Arc<Device>) -> Result<Arc<Domain>> {
        // SAFETY: `device` keeps its context open.
        let raw = unsafe { device.api.alloc_pd(device.raw) };
        let raw = made(raw, || format!("a protection domain of {}", device.name()))?;
        Ok(Arc::new(Domain {
            device: device.clone(),
            raw,
        }))
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: queue pairs and memory regions hold an `Arc<Domain>`, so none is left.
        destroyed("protection domain", unsafe {
            self.device.api.dealloc_pd(self.raw)
        });
    }
}

/// Registered memory, which an RDMA device of this host may read and remote ranks may write.
#[derive(Debug)]
pub(in super::super) struct Registered {
    domain: Arc<Domain>,
    region: Arc<Region>,
    raw: *mut IbvMr,
}

impl Registered {
    /// Registers all of `region`.
    ///
    /// # Errors
    /// System, with the bytes, the limit of locked memory, and what to do.
    pub fn new(domain: &Arc<Domain>, region: Arc<Region>) -> Result<Registered> {
        let device = &domain.device;
        let bytes = region.bytes();
        let access = (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE) as c_int;
        let address = region.place(0, bytes, 1).cast();
        // SAFETY: `domain` keeps the protection domain allocated. `Registered` holds `region`, which keeps the
        // memory mapped until after deregistration.
        let raw = unsafe { device.api.reg_mr(domain.raw, address, bytes, access) };
        let raw = made(raw, || {
            format!(
                "registering {bytes} bytes with {}; this process may lock {} (raise `ulimit -l` \
                 or the container's memlock to at least {} KiB, or lower CINCH_BUFFER_BYTES)",
                device.name(),
                locked_memory_limit(),
                bytes.div_ceil(1024)
            )
        })?;
        Ok(Registered {
            domain: domain.clone(),
            region,
            raw,
        })
    }

    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Returns the address of the first byte, for local and remote use.
    pub fn address(&self) -> u64 {
        self.region.place(0, 0, 1).addr() as u64
    }

    pub fn local_key(&self) -> u32 {
        // SAFETY: `Registered` keeps `raw` registered; the field does not change.
        unsafe { (*self.raw).lkey }
    }

    pub fn remote_key(&self) -> u32 {
        // SAFETY: `Registered` keeps `raw` registered; the field does not change.
        unsafe { (*self.raw).rkey }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: `Connection` drops its queue pairs before its `Arc<Registered>`, so none uses the memory.
        destroyed("memory region", unsafe {
            self.domain.device.api.dereg_mr(self.raw)
        });
    }
}

/// Returns the limit of locked memory as a phrase.
fn locked_memory_limit() -> String {
    // SAFETY: the struct has integers only, for which zero is valid, and is a local variable.
    let limit = unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        match libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) {
            0 => limit.rlim_cur,
            _ => libc::RLIM_INFINITY,
        }
    };
    match limit {
        libc::RLIM_INFINITY => "any amount of memory".into(),
        bytes => format!("{} KiB of memory", bytes >> 10),
    }
}
