//! Threads of one process: a rank's region is handed to the others by reference.

use crate::error::{Error, Result};
use crate::mem::Region;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Regions of ranks that are connecting, by the number that their peers are told.
static OFFERED: Mutex<Option<Offers>> = Mutex::new(None);

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
        let mut offers = offered();
        let offers = offers.get_or_insert_default();
        offers.last += 1;
        offers.regions.insert(offers.last, region);
        Offer {
            number: offers.last,
        }
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        if let Some(offers) = &mut *offered() {
            offers.regions.remove(&self.number);
        }
    }
}

/// The region that another thread offers under `number`, of at least `bytes`.
///
/// # Errors
/// Internal if there is none: the ranks only seem to be in one process.
pub(super) fn take(number: u64, bytes: usize) -> Result<Arc<Region>> {
    let region = offered()
        .as_ref()
        .and_then(|offers| offers.regions.get(&number).cloned());
    region
        .filter(|region| region.bytes() >= bytes)
        .ok_or_else(|| Error::internal(format!("no region {number} of {bytes} bytes is offered")))
}

fn offered() -> MutexGuard<'static, Option<Offers>> {
    // Nothing is left half done by a panic: entries are whole.
    OFFERED.lock().unwrap_or_else(PoisonError::into_inner)
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
