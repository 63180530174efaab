//! Connects ranks of different hosts: peer buffers in pinned memory of both hosts, and connections of a
//! host transport between them.
//!
//! ```text
//! host A                                                        host B
//! kernel -> outbox (pinned) -> proxy -> SendEnd ==> RecvEnd -> proxy -> inbox (pinned) -> kernel
//! ```
//! Kernels use both peer buffers as those of a pair in host memory. Each channel has a connection of its own,
//! so that a channel whose messages are not received does not block other channels. Each host copies a
//! message once, between a peer buffer and a slot of the transport. Over TCP the operating system copies
//! from and to the peer buffer directly.

use super::GpuLinks;
use super::paths::PeerPath;
use super::setup::LinkSetup;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::gpu::PinnedMemory;
use crate::gpu::abi::Protocol;
use crate::mem::{LINE_BYTES, PeerBufferLayout, Staging, private_bytes};
use crate::schedule::Groups;
use crate::sys::log::{Level, line};
use crate::transport::connect::connect_across_hosts;
use crate::transport::{self, ConnectContext, Links};
use crate::types::TransportKind;
use std::sync::{Arc, Mutex};

/// Number of slots per direction of a connection: while one slot is in the network, the other is
/// filled or emptied.
const SLOTS: usize = 2;

/// The connections to ranks of other hosts, and the peer buffers that kernels use for them.
#[derive(Debug)]
pub struct Network {
    /// Connections of the host transport, one channel for each GPU channel; `None` for ranks of
    /// the same host.
    pub links: Links,
    /// The peer buffers for each rank of another host, by rank.
    pub staging: Vec<Option<Arc<Staging>>>,
}

impl Network {
    /// Returns the slowest transport that carries any of the connections.
    pub fn transport(&self) -> TransportKind {
        let kinds = self.links.kinds.iter().flatten().copied();
        transport::slowest(kinds).unwrap_or(super::KIND)
    }
}

/// Returns the largest peer buffers with which every rank stays within the budget. A rank has a peer buffer
/// in device memory for each rank of its host. For each other rank it has two in pinned memory, and the
/// slots of the connections.
///
/// # Errors
/// As for [`PeerBufferLayout::new`].
pub(super) fn layout(hosts: &Groups, config: &Config) -> Result<PeerBufferLayout> {
    let ranks = |host| hosts.ranks(host).len();
    let nranks: usize = (0..hosts.count()).map(ranks).sum();
    // Ranks of the smallest host need the most memory, because a peer on another host takes more memory than
    // a peer on this host.
    let least = (0..hosts.count()).map(ranks).min().unwrap_or(nranks);
    let (same_host, other_hosts) = (least.saturating_sub(1), nranks - least);
    let channels = config.gpu_channels_for(hosts.count());
    // Proxies carry messages in slots only, so no call of a communicator on several hosts uses ll128 lines.
    PeerBufferLayout::within(nranks, config.buffer_bytes, channels, false, |shape| {
        same_host * shape.bytes()
            + other_hosts * network_bytes(shape)
            + private_bytes(shape.nranks())
    })
}

/// Returns the memory for one rank of another host in bytes: two peer buffers, and slots in both
/// directions.
fn network_bytes(shape: &PeerBufferLayout) -> usize {
    let fifo = shape.fifo(Protocol::Simple);
    let slot = LINE_BYTES + fifo.slot_bytes as usize;
    2 * shape.bytes() + 2 * fifo.channels as usize * SLOTS * slot
}

/// Connects this rank with `remote_peers`, the ranks of other hosts. All ranks call it together.
pub(super) fn connect(
    setup: &LinkSetup<'_>,
    links: &mut GpuLinks,
    remote_peers: &[usize],
) -> Result<()> {
    let allocate = || -> Result<Vec<Option<Arc<Staging>>>> {
        let mut staging = vec![None; setup.nranks()];
        for &peer in remote_peers {
            let memory = || PinnedMemory::new(setup.gpu, links.shape.bytes());
            staging[peer] = Some(Arc::new(Staging::new(memory()?, memory()?, &links.shape)?));
        }
        Ok(staging)
    };
    let staging = allocate();
    setup.round(staging.as_ref().map(|_| Vec::new()).map_err(Error::clone))?;
    let staging = staging?;

    let connections = connect_across_hosts(&ConnectContext {
        config: &config_of(setup.context.config, &links.shape),
        verbs: setup.context.verbs.clone(),
        ..*setup.context
    })?;
    for &peer in remote_peers {
        let (Some(buffers), Some(transport)) = (&staging[peer], connections.kinds[peer]) else {
            return Err(Error::internal("no transport between two hosts"));
        };
        (links.inbox[peer], links.outbox[peer]) = buffers.addresses();
        links.paths[peer] = Some(PeerPath::Network { transport });
        links.pinned_bytes += 2 * links.shape.bytes();
        // The links keep the peer buffers too, because kernels may use them after the proxy has
        // ended.
        links.staging.push(buffers.clone());
    }
    line(
        Level::Info,
        format_args!(
            "{}: {} of other hosts through {}: {} channels, {} bytes of pinned memory and {} of slots",
            setup.peers[setup.me],
            match remote_peers.len() {
                1 => "1 rank".into(),
                ranks => format!("{ranks} ranks"),
            },
            names(&connections),
            connections.channels,
            2 * links.shape.bytes() * remote_peers.len(),
            connections.buffer_bytes,
        ),
    );
    links.connection_bytes = connections.buffer_bytes;
    links.network = Mutex::new(Some(Network {
        links: connections,
        staging,
    }));
    Ok(())
}

/// Returns the names of the transports that carry messages.
fn names(links: &Links) -> String {
    let mut kinds: Vec<&str> = links
        .kinds
        .iter()
        .flatten()
        .map(|kind| kind.name())
        .collect();
    kinds.sort_unstable();
    kinds.dedup();
    kinds.join(" and ")
}

/// Returns the settings of the host transport. It has as many channels as kernels have, and slots of the size
/// of a kernel's slots. It has as many sockets between two ranks as for host buffers, but at least one per
/// channel.
fn config_of(config: &Config, shape: &PeerBufferLayout) -> Config {
    let fifo = shape.fifo(Protocol::Simple);
    let channels = fifo.channels as usize;
    Config {
        channels,
        slots: SLOTS,
        slot_bytes: fifo.slot_bytes as usize,
        tcp_sockets: (config.channels * config.tcp_sockets).div_ceil(channels),
        // No further limit applies, because `layout` has already counted these slots in the budget.
        buffer_bytes: usize::MAX,
        transport: config.transport.filter(|&kind| kind != super::KIND),
        ..config.clone()
    }
}
