//! The part of the fuzz target `members` that reads what a peer offers for RDMA.

use super::PortOffer;
use super::connect::QueuePairOffer;
use super::port_shares::shares;
use crate::wire::Wire;

/// Reads the ports of a rank and shares them among three ranks. What is read must be written alike.
pub(in crate::transport) fn ports(body: &[u8]) -> Option<bool> {
    let offer = PortOffer::from_bytes(body).ok()?;
    let again = PortOffer::from_bytes(&offer.to_bytes());
    if offer.note.chars().count() <= super::LONGEST_NOTE {
        assert_eq!(again.as_ref(), Ok(&offer), "ports are written differently");
    }
    let all: Vec<_> = offer.ports.iter().collect();
    let shares = shares(&[all.clone(), all.clone(), all]);
    let in_range = |share: &Vec<usize>| share.iter().all(|&port| port < offer.ports.len());
    assert!(shares.len() == 3 && shares.iter().all(in_range));
    Some(offer.ports.len() == 3 && offer.kinds() == 0x15)
}

/// Reads the queue pairs of a rank. What is read must be written alike.
pub(in crate::transport) fn queue_pairs(body: &[u8]) -> Option<bool> {
    let offer = QueuePairOffer::from_bytes(body).ok()?;
    assert_eq!(
        offer.to_bytes(),
        body,
        "queue pairs are written differently"
    );
    Some(offer.find(1, 2, 3).is_some())
}
