//! Rendezvous after a failure, by which the remaining ranks of a communicator make a new
//! communicator. Rank 0 may be gone, so ranks cannot agree on an address at that time.
//!
//! Every rank therefore opens a listening socket in advance, and all ranks exchange its address. A
//! rank that connects before the owner serves the socket waits in the kernel's queue. The key of a
//! rendezvous is derived from the communicator's key and the ranks that take part.

use super::auth::Listener;
use super::{OutOfBand, UniqueId, id, keys, rendezvous_server};
use crate::config::Config;
use crate::error::Result;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};

/// Addresses at which ranks of one communicator can hold another rendezvous.
#[derive(Debug)]
pub struct ShrinkRendezvous {
    rank: usize,
    listener: Listener,
    addresses: Vec<SocketAddr>,
    key: keys::DerivedKey,
    /// Number of earlier rendezvous by their members, equal on all members.
    rounds: Mutex<BTreeMap<Vec<usize>, u64>>,
}

impl ShrinkRendezvous {
    /// Opens this rank's socket, and gathers the addresses of all. All ranks call it together.
    ///
    /// # Errors
    /// System if a rank cannot listen; the errors of [`OutOfBand::all_gather`].
    pub fn open(exchange: &dyn OutOfBand) -> Result<ShrinkRendezvous> {
        let (rank, peers) = (exchange.rank(), exchange.peers());
        let (bound, port) = match Listener::bind(peers[rank].address) {
            Ok((listener, address)) => (Ok(listener), Ok(address.port())),
            Err(error) => (Err(error.clone()), Err(error)),
        };
        let ports = exchange.gather_results("listen for a later rendezvous", &port)?;
        let listener = bound?;
        let addresses = ports.into_iter().zip(peers);
        let addresses =
            addresses.map(|(port, peer)| port.map(|port| SocketAddr::new(peer.address, port)));
        Ok(ShrinkRendezvous {
            rank,
            listener,
            addresses: addresses.collect::<Result<_>>()?,
            key: exchange.key("reconnect"),
            rounds: Mutex::default(),
        })
    }

    /// Returns the id by which `members`, in order, make a communicator. On the first member the
    /// call starts to serve the rendezvous.
    ///
    /// # Errors
    /// System if the thread of the rendezvous cannot start.
    pub fn rendezvous(&self, members: &[usize], config: &Config) -> Result<UniqueId> {
        let round = {
            let mut rounds = self.rounds.lock().unwrap_or_else(PoisonError::into_inner);
            let round = rounds.entry(members.to_vec()).or_default();
            *round += 1;
            *round
        };
        let mut salt = round.to_le_bytes().to_vec();
        salt.extend(members.iter().flat_map(|rank| rank.to_le_bytes()));
        let secret = keys::derive(&self.key, &salt, "secret");
        let nonce = keys::derive(&self.key, &salt, "nonce");
        let nonce: [u8; 16] = std::array::from_fn(|at| nonce[at]);
        let id = id::assemble(0, &secret, &nonce, &[self.addresses[members[0]]]);
        if members[0] == self.rank {
            let listener = self.listener.duplicate()?;
            rendezvous_server::serve(&id, listener, config.init_timeout)?;
        }
        Ok(id)
    }
}
