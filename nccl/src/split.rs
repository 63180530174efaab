//! Communicators made from others.

use crate::boundary::CallProgress;
use crate::comm::{self, Comm, CommStage};
use crate::config::{CommOptions, ncclConfig_t};
use crate::connect_job::{self, ConnectJob, NewComm};
use crate::types::*;
use cinch::sync::Fault;
use cinch::{Error, Result};
use std::ffi::c_int;
use std::ptr::null_mut;

export! {
    /// Splits into communicators of equal `color`, ranked by `key`, then by rank in `comm`. A rank
    /// of colour `NCCL_SPLIT_NOCOLOR` gets NULL. Without a config the new one has its parent's; with
    /// one, nothing of it. One that was revoked can be split, too.
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
) -> Result<CallProgress> {
    // SAFETY: NULL or writable, by the header.
    unsafe { store("newcomm", place, null_mut())? };
    let parent = comm::lookup(comm)?;
    let revoked = parent.stage() == CommStage::Revoked;
    let communicator = match revoked {
        true => parent.connection()?,
        false => parent.ready()?,
    };
    let color = match color {
        NCCL_SPLIT_NOCOLOR => None,
        color => Some(u32::try_from(color).map_err(|_| {
            Error::invalid_argument(format!(
                "color {color} is negative and not NCCL_SPLIT_NOCOLOR ({NCCL_SPLIT_NOCOLOR})"
            ))
        })?),
    };
    // SAFETY: NULL or readable, by the header.
    let options = unsafe { CommOptions::read(config)? }.unwrap_or_else(|| parent.options.clone());
    let config = options.apply(parent.defaults.clone())?;
    // What ends the parent ends the split. The new communicator then goes on without the parent,
    // unless it is to share its fate. That of a parent that was revoked is behind it.
    let fault = match revoked {
        true => Fault::new(),
        false => parent.fault.child(),
    };
    let shares = options.shares;
    let blocking = options.blocking;
    let made = match color {
        None => None,
        Some(_) => {
            let comm = Comm::connecting(options, parent.defaults.clone(), fault.clone());
            // SAFETY: writable until the job has run, by the header.
            Some(unsafe { NewComm::new(comm, place)? })
        }
    };
    connect_job::submit(ConnectJob {
        made,
        parent: Some(parent),
        blocking,
        work: Box::new(move || {
            let (key, own) = (key.into(), fault.clone());
            let made = match revoked {
                true => communicator.split_again(color, key, config, own),
                false => communicator.split_watched(color, key, config, own),
            };
            if !shares {
                communicator.fault().detach(&fault);
            }
            // Where its ranks meet once more: a split is over nowhere before the parent has no part
            // in it anywhere.
            if let Some(made) = made.as_ref().ok().and_then(Option::as_ref) {
                made.prepare_to_shrink()?;
            }
            made
        }),
    })
}

export! {
    /// Makes a communicator of the ranks that are not in `excludeRanksList`, in order, and that
    /// all call it. With `NCCL_SHRINK_ABORT` what runs on `comm` is ended first; ranks that are
    /// excluded need not be alive.
    counted fn ncclCommShrink | pncclCommShrink(
        comm: ncclComm_t,
        excludeRanksList: *mut c_int,
        excludeRanksCount: c_int,
        newcomm: *mut ncclComm_t,
        config: *mut ncclConfig_t,
        shrinkFlags: c_int,
    ) {
        // SAFETY: NULL or writable, by the header.
        unsafe { store("newcomm", newcomm, null_mut())? };
        // SAFETY: NULL or as many ranks, by the header.
        let exclude = unsafe { ranks(excludeRanksList, excludeRanksCount)? };
        let parent = comm::lookup(comm)?;
        let communicator = parent.connection()?;
        match shrinkFlags {
            NCCL_SHRINK_DEFAULT => parent.failure().map_or(Ok(()), |failure| {
                Err(failure.context("shrink with NCCL_SHRINK_ABORT, for the communicator has failed"))
            })?,
            NCCL_SHRINK_ABORT => communicator.abort(),
            _ => {
                return Err(Error::invalid_argument(format!(
                    "shrinkFlags is {shrinkFlags}; it takes NCCL_SHRINK_DEFAULT \
                     ({NCCL_SHRINK_DEFAULT}) or NCCL_SHRINK_ABORT ({NCCL_SHRINK_ABORT})"
                )));
            }
        }
        // SAFETY: NULL or readable, by the header.
        let options = unsafe { CommOptions::read(config)? }.unwrap_or_else(|| parent.options.clone());
        let settings = options.apply(parent.defaults.clone())?;
        // The parent's failure is not the new one's.
        let fault = Fault::new();
        let blocking = options.blocking;
        let made = Comm::connecting(options, parent.defaults.clone(), fault.clone());
        connect_job::submit(ConnectJob {
            // SAFETY: writable until the job has run, by the header.
            made: Some(unsafe { NewComm::new(made, newcomm)? }),
            parent: Some(parent),
            blocking,
            work: Box::new(move || {
                let shrunk = communicator.shrink(&exclude, settings, fault)?;
                shrunk.prepare_to_shrink()?;
                Ok(Some(shrunk))
            }),
        })
    }
}

/// # Safety
/// `list` is NULL, or `count` numbers.
unsafe fn ranks(list: *const c_int, count: c_int) -> Result<Vec<usize>> {
    if count < 1 || list.is_null() {
        return Err(Error::invalid_argument(format!(
            "{count} ranks at {list:?} are to be excluded; it takes 1 or more"
        )));
    }
    (0..count as usize)
        // SAFETY: as the caller's.
        .map(|at| rank_of("excludeRanksList", unsafe { list.add(at).read_unaligned() }))
        .collect()
}
