//! Connects a GPU rank with all others.
//!
//! ```text
//! round 1  each rank's GPU
//! round 2  mappings that the driver refuses               -> layout of the inboxes
//! round 3  handles of the inboxes, allocated and zeroed
//! round 4  peers' inboxes are mapped, patterns written    -> mappings that failed
//! round 5  patterns are compared, inboxes zeroed          -> paths are final
//! round 6  only if a path failed: handles of peer buffers in host memory
//! round 7  only on several hosts: peer buffers for the proxies are allocated; then the host
//!          transport connects
//! barrier  all ranks are connected
//! ```
//! Every rank takes part in every round, even after a failure of its own, and decides about pairs from
//! the reports of all ranks. So both ranks of a pair take one path.

use super::GpuLinks;
use super::host;
use super::local_registry::Registration;
use super::mapping::{self, MappingPlan, PeerMapping};
use super::network;
use super::pair_links::PairLinks;
use super::path_probe::{PathProbe, ProbedPeerBuffer};
use super::paths::{GPUS_THAT_KEEP_LINES_WHOLE, LinkClass, PathFailures, PeerPath};
use super::round_messages::{GpuInfo, MemoryHandle, PathReport};
use super::setup::LinkSetup;
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::probe::Probe;
use crate::gpu::{Context, DeviceMemory, Stream};
use crate::mem::{ControlWords, PeerBufferLayout, private_bytes};
use crate::sys::log::{Level, line};
use crate::transport::ConnectContext;
use std::sync::{Arc, Mutex};

/// Creates the probe of a rank. Tests pass probes that damage data.
type NewProbe<'a> = &'a dyn Fn() -> Result<Box<dyn PathProbe>>;

/// Connects this rank, whose buffers are on `gpu`, with all others. All ranks call it together,
/// each from a thread of its own.
///
/// # Errors
/// On all ranks: mismatch if a rank has another version; unsupported for more than [`crate::gpu::abi::MAX_RANKS`] ranks;
/// invalid argument if the peer buffers exceed the budget; remote, naming the rank that failed. On this
/// rank: timeout; the fault's reason; system and unsupported, from the driver. After these the caller
/// must announce the failure, or the other ranks wait until the deadline.
pub fn connect(context: &ConnectContext<'_>, gpu: &Arc<Context>) -> Result<GpuLinks> {
    connect_with(context, gpu, &|| Ok(Box::new(Probe::new(gpu)?)))
}

/// Connects as [`connect`] does, and probes paths with the probe that `new_probe` creates.
pub(super) fn connect_with(
    context: &ConnectContext<'_>,
    gpu: &Arc<Context>,
    new_probe: NewProbe<'_>,
) -> Result<GpuLinks> {
    let setup = LinkSetup::new(context, gpu);
    let named =
        |error: Error| error.context(format!("{} on {}", setup.peers[setup.me], gpu.device()));
    run(&setup, new_probe).map_err(named)
}

fn run(setup: &LinkSetup<'_>, new_probe: NewProbe<'_>) -> Result<GpuLinks> {
    let gpus = GpuInfo::read_all(&setup.round(own_gpu(setup))?, setup.peers)?;
    // All ranks compute one layout or fail with one error, so no rank needs to announce the error.
    let shape = peer_buffer_layout(setup)?;
    let mut failures = PathFailures::new(&setup.hosts);
    let plans = match setup.nranks() {
        1 => Vec::new(),
        _ => plan_mappings(setup, &gpus, &mut failures)?,
    };
    // If a pair's path fails later, its peer buffers in the inboxes stay allocated but unused.
    let inboxes = GpuInboxLayout {
        refused: failures.clone(),
        shape,
    };
    let allocated = Allocated::new(setup, &inboxes, new_probe);
    if setup.nranks() == 1 {
        return Ok(allocated?.finish(&gpus));
    }
    let handle = allocated.as_ref().map(|own| own.handle.encode());
    let handles = setup.round(handle.map_err(Error::clone))?;
    let mut own = allocated?;
    let written = own.write_patterns(setup, &inboxes, &handles);
    setup.agree(written, &mut failures)?;
    let compared = own.compare_patterns(setup, &inboxes, &plans, &failures);
    let classes = setup.agree(compared, &mut failures)?;
    let slowest = classes.iter().flatten().copied().max();
    own.links.slowest = slowest.unwrap_or(LinkClass::SameDevice);
    own.links.pairs = PairLinks::new(&gpus, &classes, &failures);
    own.take_paths(setup, &plans, &failures)?;
    Ok(own.finish(&gpus))
}

/// Returns the encoded [`GpuInfo`] of this rank.
///
/// # Errors
/// Unsupported on one host if the settings request a transport between host buffers. On several hosts, the
/// host transport itself reports whether it can carry messages.
fn own_gpu(setup: &LinkSetup<'_>) -> Result<Vec<u8>> {
    let config = setup.context.config;
    if let Some(kind) = config.transport
        && kind != super::KIND
        && setup.hosts.count() == 1
    {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!("CINCH_TRANSPORT={kind} carries host memory only (unset it, or say cuda)"),
        ));
    }
    let device = setup.gpu.device();
    let info = GpuInfo {
        uuid: device.uuid,
        ordinal: device.ordinal(),
        capability: device.compute_capability,
        p2p_disable: config.p2p_disable,
    };
    Ok(info.encode())
}

fn peer_buffer_layout(setup: &LinkSetup<'_>) -> Result<PeerBufferLayout> {
    let config = setup.context.config;
    match setup.hosts.count() {
        1 => {
            let channels = config.gpu_channels_for(1);
            PeerBufferLayout::new(setup.nranks(), config.buffer_bytes, channels)
        }
        _ => network::layout(&setup.hosts, config),
    }
}

/// Plans the mappings of all peers, and agrees with them on the pairs that the driver refuses.
fn plan_mappings(
    setup: &LinkSetup<'_>,
    gpus: &[GpuInfo],
    failures: &mut PathFailures,
) -> Result<Vec<MappingPlan>> {
    let plans = mapping::plans(
        (setup.gpu, setup.context.config),
        setup.me,
        setup.peers,
        gpus,
    );
    let refused = plans.as_ref().map(|plans| PathReport {
        failures: mapping::refusals(plans),
        classes: Vec::new(),
    });
    setup.agree(refused.map_err(Error::clone), failures)?;
    plans
}

/// Offsets and sizes of the peer buffers in the inboxes of all ranks.
struct GpuInboxLayout {
    /// Pairs whose mapping the driver refuses; no inbox has peer buffers for them.
    refused: PathFailures,
    shape: PeerBufferLayout,
}

impl GpuInboxLayout {
    /// Returns the ranks that have a peer buffer in the inbox of `reader`, in rank order.
    fn writers(&self, reader: usize) -> Vec<usize> {
        self.refused.reachable(reader, self.shape.nranks())
    }

    /// Returns the size of the inbox of `reader` in bytes.
    fn bytes(&self, reader: usize) -> usize {
        self.writers(reader).len() * self.shape.bytes()
    }

    /// Returns the offset of the peer buffer from `writer` in the inbox of `reader`.
    fn offset(&self, reader: usize, writer: usize) -> u64 {
        let index = self.writers(reader).iter().position(|&rank| rank == writer);
        index.unwrap_or_default() as u64 * self.shape.bytes() as u64
    }
}

/// The memory of a rank, with the objects that are needed only until all ranks are connected.
struct Allocated {
    links: GpuLinks,
    /// Probe for the paths of this rank; `None` if the rank has no inbox.
    probe: Option<Box<dyn PathProbe>>,
    handle: MemoryHandle,
    /// Entry by which ranks of this process find the inbox.
    _registration: Option<Registration>,
}

impl Allocated {
    /// Allocates the inbox, private memory and control words, and exports the inbox.
    fn new(
        setup: &LinkSetup<'_>,
        inboxes: &GpuInboxLayout,
        new_probe: NewProbe<'_>,
    ) -> Result<Allocated> {
        let (gpu, time_left) = (setup.gpu, setup.time_left());
        let private_bytes = private_bytes(setup.nranks());
        let private = DeviceMemory::zeroed(gpu, private_bytes, time_left)?;
        let control = ControlWords::new(gpu)?;
        let memory = match inboxes.bytes(setup.me) {
            0 => None,
            bytes => Some(Arc::new(DeviceMemory::zeroed(gpu, bytes, time_left)?)),
        };
        let writers = inboxes.writers(setup.me);
        let any_local = writers.iter().any(|&peer| setup.shares_process(peer));
        let any_remote = writers.iter().any(|&peer| !setup.shares_process(peer));
        let registration = memory.clone().filter(|_| any_local).map(Registration::new);
        let mut handle = MemoryHandle {
            registration: registration.as_ref().map_or(0, |entry| entry.number),
            ..MemoryHandle::default()
        };
        // Some drivers share no memory between processes (virtual GPUs, WSL 2). The refusal sends these
        // pairs to host memory.
        match memory
            .as_ref()
            .filter(|_| any_remote)
            .map(|own| mapping::export(own))
        {
            None => {}
            Some(Ok(ipc)) => handle.ipc = Some(ipc),
            Some(Err(error)) => handle.refusal = error.message().into(),
        }
        let probe = memory.as_ref().map(|_| new_probe()).transpose()?;
        let links = GpuLinks {
            mappings: Mutex::default(),
            host: None,
            network: Mutex::default(),
            staging: Vec::new(),
            rank: setup.me,
            shape: inboxes.shape,
            inbox: vec![0; setup.nranks()],
            outbox: vec![0; setup.nranks()],
            paths: vec![None; setup.nranks()],
            slowest: LinkClass::SameDevice,
            gpus_keep_lines_whole: false,
            pairs: PairLinks::NVLINK,
            device_bytes: private_bytes + memory.as_ref().map_or(0, |memory| memory.bytes()),
            pinned_bytes: control.bytes(),
            connection_bytes: 0,
            memory,
            private,
            control,
        };
        Ok(Allocated {
            links,
            probe,
            handle,
            _registration: registration,
        })
    }

    /// Maps the inboxes of all peers that `handles` describe, and writes a pattern into this rank's peer
    /// buffer of each. Reports the mappings that failed.
    fn write_patterns(
        &mut self,
        setup: &LinkSetup<'_>,
        inboxes: &GpuInboxLayout,
        handles: &[Vec<u8>],
    ) -> Result<PathReport> {
        let mut failures = Vec::new();
        let readers = inboxes.writers(setup.me);
        for &peer in &readers {
            let handle = MemoryHandle::decode(&handles[peer], &setup.peers[peer])?;
            let local = setup.shares_process(peer);
            match PeerMapping::open(setup.gpu, &handle, local, inboxes.bytes(peer)) {
                Ok(mapping) => {
                    self.links.outbox[peer] = mapping.address() + inboxes.offset(peer, setup.me);
                    self.links.mappings().push((peer, mapping));
                }
                Err(error) => failures.push((peer, cannot_map(setup, peer, &error))),
            }
        }
        for &peer in &readers {
            if let (Some(probe), 1..) = (&self.probe, self.links.outbox[peer]) {
                setup.check_deadline()?;
                let buffer = self.probed(setup, (setup.me, peer), self.links.outbox[peer]);
                // SAFETY: `mappings` keeps the peer's inbox mapped. Only this rank writes this peer
                // buffer, and its reader waits for the next round.
                unsafe { buffer.write_pattern(&**probe)? };
            }
        }
        Ok(PathReport {
            failures,
            classes: Vec::new(),
        })
    }

    /// Compares the patterns that peers wrote into this rank's inbox, then zeroes the inbox. Reports the
    /// classes of links, and the peers whose pattern did not arrive intact.
    fn compare_patterns(
        &mut self,
        setup: &LinkSetup<'_>,
        inboxes: &GpuInboxLayout,
        plans: &[MappingPlan],
        failures: &PathFailures,
    ) -> Result<PathReport> {
        let writers = failures.reachable(setup.me, setup.nranks());
        if let Some(memory) = &self.links.memory {
            for &peer in &writers {
                self.links.inbox[peer] = memory.address() + inboxes.offset(setup.me, peer);
            }
        }
        let mut wrong_peers = Vec::new();
        for &peer in &writers {
            setup.check_deadline()?;
            let Some(probe) = &self.probe else { continue };
            let buffer = self.probed(setup, (peer, setup.me), self.links.inbox[peer]);
            // SAFETY: `links.memory` is this rank's inbox. Its writers have finished, because all ranks
            // have reported in the round before.
            let wrong = unsafe { buffer.count_wrong(&**probe)? };
            if wrong > 0 {
                wrong_peers.push((peer, arrived_wrong(setup, peer, wrong)));
            }
        }
        // The inbox can be zeroed now, because no rank writes into it before the final barrier.
        if let Some(memory) = &self.links.memory {
            let stream = Stream::new(setup.gpu)?;
            memory.fill(0, &stream)?;
            stream.wait(setup.time_left())?;
        }
        Ok(PathReport {
            failures: wrong_peers,
            classes: classes(plans, &writers),
        })
    }

    fn probed(
        &self,
        setup: &LinkSetup<'_>,
        (writer, reader): (usize, usize),
        address: u64,
    ) -> ProbedPeerBuffer<'_> {
        ProbedPeerBuffer {
            writer,
            reader,
            address,
            shape: &self.links.shape,
            nonce: setup.nonce(),
        }
    }

    /// Sets the final path of each pair, and connects pairs without peer access through host memory or
    /// the network. Returns when all ranks are connected.
    fn take_paths(
        &mut self,
        setup: &LinkSetup<'_>,
        plans: &[MappingPlan],
        failures: &PathFailures,
    ) -> Result<()> {
        let (me, nranks, links) = (setup.me, setup.nranks(), &mut self.links);
        for peer in failures.in_host_memory(me, nranks) {
            (links.inbox[peer], links.outbox[peer]) = (0, 0);
        }
        links.paths = paths(setup, plans, failures);
        if failures.is_empty() {
            setup.barrier()?;
        } else {
            links.slowest = LinkClass::Host;
            links
                .mappings()
                .retain(|(peer, _)| links.outbox[*peer] != 0);
            log_failures(setup, failures);
            host::connect(setup, links, failures)?;
        }
        if setup.hosts.count() > 1 {
            network::connect(setup, links, &failures.on_other_hosts(me, nranks))?;
        }
        Ok(())
    }

    /// Returns the links. The registration of the inbox ends, because every rank has used it.
    fn finish(self, gpus: &[GpuInfo]) -> GpuLinks {
        let mut links = self.links;
        links.gpus_keep_lines_whole = GPUS_THAT_KEEP_LINES_WHOLE
            .iter()
            .any(|&known| gpus.iter().all(|gpu| gpu.capability == known));
        links
    }
}

/// Returns the final path to each rank; `None` for this rank.
fn paths(
    setup: &LinkSetup<'_>,
    plans: &[MappingPlan],
    failures: &PathFailures,
) -> Vec<Option<PeerPath>> {
    let path = |peer: usize| match failures.between(setup.me, peer) {
        _ if peer == setup.me => None,
        Some(reason) => Some(PeerPath::PinnedHost {
            reason: reason.into(),
        }),
        None => match &plans[peer] {
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
    (0..setup.nranks()).map(path).collect()
}

/// Returns the class of the link to each rank, [`LinkClass::SameDevice`] to ranks that are not in `peers`.
fn classes(plans: &[MappingPlan], peers: &[usize]) -> Vec<LinkClass> {
    let class = |(rank, plan): (usize, &MappingPlan)| match plan {
        _ if !peers.contains(&rank) => LinkClass::SameDevice,
        MappingPlan::Open { class, .. } => *class,
        MappingPlan::Refused(_) => LinkClass::Host,
    };
    plans.iter().enumerate().map(class).collect()
}

/// Logs each failed path, on the lower rank of the pair only.
fn log_failures(setup: &LinkSetup<'_>, failures: &PathFailures) {
    for (reason, peers) in failures.with_higher_ranks(setup.me) {
        // A user who switched peer access off needs no warning.
        let level = match reason.starts_with(mapping::SWITCHED_OFF) {
            true => Level::Info,
            false => Level::Warn,
        };
        let peers: Vec<String> = peers.iter().map(usize::to_string).collect();
        line(
            level,
            format_args!(
                "pinned host memory carries data between {} and rank{} {}: {reason}",
                setup.peers[setup.me],
                if peers.len() == 1 { "" } else { "s" },
                peers.join(", "),
            ),
        );
    }
}

fn cannot_map(setup: &LinkSetup<'_>, peer: usize, error: &Error) -> String {
    format!(
        "{} cannot map the memory of {}: {}",
        setup.peers[setup.me],
        setup.peers[peer],
        error.message()
    )
}

fn arrived_wrong(setup: &LinkSetup<'_>, peer: usize, wrong: u64) -> String {
    format!(
        "{wrong} words of a pattern that {} wrote arrived wrong at {} (PCIe access control or \
         an IOMMU between the GPUs?)",
        setup.peers[peer], setup.peers[setup.me]
    )
}
