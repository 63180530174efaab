//! Communicators that new ranks join.

use crate::boundary::CallProgress;
use crate::comm::{self, Comm};
use crate::config::{CommOptions, ncclConfig_t};
use crate::connect_job::{ConnectJob, NewComm};
use crate::types::*;
use crate::{group, init, settings, unique_id};
use cinch::capi::core::arguments::unique_id_bytes;
use cinch::{Communicator, Error, Result, UniqueId};
use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::Arc;

/// Value of `rank` by which a rank of the growing communicator keeps its number.
const KEEPS_RANK: c_int = -1;

export! {
    /// Creates the id by which new ranks join `comm` in its next grow. One rank calls it, and this process
    /// serves the rendezvous. An earlier id of this rank that was not used ends.
    fn ncclCommGetUniqueId | pncclCommGetUniqueId(
        comm: ncclComm_t,
        uniqueId: *mut ncclUniqueId,
    ) {
        check_out("uniqueId", uniqueId)?;
        let internal = unique_id_bytes(&comm::lookup(comm)?.ready()?.grow_id()?);
        // SAFETY: nccl.h requires of the program that `uniqueId` is NULL or writable; `store`
        // refuses NULL.
        unsafe { store("uniqueId", uniqueId, ncclUniqueId { internal })? };
        Ok(CallProgress::Done)
    }
}

export! {
    /// Creates a communicator of `nRanks` ranks: those of `comm`, and new ranks after them. Ranks of `comm`
    /// pass -1 as `rank`, and no id or the id of `ncclCommGetUniqueId`. New ranks pass NULL as `comm`, their
    /// number, and that id. `comm` stays usable.
    counted fn ncclCommGrow | pncclCommGrow(
        comm: ncclComm_t,
        nRanks: c_int,
        uniqueId: *const ncclUniqueId,
        rank: c_int,
        newcomm: *mut ncclComm_t,
        config: *mut ncclConfig_t,
    ) {
        // SAFETY: nccl.h requires of the program that `newcomm` is NULL or writable; `store`
        // refuses NULL.
        unsafe { store("newcomm", newcomm, null_mut())? };
        // SAFETY: nccl.h requires of the program that `config` is NULL or readable, with valid strings.
        let options = unsafe { CommOptions::read(config)? };
        let id = match uniqueId.is_null() {
            true => None,
            // SAFETY: nccl.h requires of the program that `uniqueId` is NULL or readable.
            false => Some(unique_id::from_c(&unsafe { uniqueId.read_unaligned() })?),
        };
        // SAFETY: nccl.h requires of the program that the handle variable stays writable until the
        // job has run.
        let job = unsafe {
            match comm.is_null() {
                true => new_rank(newcomm, nRanks, id, rank, options)?,
                false => old_rank(comm::lookup(comm)?, newcomm, nRanks, id, rank, options)?,
            }
        };
        group::connect(job)
    }
}

/// Returns the job by which this process joins a growing communicator.
///
/// # Safety
/// `place` is writable until the job has run.
unsafe fn new_rank(
    place: *mut ncclComm_t,
    nranks: c_int,
    id: Option<UniqueId>,
    rank: c_int,
    options: Option<CommOptions>,
) -> Result<ConnectJob> {
    let id = id.ok_or_else(|| {
        Error::invalid_argument(
            "comm and uniqueId are NULL: a new rank passes the id of ncclCommGetUniqueId, other \
             ranks their communicator",
        )
    })?;
    let (number, of) = (rank_of("rank", rank)?, rank_of("nRanks", nranks)?);
    Communicator::check_new_rank(&id, number, of)?;
    let defaults = settings::on_this_gpu(settings::process()?)?;
    // SAFETY: the caller keeps `place` writable until the job has run.
    unsafe {
        init::job(
            place,
            id,
            (rank, nranks),
            options.unwrap_or_default(),
            defaults,
        )
    }
}

/// Returns the job that grows `parent`, of which this process is a rank.
///
/// # Safety
/// `place` is writable until the job has run.
unsafe fn old_rank(
    parent: Arc<Comm>,
    place: *mut ncclComm_t,
    nranks: c_int,
    id: Option<UniqueId>,
    rank: c_int,
    options: Option<CommOptions>,
) -> Result<ConnectJob> {
    let communicator = parent.ready()?;
    if rank != KEEPS_RANK {
        return Err(Error::invalid_argument(format!(
            "rank is {rank}; a rank of comm passes {KEEPS_RANK} and keeps its number, here {}",
            communicator.rank()
        )));
    }
    let nranks = rank_of("nRanks", nranks)?;
    communicator.check_grow(nranks, id.as_ref())?;
    let options = options.unwrap_or_else(|| parent.options.clone());
    let settings = options.apply(parent.defaults.clone())?;
    // A failure of the parent fails the grow, and no longer the new communicator.
    let fault = parent.fault.child();
    let blocking = options.blocking;
    let made = Comm::connecting(options, parent.defaults.clone(), fault.clone());
    Ok(ConnectJob {
        // SAFETY: the caller keeps `place` writable until the job has run.
        made: Some(unsafe { NewComm::new(made, place)? }),
        parent: Some(parent),
        blocking,
        work: Box::new(move || {
            communicator
                .grow_watched(nranks, id.as_ref(), settings, fault)
                .map(Some)
        }),
    })
}
