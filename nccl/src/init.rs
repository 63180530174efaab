//! Joining communicators.

use crate::boundary::CallProgress;
use crate::comm::Comm;
use crate::config::{CommOptions, ncclConfig_t};
use crate::connect_job::{self, ConnectJob, NewComm};
use crate::types::*;
use crate::{settings, unique_id};
use cinch::sync::Fault;
use cinch::types::DeviceChoice;
use cinch::{Communicator, Config, Error, Result, UniqueId};
use std::ffi::c_int;
use std::ptr::{null, null_mut};

export! {
    /// Joins the communicator of `commId` as `rank` of `nranks`, on this thread's GPU.
    counted fn ncclCommInitRank | pncclCommInitRank(
        comm: *mut ncclComm_t,
        nranks: c_int,
        commId: ncclUniqueId,
        rank: c_int,
    ) {
        // SAFETY: the caller's arguments are as the header says.
        unsafe { by_rank(comm, nranks, &commId, rank, null()) }
    }
}

export! {
    /// The same, with a config, which may be NULL.
    counted fn ncclCommInitRankConfig | pncclCommInitRankConfig(
        comm: *mut ncclComm_t,
        nranks: c_int,
        commId: ncclUniqueId,
        rank: c_int,
        config: *mut ncclConfig_t,
    ) {
        // SAFETY: the caller's arguments are as the header says.
        unsafe { by_rank(comm, nranks, &commId, rank, config) }
    }
}

export! {
    /// The same for many ranks, which may bring several ids. They all meet at the first one's.
    counted fn ncclCommInitRankScalable | pncclCommInitRankScalable(
        newcomm: *mut ncclComm_t,
        nranks: c_int,
        myrank: c_int,
        nId: c_int,
        commIds: *mut ncclUniqueId,
        config: *mut ncclConfig_t,
    ) {
        // SAFETY: NULL or writable, by the header.
        unsafe { store("newcomm", newcomm, null_mut())? };
        if commIds.is_null() || nId < 1 || nId > nranks.max(1) {
            return Err(Error::invalid_argument(format!(
                "nId {nId} of {nranks} ranks at {commIds:?}: there are 1 to nranks ids"
            )));
        }
        // SAFETY: there are `nId` ids.
        let first = unsafe { commIds.read_unaligned() };
        for at in 1..nId as usize {
            // SAFETY: as above.
            let id = unsafe { commIds.add(at).read_unaligned() };
            let id = unique_id::from_c(&id)?;
            // Nobody will come there, unless all name one address of the environment.
            if id != unique_id::from_c(&first)? {
                id.cancel();
            }
        }
        // SAFETY: the arguments are as the header says.
        unsafe { by_rank(newcomm, nranks, &first, myrank, config) }
    }
}

export! {
    /// Makes a communicator of `ndev` GPUs of this process: those of `devlist`, or the first ones.
    counted fn ncclCommInitAll | pncclCommInitAll(
        comm: *mut ncclComm_t,
        ndev: c_int,
        devlist: *const c_int,
    ) {
        // SAFETY: the caller's arguments are as the header says.
        unsafe { all(comm, ndev, devlist) }
    }
}

unsafe fn by_rank(
    place: *mut ncclComm_t,
    nranks: c_int,
    id: &ncclUniqueId,
    rank: c_int,
    config: *const ncclConfig_t,
) -> Result<CallProgress> {
    // SAFETY: NULL or writable, by the header.
    unsafe { store("comm", place, null_mut())? };
    // SAFETY: NULL or readable, by the header.
    let options = unsafe { CommOptions::read(config)? }.unwrap_or_default();
    let id = unique_id::from_c(id)?;
    let defaults = settings::on_this_gpu(settings::process()?)?;
    // SAFETY: writable until the job has run, by the header.
    let job = unsafe { job(place, id, (rank, nranks), options, defaults)? };
    connect_job::submit(job)
}

unsafe fn all(comms: *mut ncclComm_t, ndev: c_int, devlist: *const c_int) -> Result<CallProgress> {
    check_out("comm", comms)?;
    if ndev < 1 {
        return Err(Error::invalid_argument(format!(
            "ndev is {ndev}; there is at least one rank"
        )));
    }
    let config = settings::process()?;
    let id = UniqueId::create_for_one_host(&config)?;
    let mut jobs = Vec::new();
    let made = (0..ndev).try_for_each(|rank| {
        let number = match devlist.is_null() {
            true => rank,
            // SAFETY: `ndev` numbers, by the header.
            false => unsafe { devlist.add(rank as usize).read_unaligned() },
        };
        let config = settings::on_gpu(config.clone(), number)?;
        // SAFETY: room for `ndev` communicators, by the header.
        let place = unsafe { comms.add(rank as usize) };
        // SAFETY: writable until this call returns.
        jobs.push(unsafe { job(place, id, (rank, ndev), CommOptions::default(), config)? });
        Ok(())
    });
    // Not part of an open group: NCCL's does not wait for its end either.
    let made = made.and_then(|()| match config.device {
        DeviceChoice::Host => Ok(()),
        _ => check_gpus(ndev, devlist.is_null()),
    });
    match made {
        Ok(()) => connect_job::run(jobs),
        Err(error) => {
            connect_job::withdraw(&jobs);
            id.cancel();
            Err(error)
        }
    }
}

/// Refuses more ranks than GPUs where every rank takes the next one.
fn check_gpus(ndev: c_int, by_order: bool) -> Result<()> {
    let there_are = cinch::gpu::Driver::load()?.device_count()?;
    match by_order && ndev as u32 > there_are {
        true => Err(Error::invalid_argument(format!(
            "ndev is {ndev}, and this process sees {there_are} GPUs; name them in devlist, where \
             one may stand several times"
        ))),
        false => Ok(()),
    }
}

/// # Safety
/// `place` is writable until the job has run.
unsafe fn job(
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
    let fault = Fault::new();
    let blocking = options.blocking;
    let comm = Comm::connecting(options, defaults, fault.clone());
    Ok(ConnectJob {
        // SAFETY: as the caller's.
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
