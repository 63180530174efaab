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
mod tests {
    use super::*;
    use crate::bootstrap::LocalOutOfBand;
    use crate::comm::topology_file::unlogged_defects;
    use crate::config::EmulatedMachine;
    use crate::sync::Fault;
    use crate::topology::probe::SavedProbe;

    /// Returns the path of a machine file; `name` may also be an absolute path.
    fn file_path(name: &str) -> PathBuf {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/topology");
        folder.join(name)
    }

    /// Returns the topologies of ranks with these values of `CINCH_TOPO`.
    fn outcomes(files: &[&str]) -> Vec<Result<Option<Arc<RankTopology>>>> {
        emulated(files, None)
    }

    /// As [`outcomes`], with links that are emulated `scale` times as slow.
    fn emulated(files: &[&str], scale: Option<u32>) -> Vec<Result<Option<Arc<RankTopology>>>> {
        let faults: Vec<_> = files.iter().map(|_| Fault::new()).collect();
        let world = LocalOutOfBand::world(files.len(), &faults);
        let of = |file: &&str| Config {
            topology: FileChoice::File(file_path(file)),
            emulated: scale.map(|scale| EmulatedMachine {
                file: file.to_string(),
                xml: std::fs::read_to_string(file_path(file)).unwrap(),
                scale,
            }),
            ..Config::default()
        };
        let configs: Vec<Config> = files.iter().map(of).collect();
        std::thread::scope(|scope| {
            let ranks = world.iter().zip(&configs);
            let threads: Vec<_> = ranks
                .map(|(exchange, config)| scope.spawn(|| on_host(&**exchange, config)))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        })
    }

    #[test]
    fn equal_files_give_all_ranks_equal_groups() {
        for outcome in outcomes(&["B.xml"; 8]) {
            let topology = outcome.unwrap().unwrap();
            assert_eq!(topology.to_string(), "4 switches of 2 ranks");
        }
    }

    /// Joining ranks log the lines, so none is left afterwards.
    #[test]
    fn ranks_log_each_defect_of_the_file_once() {
        let text = std::fs::read_to_string(file_path("A.xml")).unwrap();
        let itself = "<nvlink target=\"0000:10:00.0\" count=\"1\" tclass=\"0x030200\"/>";
        let gpu = "<gpu dev=\"0\" sm=\"70\" rank=\"0\" gdr=\"1\"";
        assert!(text.contains(gpu));
        let text = text.replace(
            &format!("{gpu}/>"),
            &format!("{gpu}>{itself}{itself}</gpu>"),
        );
        let text = text.replacen("class=\"0x060400\" ", "", 1);
        let graph = MachineGraph::new(&read_xml(&text).unwrap());
        let name = format!("cinch-defects-{}.xml", std::process::id());
        let file = std::env::temp_dir().join(name);
        std::fs::write(&file, text).unwrap();
        let joined = outcomes(&[file.to_str().unwrap(); 8]);
        std::fs::remove_file(&file).unwrap();
        assert!(joined.iter().all(Result::is_ok), "{joined:?}");
        assert!(unlogged_defects(&file, &graph).is_empty());
        let other = Path::new("other.xml");
        let lines = unlogged_defects(other, &graph);
        for (line, defect) in lines.iter().zip(["has no class", "a link to itself"]) {
            let is_named = line.starts_with("CINCH_TOPO=other.xml: ");
            assert!(is_named && line.contains(defect), "{lines:?}");
        }
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(unlogged_defects(other, &graph).is_empty());
    }

    /// Whole MB/s, divided by the factor, would be 1 for every link of H from 20,000 on.
    #[test]
    fn emulated_links_of_any_scale_have_the_rings_and_groups_of_the_file() {
        for file in ["C.xml", "H.xml", "I.xml"] {
            let of = |scale| emulated(&[file; 8], scale).remove(0).unwrap().unwrap();
            let real = of(None);
            let messages = [[(0, 1, 1_000_000), (3, 4, 1_000_000), (7, 0, 1_000_000)]];
            let seconds = real.seconds(messages);
            for scale in [1, 1000, 40_000, 1_000_000] {
                let slow = of(Some(scale));
                assert_eq!(slow.order(), real.order());
                assert_eq!(slow.ring_sets(), real.ring_sets(), "{file} / {scale}");
                assert_eq!(slow.groups(), real.groups(), "{file} / {scale}");
                let ratio = slow.seconds(messages) / seconds / f64::from(scale);
                assert!((ratio - 1.0).abs() < 1e-9, "{file} / {scale}: {ratio}");
                assert_eq!(
                    slow.fingerprint() == real.fingerprint(),
                    scale == 1,
                    "{file} / {scale}"
                );
            }
        }
    }

    #[test]
    fn different_files_are_a_mismatch_on_all_ranks() {
        for outcome in outcomes(&["A.xml", "A.xml", "F.xml", "A.xml", "A.xml"]) {
            let error = outcome.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch);
            for part in [
                "2 switches of 1 to 4 ranks",
                "2 sockets of 1 to 4 ranks",
                "rank 0",
                "rank 2",
            ] {
                assert!(error.message().contains(part), "{part} is not in {error}");
            }
        }
    }

    #[test]
    fn file_with_too_few_gpus_is_refused_with_both_numbers() {
        let error = outcomes(&["G.xml"; 5]).remove(0).unwrap_err();
        assert!(error.message().contains("4 GPUs for 5 ranks"), "{error}");
        assert!(error.message().contains("CINCH_TOPO="), "{error}");
    }

    fn machine_c() -> Machine {
        read_xml(include_str!("../../tests/topology/C.xml")).unwrap()
    }

    /// Returns the topology of ranks on GPUs of machine C, of which rank 0 has saved `limits`.
    fn with_limits(limits: &str, gpus: std::ops::Range<usize>) -> Result<RankTopology> {
        let machine = machine_c();
        let graph = MachineGraph::new(&machine);
        let faults: Vec<_> = graph.gpus.iter().map(|_| Fault::new()).collect();
        let world = LocalOutOfBand::world(gpus.len(), &faults[..gpus.len()]);
        let fragment = |(rank, gpu): (usize, usize)| GpuFragment {
            bus_id: graph.gpus[gpu].bus_id,
            peer_access: vec![true; gpus.len()],
            machine: write_xml(&topology::fragment(&machine, graph.gpus[gpu].bus_id).unwrap()),
            limits: if rank == 0 {
                limits.into()
            } else {
                String::new()
            },
        };
        let peers = world[0].peers();
        let sent = gpus.clone().enumerate().map(fragment);
        let received: Vec<GpuFragment> = sent
            .zip(peers)
            .map(|(fragment, peer)| GpuFragment::decode(&fragment.encode(), peer).unwrap())
            .collect();
        let machine = fused(&received, peers)?.unwrap();
        of_fragments(&machine, &limits_of(&received[0].limits)?, &received, peers)
    }

    #[test]
    fn limits_of_rank_0_count_for_all_ranks() {
        let seconds = |topology: &RankTopology| topology.seconds([[(0, 4, 1_000_000_000)]]);
        let plain = with_limits("", 0..8).unwrap();
        let limits = "link socket_0 socket_1 1000\n";
        let measured = with_limits(limits, 0..8).unwrap();
        assert!((seconds(&plain) - 1.0 / 16.0).abs() < 1e-6);
        assert!((seconds(&measured) - 1.0).abs() < 1e-6);
        assert_ne!(plain.fingerprint(), measured.fingerprint());
        // Limits of GPUs that no rank uses have no effect.
        let unused = with_limits("link 17:00.0 86:00.0 5\n", 0..4).unwrap();
        let known = with_limits("", 0..4).unwrap();
        assert_eq!(unused.fingerprint(), known.fingerprint());
        let error = with_limits("link 17:00.0\n", 0..4).unwrap_err();
        assert!(error.message().contains("rank 0"), "{error}");
    }

    #[test]
    fn saved_limits_are_sent_unless_they_are_stale_broken_or_long() {
        let graph = MachineGraph::new(&machine_c());
        let name = format!("cinch-saved-limits-{}", std::process::id());
        let cache = std::env::temp_dir().join(name);
        let key = |driver| ProbeKey::new(&graph, &["GPU-a".into()], driver, "");
        let saved = |limits: &str| SavedProbe {
            access: PeerAccess::Rule,
            limits: limits.parse().unwrap(),
            patterns: Vec::new(),
        };
        let text = |driver| limits_text(&key(driver), &cache, &graph);
        assert_eq!(saved_limits(Some(cache.clone()), false), "");
        assert_eq!(text("550").unwrap(), "");
        let limits = "link socket_0 socket_1 1000\n";
        let path = key("550").save(&cache, &graph, &saved(limits)).unwrap();
        assert_eq!(text("550").unwrap(), limits);
        assert_eq!(text("560").unwrap(), "");
        let long = limits.repeat(MAX_FRAGMENT_BYTES / limits.len() + 1);
        key("550").save(&cache, &graph, &saved(&long)).unwrap();
        assert!(text("550").unwrap_err().message().contains("at most 16384"));
        std::fs::write(&path, "link").unwrap();
        let error = text("550").unwrap_err();
        assert!(error.message().contains("no fingerprint"), "{error}");
        std::fs::remove_dir_all(&cache).unwrap();
    }
}
