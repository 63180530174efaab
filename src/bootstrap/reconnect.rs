//! Meeting again: some ranks of a communicator make another one although others of them are gone,
//! and perhaps the hub, by which they could have agreed on a place.
//!
//! So every rank keeps a socket that listens from the beginning, and all know where. Who comes to
//! one before its owner waits in the kernel's queue. The key of a meeting is derived from the
//! communicator's and from who is to come: no one else can.

use super::auth::Listener;
use super::{OutOfBand, UniqueId, id, keys, rendezvous_server};
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};

/// Where the ranks of one communicator can meet again.
#[derive(Debug)]
pub struct ShrinkRendezvous {
    rank: usize,
    listener: Listener,
    addresses: Vec<SocketAddr>,
    key: keys::Key,
    /// Meetings so far, by who came: equal on all of them.
    meetings: Mutex<BTreeMap<Vec<usize>, u64>>,
}

impl ShrinkRendezvous {
    /// Opens this rank's socket, and learns of the others'. All ranks call it together.
    ///
    /// # Errors
    /// System if a rank cannot listen; those of the exchange.
    pub fn open(exchange: &dyn OutOfBand) -> Result<ShrinkRendezvous> {
        let (rank, peers) = (exchange.rank(), exchange.peers());
        let bound = Listener::bind(peers[rank].address);
        // A rank that cannot says so, so that nobody waits for it.
        let said = match &bound {
            Ok((_, address)) => address.port().to_le_bytes().to_vec(),
            Err(_) => Vec::new(),
        };
        let ports = exchange.all_gather(&said)?;
        let (listener, _) = bound?;
        let addresses = ports.iter().zip(peers).map(|(port, peer)| {
            let port: [u8; 2] = port.as_slice().try_into().map_err(|_| {
                Error::new(
                    ErrorKind::Remote,
                    format!("{peer} cannot listen for ranks that meet again"),
                )
            })?;
            Ok(SocketAddr::new(peer.address, u16::from_le_bytes(port)))
        });
        Ok(ShrinkRendezvous {
            rank,
            listener,
            addresses: addresses.collect::<Result<_>>()?,
            key: exchange.key("meeting again"),
            meetings: Mutex::default(),
        })
    }

    /// The id by which `members`, in order, make a communicator: they meet at the first one's,
    /// which opens the meeting by this call.
    ///
    /// # Errors
    /// System if the meeting's thread cannot start.
    pub fn meeting(&self, members: &[usize], config: &Config) -> Result<UniqueId> {
        let turn = {
            let mut meetings = self.meetings.lock().unwrap_or_else(PoisonError::into_inner);
            let turn = meetings.entry(members.to_vec()).or_default();
            *turn += 1;
            *turn
        };
        let mut who = turn.to_le_bytes().to_vec();
        who.extend(members.iter().flat_map(|rank| rank.to_le_bytes()));
        let secret = keys::derive(&self.key, &who, "secret");
        let nonce = keys::derive(&self.key, &who, "nonce");
        let nonce: [u8; 16] = std::array::from_fn(|at| nonce[at]);
        let id = id::assemble(0, &secret, &nonce, &[self.addresses[members[0]]]);
        if members[0] == self.rank {
            rendezvous_server::serve(&id, self.listener.duplicate()?, config.init_timeout)?;
        }
        Ok(id)
    }
}
