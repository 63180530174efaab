//! Ranks that are threads of one process: each takes its peers' inboxes from a registry of the process.

use super::contract::{Caps, Connected, Peers, Prepared, Setup, Transport};
use super::inbox::InboxMemory;
use crate::bootstrap::PeerInfo;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::mem::Region;
use crate::sys::fork_safe::ForkSafe;
use crate::types::TransportKind;
use crate::wire::Wire;
use std::collections::HashMap;
use std::sync::Arc;

/// The transport between threads of one process.
pub(super) struct Loopback;

/// Costs are equal to those of shared memory; see [`super::shm`].
static CAPS: Caps = Caps {
    inbox: InboxMemory::Private,
    ..super::shm::CAPS
};

impl Transport for Loopback {
    fn kind(&self) -> TransportKind {
        TransportKind::Loopback
    }

    fn caps(&self) -> &'static Caps {
        &CAPS
    }

    fn obstruction(&self, own: &PeerInfo, peer: &PeerInfo, _: &Config) -> Option<&'static str> {
        if own.process_id != peer.process_id {
            return Some("they are not threads of one process");
        }
        super::shm::on_other_host(own, peer)
    }

    fn probe(&self, _: &Config) -> Result<&'static str> {
        Ok("threads of one process")
    }

    fn prepare(&self, setup: &Setup<'_>) -> Result<Box<dyn Prepared>> {
        Ok(Box::new(Offer::new(setup.inbox()?.region().clone())))
    }
}

impl Prepared for Offer {
    fn offer(&self) -> Vec<u8> {
        self.number.to_bytes()
    }

    fn connect(&mut self, setup: &Setup<'_>, peers: &Peers<'_>) -> Result<Option<Connected>> {
        let inbox = setup.inbox()?;
        let each = peers.served.iter();
        let regions = each.map(|&rank| {
            let region = take(peers.offer(setup, rank)?, inbox.bytes());
            let region = region.map_err(|error| error.context(&setup.peers()[rank]))?;
            Ok((rank, region))
        });
        let regions = regions.collect::<Result<Vec<_>>>()?;
        setup.connect_inbox(peers, regions).map(Some)
    }
}

/// Inboxes of ranks that are connecting, by the number that each rank sends to its peers.
static OFFERED: ForkSafe<Option<Offers>> = ForkSafe::new(None);

#[derive(Default)]
struct Offers {
    last: u64,
    regions: HashMap<u64, Arc<Region>>,
}

/// An inbox in the registry; dropping the offer removes the inbox.
#[derive(Debug)]
struct Offer {
    /// Key in the registry, which peers receive.
    number: u64,
}

impl Offer {
    /// Adds `region` to the registry.
    fn new(region: Arc<Region>) -> Offer {
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
        // Unmapping a region takes a system call, so the region is dropped only after the lock is
        // released.
        let region = OFFERED.with(|offers| offers.as_mut()?.regions.remove(&self.number));
        drop(region);
    }
}

/// Returns the region under `number`, which has at least `bytes` bytes.
///
/// # Errors
/// Internal if the registry has no such region: the ranks only seem to be in one process.
fn take(number: u64, bytes: usize) -> Result<Arc<Region>> {
    let region = OFFERED.with(|offers| offers.as_ref()?.regions.get(&number).cloned());
    region
        .filter(|region| region.bytes() >= bytes)
        .ok_or_else(|| Error::internal(format!("no region {number} of {bytes} bytes is offered")))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn offer_ends_with_its_handle() {
        let region = Region::heap(4096).unwrap();
        let offer = Offer::new(region.clone());
        let number = offer.number;
        assert!(Arc::ptr_eq(&take(number, 4096).unwrap(), &region));
        assert!(take(number, 4097).is_err());
        drop(offer);
        assert!(take(number, 1).is_err());
    }
}
