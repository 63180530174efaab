//! Completion queues, and the channels that announce completions to a sleeping rank.

use super::{Device, destroyed, done, made, readable};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::ibverbs::{self, *};
use std::ffi::c_int;
use std::io;
use std::os::fd::RawFd;
use std::ptr::null_mut;
use std::sync::Arc;

/// A completion channel, on which queues announce completions.
#[derive(Debug)]
pub(in super::super) struct Channel {
    device: Arc<Device>,
    raw: *mut IbvCompChannel,
}

impl Channel {
    pub fn new(device: &Arc<Device>) -> Result<Arc<Channel>> {
        // SAFETY: `device` keeps its context open.
        let raw = unsafe { device.api.create_comp_channel(device.raw) };
        let raw = made(raw, || format!("a completion channel of {}", device.name()))?;
        Ok(Arc::new(Channel {
            device: device.clone(),
            raw,
        }))
    }

    /// Returns the descriptor that becomes readable with an announcement.
    pub fn fd(&self) -> RawFd {
        // SAFETY: `Channel` keeps `raw` allocated; the field does not change.
        unsafe { (*self.raw).fd }
    }

    /// Takes all announcements, and calls `each` with the number of the queue.
    pub fn events(&self, mut each: impl FnMut(usize)) {
        while readable(self.fd()) {
            let (mut queue, mut number) = (null_mut(), null_mut());
            // SAFETY: `Channel` keeps `raw` allocated, and both pointers are local variables. `readable` has found
            // an event, so the call does not block. Destroying a queue waits for the acknowledgement.
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
        // SAFETY: each completion queue holds an `Arc<Channel>`, so no queue of this channel exists
        // when it is dropped.
        destroyed("completion channel", unsafe {
            self.device.api.destroy_comp_channel(self.raw)
        });
    }
}

/// A completion queue, whose events are announced on a completion channel.
#[derive(Debug)]
pub(in super::super) struct Queue {
    channel: Arc<Channel>,
    pub(super) raw: *mut IbvCq,
}

impl Queue {
    /// Creates a queue of `entries` completions, whose announcements carry `number`.
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
        // SAFETY: `channel` keeps itself and the context of its device open.
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

    /// Takes completions; returns their number.
    ///
    /// # Errors
    /// The queue is broken.
    #[inline]
    pub fn poll(&self, into: &mut [IbvWc]) -> io::Result<usize> {
        // SAFETY: `Queue` keeps `raw` allocated.
        match unsafe { ibverbs::poll_cq(self.raw, into) } {
            count @ 0.. => Ok(count as usize),
            code => Err(io::Error::from_raw_os_error(code.abs())),
        }
    }

    /// Requests an announcement of the next completion.
    pub fn arm(&self) -> io::Result<()> {
        // SAFETY: `Queue` keeps `raw` allocated.
        done(unsafe { ibverbs::req_notify_cq(self.raw) })
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: queue pairs hold an `Arc<Queue>`, so none is left.
        destroyed("completion queue", unsafe {
            self.channel.device.api.destroy_cq(self.raw)
        });
    }
}
