//! Handles of communicators.
//!
//! A `cinch_comm_t*` is a ticket, not an address: a tag and a number that is never reused, looked
//! up in a table of the living. Hence NULL, garbage, and handles that were destroyed are errors
//! for as long as the process lives, and nothing that a caller passes is dereferenced. The lookup
//! costs a call some tens of nanoseconds.

use super::error::cinch_result_t;
use super::op::CreatedOps;
use crate::comm::Communicator;
use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

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

/// The upper 16 bits of a ticket. With these, no pointer of a 64-bit user process looks like one.
const TAG: usize = 0xC1C4 << NUMBER_BITS;
const NUMBER_BITS: u32 = usize::BITS - 16;

static LIVE: RwLock<BTreeMap<usize, Arc<Handle>>> = RwLock::new(BTreeMap::new());
static NEXT: AtomicUsize = AtomicUsize::new(1);

/// Gives `comm` a ticket.
pub(super) fn register(comm: Communicator) -> Result<*mut cinch_comm_t> {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    if number >> NUMBER_BITS != 0 {
        return Err(Error::invalid_usage(format!(
            "{number} communicators were made by this process; there are no more handles"
        )));
    }
    let handle = Arc::new(Handle {
        comm,
        ops: CreatedOps::default(),
    });
    LIVE.write()
        .unwrap_or_else(PoisonError::into_inner)
        .insert(number, handle);
    Ok(std::ptr::without_provenance_mut(TAG | number))
}

/// What the ticket stands for.
pub(super) fn lookup(comm: *const cinch_comm_t) -> Result<Arc<Handle>> {
    let number = number_of(comm)?;
    LIVE.read()
        .unwrap_or_else(PoisonError::into_inner)
        .get(&number)
        .cloned()
        .ok_or_else(|| not_alive(comm, number))
}

/// Takes the ticket back.
pub(super) fn remove(comm: *const cinch_comm_t) -> Result<Arc<Handle>> {
    let number = number_of(comm)?;
    LIVE.write()
        .unwrap_or_else(PoisonError::into_inner)
        .remove(&number)
        .ok_or_else(|| not_alive(comm, number))
}

fn number_of(comm: *const cinch_comm_t) -> Result<usize> {
    if comm.is_null() {
        return Err(Error::invalid_argument("comm is NULL"));
    }
    match comm.addr() ^ TAG {
        number if number >> NUMBER_BITS == 0 => Ok(number),
        _ => Err(Error::invalid_argument(format!(
            "comm {comm:?} is not a communicator"
        ))),
    }
}

fn not_alive(comm: *const cinch_comm_t, number: usize) -> Error {
    let why = if (1..NEXT.load(Ordering::Relaxed)).contains(&number) {
        "was destroyed"
    } else {
        "is not a communicator"
    };
    Error::invalid_argument(format!("comm {comm:?} {why}"))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn garbage_is_named_and_not_touched() {
        let stack = [0u8; 64];
        for (comm, said) in [
            (std::ptr::null(), "comm is NULL"),
            (stack.as_ptr().cast(), "is not a communicator"),
            (std::ptr::without_provenance(1), "is not a communicator"),
            (
                std::ptr::without_provenance(usize::MAX),
                "is not a communicator",
            ),
            (std::ptr::without_provenance(TAG), "is not a communicator"),
            (
                std::ptr::without_provenance(TAG | (1 << 40)),
                "is not a communicator",
            ),
        ] {
            for error in [lookup(comm).unwrap_err(), remove(comm).unwrap_err()] {
                assert!(error.message().contains(said), "{error}");
            }
        }
        // A number that was given out and is not in the table belongs to the dead.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let error = lookup(std::ptr::without_provenance(TAG | number)).unwrap_err();
        assert!(error.message().contains("was destroyed"), "{error}");
    }
}
