//! Completion queues, and the channels that announce completions to who sleeps.

use super::{Device, done, gone, made, readable};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::ibverbs::{self, *};
use std::ffi::c_int;
use std::io;
use std::os::fd::RawFd;
use std::ptr::null_mut;
use std::sync::Arc;

/// Where completion queues say that something came.
#[derive(Debug)]
pub(in super::super) struct Channel {
    device: Arc<Device>,
    raw: *mut IbvCompChannel,
}

impl Channel {
    pub fn new(device: &Arc<Device>) -> Result<Arc<Channel>> {
        // SAFETY: alive.
        let raw = unsafe { device.api.create_comp_channel(device.raw) };
        let raw = made(raw, || format!("a completion channel of {}", device.name()))?;
        Ok(Arc::new(Channel {
            device: device.clone(),
            raw,
        }))
    }

    /// Descriptor that becomes readable when a queue has something to say.
    pub fn fd(&self) -> RawFd {
        // SAFETY: alive; the field does not change.
        unsafe { (*self.raw).fd }
    }

    /// Takes what queues have to say: the numbers that they were made with.
    pub fn events(&self, mut each: impl FnMut(usize)) {
        while readable(self.fd()) {
            let (mut queue, mut number) = (null_mut(), null_mut());
            // SAFETY: alive, and writable; there is one, so this does not block. Acknowledged at
            // once: a queue that has events to be acknowledged cannot be destroyed.
            unsafe {
                if self
                    .device
                    .api
                    .get_cq_event(self.raw, &mut queue, &mut number)
                    != 0
                {
                    return;
                }
                self.device.api.ack_cq_events(queue, 1);
            }
            each(number.addr());
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: queues hold it.
        gone("completion channel", unsafe {
            self.device.api.destroy_comp_channel(self.raw)
        });
    }
}

/// A completion queue.
#[derive(Debug)]
pub(in super::super) struct Queue {
    channel: Arc<Channel>,
    pub(super) raw: *mut IbvCq,
}

impl Queue {
    /// With room for `entries`; events carry `number`.
    ///
    /// # Errors
    /// System, with the number of entries.
    pub fn new(channel: &Arc<Channel>, entries: usize, number: usize) -> Result<Arc<Queue>> {
        let device = &channel.device;
        let most = device.attributes()?.max_cqe;
        if entries > most.max(0) as usize {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "a connection over {} needs a completion queue of {entries} entries, and they \
                     have at most {most} (lower CINCH_SLOTS or CINCH_IB_QPS)",
                    device.name()
                ),
            ));
        }
        let user = std::ptr::without_provenance_mut(number);
        // SAFETY: alive.
        let raw = unsafe {
            let (api, context) = (&device.api, device.raw);
            api.create_cq(context, entries as c_int, user, channel.raw, 0)
        };
        let raw = made(raw, || {
            format!(
                "a completion queue of {entries} entries of {}",
                device.name()
            )
        })?;
        Ok(Arc::new(Queue {
            channel: channel.clone(),
            raw,
        }))
    }

    /// Takes what is complete; how many.
    ///
    /// # Errors
    /// The queue is broken.
    #[inline]
    pub fn poll(&self, into: &mut [IbvWc]) -> io::Result<usize> {
        // SAFETY: alive.
        match unsafe { ibverbs::poll_cq(self.raw, into) } {
            count @ 0.. => Ok(count as usize),
            code => Err(io::Error::from_raw_os_error(code.abs())),
        }
    }

    /// CompletionPoller for an event with the next completion.
    pub fn arm(&self) -> io::Result<()> {
        // SAFETY: alive.
        done(unsafe { ibverbs::req_notify_cq(self.raw) })
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: queue pairs hold it.
        gone("completion queue", unsafe {
            self.channel.device.api.destroy_cq(self.raw)
        });
    }
}
