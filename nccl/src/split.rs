//! Communicators that are split or shrunk from others.

use crate::boundary::CallProgress;
use crate::comm::{self, Comm, CommStage};
use crate::config::{CommOptions, ncclConfig_t};
use crate::connect_job::{ConnectJob, NewComm};
use crate::group;
use crate::types::*;
use cinch::capi::core::arguments::{rank_list, split_color};
use cinch::sync::Fault;
use cinch::{Error, Result};
use std::ffi::c_int;
use std::ptr::null_mut;

export! {
    /// Splits `comm` into communicators of ranks with equal `color`, ordered by `key`, then by rank in
    /// `comm`. A rank with `NCCL_SPLIT_NOCOLOR` gets NULL. Without a config the new communicator has the
    /// parent's options; with a config, none of them. A revoked communicator can be split.
    counted fn ncclCommSplit | pncclCommSplit(
        comm: ncclComm_t,
        color: c_int,
        key: c_int,
        newcomm: *mut ncclComm_t,
        config: *mut ncclConfig_t,
    ) {
        // SAFETY: the program passes pointers that are valid as nccl.h documents for this function.
        unsafe { split(comm, color, key, newcomm, config) }
    }
}

/// # Safety
/// The arguments are as the header documents.
unsafe fn split(
    comm: ncclComm_t,
    color: c_int,
    key: c_int,
    place: *mut ncclComm_t,
    config: *const ncclConfig_t,
) -> Result<CallProgress> {
    // SAFETY: nccl.h requires of the program that `place` is NULL or writable; `store` refuses
    // NULL.
    unsafe { store("newcomm", place, null_mut())? };
    let parent = comm::lookup(comm)?;
    let revoked = parent.stage() == CommStage::Revoked;
    let communicator = if revoked {
        parent.connection()?
    } else {
        parent.ready()?
    };
    let color = split_color(color, "NCCL_SPLIT_NOCOLOR")?;
    // SAFETY: nccl.h requires of the program that `config` is NULL or readable, with valid strings.
    let options = unsafe { CommOptions::read(config)? }.unwrap_or_else(|| parent.options.clone());
    let config = options.apply(parent.defaults.clone())?;
    // A failure of the parent fails the split, unless the parent was revoked: such a parent has
    // failed already. Later the new communicator fails with the parent only if `splitShare` is set.
    let fault = if revoked {
        Fault::new()
    } else {
        parent.fault.child()
    };
    let shares = options.shares;
    let blocking = options.blocking;
    let made = match color {
        None => None,
        Some(_) => {
            let comm = Comm::connecting(options, parent.defaults.clone(), fault.clone());
            // SAFETY: nccl.h requires of the program that the handle variable stays writable until
            // the job has run.
            Some(unsafe { NewComm::new(comm, place)? })
        }
    };
    group::connect(ConnectJob {
        made,
        parent: Some(parent),
        blocking,
        work: Box::new(move || {
            let (key, own) = (key.into(), fault.clone());
            let made = if revoked {
                communicator.split_again(color, key, config, own)
            } else {
                communicator.split_watched(color, key, config, own)
            };
            if !shares {
                communicator.fault().detach(&fault);
            }
            // This synchronises the ranks of the new communicator. Otherwise the split could end on one rank
            // while on another rank it may still fail with the parent.
            if let Some(made) = made.as_ref().ok().and_then(Option::as_ref) {
                made.prepare_to_shrink()?;
            }
            made
        }),
    })
}

export! {
    /// Creates a communicator of the ranks that are not in `excludeRanksList`, in order; all of them must
    /// call it. With `NCCL_SHRINK_ABORT`, running calls of `comm` are aborted first. Excluded ranks may
    /// have died.
    counted fn ncclCommShrink | pncclCommShrink(
        comm: ncclComm_t,
        excludeRanksList: *mut c_int,
        excludeRanksCount: c_int,
        newcomm: *mut ncclComm_t,
        config: *mut ncclConfig_t,
        shrinkFlags: c_int,
    ) {
        // SAFETY: nccl.h requires of the program that `newcomm` is NULL or writable; `store`
        // refuses NULL.
        unsafe { store("newcomm", newcomm, null_mut())? };
        // SAFETY: nccl.h requires of the program that the list is NULL or has `excludeRanksCount`
        // ranks.
        let exclude = unsafe { rank_list("excludeRanksList", excludeRanksList, excludeRanksCount)? };
        if exclude.is_empty() {
            return Err(Error::invalid_argument("0 ranks are to be excluded; exclude 1 or more"));
        }
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
        // SAFETY: nccl.h requires of the program that `config` is NULL or readable, with valid
        // strings.
        let options = unsafe { CommOptions::read(config)? }.unwrap_or_else(|| parent.options.clone());
        let settings = options.apply(parent.defaults.clone())?;
        // A failure of the parent does not fail the new communicator.
        let fault = Fault::new();
        let blocking = options.blocking;
        let made = Comm::connecting(options, parent.defaults.clone(), fault.clone());
        group::connect(ConnectJob {
            // SAFETY: nccl.h requires of the program that the handle variable stays writable until
            // the job has run.
            made: Some(unsafe { NewComm::new(made, newcomm)? }),
            parent: Some(parent),
            blocking,
            work: Box::new(move || {
                communicator.shrink_watched(&exclude, settings, fault).map(Some)
            }),
        })
    }
}
