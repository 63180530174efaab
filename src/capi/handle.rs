//! Handles of communicators: a `cinch_comm_t*` is a ticket (see [`HandleTable`]).

use super::error::cinch_result_t;
use super::handle_table::HandleTable;
use super::op::CreatedOps;
use crate::comm::Communicator;
use crate::error::{Error, Result};
use std::sync::Arc;

/// A communicator: a group of ranks that call collectives together.
///
/// Only pointers to it exist; they are tickets, and must not be dereferenced.
pub struct cinch_comm_t {
    _opaque: [u8; 0],
}

/// What a ticket stands for. A call that is under way on another thread keeps it alive.
#[derive(Debug)]
pub(super) struct Handle {
    pub(super) comm: Communicator,
    pub(super) ops: CreatedOps,
}

static LIVE: HandleTable<Handle> = HandleTable::new("comm", "communicator", 0xC1C4);

/// Gives `comm` a ticket.
pub(super) fn register(comm: Communicator) -> Result<*mut cinch_comm_t> {
    LIVE.register(Arc::new(Handle {
        comm,
        ops: CreatedOps::default(),
    }))
}

/// What the ticket stands for.
pub(super) fn lookup(comm: *const cinch_comm_t) -> Result<Arc<Handle>> {
    LIVE.lookup(comm)
}

/// Takes the ticket back.
pub(super) fn remove(comm: *const cinch_comm_t) -> Result<Arc<Handle>> {
    LIVE.remove(comm)
}

/// Writes `value` to the out-parameter `name`.
///
/// # Safety
/// `target` is NULL or writable.
pub(super) unsafe fn store<T>(name: &str, target: *mut T, value: T) -> Result<()> {
    check_out(name, target)?;
    // SAFETY: not NULL, so writable; C may have placed it anywhere.
    unsafe { target.write_unaligned(value) };
    Ok(())
}

/// Whether there is an out-parameter at all: asked before anything happens.
pub(super) fn check_out<T>(name: &str, target: *mut T) -> Result<()> {
    if target.is_null() {
        return Err(Error::invalid_argument(format!(
            "{name}, where the result goes, is NULL"
        )));
    }
    Ok(())
}

/// A rank, root or peer as an unsigned number. Whether there is such a rank is for `comm` to say.
pub(super) fn rank_of(name: &str, rank: std::ffi::c_int) -> Result<usize> {
    usize::try_from(rank).map_err(|_| Error::invalid_argument(format!("{name} {rank} is negative")))
}

const _: () = {
    // Handles are shared by threads; calls on one run one after the other.
    const fn shared<T: Send + Sync>() {}
    shared::<Handle>();
    // The codes are returned as numbers of C.
    assert!(size_of::<cinch_result_t>() == 4);
};
