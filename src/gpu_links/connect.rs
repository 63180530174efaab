//! Connects a GPU rank with all others.
//!
//! ```text
//! round 1  GPU of each rank
//! round 2  which ways the driver refuses                       -> layout of the inboxes
//! round 3  inboxes are allocated and zero: where they are
//! round 4  peers' inboxes are mapped, and patterns written into them: what failed
//! round 5  what came in looks right, or not                    -> paths are final
//! round 6  only if some pair has no path: where its boxes in host memory are
//! round 7  only on several hosts: boxes in host memory for the proxies are there; then the
//!          connections of a host transport between them
//! barrier  all is connected
//! ```
//! Every rank takes part in every round, in trouble or not, and decides about pairs from what all
//! ranks said: both ends of a pair come to the same path.

use super::GpuLinks;
use super::gathered_round::{GpuInfo, MemoryHandle, PathReport, round};
use super::host;
use super::local_registry::Offer;
use super::mapping::{self, Mapping, MappingPlan};
use super::network;
use super::path_probe::{Pair, PathProbe};
use super::paths::{GPUS_THAT_KEEP_LINES_WHOLE, LinkClass, PathFailures, PeerPath};
use crate::bootstrap::PeerInfo;
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::abi::MAX_RANKS;
use crate::gpu::probe::Probe;
use crate::gpu::{Context, DeviceMemory, Stream};
use crate::mem::{ControlWords, PRIVATE_BYTES, PeerBufferLayout};
use crate::schedule::Hosts;
use crate::sys::log::{Level, line};
use crate::transport::ConnectContext;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Connects this rank, whose buffers are on `gpu`, with all others. All ranks call it together,
/// each from a thread of its own.
///
/// # Errors
/// On all ranks: mismatch if a rank has another version; unsupported if ranks are too many; invalid
/// argument if the peer buffers cannot fit the budget; remote, naming the rank that is in trouble. On this rank: timeout; the fault's reason; system
/// and unsupported, from the driver. After these the caller announces the failure, so that the
/// other ranks do not wait for the deadline.
pub fn connect(context: &ConnectContext<'_>, gpu: &Arc<Context>) -> Result<GpuLinks> {
    connect_with(context, gpu, &|| Ok(Box::new(Probe::new(gpu)?)))
}

/// The same, with another way to try the paths.
pub(super) fn connect_with(
    context: &ConnectContext<'_>,
    gpu: &Arc<Context>,
    probe: &dyn Fn() -> Result<Box<dyn PathProbe>>,
) -> Result<GpuLinks> {
    let exchange = context.exchange;
    let (me, peers) = (exchange.rank(), exchange.peers());
    let named = |error: Error| error.context(format!("{} on {}", peers[me], gpu.device()));
    let connecting = Connecting {
        context,
        gpu,
        me,
        peers,
        hosts: Hosts::new(peers.iter().map(|peer| peer.host_id)),
    };
    connecting.run(probe).map_err(named)
}

/// One rank, connecting.
pub(super) struct Connecting<'a> {
    pub context: &'a ConnectContext<'a>,
    pub gpu: &'a Arc<Context>,
    pub me: usize,
    pub peers: &'a [PeerInfo],
    pub hosts: Hosts,
}

/// What a rank has allocated before it knows where the others' memory is.
struct Prepared {
    links: GpuLinks,
    probe: Option<Box<dyn PathProbe>>,
    exported: MemoryHandle,
    /// Until all are connected.
    offer: Option<Offer>,
}

impl Connecting<'_> {
    fn run(&self, probe: &dyn Fn() -> Result<Box<dyn PathProbe>>) -> Result<GpuLinks> {
        let (me, nranks, config) = (self.me, self.peers.len(), self.context.config);
        let gpus = GpuInfo::read_all(&self.round(self.gpu_info())?, self.peers)?;
        // All ranks compute the same, or fail alike: no error needs to be announced.
        let shape = match self.hosts.count() {
            1 => PeerBufferLayout::new(nranks, config.buffer_bytes, config.gpu_channels_for(1))?,
            _ => network::shape(&self.hosts, config)?,
        };
        if nranks == 1 {
            let mut links = self.prepare(shape, &[], probe)?.links;
            links.gpus_keep_lines_whole = gpus_keep_lines_whole(&gpus);
            return Ok(links);
        }

        let mut failures = PathFailures::on(&self.hosts);
        let ways = mapping::ways(self.gpu, me, self.peers, &gpus);
        let refused = ways.as_ref().map(|ways| PathReport {
            failures: mapping::refusals(ways),
            slowest: LinkClass::SameDevice,
        });
        self.agree(refused.map_err(Error::clone), &mut failures)?;
        let ways = ways?;

        // By what all know now the inboxes are laid out. Pairs that turn out to be apart later
        // leave their part unused.
        let candidates = failures.clone();
        let reachable = candidates.reachable(me, nranks);
        let prepared = self.prepare(shape, &reachable, probe);
        let part = prepared.as_ref().map(|own| own.exported.encode());
        let parts = self.round(part.map_err(Error::clone))?;
        let Prepared {
            mut links,
            probe,
            offer,
            ..
        } = prepared?;
        links.gpus_keep_lines_whole = gpus_keep_lines_whole(&gpus);

        let pair = |from, to, address| Pair {
            from,
            to,
            address,
            shape: &shape,
            nonce: self.nonce(),
        };

        let written = self.map(&parts, &reachable, &candidates, &mut links);
        let written = written.and_then(|failed| {
            for &peer in &reachable {
                if let (Some(probe), 1..) = (&probe, links.outbox[peer]) {
                    self.glance()?;
                    // SAFETY: the peer's inbox, mapped by `map`, where this box is ours alone;
                    // kernels of calls come when all have met.
                    unsafe { pair(me, peer, links.outbox[peer]).write(&**probe)? };
                }
            }
            Ok(PathReport {
                failures: failed,
                slowest: LinkClass::SameDevice,
            })
        });
        self.agree(written, &mut failures)?;

        let reachable = failures.reachable(me, nranks);
        if let Some(memory) = &links.memory {
            for &peer in &reachable {
                links.inbox[peer] = memory.address() + place(&candidates, me, peer, &shape);
            }
        }
        let look = || -> Result<PathReport> {
            let mut failed = Vec::new();
            for &peer in &reachable {
                self.glance()?;
                let probe = probe.as_deref();
                // SAFETY: our inbox, whose writers have ended: all ranks have told what failed.
                let wrong =
                    probe.map(|probe| unsafe { pair(peer, me, links.inbox[peer]).wrong(probe) });
                match wrong.transpose()? {
                    None | Some(0) => {}
                    Some(wrong) => failed.push((peer, self.garbled(peer, wrong))),
                }
            }
            // Nobody writes here again before all have met.
            if let Some(memory) = &links.memory {
                let stream = Stream::new(self.gpu)?;
                memory.fill(0, &stream)?;
                stream.wait(self.left())?;
            }
            Ok(PathReport {
                failures: failed,
                slowest: slowest(&ways, &reachable),
            })
        };
        links.slowest = self.agree(look(), &mut failures)?;

        for peer in failures.apart(me, nranks) {
            (links.inbox[peer], links.outbox[peer]) = (0, 0);
        }
        links.paths = self.paths(&ways, &failures);
        if !failures.is_empty() {
            links.slowest = LinkClass::Host;
            let reached = links.reached.get_mut();
            let reached = reached.unwrap_or_else(PoisonError::into_inner);
            reached.retain(|(peer, _)| links.outbox[*peer] != 0);
            self.log(&failures);
            host::connect(self, &mut links, &failures)?;
        } else {
            self.meet()?;
        }
        if self.hosts.count() > 1 {
            network::connect(self, &mut links, &failures.abroad(me, nranks))?;
        }
        // All have met: offers have served every rank, and every inbox is zero.
        drop(offer);
        Ok(links)
    }

    /// Maps the inboxes of `reachable` peers; which failed, and why.
    fn map(
        &self,
        parts: &[Vec<u8>],
        reachable: &[usize],
        candidates: &PathFailures,
        links: &mut GpuLinks,
    ) -> Result<Vec<(usize, String)>> {
        let mut failed = Vec::new();
        for &peer in reachable {
            let exported = MemoryHandle::decode(&parts[peer], &self.peers[peer])?;
            let bytes = candidates.reachable(peer, self.peers.len()).len() * links.shape.bytes();
            match Mapping::open(self.gpu, &exported, self.share_process(peer), bytes) {
                Ok(reached) => {
                    let at = place(candidates, peer, self.me, &links.shape);
                    links.outbox[peer] = reached.address() + at;
                    let all = links.reached.get_mut();
                    let all = all.unwrap_or_else(PoisonError::into_inner);
                    all.push((peer, reached));
                }
                Err(error) => failed.push((peer, self.unmapped(peer, &error))),
            }
        }
        Ok(failed)
    }

    /// Says which GPU this is, unless a setting forbids GPUs.
    fn gpu_info(&self) -> Result<Vec<u8>> {
        let config = self.context.config;
        // Between hosts another kind may be asked for; which of them can, connecting says.
        if let Some(kind) = config.transport
            && kind != super::KIND
            && self.hosts.count() == 1
        {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("CINCH_TRANSPORT={kind} carries host memory only (unset it, or say cuda)"),
            ));
        }
        let device = self.gpu.device();
        let gpu_info = GpuInfo {
            uuid: device.uuid,
            ordinal: device.ordinal(),
            capability: device.compute_capability,
            p2p_disable: config.p2p_disable,
        };
        Ok(gpu_info.encode())
    }

    /// Allocates what this rank needs, boxes for the `reachable` peers among it.
    fn prepare(
        &self,
        shape: PeerBufferLayout,
        reachable: &[usize],
        probe: &dyn Fn() -> Result<Box<dyn PathProbe>>,
    ) -> Result<Prepared> {
        let (gpu, left) = (self.gpu, self.left());
        let private = DeviceMemory::zeroed(gpu, PRIVATE_BYTES, left)?;
        let control = ControlWords::new(gpu)?;
        let memory = match reachable.len() * shape.bytes() {
            0 => None,
            bytes => Some(Arc::new(DeviceMemory::zeroed(gpu, bytes, left)?)),
        };
        let abroad = reachable.iter().any(|&peer| !self.share_process(peer));
        let at_home = reachable.iter().any(|&peer| self.share_process(peer));
        // Where the driver shares no memory between processes (virtual GPUs, WSL 2) these pairs meet in
        // host memory.
        let (handle, refusal) = match memory
            .as_ref()
            .filter(|_| abroad)
            .map(|own| mapping::export(own))
        {
            None => (None, String::new()),
            Some(Ok(handle)) => (Some(handle), String::new()),
            Some(Err(error)) => (None, error.message().into()),
        };
        let offer = memory.clone().filter(|_| at_home).map(Offer::new);
        let memory_is_there = memory.is_some();
        let links = GpuLinks {
            reached: Mutex::default(),
            host: None,
            network: Mutex::default(),
            staging: Vec::new(),
            rank: self.me,
            shape,
            inbox: [0; MAX_RANKS],
            outbox: [0; MAX_RANKS],
            paths: vec![None; self.peers.len()],
            slowest: LinkClass::SameDevice,
            gpus_keep_lines_whole: false,
            device_bytes: PRIVATE_BYTES + memory.as_ref().map_or(0, |memory| memory.bytes()),
            pinned_bytes: control.bytes(),
            connection_bytes: 0,
            memory,
            private,
            control,
        };
        Ok(Prepared {
            links,
            probe: memory_is_there.then(probe).transpose()?,
            exported: MemoryHandle {
                offer: offer.as_ref().map_or(0, |offer| offer.number),
                handle,
                refusal,
            },
            offer,
        })
    }

    fn paths(&self, ways: &[MappingPlan], failures: &PathFailures) -> Vec<Option<PeerPath>> {
        let path = |peer: usize| match failures.between(self.me, peer) {
            _ if peer == self.me => None,
            Some(reason) => Some(PeerPath::PinnedHost {
                reason: reason.into(),
            }),
            None => match &ways[peer] {
                MappingPlan::Open {
                    class,
                    performance_rank,
                } if *class != LinkClass::SameDevice => Some(PeerPath::Peer {
                    class: *class,
                    performance_rank: *performance_rank,
                }),
                _ => Some(PeerPath::SameDevice),
            },
        };
        (0..self.peers.len()).map(path).collect()
    }

    fn log(&self, failures: &PathFailures) {
        for (reason, peers) in failures.told_by(self.me) {
            // What was asked for is no news.
            let level = match reason.starts_with(mapping::SWITCHED_OFF) {
                true => Level::Info,
                false => Level::Warn,
            };
            let peers: Vec<String> = peers.iter().map(usize::to_string).collect();
            line(
                level,
                format_args!(
                    "pinned host memory carries data between {} and rank{} {}: {reason}",
                    self.peers[self.me],
                    if peers.len() == 1 { "" } else { "s" },
                    peers.join(", "),
                ),
            );
        }
    }

    fn unmapped(&self, peer: usize, error: &Error) -> String {
        format!(
            "{} cannot map the memory of {}: {}",
            self.peers[self.me],
            self.peers[peer],
            error.message()
        )
    }

    fn garbled(&self, peer: usize, wrong: u64) -> String {
        format!(
            "{wrong} words of a pattern that {} wrote arrived wrong at {} (PCIe access control or \
             an IOMMU between the GPUs?)",
            self.peers[peer], self.peers[self.me]
        )
    }

    /// Whether `peer` is in this process.
    pub fn share_process(&self, peer: usize) -> bool {
        self.peers[peer].process_id == self.peers[self.me].process_id
    }

    /// Time that is left.
    pub fn left(&self) -> Duration {
        let deadline = self.context.deadline;
        deadline.saturating_duration_since(Instant::now())
    }

    /// Returns when all ranks are here.
    pub fn meet(&self) -> Result<()> {
        self.context.exchange.barrier()
    }

    /// See [`round`].
    pub fn round(&self, mine: Result<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        round(self.context.exchange, mine)
    }

    /// Tells all what this rank found, and notes what all say: in rank order, so that all note
    /// the same. Returns the slowest link of all.
    fn agree(&self, mine: Result<PathReport>, failures: &mut PathFailures) -> Result<LinkClass> {
        let parts = self.round(mine.map(|report| report.encode()))?;
        let mut slowest = LinkClass::SameDevice;
        for (by, part) in parts.iter().enumerate() {
            let report = PathReport::decode(part, &self.peers[by], self.peers.len())?;
            slowest = slowest.max(report.slowest);
            for (peer, reason) in report.failures {
                failures.note(by, peer, reason);
            }
        }
        Ok(slowest)
    }

    /// Looks whether connecting must end.
    fn glance(&self) -> Result<()> {
        self.context.fault.check()?;
        if self.left().is_zero() {
            return Err(Error::new(
                ErrorKind::Timeout,
                "connecting GPUs took longer than CINCH_INIT_TIMEOUT",
            ));
        }
        Ok(())
    }

    /// A number of this communicator.
    fn nonce(&self) -> u64 {
        let key = self.context.exchange.key("cuda path probe");
        u64::from_le_bytes(std::array::from_fn(|at| key[at]))
    }
}

/// Where in `reader`'s inbox the box of `writer` is: those who may reach it have theirs in order.
fn place(candidates: &PathFailures, reader: usize, writer: usize, shape: &PeerBufferLayout) -> u64 {
    let order = candidates.reachable(reader, shape.nranks());
    let index = order.iter().position(|&rank| rank == writer);
    index.unwrap_or_default() as u64 * shape.bytes() as u64
}

/// Whether all these GPUs are of one kind, and that one is known to show lines of 128 bytes whole.
fn gpus_keep_lines_whole(gpus: &[GpuInfo]) -> bool {
    GPUS_THAT_KEEP_LINES_WHOLE
        .iter()
        .any(|&known| gpus.iter().all(|gpu_info| gpu_info.capability == known))
}

fn slowest(ways: &[MappingPlan], peers: &[usize]) -> LinkClass {
    let class = |&peer: &usize| match &ways[peer] {
        MappingPlan::Open { class, .. } => *class,
        MappingPlan::Refused(_) => LinkClass::Host,
    };
    let classes = peers.iter().map(class);
    classes.max().unwrap_or(LinkClass::SameDevice)
}
