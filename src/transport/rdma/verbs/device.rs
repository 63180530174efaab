//! RDMA devices: attributes, ports, addresses and events.

use super::{destroyed, done, made, readable};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::fork_safe::ForkSafe;
use crate::sys::ibverbs::*;
use crate::sys::log::{self, Level};
use crate::types::Subsystem;
use std::ffi::c_uint;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

/// An open RDMA device: an `ibv_context`, which is closed when the value is dropped.
#[derive(Debug)]
pub(in super::super) struct Device {
    pub(super) api: Arc<dyn Api>,
    pub(super) raw: *mut IbvContext,
    name: String,
}

impl Device {
    /// Opens the devices whose names `wanted` accepts, and returns them sorted by name, with the names of all
    /// devices.
    ///
    /// # Errors
    /// Unsupported if the kernel has no verbs. A system error that names the device if a device cannot be
    /// opened.
    pub fn open_all(
        api: &Arc<dyn Api>,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<(Vec<Arc<Device>>, Vec<String>)> {
        let mut count = 0;
        // SAFETY: `count` is a local variable.
        let list = unsafe { api.get_device_list(&mut count) };
        if list.is_null() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{} finds no verbs in this kernel ({}): the module ib_uverbs is not loaded",
                    api.source(),
                    io::Error::last_os_error()
                ),
            ));
        }
        if count > 0
            && let Some(warning) = keep_from_children(api)
        {
            log::line_of(Subsystem::Net, Level::Warn, format_args!("{warning}"));
        }
        let (mut open, mut names) = (Vec::new(), Vec::new());
        let mut failure = None;
        for index in 0..count.max(0) as usize {
            // SAFETY: `ibv_get_device_list` returned a list of `count` devices.
            let device = unsafe { *list.add(index) };
            // SAFETY: devices are valid until `free_device_list`, which runs after this loop.
            let name = unsafe { (*device).name() };
            if wanted(&name) {
                // SAFETY: devices are valid until `free_device_list`, which runs after this loop.
                let raw = unsafe { api.open_device(device) };
                let what = || format!("opening the RDMA device {name} (is /dev/infiniband there?)");
                match made(raw, what) {
                    Ok(raw) => open.push(Arc::new(Device {
                        api: api.clone(),
                        raw,
                        name: name.clone(),
                    })),
                    Err(error) => failure = Some(error),
                }
            }
            names.push(name);
        }
        // SAFETY: the list comes from `get_device_list`; open devices stay valid without it.
        unsafe { api.free_device_list(list) };
        open.sort_by(|one, two| one.name.cmp(&two.name));
        names.sort();
        match failure {
            Some(error) if open.is_empty() => Err(error),
            _ => Ok((open, names)),
        }
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the limits of the device.
    pub fn attributes(&self) -> Result<IbvDeviceAttr> {
        // SAFETY: the struct has integers only, for which zero is valid; `Device` keeps `raw` open.
        unsafe {
            let mut attributes = std::mem::zeroed();
            done(self.api.query_device(self.raw, &mut attributes)).map_err(|error| {
                Error::system(format!("asking {} what it can", self.name), error)
            })?;
            Ok(attributes)
        }
    }

    /// Returns the state of a port, counted from 1.
    pub fn port(&self, port: u8) -> Result<IbvPortAttr> {
        // SAFETY: the struct has integers only, for which zero is valid; `Device` keeps `raw` open.
        unsafe {
            let mut attributes = std::mem::zeroed();
            done(self.api.query_port(self.raw, port, &mut attributes)).map_err(|error| {
                Error::system(
                    format!("asking for the state of {}:{port}", self.name),
                    error,
                )
            })?;
            Ok(attributes)
        }
    }

    /// Returns an entry of a port's GID table; `None` if the entry is empty.
    pub fn gid(&self, port: u8, index: u32) -> Option<IbvGidEntry> {
        let mut entry = IbvGidEntry::default();
        let (port, bytes) = (u32::from(port), size_of::<IbvGidEntry>());
        // SAFETY: `Device` keeps `raw` open, and `entry` is a local variable.
        let code = unsafe {
            self.api
                .query_gid(self.raw, port, index, &mut entry, 0, bytes)
        };
        (code == 0 && entry.gid.raw != [0; 16]).then_some(entry)
    }

    /// Returns the descriptor that becomes readable with an event of the device.
    pub fn event_fd(&self) -> RawFd {
        // SAFETY: `Device` keeps `raw` open; the field does not change.
        unsafe { (*self.raw).async_fd }
    }

    /// Returns type and element of the next event; `None` if no event is pending.
    pub fn event(&self) -> Option<(c_uint, usize)> {
        if !readable(self.event_fd()) {
            return None;
        }
        let mut event = IbvAsyncEvent {
            element: 0,
            event_type: 0,
        };
        // SAFETY: `Device` keeps `raw` open, and `event` is a local variable. `readable` has found an event, so
        // the call does not block. The element is not touched after the acknowledgement.
        unsafe {
            if self.api.get_async_event(self.raw, &mut event) != 0 {
                return None;
            }
            self.api.ack_async_event(&mut event);
        }
        Some((event.event_type, event.element))
    }
}

/// Serializes `ibv_fork_init`, which two threads must not call at once.
static FORK_INIT: ForkSafe<()> = ForkSafe::new(());

/// Excludes registered memory from copy-on-write in forked children; returns a warning if that fails.
///
/// Without it, the first process that writes to a page after a fork gets a new page. That may be the parent,
/// whose device then goes on with the old page.
fn keep_from_children(api: &Arc<dyn Api>) -> Option<String> {
    // SAFETY: the call has no preconditions.
    if unsafe { api.is_fork_initialized() } == Some(IBV_FORK_UNNEEDED) {
        return None;
    }
    // SAFETY: `FORK_INIT` excludes other threads of this library; repeated calls have no effect.
    let code = FORK_INIT.with(|()| unsafe { api.fork_init() });
    let error = done(code).err()?;
    Some(format!(
        "neither this kernel nor {} keeps registered memory apart from forked children ({error}): \
         what is sent by RDMA after the program has forked, for a data loader say, may be wrong; \
         fork before communicators are made, or set CINCH_IB_DISABLE=1",
        api.source()
    ))
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: every object of the device holds an `Arc<Device>`, so none is left.
        destroyed("device", unsafe { self.api.close_device(self.raw) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::ibverbs::fake::{Fabric, FakeDevice};

    fn open(fabric: &Arc<Fabric>) -> usize {
        let api: Arc<dyn Api> = fabric.clone();
        Device::open_all(&api, |_| true).unwrap().0.len()
    }

    #[test]
    fn fork_init_is_called_unless_the_kernel_copies_memory() {
        for (answer, calls) in [
            (None, 1),
            (Some(IBV_FORK_DISABLED), 1),
            (Some(IBV_FORK_UNNEEDED), 0),
        ] {
            let fabric = Fabric::new(vec![FakeDevice::roce("r0", 1)]);
            fabric.set_fork_support(answer);
            // Opening a device fails in this test. `ibv_fork_init` must have been called nevertheless,
            // because libibverbs demands the call before any device is opened.
            fabric.fail("open_device", 0, 1, libc::EIO);
            let api: Arc<dyn Api> = fabric.clone();
            assert!(Device::open_all(&api, |_| true).is_err());
            assert_eq!(fabric.calls("fork_init"), calls, "{answer:?}");
            assert_eq!(open(&fabric), 1);
        }
    }

    #[test]
    fn failed_fork_init_is_a_warning() {
        let fabric = Fabric::new(vec![FakeDevice::roce("r0", 1)]);
        fabric.set_fork_support(None);
        fabric.fail("fork_init", 0, 2, libc::EINVAL);
        let api: Arc<dyn Api> = fabric.clone();
        let warning = keep_from_children(&api).unwrap();
        for part in ["forked children", "Invalid argument", "CINCH_IB_DISABLE=1"] {
            assert!(warning.contains(part), "{warning}");
        }
        assert_eq!(open(&fabric), 1, "it goes on");
        assert_eq!(keep_from_children(&api), None);
    }
}
