//! What a job's ranks share before they are connected.

use super::error::cinch_result_t;
use super::handle::check_out;
use crate::bootstrap::UniqueId;
use crate::config::Config;
use crate::error::{Error, Result};
use std::ffi::c_char;

/// Where a job's ranks meet, and their secret: opaque bytes that one rank makes and the program
/// hands to all others. Who knows them can join.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct cinch_unique_id_t {
    /// Opaque; no text.
    pub bytes: [c_char; 128],
}

/// Makes an id for one communicator, to be handed to all its ranks.
///
/// The process that calls it is where they meet, so it must itself become one of them.
/// Settings are those of the environment (`CINCH_SOCKET_IFNAME` chooses the interface).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_unique_id_create(id: *mut cinch_unique_id_t) -> cinch_result_t {
    guard!("cinch_unique_id_create", {
        check_out("id", id)?;
        let made = UniqueId::create(&Config::from_env()?)?;
        let bytes = made.as_bytes().map(|byte| byte as c_char);
        // SAFETY: not NULL, so writable by the documented contract.
        unsafe { id.write_unaligned(cinch_unique_id_t { bytes }) };
        Ok(())
    })
}

/// The id at `id`.
///
/// # Safety
/// `id` is NULL or readable.
pub(super) unsafe fn read(id: *const cinch_unique_id_t) -> Result<UniqueId> {
    if id.is_null() {
        return Err(Error::invalid_argument("id is NULL"));
    }
    // SAFETY: not NULL, so readable.
    let bytes = unsafe { id.read_unaligned() }.bytes;
    UniqueId::from_bytes(&bytes.map(|byte| byte as u8))
}
