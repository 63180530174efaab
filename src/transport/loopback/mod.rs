//! Threads of one process: a rank's region is handed to the others by reference.

use crate::error::{Error, Result};
use crate::mem::Region;
use crate::sys::fork_safe::ForkSafe;
use std::collections::HashMap;
use std::sync::Arc;

/// Regions of ranks that are connecting, by the number that their peers are told.
static OFFERED: ForkSafe<Option<Offers>> = ForkSafe::new(None);

#[derive(Default)]
struct Offers {
    last: u64,
    regions: HashMap<u64, Arc<Region>>,
}

/// An offer to the other threads, until it is dropped.
#[derive(Debug)]
pub(super) struct Offer {
    /// What to tell the peers.
    pub number: u64,
}

impl Offer {
    /// Offers `region`.
    pub fn new(region: Arc<Region>) -> Offer {
        let number = OFFERED.with(|offers| {
            let offers = offers.get_or_insert_default();
            offers.last += 1;
            offers.regions.insert(offers.last, region);
            offers.last
        });
        Offer { number }
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        // A region closes what it has: not under the lock.
        let region = OFFERED.with(|offers| offers.as_mut()?.regions.remove(&self.number));
        drop(region);
    }
}

/// The region that another thread offers under `number`, of at least `bytes`.
///
/// # Errors
/// Internal if there is none: the ranks only seem to be in one process.
pub(super) fn take(number: u64, bytes: usize) -> Result<Arc<Region>> {
    let region = OFFERED.with(|offers| offers.as_ref()?.regions.get(&number).cloned());
    region
        .filter(|region| region.bytes() >= bytes)
        .ok_or_else(|| Error::internal(format!("no region {number} of {bytes} bytes is offered")))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn an_offer_ends_with_its_handle() {
        let region = Region::heap(4096).unwrap();
        let offer = Offer::new(region.clone());
        let number = offer.number;
        assert!(Arc::ptr_eq(&take(number, 4096).unwrap(), &region));
        assert!(take(number, 4097).is_err());
        drop(offer);
        assert!(take(number, 1).is_err());
    }
}
