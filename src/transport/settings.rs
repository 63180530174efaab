//! What ranks tell each other before they connect, and what follows from it on all of them alike:
//! geometry, and which transport serves which pair.

use super::rdma::AddressKind;
use crate::bootstrap::PeerInfo;
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::{FifoShape, LINE_BYTES};
use crate::sys::cpu::{self, CoreSet};
use crate::types::TransportKind;
use crate::wire::{Reader, Wire, WireResult, Writer};

/// Slots do not shrink below this.
const SMALLEST_SLOT: usize = 4 << 10;

/// The slots of a connection: as configured, or smaller where the budget demands it.
///
/// # Errors
/// Invalid argument if the settings are impossible, or, with the number that is needed, if even
/// the smallest slots exceed the budget.
pub(super) fn shape(config: &Config, nranks: usize) -> Result<FifoShape> {
    let sensible = config.slots.is_power_of_two()
        && config.slot_bytes >= SMALLEST_SLOT
        && config.slot_bytes.is_multiple_of(64)
        && config.slot_bytes <= u32::MAX as usize
        && config.channels > 0
        && config.tcp_sockets > 0
        && config.ib_qps > 0;
    if !sensible {
        return Err(Error::invalid_argument(format!(
            "{} slots of {} bytes on {} channels with {} sockets: slots must be a power of two, \
             slot bytes a multiple of 64 from {SMALLEST_SLOT}, channels and sockets at least 1",
            config.slots, config.slot_bytes, config.channels, config.tcp_sockets
        )));
    }
    // Both directions.
    let slots = 2 * nranks as u128 * config.channels as u128 * config.slots as u128;
    let need = |slot_bytes: usize| slots * (slot_bytes + LINE_BYTES) as u128;
    let mut slot_bytes = config.slot_bytes;
    while need(slot_bytes) > config.buffer_bytes as u128 {
        if slot_bytes == SMALLEST_SLOT {
            return Err(Error::invalid_argument(format!(
                "CINCH_BUFFER_BYTES={} is too small: {nranks} ranks with {} channels and {} slots \
                 need {} bytes for the smallest slots (raise it, or lower CINCH_CHANNELS or \
                 CINCH_SLOTS)",
                config.buffer_bytes,
                config.channels,
                config.slots,
                need(SMALLEST_SLOT)
            )));
        }
        slot_bytes = (slot_bytes / 2 / 64 * 64).max(SMALLEST_SLOT);
    }
    Ok(FifoShape {
        depth: config.slots,
        slot_bytes,
    })
}

/// Bytes of a slot between so many ranks: `CINCH_SLOT_BYTES`, or fewer where `CINCH_BUFFER_BYTES`
/// demands it.
///
/// # Errors
/// Invalid argument if such ranks could not connect: the settings are impossible, or even the smallest
/// slots exceed the budget.
pub fn slot_bytes(config: &Config, nranks: usize) -> Result<usize> {
    Ok(shape(config, nranks)?.slot_bytes)
}

/// Which transport serves each rank; None for `me`. `shm_disable` leaves shared memory between
/// processes out. Where none is forced, TCP stands for whatever connects hosts.
///
/// # Errors
/// Unsupported, naming both ranks and why, if the forced transport cannot connect a pair.
pub(super) fn kinds(
    peers: &[PeerInfo],
    me: usize,
    forced: Option<TransportKind>,
    shm_disable: bool,
) -> Result<Vec<Option<TransportKind>>> {
    let own = &peers[me];
    let kind = |peer: &PeerInfo| {
        let obstacle = |kind| match kind {
            TransportKind::Loopback if own.process_id != peer.process_id => {
                Some("they are not threads of one process")
            }
            TransportKind::Loopback | TransportKind::Shm if own.host_id != peer.host_id => {
                Some("they do not share a host, its network namespace and CINCH_HOST_ID")
            }
            TransportKind::Shm if shm_disable => Some("CINCH_SHM_DISABLE=1"),
            TransportKind::Cuda => Some("it carries memory of GPUs, and theirs is on the host"),
            _ => None,
        };
        match forced {
            None => Ok(TransportKind::HOST
                .into_iter()
                .find(|&kind| obstacle(kind).is_none())),
            Some(kind) => match obstacle(kind) {
                None => Ok(Some(kind)),
                Some(why) => Err(Error::new(
                    ErrorKind::Unsupported,
                    format!(
                        "CINCH_TRANSPORT={} cannot connect {own} and {peer}: {why}",
                        kind.name()
                    ),
                )),
            },
        }
    };
    let ranks = peers.iter().enumerate();
    ranks
        .map(|(rank, peer)| if rank == me { Ok(None) } else { kind(peer) })
        .collect()
}

/// One rank's part of the exchange.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ConnectInfo {
    /// Under which its region is offered to threads of its process.
    pub offer: u64,
    /// Where its region is handed to other processes.
    pub local: [u8; 16],
    /// Where it takes TCP connections.
    pub port: u16,
    /// The cores that it may run on.
    pub cores: CoreSet,
    /// Kinds of addresses that its RDMA ports have, as a set.
    pub rdma: u8,
    /// Why there are none, or the names of its ports.
    pub rdma_note: String,
    /// Why it cannot take part, so that all ranks hear of it; empty if it can.
    pub trouble: String,
}

/// Most characters of [`ConnectInfo::rdma_note`] on the wire.
const LONGEST_NOTE: usize = 250;

impl Wire for ConnectInfo {
    fn write(&self, writer: &mut Writer) {
        let note: String = self.rdma_note.chars().take(LONGEST_NOTE).collect();
        writer.u64(self.offer).put(&self.local);
        writer.u16(self.port).put(&self.cores).u8(self.rdma);
        writer.text(&note).text(&self.trouble);
    }

    fn read(reader: &mut Reader<'_>) -> WireResult<ConnectInfo> {
        Ok(ConnectInfo {
            offer: reader.u64()?,
            local: reader.take()?,
            port: reader.u16()?,
            cores: reader.take()?,
            rdma: reader.u8()?,
            rdma_note: reader.text()?,
            trouble: reader.text()?,
        })
    }
}

/// The kind of address by which RDMA connects all ranks.
///
/// # Errors
/// Why it cannot: the rank that has no port, or the two that share no kind. The same on all ranks.
pub(super) fn rdma_kind(
    infos: &[ConnectInfo],
    peers: &[PeerInfo],
) -> std::result::Result<AddressKind, String> {
    if let Some((info, peer)) = infos.iter().zip(peers).find(|(info, _)| info.rdma == 0) {
        return Err(format!("{peer}: {}", info.rdma_note));
    }
    let common = infos.iter().fold(u8::MAX, |set, info| set & info.rdma);
    AddressKind::first(common).ok_or_else(|| {
        let first = infos[0].rdma;
        let other = infos.iter().zip(peers).find(|(info, _)| info.rdma != first);
        let has = |info: &ConnectInfo| AddressKind::names(info.rdma);
        let other = other.map_or(String::new(), |(info, peer)| {
            format!(" and {peer} has {}", has(info))
        });
        format!(
            "ports of the ranks share no kind of address: {} has {}{other}",
            peers[0],
            has(&infos[0])
        )
    })
}

/// The ranks of one host and the cores that any of them may run on: launchers often give each
/// rank one of them.
pub(super) fn crowd(
    peers: &[PeerInfo],
    infos: &[ConnectInfo],
    host_id: [u8; 16],
) -> (usize, usize) {
    let mut all = CoreSet::default();
    let mut ranks = 0;
    for (_, info) in peers
        .iter()
        .zip(infos)
        .filter(|(peer, _)| peer.host_id == host_id)
    {
        ranks += 1;
        for (all, word) in all.iter_mut().zip(info.cores) {
            *all |= word;
        }
    }
    (ranks, cpu::count(&all))
}

/// Reads the info of all ranks, and finds out whether all of them can connect.
///
/// # Errors
/// Mismatch if a rank's info has another format; remote, naming the rank that has trouble. The
/// same on all ranks.
pub(super) fn compare(blobs: &[Vec<u8>], peers: &[PeerInfo]) -> Result<Vec<ConnectInfo>> {
    let mut infos = Vec::with_capacity(blobs.len());
    for (blob, peer) in blobs.iter().zip(peers) {
        infos.push(ConnectInfo::from_bytes(blob).map_err(|_| {
            Error::new(
                ErrorKind::Mismatch,
                format!("{peer} described its connections in another format: use one version"),
            )
        })?);
    }
    for (info, peer) in infos.iter().zip(peers) {
        if !info.trouble.is_empty() {
            return Err(Error::new(
                ErrorKind::Remote,
                format!("{peer} cannot connect: {}", info.trouble),
            ));
        }
    }
    Ok(infos)
}

#[cfg(test)]
#[path = "settings_tests.rs"]
mod tests;
