//! From addresses to sockets: the only place that knows how a TCP connection proves itself.

use super::super::mesh::{Link, Mesh};
use crate::bootstrap::PeerInfo;
use crate::error::Result;
use crate::sync::Fault;
use crate::sys::socket::{self, Address, Socket};
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

/// What the sockets are for, in messages and in the key.
pub(in super::super) const PURPOSE: &str = "tcp";

/// A listener for the peers of this rank, and its port.
///
/// # Errors
/// System, naming the address.
pub(in super::super) fn listen(address: IpAddr) -> Result<(Socket, u16)> {
    let listener = socket::listen(&Address::Tcp(SocketAddr::new(address, 0)))?;
    let port = socket::port(&listener)?;
    Ok((listener, port))
}

/// Which sockets to open, and how.
pub(in super::super) struct Plan<'a> {
    pub me: usize,
    pub peers: &'a [PeerInfo],
    /// Ranks that TCP serves, with their ports.
    pub ports: Vec<(usize, u16)>,
    pub channels: usize,
    pub sockets: usize,
    pub listener: Socket,
    pub key: [u8; 32],
    pub fault: &'a Fault,
    pub deadline: Instant,
}

/// Opens every socket of the plan. Both ends have proven that they know the key.
///
/// # Errors
/// As for [`Mesh::open`].
pub(in super::super) fn connect(plan: Plan<'_>) -> Result<HashMap<Link, Socket>> {
    let (mut accepts, mut connects) = (Vec::new(), Vec::new());
    for &(peer, port) in &plan.ports {
        for channel in 0..plan.channels {
            for socket in 0..plan.sockets {
                let link = Link {
                    peer,
                    channel,
                    socket,
                };
                // The higher rank connects.
                if peer > plan.me {
                    accepts.push(link);
                } else {
                    let address = SocketAddr::new(plan.peers[peer].address, port);
                    connects.push((link, Address::Tcp(address)));
                }
            }
        }
    }
    let mesh = Mesh {
        purpose: PURPOSE,
        key: plan.key,
        me: plan.me,
        peers: plan.peers,
        listener: plan.listener,
        local: false,
        accepts,
        connects,
        fault: plan.fault,
        deadline: plan.deadline,
    };
    let sockets = mesh.open()?;
    for socket in sockets.values() {
        // Buffers stay the kernel's business: it tunes them to the path; a fixed size would cap it.
        socket::no_delay(socket)?;
        socket::keep_alive(socket)?;
    }
    Ok(sockets)
}
