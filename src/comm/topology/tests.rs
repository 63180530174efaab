use super::*;
use crate::bootstrap::{ControlPlane, LocalOutOfBand, UniqueId};
use crate::comm::topology_file::unlogged_defects;
use crate::config::EmulatedMachine;
use crate::sync::Fault;
use crate::topology::probe::SavedProbe;
use std::time::{Duration, Instant};

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
    read_xml(include_str!("../../../tests/topology/C.xml")).unwrap()
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

/// The first agreement of a process also resolves symbols and pages in code; the fastest of a few is the work.
#[test]
fn agreement_of_8_local_ranks_takes_few_milliseconds() {
    const LIMIT: Duration = match cfg!(debug_assertions) {
        true => Duration::from_millis(50),
        false => Duration::from_millis(5),
    };
    let machine = machine_c();
    let graph = MachineGraph::new(&machine);
    let config = Config::default();
    let id = UniqueId::create_for_one_host(&config).unwrap();
    let run = |rank: usize| {
        let exchange = ControlPlane::join(&id, rank, 8, &config, Fault::new()).unwrap();
        let bus_id = graph.gpus[rank].bus_id;
        let own = GpuFragment {
            bus_id,
            peer_access: vec![true; 8],
            machine: write_xml(&topology::fragment(&machine, bus_id).unwrap()),
            limits: String::new(),
        };
        let times = (0..10).map(|_| {
            exchange.barrier().unwrap();
            let begun = Instant::now();
            let agreed = agree_on(&*exchange, &config, &own).unwrap();
            assert!(agreed.is_some());
            begun.elapsed()
        });
        let times: Vec<Duration> = times.collect();
        exchange.leave();
        times
    };
    let times: Vec<Vec<Duration>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..8)
            .map(|rank| {
                scope.spawn({
                    let run = &run;
                    move || run(rank)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let slowest = (0..10).map(|at| times.iter().map(|times| times[at]).max().unwrap());
    let mut slowest: Vec<Duration> = slowest.collect();
    slowest.sort_unstable();
    println!("the slowest of 8 ranks agreed after {slowest:?}");
    assert!(slowest[0] <= LIMIT, "{slowest:?}");
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
