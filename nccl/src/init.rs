//! Functions that create communicators.

use crate::boundary::CallProgress;
use crate::comm::Comm;
use crate::config::{CommOptions, ncclConfig_t};
use crate::connect_job::{self, ConnectJob, NewComm};
use crate::group;
use crate::types::*;
use crate::{ras, settings, unique_id};
use cinch::sync::Fault;
use cinch::types::DeviceChoice;
use cinch::{Communicator, Config, Error, Result, UniqueId};
use std::ffi::c_int;
use std::ptr::{null, null_mut};

export! {
    /// Creates the communicator of `commId` as `rank` of `nranks`, on this thread's GPU.
    counted fn ncclCommInitRank | pncclCommInitRank(
        comm: *mut ncclComm_t,
        nranks: c_int,
        commId: ncclUniqueId,
        rank: c_int,
    ) {
        // SAFETY: the program passes pointers that are valid as nccl.h documents for this function.
        unsafe { by_rank(comm, nranks, &commId, rank, null()) }
    }
}

export! {
    /// Creates a communicator as `ncclCommInitRank` does, with a config, which may be NULL.
    counted fn ncclCommInitRankConfig | pncclCommInitRankConfig(
        comm: *mut ncclComm_t,
        nranks: c_int,
        commId: ncclUniqueId,
        rank: c_int,
        config: *mut ncclConfig_t,
    ) {
        // SAFETY: the program passes pointers that are valid as nccl.h documents for this function.
        unsafe { by_rank(comm, nranks, &commId, rank, config) }
    }
}

export! {
    /// Creates a communicator of many ranks, which may pass several ids. All ranks use the rendezvous of
    /// the first id.
    counted fn ncclCommInitRankScalable | pncclCommInitRankScalable(
        newcomm: *mut ncclComm_t,
        nranks: c_int,
        myrank: c_int,
        nId: c_int,
        commIds: *mut ncclUniqueId,
        config: *mut ncclConfig_t,
    ) {
        // SAFETY: nccl.h requires of the program that `newcomm` is NULL or writable; `store`
        // refuses NULL.
        unsafe { store("newcomm", newcomm, null_mut())? };
        if commIds.is_null() || nId < 1 || nId > nranks.max(1) {
            return Err(Error::invalid_argument(format!(
                "nId {nId} of {nranks} ranks at {commIds:?}: pass 1 to nranks ids"
            )));
        }
        // SAFETY: nccl.h requires of the program that `commIds` has `nId` ids, of which there is at
        // least one.
        let first = unsafe { commIds.read_unaligned() };
        for at in 1..nId as usize {
            // SAFETY: nccl.h requires of the program that `commIds` has `nId` ids, and `at` is
            // less.
            let id = unsafe { commIds.add(at).read_unaligned() };
            let id = unique_id::from_c(&id)?;
            // cinch serves only the first id, so no rank would join at the others. Equal ids are
            // allowed: they may all name the rendezvous address of the environment.
            if id != unique_id::from_c(&first)? {
                id.cancel();
            }
        }
        // SAFETY: the program passes pointers that are valid as nccl.h documents for this function.
        unsafe { by_rank(newcomm, nranks, &first, myrank, config) }
    }
}

export! {
    /// Creates a communicator with one rank on each of `ndev` GPUs of this process: the GPUs in `devlist`, or
    /// the first ones.
    counted fn ncclCommInitAll | pncclCommInitAll(
        comm: *mut ncclComm_t,
        ndev: c_int,
        devlist: *const c_int,
    ) {
        // SAFETY: the program passes pointers that are valid as nccl.h documents for this function.
        unsafe { all(comm, ndev, devlist) }
    }
}

/// # Safety
/// The arguments are as the header documents.
unsafe fn by_rank(
    place: *mut ncclComm_t,
    nranks: c_int,
    id: &ncclUniqueId,
    rank: c_int,
    config: *const ncclConfig_t,
) -> Result<CallProgress> {
    // SAFETY: nccl.h requires of the program that `place` is NULL or writable; `store` refuses
    // NULL.
    unsafe { store("comm", place, null_mut())? };
    // SAFETY: nccl.h requires of the program that `config` is NULL or readable, with valid strings.
    let options = unsafe { CommOptions::read(config)? }.unwrap_or_default();
    let id = unique_id::from_c(id)?;
    let defaults = settings::on_this_gpu(settings::process()?)?;
    // SAFETY: nccl.h requires of the program that the handle variable stays writable until the job
    // has run.
    let job = unsafe { job(place, id, (rank, nranks), options, defaults)? };
    group::connect(job)
}

/// # Safety
/// The arguments are as the header documents.
unsafe fn all(comms: *mut ncclComm_t, ndev: c_int, devlist: *const c_int) -> Result<CallProgress> {
    check_out("comm", comms)?;
    if ndev < 1 {
        return Err(Error::invalid_argument(format!(
            "ndev is {ndev}; pass 1 or more"
        )));
    }
    let config = settings::process()?;
    // The program's array has places for the GPUs of the machine. With more, it would be written beyond its end.
    if config.device != DeviceChoice::Host {
        check_gpus(ndev, devlist.is_null())?;
    }
    let id = UniqueId::create_for_one_host(&config)?;
    let mut jobs = Vec::new();
    let made = (0..ndev).try_for_each(|rank| {
        let number = if devlist.is_null() {
            rank
        } else {
            // SAFETY: nccl.h requires of the program that `devlist` has `ndev` numbers, and `rank`
            // is less.
            unsafe { devlist.add(rank as usize).read_unaligned() }
        };
        let config = settings::on_gpu(config.clone(), number)?;
        // SAFETY: nccl.h requires of the program that `comms` has space for `ndev` handles, and
        // `rank` is less.
        let place = unsafe { comms.add(rank as usize) };
        // SAFETY: nccl.h requires of the program that `comms` stays writable until this call
        // returns, which runs the job.
        jobs.push(unsafe { job(place, id, (rank, ndev), CommOptions::default(), config)? });
        Ok(())
    });
    // Runs the jobs at once even inside a group, as NCCL does.
    match made {
        Ok(()) => connect_job::run(jobs),
        Err(error) => {
            connect_job::withdraw(&jobs);
            id.cancel();
            Err(error)
        }
    }
}

/// Checks that the machine has `ndev` GPUs, if rank r uses GPU r (`by_order`).
///
/// # Errors
/// Invalid argument if there are fewer.
fn check_gpus(ndev: c_int, by_order: bool) -> Result<()> {
    let gpus = cinch::gpu::Driver::load()?.device_count()?;
    if by_order && ndev as u32 > gpus {
        return Err(Error::invalid_argument(format!(
            "ndev is {ndev}, and this process sees {gpus} GPUs; name them in devlist, where a GPU \
             may be repeated"
        )));
    }
    Ok(())
}

/// Returns the job that connects `rank` of `nranks`, and writes the new handle to `place`.
///
/// # Errors
/// Invalid argument if there is no such rank, or a setting is out of range.
///
/// # Safety
/// `place` is writable until the job has run.
pub(crate) unsafe fn job(
    place: *mut ncclComm_t,
    id: UniqueId,
    (rank, nranks): (c_int, c_int),
    options: CommOptions,
    defaults: Config,
) -> Result<ConnectJob> {
    let (rank, nranks) = (rank_of("rank", rank)?, rank_of("nranks", nranks)?);
    if rank >= nranks {
        return Err(Error::invalid_argument(format!(
            "rank {rank} of {nranks}: a communicator of n ranks has ranks 0 to n-1"
        )));
    }
    let config = options.apply(defaults.clone())?;
    ras::offer(&config);
    let fault = Fault::new();
    let blocking = options.blocking;
    let comm = Comm::connecting(options, defaults, fault.clone());
    Ok(ConnectJob {
        // SAFETY: the caller keeps `place` writable until the job has run.
        made: Some(unsafe { NewComm::new(comm, place)? }),
        parent: None,
        blocking,
        work: Box::new(move || {
            let joined = Communicator::init_watched(&id, rank, nranks, config, fault)?;
            joined.prepare_to_shrink()?;
            Ok(Some(joined))
        }),
    })
}
