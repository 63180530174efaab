//! Communicators made from others.

use crate::async_job::{self, Job, Made};
use crate::boundary::Progress;
use crate::comm::{self, Comm};
use crate::config::{Asked, ncclConfig_t};
use crate::leave::Family;
use crate::types::*;
use cinch::{Error, Result};
use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;

export! {
    /// Splits into communicators of equal `color`, ranked by `key`, then by rank in `comm`. A rank
    /// of colour `NCCL_SPLIT_NOCOLOR` gets NULL. Without a config the new one has its parent's.
    counted fn ncclCommSplit | pncclCommSplit(
        comm: ncclComm_t,
        color: c_int,
        key: c_int,
        newcomm: *mut ncclComm_t,
        config: *mut ncclConfig_t,
    ) {
        // SAFETY: the caller's arguments are as the header says.
        unsafe { split(comm, color, key, newcomm, config) }
    }
}

unsafe fn split(
    comm: ncclComm_t,
    color: c_int,
    key: c_int,
    place: *mut ncclComm_t,
    config: *const ncclConfig_t,
) -> Result<Progress> {
    // SAFETY: NULL or writable, by the header.
    unsafe { store("newcomm", place, null_mut())? };
    let parent = comm::lookup(comm)?;
    let communicator = parent.ready()?;
    let color = match color {
        NCCL_SPLIT_NOCOLOR => None,
        color => Some(u32::try_from(color).map_err(|_| {
            Error::invalid_argument(format!(
                "color {color} is negative and not NCCL_SPLIT_NOCOLOR ({NCCL_SPLIT_NOCOLOR})"
            ))
        })?),
    };
    // SAFETY: NULL or readable, by the header.
    let asked = unsafe { Asked::read(config)? }.unwrap_or_else(|| parent.asked.clone());
    let config = asked.apply(parent.config.clone())?;
    let fault = parent.fault.child();
    let number = parent.splits.fetch_add(1, Ordering::Relaxed);
    let blocking = asked.blocking;
    let made = match color {
        None => None,
        Some(color) => {
            let family = Family::of(&(parent.family.key(), number, color));
            let comm = Comm::connecting(asked, config.clone(), fault.clone(), family);
            // SAFETY: writable until the job has run, by the header.
            Some(unsafe { Made::new(comm, place)? })
        }
    };
    async_job::submit(Job {
        made,
        parent: Some(parent),
        blocking,
        work: Box::new(move || communicator.split_watched(color, key.into(), config, fault)),
    })
}
