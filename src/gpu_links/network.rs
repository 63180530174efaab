//! Ranks of different hosts: boxes in pinned memory on both sides, and the connections of a host
//! transport between them.
//!
//! ```text
//! host A                                                        host B
//! kernel -> outbox (pinned) -> proxy -> SendEnd ==> RecvEnd -> proxy -> inbox (pinned) -> kernel
//! ```
//! To a kernel both boxes look like those of a peer that it meets in host memory. Each channel has a
//! connection of its own, so that a channel whose messages nobody takes holds up no other. A message
//! is copied once on each side, between a box and a slot of the transport; over TCP not even that:
//! the kernel of the operating system copies from the box and into it.

use super::GpuLinks;
use super::connect::Connecting;
use super::paths::PeerPath;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::gpu::PinnedMemory;
use crate::gpu::abi::Protocol;
use crate::mem::{LINE_BYTES, PRIVATE_BYTES, PeerBufferLayout, Staging};
use crate::schedule::Hosts;
use crate::sys::log::{Level, line};
use crate::transport::connect::connect_across_hosts;
use crate::transport::{self, ConnectContext, Links};
use crate::types::TransportKind;
use std::sync::{Arc, Mutex};

/// Slots of a connection of the transport: one is filled or emptied while another travels, beside
/// those of the boxes.
const SLOTS: usize = 2;

/// The connections with ranks of other hosts, and the boxes that kernels use for them.
#[derive(Debug)]
pub struct Network {
    /// Connections of the host transport, one channel for each GPU channel; nothing for ranks of the same host.
    pub links: Links,
    /// The boxes of each rank of another host, by rank.
    pub staging: Vec<Option<Arc<Staging>>>,
}

impl Network {
    /// Returns the slowest transport that carries any of the connections.
    pub fn transport(&self) -> TransportKind {
        let kinds = self.links.kinds.iter().flatten().copied();
        transport::slowest(kinds).unwrap_or(super::KIND)
    }
}

/// The largest boxes with which no rank takes more than the budget: one in device memory for each
/// rank of its host; for each other rank two in pinned memory, and the slots of the connections.
///
/// # Errors
/// As for [`PeerBufferLayout::new`].
pub(super) fn shape(hosts: &Hosts, config: &Config) -> Result<PeerBufferLayout> {
    let ranks = |host| hosts.ranks(host).len();
    let nranks: usize = (0..hosts.count()).map(ranks).sum();
    // A rank abroad takes more than one at home, so the ranks of the smallest host take most.
    let at_home = (0..hosts.count()).map(ranks).min().unwrap_or(nranks);
    let (near, far) = (at_home.saturating_sub(1), nranks - at_home);
    let channels = config.gpu_channels_for(hosts.count());
    // What crosses hosts is carried in slots alone, and so are all calls of such a communicator.
    PeerBufferLayout::within(nranks, config.buffer_bytes, channels, false, |shape| {
        near * shape.bytes() + far * far_bytes(shape) + PRIVATE_BYTES
    })
}

/// What a rank of another host takes: its boxes, and the slots of its connections, both ways.
fn far_bytes(shape: &PeerBufferLayout) -> usize {
    let fifo = shape.fifo(Protocol::Simple);
    let slot = LINE_BYTES + fifo.slot_bytes as usize;
    2 * shape.bytes() + 2 * fifo.channels as usize * SLOTS * slot
}

/// Gives each rank `abroad` its boxes and connections. All ranks call it together.
pub(super) fn connect(
    connecting: &Connecting<'_>,
    links: &mut GpuLinks,
    abroad: &[usize],
) -> Result<()> {
    let nranks = connecting.peers.len();
    let boxes = || -> Result<Vec<Option<Arc<Staging>>>> {
        let mut staging = vec![None; nranks];
        for &peer in abroad {
            let memory = || PinnedMemory::new(connecting.gpu, links.shape.bytes());
            staging[peer] = Some(Arc::new(Staging::new(memory()?, memory()?, &links.shape)?));
        }
        Ok(staging)
    };
    let boxes = boxes();
    connecting.round(boxes.as_ref().map(|_| Vec::new()).map_err(Error::clone))?;
    let staging = boxes?;

    let between = connect_across_hosts(&ConnectContext {
        config: &config_of(connecting.context.config, &links.shape),
        verbs: connecting.context.verbs.clone(),
        ..*connecting.context
    })?;
    for &peer in abroad {
        let boxes = staging[peer].as_ref();
        let (Some(boxes), Some(transport)) = (boxes, between.kinds[peer]) else {
            return Err(Error::internal("no transport between two hosts"));
        };
        (links.inbox[peer], links.outbox[peer]) = boxes.addresses();
        links.paths[peer] = Some(PeerPath::Network { transport });
        links.pinned_bytes += 2 * links.shape.bytes();
        // Kernels may use them longer than the proxy lives.
        links.staging.push(boxes.clone());
    }
    line(
        Level::Info,
        format_args!(
            "{}: {} of other hosts through {}: {} channels, {} bytes of pinned memory and {} of slots",
            connecting.peers[connecting.me],
            match abroad.len() {
                1 => "1 rank".into(),
                ranks => format!("{ranks} ranks"),
            },
            names(&between),
            between.channels,
            2 * links.shape.bytes() * abroad.len(),
            between.buffer_bytes,
        ),
    );
    links.connection_bytes = between.buffer_bytes;
    links.network = Mutex::new(Some(Network {
        links: between,
        staging,
    }));
    Ok(())
}

/// The transports that carry anything.
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

/// The settings of the host transport: a channel for each channel, a slot for what a kernel's slot
/// holds, and as many sockets between two ranks as for host buffers, one for each channel at least.
fn config_of(config: &Config, shape: &PeerBufferLayout) -> Config {
    let fifo = shape.fifo(Protocol::Simple);
    let channels = fifo.channels as usize;
    Config {
        channels,
        slots: SLOTS,
        slot_bytes: fifo.slot_bytes as usize,
        tcp_sockets: (config.channels * config.tcp_sockets).div_ceil(channels),
        // The boxes were fitted to the budget, with these slots counted: see `shape`.
        buffer_bytes: usize::MAX,
        transport: config.transport.filter(|&kind| kind != super::KIND),
        ..config.clone()
    }
}
