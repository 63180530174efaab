//! Handles of communicators: a `cinch_comm_t*` is a number in a [`HandleTable`].

use super::core::created_ops::CreatedOps;
use super::core::handle_table::HandleTable;
use crate::comm::Communicator;
use crate::error::Result;
use std::sync::Arc;

/// A communicator: a group of ranks that call collectives together.
///
/// Programs hold pointers to it as opaque handles; they must not be dereferenced.
pub struct cinch_comm_t {
    _opaque: [u8; 0],
}

/// The communicator behind a handle. A call that runs on another thread keeps it until the call
/// returns.
#[derive(Debug)]
pub(super) struct CommEntry {
    pub(super) comm: Arc<Communicator>,
    pub(super) ops: CreatedOps,
}

static COMMS: HandleTable<CommEntry> = HandleTable::new("comm", "communicator", 0xC1C4);

/// Returns a new handle for `comm`.
pub(super) fn register(comm: Communicator) -> Result<*mut cinch_comm_t> {
    COMMS.register(Arc::new(CommEntry {
        comm: Arc::new(comm),
        ops: CreatedOps::default(),
    }))
}

/// Returns the object of the handle `comm`.
///
/// # Errors
/// See [`HandleTable::lookup`]; invalid usage in a process that was forked after the communicator was
/// made, where its locks may stay locked forever.
pub(super) fn lookup(comm: *const cinch_comm_t) -> Result<Arc<CommEntry>> {
    let entry = COMMS.lookup(comm)?;
    entry.comm.check_process()?;
    Ok(entry)
}

/// Removes the handle `comm` and returns its object.
///
/// # Errors
/// See [`lookup`].
pub(super) fn remove(comm: *const cinch_comm_t) -> Result<Arc<CommEntry>> {
    lookup(comm)?;
    COMMS.remove(comm)
}

const _: () = {
    // Asserts at compile time that threads may share handles; calls on one communicator run one
    // after the other.
    const fn shared<T: Send + Sync>() {}
    shared::<CommEntry>();
};
