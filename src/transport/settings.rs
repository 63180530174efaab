//! Decisions that all ranks make alike: slot geometry and the transports of each pair.

use super::contract::another_format;
use super::{TRANSPORTS, Transport, find, slowest};
use crate::bootstrap::PeerInfo;
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::{FifoShape, LINE_BYTES};
use crate::sys::cgroup::GroupMemory;
use crate::sys::cpu::CoreSet;
use crate::types::TransportKind;
use crate::wire::{Reader, Wire, WireResult, Writer};

/// Smallest payload of a slot, to which the budget may shrink slots.
const SMALLEST_SLOT: usize = 4 << 10;

/// Returns the slots of a connection: as configured, or smaller if the budget demands it.
///
/// # Errors
/// Invalid argument if the settings are impossible, or if even the smallest slots exceed the budget; the
/// latter names the bytes needed.
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
    // Every pair has slots in both directions.
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

/// Returns the bytes of a slot between `nranks` ranks: `CINCH_SLOT_BYTES`, or fewer if
/// `CINCH_BUFFER_BYTES` demands it.
///
/// # Errors
/// Invalid argument if the ranks could not connect: the settings are impossible, or even the smallest
/// slots exceed the budget.
pub fn slot_bytes(config: &Config, nranks: usize) -> Result<usize> {
    Ok(shape(config, nranks)?.slot_bytes)
}

/// Returns the transports that may connect rank `me` with each rank, best first. All but the last may
/// decline. The list of `me` is empty.
///
/// # Errors
/// Unsupported, naming both ranks and why, if the forced transport cannot connect a pair.
pub(super) fn candidates(
    peers: &[PeerInfo],
    me: usize,
    config: &Config,
) -> Result<Vec<Vec<&'static dyn Transport>>> {
    let each = peers
        .iter()
        .enumerate()
        .map(|(rank, peer)| match rank == me {
            true => Ok(Vec::new()),
            false => of_pair(&peers[me], peer, config),
        });
    each.collect()
}

fn of_pair(
    own: &PeerInfo,
    peer: &PeerInfo,
    config: &Config,
) -> Result<Vec<&'static dyn Transport>> {
    let Some(kind) = config.transport else {
        let mut found = Vec::new();
        for &transport in TRANSPORTS {
            if transport.obstruction(own, peer, config).is_some() {
                continue;
            }
            found.push(transport);
            if !transport.caps().may_decline {
                break;
            }
        }
        return Ok(found);
    };
    let unsupported = |why| {
        Error::new(
            ErrorKind::Unsupported,
            format!("CINCH_TRANSPORT={kind} cannot connect {own} and {peer}: {why}"),
        )
    };
    let transport = find(kind)
        .ok_or_else(|| unsupported("it carries memory of GPUs, and theirs is on the host"))?;
    match transport.obstruction(own, peer, config) {
        Some(why) => Err(unsupported(why)),
        None => Ok(vec![transport]),
    }
}

/// The slowest transports of a communicator, equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlowestLinks {
    /// The slowest transport between any two ranks.
    pub any: TransportKind,
    /// The slowest transport between two ranks of one host. Shared memory if no two ranks share a
    /// host.
    pub inside: TransportKind,
}

/// Returns the slowest transports of a communicator. `connected` are the transports of one rank: a
/// transport that may decline connects all ranks or none, so that any rank's list shows which.
pub fn slowest_links(
    peers: &[PeerInfo],
    config: &Config,
    connected: &[Option<TransportKind>],
) -> SlowestLinks {
    let kind_of = |one: &PeerInfo, other: &PeerInfo| {
        let mut candidates = TRANSPORTS.iter().filter(|transport| {
            transport.obstruction(one, other, config).is_none()
                && (!transport.caps().may_decline || connected.contains(&Some(transport.kind())))
        });
        candidates.next().map(|transport| transport.kind())
    };
    let each = peers.iter().enumerate();
    let neighbours = each.flat_map(|(rank, one)| {
        let others = peers[rank + 1..].iter();
        let of_host = others.filter(|other| one.host_id == other.host_id);
        of_host.filter_map(move |other| kind_of(one, other))
    });
    // Pairs of different hosts all have the same transport, so the first rank's pairs show it.
    let first = &peers[0];
    let abroad = peers.iter().filter(|peer| peer.host_id != first.host_id);
    let abroad = abroad.filter_map(|peer| kind_of(first, peer));
    // The best transport between ranks of one host is shared memory. It costs the same within a
    // process and between processes.
    let shared = TRANSPORTS.iter().filter(|one| one.caps().shares_memory());
    let floor = shared.map(|transport| transport.kind());
    let inside = slowest(floor.chain(neighbours));
    let any = slowest(inside.into_iter().chain(abroad));
    let forced_or = |found: Option<TransportKind>| {
        let first = TRANSPORTS[0].kind();
        config.transport.or(found).unwrap_or(first)
    };
    SlowestLinks {
        any: forced_or(any),
        inside: forced_or(inside),
    }
}

/// Data of one rank in the exchange before connecting.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ConnectInfo {
    /// Cores that the rank may run on.
    pub cores: CoreSet,
    /// Bytes of the rank's inbox.
    pub inbox_bytes: u64,
    /// The control group that leaves the rank the least memory. Its limit is 0 without one.
    pub group: GroupMemory,
    /// Offers of the rank's transports, by number of the kind.
    pub offers: Vec<(u8, Vec<u8>)>,
    /// The reason for which the rank cannot take part; empty if it can.
    pub trouble: String,
}

impl ConnectInfo {
    /// Returns the rank's offer for a transport; empty if it has none.
    pub fn offer(&self, kind: TransportKind) -> &[u8] {
        let mut offers = self.offers.iter();
        let found = offers.find(|(number, _)| *number == kind as u8);
        found.map_or(&[], |(_, offer)| offer)
    }
}

impl Wire for ConnectInfo {
    fn write(&self, writer: &mut Writer) {
        let [device, inode] = self.group.id;
        writer.put(&self.cores);
        for word in [
            self.inbox_bytes,
            device,
            inode,
            self.group.limit,
            self.group.free,
        ] {
            writer.u64(word);
        }
        writer.u8(self.offers.len() as u8);
        for (kind, offer) in &self.offers {
            writer.u8(*kind).put(offer);
        }
        writer.text(&self.trouble);
    }

    fn read(reader: &mut Reader<'_>) -> WireResult<ConnectInfo> {
        let cores = reader.take()?;
        let inbox_bytes = reader.u64()?;
        let group = GroupMemory {
            id: [reader.u64()?, reader.u64()?],
            limit: reader.u64()?,
            free: reader.u64()?,
        };
        let count = reader.u8()?;
        let offers = (0..count).map(|_| Ok((reader.u8()?, reader.take()?)));
        Ok(ConnectInfo {
            cores,
            inbox_bytes,
            group,
            offers: offers.collect::<WireResult<_>>()?,
            trouble: reader.text()?,
        })
    }
}

/// Reads the infos of all ranks.
///
/// # Errors
/// Mismatch if a rank's info has another format; remote, naming a rank that cannot take part; system if the inboxes
/// exceed the memory of a control group. All ranks get the same error.
pub(super) fn compare(frames: &[Vec<u8>], peers: &[PeerInfo]) -> Result<Vec<ConnectInfo>> {
    let each = frames.iter().zip(peers);
    let infos =
        each.map(|(frame, peer)| ConnectInfo::from_bytes(frame).map_err(|_| another_format(peer)));
    let infos: Vec<ConnectInfo> = infos.collect::<Result<_>>()?;
    let mut each = infos.iter().zip(peers);
    match each.find(|(info, _)| !info.trouble.is_empty()) {
        None => check_memory(&infos, peers).map(|()| infos),
        Some((info, peer)) => Err(Error::new(
            ErrorKind::Remote,
            format!("{peer} cannot connect: {}", info.trouble),
        )),
    }
}

/// Compares the inboxes of the ranks of each control group with the memory that it has left.
fn check_memory(infos: &[ConnectInfo], peers: &[PeerInfo]) -> Result<()> {
    for (info, peer) in infos.iter().zip(peers) {
        let is_member = |(other, at): &(&ConnectInfo, &PeerInfo)| {
            (at.host_id, other.group.id) == (peer.host_id, info.group.id) && other.group.limit > 0
        };
        let members: Vec<&ConnectInfo> = infos
            .iter()
            .zip(peers)
            .filter(is_member)
            .map(|(other, _)| other)
            .collect();
        let need = members
            .iter()
            .fold(0u64, |sum, member| sum.saturating_add(member.inbox_bytes));
        let free = members.iter().map(|member| member.group.free).min();
        let Some(free) = free.filter(|&free| free < need) else {
            continue;
        };
        return Err(Error::new(
            ErrorKind::System,
            format!(
                "the slots of {} ranks on host {} take {need} bytes, and their control group has {free} bytes free \
                 of {}: give the job more memory, or lower CINCH_BUFFER_BYTES or CINCH_SLOT_BYTES",
                members.len(),
                peer.host,
                info.group.limit
            ),
        ));
    }
    Ok(())
}

#[cfg(test)]
#[path = "settings_tests.rs"]
mod tests;
