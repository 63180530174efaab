//! The topology by which a communicator's ranks choose rings and groups, agreed between all ranks.

use super::topology_file::{of_file, read_file, warn_of_defects};
use crate::bootstrap::{OutOfBand, PeerInfo};
use crate::config::{Config, FileChoice, cache_directory};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::Device;
use crate::gpu_links::PeerPath;
use crate::sys::log::{self, Level};
use crate::sys::nvml::Nvml;
use crate::sys::{cpu, numa};
use crate::topology::probe::{DRIVER, ProbeKey};
use crate::topology::{
    self, BusId, DetectSources, DriverGpu, Machine, MachineGraph, MeasuredLimits, PeerAccess,
    ProcessorFacts, RankPlace, RankTopology, read_xml, write_xml,
};
use crate::types::DeviceChoice;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Returns the topology of ranks on host memory: that of `CINCH_TOPO=FILE`, in which GPUs stand for ranks in the
/// order of their `rank`, or `dev`. `None` without a file, or on several hosts. All ranks call it together.
///
/// # Errors
/// Invalid argument if the file cannot be used. Mismatch, naming two ranks and both fingerprints, if ranks have
/// different topologies; all ranks get this error alike.
pub(super) fn on_host(
    exchange: &dyn OutOfBand,
    config: &Config,
) -> Result<Option<Arc<RankTopology>>> {
    let peers = exchange.peers();
    let one_host = peers.iter().all(|peer| peer.host_id == peers[0].host_id);
    let FileChoice::File(path) = &config.topology else {
        return Ok(None);
    };
    if !one_host || peers.len() < 2 {
        return Ok(None);
    }
    let topology = of_file(path, peers.len(), &access(config), exchange.rank() == 0)
        .map_err(|error| error.context(format!("CINCH_TOPO={}", path.display())))
        // The other ranks wait for this rank next.
        .inspect_err(|error| exchange.announce(error))?;
    // Emulated links are slower than those of the file.
    let topology = match config.emulated_machine() {
        Some(machine) => topology.slowed_down(machine.scale),
        None => topology,
    };
    agree(exchange, &topology)?;
    Ok(Some(Arc::new(topology)))
}

/// Returns whether ranks of one host may have a topology with several groups. Whether they have is known once they are
/// connected.
pub(super) fn may_have_groups(config: &Config) -> bool {
    match &config.topology {
        FileChoice::Off => false,
        FileChoice::File(_) => true,
        FileChoice::Auto => config.device != DeviceChoice::Host,
    }
}

/// Returns the place of a rank on `device`; unknown with `CINCH_TOPO=off`.
pub(super) fn place_of_gpu(config: &Config, device: &Device) -> RankPlace {
    if config.topology == FileChoice::Off {
        return RankPlace::Unknown;
    }
    let address = device.pci_bus_id.to_ascii_lowercase();
    address.parse().map_or(RankPlace::Unknown, RankPlace::Gpu)
}

/// Returns the place of a rank on host memory: the NUMA node of all cores of the calling thread, if they are on one
/// node; unknown with `CINCH_TOPO=off`.
pub(super) fn place_of_cores(config: &Config) -> RankPlace {
    if config.topology == FileChoice::Off {
        return RankPlace::Unknown;
    }
    let node = numa::node_of_cores(Path::new(numa::SYS), &cpu::allowed());
    node.map_or(RankPlace::Unknown, RankPlace::Node)
}

/// Facts about the GPU of a rank, which all ranks of its host receive.
struct GpuFragment {
    bus_id: BusId,
    /// For each rank, whether this rank's kernels write its memory directly.
    peer_access: Vec<bool>,
    /// The part of the machine that holds the GPU, in NCCL's XML format; empty if it is unknown.
    machine: String,
    /// Saved measured limits of the machine, from rank 0 alone; empty if there are none.
    limits: String,
}

impl GpuFragment {
    fn encode(&self) -> Vec<u8> {
        let access: String = self
            .peer_access
            .iter()
            .map(|&can| if can { '1' } else { '0' })
            .collect();
        let words = [self.bus_id.to_string(), access, self.machine.clone()];
        [words.join("\0"), self.limits.clone()]
            .join("\0")
            .into_bytes()
    }

    fn decode(bytes: &[u8], peer: &PeerInfo) -> Result<GpuFragment> {
        let malformed = || {
            let text = format!("{peer} described its machine in another format: use one version");
            Error::new(ErrorKind::Mismatch, text)
        };
        let text = std::str::from_utf8(bytes).map_err(|_| malformed())?;
        let words: Vec<&str> = text.split('\0').collect();
        let [bus_id, access, machine, limits] = words[..] else {
            return Err(malformed());
        };
        Ok(GpuFragment {
            bus_id: bus_id.parse().map_err(|()| malformed())?,
            peer_access: access.bytes().map(|byte| byte == b'1').collect(),
            machine: machine.into(),
            limits: limits.into(),
        })
    }
}

/// Largest size of a fragment in bytes. Longer fragments count as unknown machines.
const MAX_FRAGMENT_BYTES: usize = 16 << 10;

/// Returns the topology of ranks on GPUs: that of the machine, fused from what all ranks see of it, or that of
/// `CINCH_TOPO=FILE`. `None` with `CINCH_TOPO=off`, on several hosts, if ranks share a GPU, or if a rank knows nothing
/// of its machine. All ranks call it together.
///
/// # Errors
/// As for [`on_host`]; mismatch also if two ranks see the machine differently.
pub(super) fn on_gpus(
    exchange: &dyn OutOfBand,
    config: &Config,
    device: &Device,
    paths: &[Option<PeerPath>],
) -> Result<Option<Arc<RankTopology>>> {
    let peers = exchange.peers();
    let one_host = peers.iter().all(|peer| peer.host_id == peers[0].host_id);
    // All ranks have compared the kind of choice.
    if config.topology == FileChoice::Off || !one_host || peers.len() < 2 {
        return Ok(None);
    }
    if config.emulated_machine().is_some() {
        // The ranks stand for the GPUs of a file, whatever their own GPU is.
        return on_host(exchange, config);
    }
    let mut own = own_fragment(device, paths).inspect_err(|error| exchange.announce(error))?;
    // The limits that rank 0 has saved count for all ranks of its host. Nothing is measured while ranks join.
    if exchange.rank() == 0 && config.topology == FileChoice::Auto {
        own.limits = saved_limits(cache_directory(), config.p2p_disable);
    }
    agree_on(exchange, config, &own)
}

/// Returns the topology of the GPUs whose fragments all ranks of a host bring, see [`on_gpus`].
fn agree_on(
    exchange: &dyn OutOfBand,
    config: &Config,
    own: &GpuFragment,
) -> Result<Option<Arc<RankTopology>>> {
    let peers = exchange.peers();
    let parts = exchange.all_gather(&own.encode())?;
    let fragments: Vec<GpuFragment> = parts
        .iter()
        .zip(peers)
        .map(|(part, peer)| GpuFragment::decode(part, peer))
        .collect::<Result<_>>()?;
    let shares = |at: usize| {
        fragments[..at]
            .iter()
            .any(|f| f.bus_id == fragments[at].bus_id)
    };
    if (0..fragments.len()).any(shares) {
        return Ok(None);
    }
    let machine = match &config.topology {
        FileChoice::File(path) => {
            let machine = read_file(path)
                .map_err(|error| error.context(format!("CINCH_TOPO={}", path.display())))
                .inspect_err(|error| exchange.announce(error))?;
            if exchange.rank() == 0 {
                warn_of_defects(path, &MachineGraph::new(&machine));
            }
            Some(machine)
        }
        _ => fused(&fragments, peers)?,
    };
    let Some(machine) = machine else {
        return Ok(None);
    };
    let topology = limits_of(&fragments[0].limits)
        .and_then(|limits| of_fragments(&machine, &limits, &fragments, peers))
        .inspect_err(|error| exchange.announce(error))?;
    agree(exchange, &topology)?;
    Ok(Some(Arc::new(topology)))
}

/// Describes this rank's GPU and its way to the socket.
fn own_fragment(device: &Device, paths: &[Option<PeerPath>]) -> Result<GpuFragment> {
    let bus_id: BusId = device
        .pci_bus_id
        .to_ascii_lowercase()
        .parse()
        .map_err(|()| {
            Error::internal(format!(
                "the driver gives {} as a PCI address",
                device.pci_bus_id
            ))
        })?;
    let (major, minor) = device.compute_capability;
    let driver = [DriverGpu {
        bus_id,
        sm: Some(10 * major + minor),
        gdr: None,
    }];
    // Without NVML the links between GPUs are unknown, and the rest is still known.
    let nvml = Nvml::open().and_then(|nvml| nvml.gpu_at(bus_id));
    let nvml: Vec<_> = nvml.ok().flatten().into_iter().collect();
    let processor = ProcessorFacts::read(Path::new("/proc/cpuinfo"));
    let sources = DetectSources {
        processor,
        nvml: &nvml,
        driver: &driver,
    };
    // A machine that cannot be described is an unknown machine, on which calls still run.
    let text = match topology::detect(Path::new(numa::SYS), &sources) {
        Ok(machine) => {
            topology::fragment(&machine, bus_id).map_or(String::new(), |part| write_xml(&part))
        }
        Err(error) => {
            log::line(
                Level::Warn,
                format_args!("the topology stays unknown: {error}"),
            );
            String::new()
        }
    };
    Ok(GpuFragment {
        bus_id,
        peer_access: paths
            .iter()
            .map(|path| !matches!(path, Some(PeerPath::PinnedHost { .. })))
            .collect(),
        machine: if text.len() <= MAX_FRAGMENT_BYTES {
            text
        } else {
            String::new()
        },
        limits: String::new(),
    })
}

/// Returns the text of the limits that `cinch topo --probe` has measured and saved for this machine; empty if there are
/// none. A file that cannot be used costs speed, not correctness, so it is a warning.
fn saved_limits(cache: Option<PathBuf>, p2p_disable: bool) -> String {
    // The machine is described only if a probe was saved, because that takes milliseconds.
    let Some(cache) = cache.filter(|cache| ProbeKey::any_saved(cache)) else {
        return String::new();
    };
    let saved = ProbeKey::at_hand(Path::new(numa::SYS), Path::new(DRIVER), p2p_disable)
        .and_then(|(key, graph)| limits_text(&key, &cache, &graph));
    saved.unwrap_or_else(|error| {
        log::line(
            Level::Warn,
            format_args!("no measured limits are used: {error}"),
        );
        String::new()
    })
}

/// Returns the text of the limits that are saved in `cache` for the machine of `key`.
fn limits_text(key: &ProbeKey, cache: &Path, graph: &MachineGraph) -> Result<String> {
    let stale = |path: &Path| {
        log::line(
            Level::Warn,
            format_args!(
                "the measured limits {} are ignored, because the topology, the driver or a setting of peer \
                 access has changed since; `cinch topo --probe` measures again",
                path.display()
            ),
        );
    };
    let Some((path, saved)) = key.load(cache, graph, stale)? else {
        return Ok(String::new());
    };
    let text = saved.limits.to_string();
    if text.len() > MAX_FRAGMENT_BYTES {
        return Err(Error::invalid_argument(format!(
            "{} has {} bytes of limits, and ranks exchange at most {MAX_FRAGMENT_BYTES}",
            path.display(),
            text.len()
        )));
    }
    log::line(
        Level::Info,
        format_args!("links have the measured limits of {}", path.display()),
    );
    Ok(text)
}

/// Reads the limits that rank 0 sent.
fn limits_of(text: &str) -> Result<MeasuredLimits> {
    text.parse()
        .map_err(|error: Error| error.context("the measured limits of rank 0"))
}

/// Fuses what all ranks see of the machine; `None` if a rank sees nothing.
fn fused(fragments: &[GpuFragment], peers: &[PeerInfo]) -> Result<Option<Machine>> {
    if fragments.iter().any(|fragment| fragment.machine.is_empty()) {
        return Ok(None);
    }
    let read = |(fragment, peer): (&GpuFragment, &PeerInfo)| -> Result<(String, Machine)> {
        let machine = read_xml(&fragment.machine)
            .map_err(|error| error.context(format!("the machine that {peer} describes")))?;
        Ok((peer.to_string(), machine))
    };
    let mut all: Vec<(BusId, (String, Machine))> = fragments
        .iter()
        .zip(peers)
        .map(|pair| Ok((pair.0.bus_id, read(pair)?)))
        .collect::<Result<_>>()?;
    all.sort_by_key(|(bus_id, _)| *bus_id);
    let all: Vec<(String, Machine)> = all.into_iter().map(|(_, part)| part).collect();
    topology::fuse(&all).map(Some)
}

/// Returns the topology of the ranks of `fragments` on `machine`, whose links have the measured limits that fit.
fn of_fragments(
    machine: &Machine,
    limits: &MeasuredLimits,
    fragments: &[GpuFragment],
    peers: &[PeerInfo],
) -> Result<RankTopology> {
    let mut graph = MachineGraph::new(machine);
    limits.apply_known(&mut graph);
    let place = |(fragment, peer): (&GpuFragment, &PeerInfo)| {
        graph.gpus.iter().position(|gpu| gpu.bus_id == fragment.bus_id).ok_or_else(|| {
            Error::invalid_argument(format!(
                "the topology has no GPU at {}, which {peer} uses: give a file with all GPUs, or off",
                fragment.bus_id
            ))
        })
    };
    let gpus: Vec<usize> = fragments
        .iter()
        .zip(peers)
        .map(place)
        .collect::<Result<_>>()?;
    let access = fragments
        .iter()
        .flat_map(|fragment| fragment.peer_access.iter().copied());
    RankTopology::new(&graph, &gpus, &PeerAccess::Pairs(access.collect()))
}

fn access(config: &Config) -> PeerAccess {
    match config.p2p_disable {
        true => PeerAccess::Never,
        false => PeerAccess::Rule,
    }
}

/// Compares the fingerprints of all ranks.
fn agree(exchange: &dyn OutOfBand, topology: &RankTopology) -> Result<()> {
    let own = format!("{} ({topology})", topology.fingerprint());
    let all = exchange.all_gather(own.as_bytes())?;
    let Some(rank) = all.iter().position(|other| *other != all[0]) else {
        return Ok(());
    };
    let peers = exchange.peers();
    let text = |rank: usize| String::from_utf8_lossy(&all[rank]).into_owned();
    Err(Error::new(
        ErrorKind::Mismatch,
        format!(
            "the topology is {} on {} and {} on {}: give all ranks one CINCH_TOPO, or off",
            text(0),
            peers[0],
            text(rank),
            peers[rank]
        ),
    ))
}

#[cfg(test)]
mod tests;
