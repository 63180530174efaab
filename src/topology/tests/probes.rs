//! Tests of probes on simulated machines: a meter returns the rates of a hidden graph, and the inferred limits make
//! the static graph of the machine predict the rates of the hidden graph.

use super::machines::case;
use super::pairs::{BYTES, measured_pairs, nested};
use crate::error::Result;
use crate::testing::Random;
use crate::topology::flows::Loads;
use crate::topology::hierarchy::LevelExchange;
use crate::topology::probe::{
    FlowEnd, MAX_PATTERNS, MeasuredPattern, PatternMeter, ProbeFlow, ProbeKey, SavedLimits,
    SavedProbe, TrafficPattern, infer, measure, plan, predicted_rates,
};
use crate::topology::{
    BandwidthOrigin, MachineGraph, MeasuredLimit, MeasuredLimits, PathType, Paths, PeerAccess,
    concurrent_rates, predict,
};
use std::collections::HashSet;

/// A meter that measures a hidden machine, with a random error of up to `noise` percent a flow.
struct SimulatedMeter {
    graph: MachineGraph,
    paths: Paths,
    noise: u64,
    random: Random,
}

impl PatternMeter for SimulatedMeter {
    fn measure(&mut self, _: &MachineGraph, flows: &[ProbeFlow]) -> Result<Vec<u32>> {
        let rates = predicted_rates(&self.graph, &self.paths, flows);
        let scale = |rate: u64| {
            let error = self.random.below(2 * self.noise as usize + 1) as u64;
            (rate * (100 - self.noise + error) / 100) as u32
        };
        Ok(rates.into_iter().map(scale).collect())
    }
}

/// A machine whose static graph is known, and whose limits are hidden.
struct Hidden {
    known: MachineGraph,
    access: PeerAccess,
    hidden: MachineGraph,
}

impl Hidden {
    fn new(machine: &'static str, access: PeerAccess, limits: &str) -> Hidden {
        let known = MachineGraph::new(&case(machine).machine);
        let mut hidden = known.clone();
        let limits: MeasuredLimits = limits.parse().unwrap();
        limits.apply(&mut hidden).unwrap();
        Hidden {
            known,
            access,
            hidden,
        }
    }

    /// Returns the patterns with measured rates, and the inferred limits.
    fn probe(&self, noise: u64) -> (Vec<MeasuredPattern>, MeasuredLimits) {
        let patterns = plan(&self.known, &Paths::new(&self.known, &self.access));
        assert!(patterns.len() <= MAX_PATTERNS);
        let mut meter = SimulatedMeter {
            graph: self.hidden.clone(),
            paths: Paths::new(&self.hidden, &self.access),
            noise,
            random: Random::new(7 + noise),
        };
        let measured = measure(&self.known, patterns, &mut meter).unwrap();
        let limits = infer(&self.known, &self.access, &measured);
        (measured, limits)
    }

    fn with(&self, limits: &MeasuredLimits) -> (MachineGraph, Paths) {
        let mut graph = self.known.clone();
        limits.apply(&mut graph).unwrap();
        let paths = Paths::new(&graph, &self.access);
        (graph, paths)
    }

    /// Checks that the static graph with `limits` predicts the rates of writes between GPUs within 3 %.
    fn check(&self, measured: &[MeasuredPattern], limits: &MeasuredLimits) {
        let (graph, paths) = self.with(limits);
        for one in measured.iter().filter(|one| one.pattern.is_peer_write()) {
            let predicted: u64 = predicted_rates(&graph, &paths, &one.pattern.flows)
                .iter()
                .sum();
            let error = predicted.abs_diff(one.total()) as f64 / one.total() as f64;
            assert!(
                error < 0.03,
                "{}: predicted {predicted}, measured {}\n{limits}",
                one.pattern,
                one.total()
            );
        }
    }
}

fn public_pairs() -> Hidden {
    let (hidden, _) = measured_pairs(true);
    Hidden {
        known: MachineGraph::new(&case("C").machine),
        access: PeerAccess::UpTo(PathType::Sys),
        hidden,
    }
}

fn fans(limits: &MeasuredLimits) -> Vec<&MeasuredLimit> {
    let is_fan = |limit: &&MeasuredLimit| matches!(limit, MeasuredLimit::Fan { .. });
    limits.limits().filter(is_fan).collect()
}

fn pools(limits: &MeasuredLimits) -> Vec<&MeasuredLimit> {
    let is_pool = |limit: &&MeasuredLimit| matches!(limit, MeasuredLimit::Pool(..));
    limits.limits().filter(is_pool).collect()
}

#[test]
fn published_machine_is_found_by_its_patterns() {
    let machine = public_pairs();
    let (measured, limits) = machine.probe(0);
    println!("{} patterns\n{limits}", measured.len());
    machine.check(&measured, &limits);
    // Patterns that the plan does not have: the rows of the published table.
    let (graph, paths) = machine.with(&limits);
    let hidden = Paths::new(&machine.hidden, &machine.access);
    let all = |from: std::ops::Range<usize>, to: std::ops::Range<usize>| -> Vec<(usize, usize)> {
        from.flat_map(|a| to.clone().filter(move |&b| b != a).map(move |b| (a, b)))
            .collect()
    };
    for flows in [
        all(0..4, 4..8),
        all(0..4, 0..4),
        vec![(0, 4), (0, 6)],
        vec![(0, 2), (1, 4)],
    ] {
        let total = |graph: &MachineGraph, paths: &Paths| -> f64 {
            concurrent_rates(graph, paths, &flows).iter().sum::<u64>() as f64 / 1e9
        };
        let (found, real) = (total(&graph, &paths), total(&machine.hidden, &hidden));
        assert!(
            (found - real).abs() < 0.03 * real,
            "{flows:?}: {found} instead of {real}"
        );
    }
    assert_eq!(fans(&limits).len(), 4, "{limits}");
    assert_eq!(pools(&limits).len(), 1, "{limits}");
    let text = limits.to_string();
    for line in [
        "connect 0000:80:00.0 0000:82:00.0 107",
        "fan 0000:86:00.0 2 2 2700\n",
    ] {
        assert!(text.contains(line), "{line} is not in {text}");
    }
    assert_eq!(text.parse::<MeasuredLimits>().unwrap().to_string(), text);
}

#[test]
fn published_machine_changes_the_predictions() {
    let machine = public_pairs();
    let (_, limits) = machine.probe(0);
    let (graph, paths) = machine.with(&limits);
    let sockets: [&[usize]; 2] = [&[0, 1, 2, 3], &[4, 5, 6, 7]];
    let crossed: [&[usize]; 2] = [&[0, 1, 2, 3], &[4, 6, 5, 7]];
    let direct = [LevelExchange::Direct; 2];
    let ms = |loads: Loads| loads.time(&graph).milliseconds(BYTES);
    let cases = [
        (Loads::direct(&graph, &paths), 199.0),
        (nested(&sockets, direct).loads(&graph, &paths), 9.3),
        (nested(&crossed, direct).loads(&graph, &paths), 50.2),
    ];
    for (loads, published) in cases {
        let found = ms(loads);
        assert!(
            (found - published).abs() < 0.1 * published,
            "{found} instead of {published}"
        );
    }
    let plain = Paths::new(&machine.known, &machine.access);
    let before = predict(&machine.known, &plain).direct.milliseconds(BYTES);
    let after = predict(&graph, &paths);
    assert!(before < 70.0, "{before}");
    assert!(after.direct.milliseconds(BYTES) > 190.0);
    assert!(after.best().milliseconds(BYTES) < 10.0);
}

#[test]
fn other_figures_than_the_tables_are_found() {
    let near = PeerAccess::UpTo(PathType::Sys);
    let halved = "link 80:00.0 socket_0 6100\nlink 84:00.0>socket_0 5000\n";
    let uneven =
        "link 10:00.0 80:00.0 13100\nlink 82:00.0>socket_0 9000\nlink socket_0 socket_1 30000\n";
    let one_pool = "link socket_0 socket_1 20000\npool 22000 socket_0>socket_1 socket_1>socket_0\n";
    let half_duplex = "pool 15000 80:00.0>socket_0 socket_0>80:00.0\n";
    let four = "fan 80:00.0 4 2 3000\nfan 84:00.0 3 1 4000\n";
    let deaf = "fan 80:00.0 2 2 900\nfan 80:00.0 1 2 5000\n";
    for (name, access, text, expected) in [
        ("A", PeerAccess::Rule, "", [0, 0]),
        ("A", near.clone(), halved, [0, 0]),
        ("A", near.clone(), half_duplex, [0, 1]),
        ("A", near.clone(), "fan 80:00.0 4 1 3000\n", [1, 0]),
        ("A", near.clone(), &four.replace("4 2", "4 1"), [2, 0]),
        ("B", near.clone(), uneven, [0, 0]),
        ("B", PeerAccess::Rule, "", [0, 0]),
        ("C", near.clone(), one_pool, [0, 1]),
        ("C", near.clone(), deaf, [2, 0]),
        ("F", near.clone(), one_pool, [0, 1]),
        (
            "F",
            PeerAccess::Never,
            "link 10:00.0>socket_0 11000\n",
            [0, 0],
        ),
        ("H", near, "", [0, 0]),
        ("K", PeerAccess::Rule, "", [0, 0]),
    ] {
        println!("{name} {text}");
        let machine = Hidden::new(name, access, text);
        let (measured, limits) = machine.probe(0);
        machine.check(&measured, &limits);
        let found = [fans(&limits).len(), pools(&limits).len()];
        assert_eq!(found, expected, "{name} {text}: {limits}");
    }
}

#[test]
fn noise_makes_no_pool_and_no_fan() {
    for name in ["A", "B", "C", "D", "E", "F", "G", "H", "I", "K"] {
        for access in [PeerAccess::Rule, PeerAccess::UpTo(PathType::Sys)] {
            let machine = Hidden::new(name, access.clone(), "");
            // Each noise has its own sequence of errors.
            for noise in 2..=5 {
                let (_, limits) = machine.probe(noise);
                let found = [fans(&limits).len(), pools(&limits).len()];
                assert_eq!(found, [0, 0], "{name} {access:?}: {limits}");
                assert!(!limits.to_string().contains("connect"), "{name}: {limits}");
            }
        }
    }
}

#[test]
fn noise_hides_no_limit_of_the_published_machine() {
    let machine = public_pairs();
    let (_, limits) = machine.probe(5);
    assert_eq!(fans(&limits).len(), 4, "{limits}");
    assert_eq!(pools(&limits).len(), 1, "{limits}");
    let (graph, paths) = machine.with(&limits);
    let prediction = predict(&graph, &paths);
    assert!(prediction.direct.milliseconds(BYTES) > 180.0);
    assert!(prediction.best().milliseconds(BYTES) < 10.0);
}

#[test]
fn every_link_that_carries_data_is_measured() {
    for name in ["A", "B", "C", "F", "K"] {
        let machine = Hidden::new(name, PeerAccess::UpTo(PathType::Sys), "");
        let (_, limits) = machine.probe(0);
        let (graph, paths) = machine.with(&limits);
        let crossed = (0..8).flat_map(|a| (0..8).map(move |b| (a, b)));
        for link in crossed.flat_map(|(a, b)| paths.get(a, b).links.clone()) {
            let origin = graph.links[link].bandwidth.origin;
            assert_eq!(origin, BandwidthOrigin::Measured, "{name} {link}");
        }
    }
}

#[test]
fn patterns_are_distinct_and_bounded() {
    for (name, most) in [
        ("A", 300),
        ("C", 350),
        ("D", MAX_PATTERNS),
        ("F", 350),
        ("K", 250),
    ] {
        let graph = MachineGraph::new(&case(name).machine);
        let patterns = plan(
            &graph,
            &Paths::new(&graph, &PeerAccess::UpTo(PathType::Sys)),
        );
        println!("{name}: {} patterns", patterns.len());
        assert!(patterns.len() <= most, "{name}: {}", patterns.len());
        let distinct: HashSet<&Vec<ProbeFlow>> = patterns.iter().map(|p| &p.flows).collect();
        assert_eq!(distinct.len(), patterns.len());
        let is_pair =
            |pattern: &&TrafficPattern| pattern.flows.len() == 1 && pattern.is_peer_write();
        let pairs = patterns.iter().filter(is_pair).count();
        assert!(
            if graph.gpus.len() == 8 {
                pairs == 56
            } else {
                pairs >= 48
            },
            "{name}: {pairs}"
        );
    }
}

#[test]
fn host_memory_alone_is_measured_without_other_gpus() {
    let mut machine = case("A").machine;
    for socket in &mut machine.sockets {
        socket.devices.truncate(1);
        socket.devices[0].devices.truncate(1);
    }
    let known = MachineGraph::new(&machine);
    let mut hidden = known.clone();
    let limits = "link 10:00.0 80:00.0 9000\npool 11000 10:00.0>80:00.0 80:00.0>10:00.0\n";
    limits
        .parse::<MeasuredLimits>()
        .unwrap()
        .apply(&mut hidden)
        .unwrap();
    let machine = Hidden {
        known,
        access: PeerAccess::Rule,
        hidden,
    };
    let (measured, limits) = machine.probe(0);
    assert_eq!(measured.len(), 3);
    let (graph, paths) = machine.with(&limits);
    for one in &measured {
        assert!(matches!(
            one.pattern.flows[0].from,
            FlowEnd::Gpu(_) | FlowEnd::Host(_)
        ));
        let predicted: u64 = predicted_rates(&graph, &paths, &one.pattern.flows)
            .iter()
            .sum();
        assert_eq!(predicted, one.total(), "{}", one.pattern);
    }
}

#[test]
fn failing_meter_names_the_pattern() {
    struct Broken;
    impl PatternMeter for Broken {
        fn measure(&mut self, _: &MachineGraph, _: &[ProbeFlow]) -> Result<Vec<u32>> {
            Err(crate::error::Error::invalid_argument("the copy failed"))
        }
    }
    let graph = MachineGraph::new(&case("K").machine);
    let patterns = plan(&graph, &Paths::new(&graph, &PeerAccess::Rule));
    let name = patterns[0].name.clone();
    let error = measure(&graph, patterns, &mut Broken).unwrap_err();
    assert!(error.message().contains(&name), "{error}");
}

/// A cache directory that is removed when dropped.
struct Cache(std::path::PathBuf);

impl Cache {
    fn new(name: &str) -> Cache {
        let name = format!("cinch-cache-{name}-{}", std::process::id());
        Cache(std::env::temp_dir().join(name))
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn key(graph: &MachineGraph, driver: &str) -> ProbeKey {
    ProbeKey::new(
        graph,
        &["GPU-b".into(), "GPU-a".into()],
        driver,
        "p2p_disable false",
    )
}

#[test]
fn saved_probe_is_loaded_as_it_was() {
    let machine = public_pairs();
    let (patterns, limits) = machine.probe(0);
    let saved = SavedProbe {
        access: PeerAccess::Pairs(vec![true; 64]),
        limits,
        patterns,
    };
    let cache = Cache::new("as-it-was");
    let key = key(&machine.known, "550");
    assert!(!ProbeKey::any_saved(&cache.0));
    let path = key.save(&cache.0, &machine.known, &saved).unwrap();
    assert!(ProbeKey::any_saved(&cache.0));
    let stale = |path: &std::path::Path| panic!("{} is stale", path.display());
    let loaded = key.load(&cache.0, &machine.known, stale).unwrap().unwrap();
    assert_eq!(loaded.0, path);
    // Limits remember the lines of their text, so the texts are compared.
    let text = |saved: &SavedProbe| saved.to_text(&machine.known, "f");
    assert_eq!(text(&loaded.1), text(&saved));
    assert_eq!(
        (loaded.1.access, loaded.1.patterns),
        (saved.access, saved.patterns)
    );
}

#[test]
fn saved_probe_of_another_machine_driver_or_setting_is_ignored() {
    let machine = public_pairs();
    let saved = SavedProbe {
        access: PeerAccess::Rule,
        limits: MeasuredLimits::default(),
        patterns: Vec::new(),
    };
    let cache = Cache::new("ignored");
    let path = key(&machine.known, "550")
        .save(&cache.0, &machine.known, &saved)
        .unwrap();
    let mut narrow = machine.known.clone();
    narrow.links[0].bandwidth.mb_s /= 2;
    let uuids = ["GPU-a".to_string(), "GPU-b".to_string()];
    let stale = [
        key(&machine.known, "560"),
        key(&narrow, "550"),
        ProbeKey::new(&machine.known, &uuids, "550", "p2p_disable true"),
    ];
    for key in stale {
        let mut reported = None;
        let loaded = key.load(&cache.0, &machine.known, |path| {
            reported = Some(path.to_path_buf())
        });
        assert_eq!(loaded.unwrap(), None);
        assert_eq!(reported.as_ref(), Some(&path));
    }
    // Other GPUs have another file. The order of UUIDs and network devices do not count.
    let others = ProbeKey::new(&machine.known, &uuids[..1], "550", "p2p_disable false");
    assert_eq!(others.find(&cache.0).unwrap(), SavedLimits::Missing);
    let equal = ProbeKey::new(&machine.known, &uuids, "550", "p2p_disable false");
    assert!(matches!(equal.find(&cache.0), Ok(SavedLimits::Found(..))));
    let with_nics = super::machines::with_nics(2, 2);
    let mut without = with_nics.clone();
    for device in without
        .sockets
        .iter_mut()
        .flat_map(|socket| &mut socket.devices)
    {
        device.devices.retain(|device| device.gpu.is_some());
    }
    let [with, without] = [with_nics, without].map(|m| key(&MachineGraph::new(&m), "550"));
    assert_eq!(with, without);
}

#[test]
fn broken_saved_probes_are_refused_with_path_and_line() {
    let graph = MachineGraph::new(&case("C").machine);
    let cache = Cache::new("broken");
    let key = key(&graph, "550");
    let empty = SavedProbe {
        access: PeerAccess::Rule,
        limits: MeasuredLimits::default(),
        patterns: Vec::new(),
    };
    let path = key.save(&cache.0, &graph, &empty).unwrap();
    let head = std::fs::read_to_string(&path)
        .unwrap()
        .lines()
        .next()
        .unwrap()
        .to_string();
    for (line, what) in [
        ("link 10:00.0 80:00.0 fast", "line 2: `fast` is no number"),
        (
            "link 10:00.0 99:00.0 5",
            "line 2: the machine has no node 99:00.0",
        ),
        ("access 01 10", "line 2: access needs 8 words"),
        (
            "pattern write 10:00.0>11:00.0 : x",
            "line 2: a pattern has the form",
        ),
        (
            "pattern send 10:00.0>11:00.0=5 : x",
            "line 2: a pattern has the form",
        ),
        (
            "pattern write 10:00.0>99:00.0=5 : x",
            "line 2: the machine has no GPU or socket `99",
        ),
        ("pattern write : x", "line 2: a pattern has the form"),
        ("fingerprint 5", "line 2: `fingerprint 5` is none of"),
    ] {
        std::fs::write(&path, format!("{head}\n{line}\n")).unwrap();
        let error = key.load(&cache.0, &graph, |_| ()).unwrap_err();
        for part in [what, &path.display().to_string(), "cinch topo --probe"] {
            assert!(error.message().contains(part), "{part} is not in {error}");
        }
    }
    for text in ["", "link a b 5\n", "fingerprint"] {
        std::fs::write(&path, text).unwrap();
        let error = key.find(&cache.0).unwrap_err();
        assert!(error.message().contains("no fingerprint"), "{error}");
    }
    std::fs::write(&path, [0xff, 0xfe]).unwrap();
    assert!(key.find(&cache.0).unwrap_err().message().contains("UTF-8"));
}

#[test]
fn limits_of_devices_that_no_rank_uses_are_left_out() {
    let (measured, _) = measured_pairs(true);
    let text = "link 10:00.0 80:00.0 53700\nlink 12:00.0 82:00.0 53700\nconnect 80:00.0 82:00.0 107000\n\
                fan 82:00.0 2 2 2700\npool 82000 socket_0>socket_1 socket_1>socket_0 82:00.0>socket_0\n";
    let limits: MeasuredLimits = text.parse().unwrap();
    assert_eq!(limits.apply_known(&mut measured.clone()), 0);
    let mut machine = case("C").machine;
    machine.sockets[0].devices.truncate(1);
    let mut graph = MachineGraph::new(&machine);
    assert_eq!(limits.apply_known(&mut graph), 3);
    assert_eq!((graph.pools.len(), graph.pools[0].links.len()), (1, 2));
}
