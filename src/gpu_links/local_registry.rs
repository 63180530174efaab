//! Registry through which a rank gives the other ranks of its process access to its memory. An entry has a
//! number, which a rank sends in a round of connecting.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};

static REGISTRY: Mutex<Option<LocalRegistry>> = Mutex::new(None);

#[derive(Default)]
struct LocalRegistry {
    last: u64,
    entries: HashMap<u64, Arc<dyn Any + Send + Sync>>,
}

/// Owner of an entry of the registry. Dropping it removes the entry.
#[derive(Debug)]
pub(super) struct Registration {
    /// The number by which [`lookup`] finds the entry; never 0.
    pub number: u64,
}

impl Registration {
    pub fn new<T: Any + Send + Sync>(entry: Arc<T>) -> Registration {
        let mut registry = registry();
        let registry = registry.get_or_insert_default();
        registry.last += 1;
        registry.entries.insert(registry.last, entry);
        Registration {
            number: registry.last,
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // The lock is released before the entry is dropped, because freeing memory may wait for the
        // driver.
        let entry = registry()
            .as_mut()
            .and_then(|registry| registry.entries.remove(&self.number));
        drop(entry);
    }
}

/// Returns the entry that another rank of this process registered under `number`.
///
/// # Errors
/// Internal if no entry of this type has the number: the ranks are not in one process.
pub(super) fn lookup<T: Any + Send + Sync>(number: u64) -> Result<Arc<T>> {
    let entry = registry()
        .as_ref()
        .and_then(|registry| registry.entries.get(&number).cloned());
    entry
        .and_then(|entry| entry.downcast().ok())
        .ok_or_else(|| {
            Error::internal(format!(
                "no {} is offered under {number}",
                std::any::type_name::<T>()
            ))
        })
}

fn registry() -> MutexGuard<'static, Option<LocalRegistry>> {
    // Each change leaves the registry consistent, so a poisoned lock does not matter.
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_lookup_of_a_dropped_registration_or_another_type_fails() {
        let entry = Arc::new(7u32);
        let registration = Registration::new(entry.clone());
        let number = registration.number;
        assert!(Arc::ptr_eq(&lookup::<u32>(number).unwrap(), &entry));
        assert!(lookup::<u64>(number).is_err());
        drop(registration);
        assert!(lookup::<u32>(number).is_err());
        assert_eq!(Arc::strong_count(&entry), 1);
    }
}
