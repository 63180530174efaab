//! Memory of ranks that are connecting, for the other ranks of this process: by reference.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};

static OFFERED: Mutex<Option<Offers>> = Mutex::new(None);

#[derive(Default)]
struct Offers {
    last: u64,
    things: HashMap<u64, Arc<dyn Any + Send + Sync>>,
}

/// An offer to the other ranks of this process, until it is dropped.
#[derive(Debug)]
pub(super) struct Offer {
    /// What to tell them; never 0.
    pub number: u64,
}

impl Offer {
    /// Offers `thing`.
    pub fn new<T: Any + Send + Sync>(thing: Arc<T>) -> Offer {
        let mut offers = offered();
        let offers = offers.get_or_insert_default();
        offers.last += 1;
        offers.things.insert(offers.last, thing);
        Offer {
            number: offers.last,
        }
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        // Whatever it is may take the driver's time to destroy: not under the lock.
        let thing = offered()
            .as_mut()
            .and_then(|offers| offers.things.remove(&self.number));
        drop(thing);
    }
}

/// What another rank of this process offers under `number`.
///
/// # Errors
/// Internal if there is no such thing: the ranks only seem to be in one process.
pub(super) fn take<T: Any + Send + Sync>(number: u64) -> Result<Arc<T>> {
    let thing = offered()
        .as_ref()
        .and_then(|offers| offers.things.get(&number).cloned());
    thing
        .and_then(|thing| thing.downcast().ok())
        .ok_or_else(|| {
            Error::internal(format!(
                "no {} is offered under {number}",
                std::any::type_name::<T>()
            ))
        })
}

fn offered() -> MutexGuard<'static, Option<Offers>> {
    // Nothing is left half done by a panic: entries are whole.
    OFFERED.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn an_offer_ends_with_its_handle_and_has_one_type() {
        let thing = Arc::new(7u32);
        let offer = Offer::new(thing.clone());
        assert!(Arc::ptr_eq(&take::<u32>(offer.number).unwrap(), &thing));
        assert!(take::<u64>(offer.number).is_err());
        let number = offer.number;
        drop(offer);
        assert!(take::<u32>(number).is_err());
        assert_eq!(Arc::strong_count(&thing), 1);
    }
}
