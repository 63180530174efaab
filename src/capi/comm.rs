//! Functions that create, query, split, shrink, grow, finalize, destroy and abort communicators.

use super::config::{self, cinch_config_t};
use super::core::arguments::{
    NO_COLOR, as_int, check_out, rank_list, rank_of, split_color, store, unique_id_bytes,
};
use super::error::{cinch_result_t, report};
use super::group;
use super::handle::{self, cinch_comm_t};
use super::id::{self, cinch_unique_id_t};
use crate::comm::Communicator;
use std::ffi::c_int;

/// Color of a rank that joins none of the communicators of a split.
pub const CINCH_SPLIT_NO_COLOR: c_int = -1;
const _: () = assert!(CINCH_SPLIT_NO_COLOR == NO_COLOR);

/// Creates the communicator of `id` as `rank` of `nranks`; returns when all ranks have called it.
///
/// `config` may be NULL: then all settings are those of the environment. An id serves one
/// communicator. With an id of `cinch_comm_grow_id` this is a new rank of a communicator that grows.
/// `*comm` is NULL unless the call succeeds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_init(
    id: *const cinch_unique_id_t,
    rank: c_int,
    nranks: c_int,
    config: *const cinch_config_t,
    comm: *mut *mut cinch_comm_t,
) -> cinch_result_t {
    guard!("cinch_comm_init", {
        // SAFETY: cinch.h requires of the program that inputs are NULL or readable and outputs NULL
        // or writable.
        unsafe {
            store("comm", comm, std::ptr::null_mut())?;
            group::refuse("a communicator cannot be created")?;
            let id = id::read(id)?;
            let config = config::read(config)?;
            let (rank, nranks) = (rank_of("rank", rank)?, rank_of("nranks", nranks)?);
            let joined = Communicator::init(&id, rank, nranks, config)?;
            store("comm", comm, handle::register(joined)?)
        }
    })
}

/// Creates the communicator that the launcher's environment describes: `cinch run`, torchrun, mpirun or
/// srun.
///
/// `config` may be NULL: then all settings are those of the environment. `*comm` is NULL unless the
/// call succeeds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_init_from_env(
    config: *const cinch_config_t,
    comm: *mut *mut cinch_comm_t,
) -> cinch_result_t {
    guard!("cinch_comm_init_from_env", {
        // SAFETY: cinch.h requires of the program that inputs are NULL or readable and outputs NULL
        // or writable.
        unsafe {
            store("comm", comm, std::ptr::null_mut())?;
            group::refuse("a communicator cannot be created")?;
            let joined = Communicator::from_env(config::read(config)?)?;
            store("comm", comm, handle::register(joined)?)
        }
    })
}

/// Stores this process's rank in `comm` in `*rank`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_rank(
    comm: *const cinch_comm_t,
    rank: *mut c_int,
) -> cinch_result_t {
    guard!("cinch_comm_rank", {
        let own = as_int(handle::lookup(comm)?.comm.rank())?;
        // SAFETY: cinch.h requires of the program that `rank` is NULL or writable; `store` refuses
        // NULL.
        unsafe { store("rank", rank, own) }
    })
}

/// Stores the number of ranks of `comm` in `*nranks`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_size(
    comm: *const cinch_comm_t,
    nranks: *mut c_int,
) -> cinch_result_t {
    guard!("cinch_comm_size", {
        let number = as_int(handle::lookup(comm)?.comm.nranks())?;
        // SAFETY: cinch.h requires of the program that `nranks` is NULL or writable; `store`
        // refuses NULL.
        unsafe { store("nranks", nranks, number) }
    })
}

/// Splits `comm` into communicators of ranks with equal `color`, ordered by `key`, then by rank in
/// `comm`.
///
/// All ranks must call it. A color is 0 or more, or `CINCH_SPLIT_NO_COLOR`: then the call succeeds
/// with `*newcomm` NULL. The new communicators stay valid when `comm` is destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_split(
    comm: *mut cinch_comm_t,
    color: c_int,
    key: i64,
    newcomm: *mut *mut cinch_comm_t,
) -> cinch_result_t {
    guard!("cinch_comm_split", {
        // SAFETY: cinch.h requires of the program that `newcomm` is NULL or writable; `store`
        // refuses NULL.
        unsafe {
            store("newcomm", newcomm, std::ptr::null_mut())?;
            let entry = handle::lookup(comm)?;
            group::refuse("a communicator cannot be split")?;
            let color = split_color(color, "CINCH_SPLIT_NO_COLOR")?;
            match entry.comm.split(color, key)? {
                Some(split) => store("newcomm", newcomm, handle::register(split)?),
                None => Ok(()),
            }
        }
    })
}

/// Prepares for `cinch_comm_shrink`. All ranks must call it, while all of them exist.
///
/// Every rank then keeps a listening socket as long as `comm` exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_prepare_to_shrink(comm: *mut cinch_comm_t) -> cinch_result_t {
    guard!("cinch_comm_prepare_to_shrink", {
        let entry = handle::lookup(comm)?;
        group::refuse("a communicator cannot be prepared to shrink")?;
        entry.comm.prepare_to_shrink()
    })
}

/// Creates a communicator of the ranks of `comm` that are not among the `count` ranks in `exclude`, in
/// order. `comm` may have failed, and excluded ranks may have ended.
///
/// With a count of 0, `exclude` may be NULL: then the ranks are excluded that have ended or destroyed
/// `comm`. All ranks of the new communicator must call it with the same list. A rank that dies
/// meanwhile is `CINCH_ERROR_REMOTE` on all others, which can call it again without that rank.
///
/// Needs an earlier `cinch_comm_prepare_to_shrink`; the new communicator needs none. `config` may be
/// NULL: then the settings are those of `comm`. `*newcomm` is NULL unless the call succeeds. `comm`
/// stays valid for `cinch_comm_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_shrink(
    comm: *mut cinch_comm_t,
    exclude: *const c_int,
    count: c_int,
    config: *const cinch_config_t,
    newcomm: *mut *mut cinch_comm_t,
) -> cinch_result_t {
    guard!("cinch_comm_shrink", {
        // SAFETY: cinch.h requires of the program that `newcomm` is NULL or writable, `config` NULL or
        // readable, and that `exclude` has `count` ranks.
        unsafe {
            store("newcomm", newcomm, std::ptr::null_mut())?;
            let exclude = rank_list("exclude", exclude, count)?;
            let entry = handle::lookup(comm)?;
            group::refuse("a communicator cannot be shrunk")?;
            let config = match config.is_null() {
                true => entry.comm.config().clone(),
                false => config::read(config)?,
            };
            let shrunk = entry.comm.shrink(&exclude, config)?;
            store("newcomm", newcomm, handle::register(shrunk)?)
        }
    })
}

/// Creates the id by which new ranks join `comm` in its next `cinch_comm_grow`. One rank of `comm` calls it,
/// any one, and the program sends the id to the new ranks, which call `cinch_comm_init` with it.
///
/// The calling process serves the rendezvous until the timeout of creating a communicator. An id serves one
/// grow. An earlier id of this rank that was not used ends.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_grow_id(
    comm: *mut cinch_comm_t,
    id: *mut cinch_unique_id_t,
) -> cinch_result_t {
    guard!("cinch_comm_grow_id", {
        check_out("id", id)?;
        let bytes = unique_id_bytes(&handle::lookup(comm)?.comm.grow_id()?);
        // SAFETY: cinch.h requires of the program that `id` is NULL or writable; `store` refuses NULL.
        unsafe { store("id", id, cinch_unique_id_t { bytes }) }
    })
}

/// Creates a communicator of `nranks` ranks: the ranks of `comm`, which keep their numbers, and new ranks
/// after them. Returns when all of them have joined.
///
/// All ranks of `comm` must call it, after one of them has called `cinch_comm_grow_id`. A new rank calls
/// `cinch_comm_init` with that id, its number and `nranks`. To replace a rank that has died, shrink, and grow
/// the smaller communicator.
///
/// `config` may be NULL: then the settings are those of `comm`, which the new ranks must share. `*newcomm` is
/// NULL unless the call succeeds. It needs no `cinch_comm_prepare_to_shrink`, and does not fail with `comm`,
/// which stays usable.
///
/// A rank that dies meanwhile is `CINCH_ERROR_REMOTE` on all others. A new rank that does not come is
/// `CINCH_ERROR_TIMEOUT`: then the ranks of `comm` can try again with a new id.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_grow(
    comm: *mut cinch_comm_t,
    nranks: c_int,
    config: *const cinch_config_t,
    newcomm: *mut *mut cinch_comm_t,
) -> cinch_result_t {
    guard!("cinch_comm_grow", {
        // SAFETY: cinch.h requires of the program that `newcomm` is NULL or writable, and `config` NULL or
        // readable.
        unsafe {
            store("newcomm", newcomm, std::ptr::null_mut())?;
            let nranks = rank_of("nranks", nranks)?;
            let entry = handle::lookup(comm)?;
            group::refuse("a communicator cannot grow")?;
            let config = match config.is_null() {
                true => entry.comm.config().clone(),
                false => config::read(config)?,
            };
            let grown = entry.comm.grow(nranks, config)?;
            store("newcomm", newcomm, handle::register(grown)?)
        }
    })
}

/// Returns when every rank has called it. Does not wait for calls that are queued on a GPU.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_barrier(comm: *mut cinch_comm_t) -> cinch_result_t {
    guard!("cinch_barrier", {
        let entry = handle::lookup(comm)?;
        group::refuse("a barrier cannot wait")?;
        entry.comm.barrier()
    })
}

/// Waits until every rank has called it, so that the following `cinch_comm_destroy` loses no rank's
/// data.
///
/// It is optional on host memory, but a rank that destroys without it may fail ranks that still
/// communicate. On GPUs, ranks in different processes must call it: they map each other's memory, which
/// must stay until all ranks have unmapped it. There it also waits for the queued calls, however long
/// earlier work on their streams takes, and the communicator takes no more calls. Destroy CUDA graphs
/// with calls of the communicator first: a graph keeps the mappings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_finalize(comm: *mut cinch_comm_t) -> cinch_result_t {
    guard!("cinch_comm_finalize", {
        let entry = handle::lookup(comm)?;
        group::refuse("a communicator cannot be finalized")?;
        entry.comm.finalize()
    })
}

/// Destroys the handle and frees the communicator's resources. Does not wait for other ranks.
///
/// Calls that run on other threads continue, and the last of them frees the resources. A destroyed
/// handle stays invalid: no later communicator has the same handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_destroy(comm: *mut cinch_comm_t) -> cinch_result_t {
    guard!("cinch_comm_destroy", {
        handle::lookup(comm)?;
        group::refuse("a communicator cannot be destroyed")?;
        drop(handle::remove(comm)?);
        Ok(())
    })
}

/// Aborts the communicator: it fails on this rank at once, and on the others by a message.
///
/// Waiting calls on any thread return `CINCH_ERROR_ABORTED`. Communicators that were split from this
/// one fail, too. The handle stays valid for `cinch_comm_destroy`. It may be called inside a group, and
/// while other threads are in calls on `comm`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_abort(comm: *mut cinch_comm_t) -> cinch_result_t {
    guard!("cinch_comm_abort", {
        handle::lookup(comm)?.comm.abort();
        Ok(())
    })
}

/// Stores the error that failed the communicator in `*code`, `CINCH_SUCCESS` if none did.
///
/// After an error, `cinch_last_error` returns its sentence. Does not wait; any thread may call it.
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
        // SAFETY: cinch.h requires of the program that `code` is NULL or writable; `store` refuses
        // NULL.
        unsafe { store("code", code, found) }
    })
}
