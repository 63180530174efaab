//! Processes of one host: a rank's region is a sealed memfd, handed to the others over a UNIX
//! socket after both sides have proven that they belong to the communicator.
//!
//! Nothing has a name in a file system. The sockets' abstract name is random, goes with the
//! listener, and is worth nothing without the key; the process at the other end must run as the
//! same user.

use super::mesh::{Link, Mesh};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::Region;
use crate::sys::socket;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What the sockets are for, in messages and in the key.
pub(super) const PURPOSE: &str = "shm";

/// Gives `memory` to the peers of `mesh`, and returns the region of each, by rank.
///
/// # Errors
/// As for [`Mesh::open`]; remote, naming the peer, if it goes away; mismatch if its memory does
/// not have `bytes` bytes for good.
pub(super) fn exchange(
    mesh: Mesh<'_>,
    memory: OwnedFd,
    bytes: usize,
) -> Result<Vec<(usize, Arc<Region>)>> {
    let (peers, fault, deadline) = (mesh.peers, mesh.fault, mesh.deadline);
    let sockets = mesh.open()?;
    let lost = |link: &Link, error: io::Error| {
        let peer = &peers[link.peer];
        Error::new(
            ErrorKind::Remote,
            format!("{peer} went away while shared memory was handed over: {error}"),
        )
    };
    // Sending never waits: each socket is fresh and its buffer empty. So all can send first.
    for (link, socket) in &sockets {
        socket::send_descriptor(socket, &memory).map_err(|error| lost(link, error))?;
    }
    drop(memory);
    let mut regions = Vec::with_capacity(sockets.len());
    for (link, socket) in &sockets {
        let memory = loop {
            match socket::receive_descriptor(socket) {
                Ok(memory) => break memory,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(lost(link, error)),
            }
            fault.check()?;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!("{} has not handed over its shared memory", peers[link.peer]),
                ));
            }
            let mut interests = [socket::interest(socket, true, false)];
            socket::poll(&mut interests, left.min(Duration::from_millis(20)))?;
        };
        let region =
            Region::of(&memory, bytes).map_err(|error| error.context(&peers[link.peer]))?;
        regions.push((link.peer, region));
    }
    Ok(regions)
}
