//! Joining, asking, splitting, leaving.

use super::config::{self, cinch_config_t};
use super::error::{cinch_result_t, report};
use super::group;
use super::handle::{self, check_out, cinch_comm_t, rank_of, store};
use super::id::{self, cinch_unique_id_t};
use crate::comm::Communicator;
use crate::error::{Error, Result};
use std::ffi::c_int;

/// The colour of a rank that joins none of the communicators of a split.
pub const CINCH_SPLIT_NO_COLOR: c_int = -1;

/// Joins the communicator of `id` as `rank` of `nranks`, and returns when all ranks have joined.
///
/// `config` may be NULL: the environment's settings. An id serves one communicator. `*comm` is
/// NULL unless the call succeeds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_init(
    id: *const cinch_unique_id_t,
    rank: c_int,
    nranks: c_int,
    config: *const cinch_config_t,
    comm: *mut *mut cinch_comm_t,
) -> cinch_result_t {
    guard!("cinch_comm_init", {
        // SAFETY: NULL or writable and readable, by the documented contract.
        unsafe {
            store("comm", comm, std::ptr::null_mut())?;
            group::refuse("a communicator cannot be joined")?;
            let id = id::read(id)?;
            let config = config::read(config)?;
            let (rank, nranks) = (rank_of("rank", rank)?, rank_of("nranks", nranks)?);
            let joined = Communicator::init(&id, rank, nranks, config)?;
            store("comm", comm, handle::register(joined)?)
        }
    })
}

/// Joins the communicator that the launcher describes: `cinch run`, torchrun, mpirun, srun.
///
/// `config` may be NULL: the environment's settings. `*comm` is NULL unless the call succeeds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_init_from_env(
    config: *const cinch_config_t,
    comm: *mut *mut cinch_comm_t,
) -> cinch_result_t {
    guard!("cinch_comm_init_from_env", {
        // SAFETY: NULL or writable and readable, by the documented contract.
        unsafe {
            store("comm", comm, std::ptr::null_mut())?;
            group::refuse("a communicator cannot be joined")?;
            let joined = Communicator::from_env(config::read(config)?)?;
            store("comm", comm, handle::register(joined)?)
        }
    })
}

/// This process's rank in `comm`, to `*rank`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_rank(
    comm: *const cinch_comm_t,
    rank: *mut c_int,
) -> cinch_result_t {
    guard!("cinch_comm_rank", {
        let handle = handle::lookup(comm)?;
        // SAFETY: NULL or writable, by the documented contract.
        unsafe { store("rank", rank, as_int(handle.comm.rank())?) }
    })
}

/// Number of ranks of `comm`, to `*nranks`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_size(
    comm: *const cinch_comm_t,
    nranks: *mut c_int,
) -> cinch_result_t {
    guard!("cinch_comm_size", {
        let handle = handle::lookup(comm)?;
        // SAFETY: NULL or writable, by the documented contract.
        unsafe { store("nranks", nranks, as_int(handle.comm.nranks())?) }
    })
}

/// Splits into communicators of equal `color`, ranked by `key`, then by rank in `comm`.
///
/// All ranks must call it. A colour is 0 or more, or `CINCH_SPLIT_NO_COLOR`: then `*newcomm` is
/// NULL and the call succeeds. The new communicators live on when `comm` is destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_split(
    comm: *mut cinch_comm_t,
    color: c_int,
    key: i64,
    newcomm: *mut *mut cinch_comm_t,
) -> cinch_result_t {
    guard!("cinch_comm_split", {
        // SAFETY: NULL or writable, by the documented contract.
        unsafe {
            store("newcomm", newcomm, std::ptr::null_mut())?;
            let handle = handle::lookup(comm)?;
            group::refuse("a communicator cannot be split")?;
            let color = match color {
                CINCH_SPLIT_NO_COLOR => None,
                color => Some(u32::try_from(color).map_err(|_| {
                    Error::invalid_argument(format!(
                        "color {color} is negative and not CINCH_SPLIT_NO_COLOR (-1)"
                    ))
                })?),
            };
            match handle.comm.split(color, key)? {
                Some(split) => store("newcomm", newcomm, handle::register(split)?),
                None => Ok(()),
            }
        }
    })
}

/// Returns when every rank has called it. On a GPU it does not wait for calls that are queued.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_barrier(comm: *mut cinch_comm_t) -> cinch_result_t {
    guard!("cinch_barrier", {
        let handle = handle::lookup(comm)?;
        group::refuse("a barrier cannot wait")?;
        handle.comm.barrier()
    })
}

/// Waits until every rank has finalized, so that no rank's data is lost by the destroy that
/// follows. Optional; a rank that destroys without it may fail others that still communicate. On a
/// GPU it waits for the calls that are queued, however long the work takes that is ahead of them, and
/// the communicator takes no more then. It is due where ranks are processes: they map each other's
/// memory, which must not be freed before all have given it up. Graphs that hold calls of the
/// communicator go first: they keep it mapped.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_finalize(comm: *mut cinch_comm_t) -> cinch_result_t {
    guard!("cinch_comm_finalize", {
        let handle = handle::lookup(comm)?;
        group::refuse("a communicator cannot be finalized")?;
        handle.comm.finalize()
    })
}

/// Ends the handle and frees what it holds; waits for no other rank.
///
/// Calls that other threads have under way end as they would have, and the last one frees. A
/// handle that was destroyed stays an error for ever; it is never mistaken for a newer one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_destroy(comm: *mut cinch_comm_t) -> cinch_result_t {
    guard!("cinch_comm_destroy", {
        handle::lookup(comm)?;
        group::refuse("a communicator cannot be destroyed")?;
        drop(handle::remove(comm)?);
        Ok(())
    })
}

/// Fails the communicator, on this rank at once and on the others by message.
///
/// Calls that wait, on any thread, return `CINCH_ERROR_ABORTED`. Communicators split from this one
/// fail with it. The handle stays, to be destroyed. May be called inside a group and while other
/// threads are inside calls on `comm`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_abort(comm: *mut cinch_comm_t) -> cinch_result_t {
    guard!("cinch_comm_abort", {
        handle::lookup(comm)?.comm.abort();
        Ok(())
    })
}

/// Whether the communicator has failed, to `*code`: `CINCH_SUCCESS` while it has not.
///
/// If it has, `cinch_last_error` gives the reason. Does not wait; may be called from any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_async_error(
    comm: *const cinch_comm_t,
    code: *mut cinch_result_t,
) -> cinch_result_t {
    guard!("cinch_comm_async_error", {
        check_out("code", code)?;
        let found = match handle::lookup(comm)?.comm.async_error() {
            Some(reason) => report(&reason),
            None => cinch_result_t::CINCH_SUCCESS,
        };
        // SAFETY: not NULL, so writable by the documented contract.
        unsafe { store("code", code, found) }
    })
}

fn as_int(number: usize) -> Result<c_int> {
    c_int::try_from(number)
        .map_err(|_| Error::internal(format!("{number} does not fit an int of C")))
}
