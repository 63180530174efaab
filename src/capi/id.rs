//! The unique id that the ranks of a communicator share before they are connected.

use super::core::arguments::{check_out, store, unique_id, unique_id_bytes};
use super::error::cinch_result_t;
use crate::bootstrap::UniqueId;
use crate::config::Config;
use crate::error::{Error, Result};
use std::ffi::c_char;

/// Address of a communicator's rendezvous and a secret: opaque bytes that one rank creates and the
/// program sends to all others. Whoever has the bytes can join.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct cinch_unique_id_t {
    /// Opaque bytes, not text.
    pub bytes: [c_char; 128],
}

/// Creates the id of one communicator, for the program to send to all its ranks.
///
/// The calling process serves the rendezvous, so it must become one of the ranks. Settings are those
/// of the environment; `CINCH_SOCKET_IFNAME` chooses the network interface.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_unique_id_create(id: *mut cinch_unique_id_t) -> cinch_result_t {
    guard!("cinch_unique_id_create", {
        check_out("id", id)?;
        let bytes = unique_id_bytes(&UniqueId::create(&Config::from_env()?)?);
        // SAFETY: cinch.h requires of the program that `id` is NULL or writable; `store` refuses
        // NULL.
        unsafe { store("id", id, cinch_unique_id_t { bytes }) }
    })
}

/// Returns the id at `id`.
///
/// # Safety
/// `id` is NULL or readable.
pub(super) unsafe fn read(id: *const cinch_unique_id_t) -> Result<UniqueId> {
    if id.is_null() {
        return Err(Error::invalid_argument("id is NULL"));
    }
    // SAFETY: the caller passes `id` as NULL or readable, and it is not NULL.
    unique_id(&unsafe { id.read_unaligned() }.bytes)
}
