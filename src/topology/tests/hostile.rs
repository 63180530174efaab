//! Seeded random input for the readers of XML and of /sys: neither may panic, hang, or take much memory.

use super::fake_sys::FakeSys;
use super::machines::{case, with_nics};
use crate::config::test_number;
use crate::sys::nvml::NvmlGpu;
use crate::sys::pci::memory_files::{MemoryEntry, MemoryFiles};
use crate::testing::Random;
use crate::topology::machine::{Machine, XmlVersion};
use crate::topology::{MachineGraph, Paths, PeerAccess, detect_in, predict, read_xml, write_xml};
use std::collections::BTreeSet;
use std::ops::Range;

/// Inputs of each reader in the usual test.
const CASES: u64 = 10_000;

/// Inputs of each reader in the long tests, unless `CINCH_TEST_TOPOLOGY_INPUTS` is set.
const LONG_CASES: u64 = 10_000_000;

/// Most memory that the long tests may take, in KiB.
const MOST_KIB: u64 = 256 << 10;

/// Texts that have a meaning somewhere in a file or a path.
const TOKENS: [&str; 44] = [
    "<pci busid=\"0000:10:00.0\">",
    "</pci>",
    "<gpu dev=\"0\"/>",
    "<cpu numaid=\"0\">",
    "</cpu>",
    "<nic>",
    "<net/>",
    "<nvlink target=\"0000:11:00.0\" count=\"4294967295\" tclass=\"0x068000\"/>",
    "<c2c/>",
    "<!DOCTYPE a>",
    "<![CDATA[",
    "&amp;",
    "&#0;",
    "&#10;",
    "<!--",
    "\"",
    ">",
    "/>",
    "=",
    "version=\"2\"",
    "4294967295",
    "-1",
    "0",
    "0x030200",
    "0x068000",
    "0x1002",
    "0x10de",
    "ffffffff:ff:ff.7",
    "0000:10:00.0",
    "0000:00:01.0",
    "pci0000:00",
    "429496729.9 GT/s",
    "2.5 GT/s PCIe",
    "Unknown",
    "255",
    "..",
    ".",
    "/",
    "bus/pci/devices",
    "class/net/eth0",
    "devices/pci0000:00",
    "type 11\nnode_to 1\nmax_bandwidth 18446744073709551615",
    "400 Gb/sec",
    "\u{e9}",
];

/// Overwrites, removes, copies or inserts bytes.
fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..1 + random.below(4) {
        let at = random.below(bytes.len() + 1);
        let end = (at + random.below(64)).min(bytes.len());
        match random.below(6) {
            0 if at < end => bytes[at] = random.word() as u8,
            1 if at < end => bytes[at] ^= 1 << random.below(8),
            2 => drop(bytes.drain(at..end)),
            3 if bytes.len() < 4096 => {
                let copy = bytes[at..end].to_vec();
                let to = random.below(bytes.len() + 1);
                bytes.splice(to..to, copy);
            }
            _ => {
                let token = TOKENS[random.below(TOKENS.len())].bytes();
                let end = if random.below(2) == 0 { at } else { end };
                bytes.splice(at..end, token);
            }
        }
    }
}

/// Returns random bytes, or random tokens.
fn rubbish(random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..random.below(40) {
        match random.below(3) {
            0 => bytes.push(random.word() as u8),
            _ => bytes.extend(TOKENS[random.below(TOKENS.len())].bytes()),
        }
    }
    bytes
}

/// Asserts what holds for every description that a reader returns.
fn check(machine: &Machine, what: &dyn Fn() -> String) {
    let graph = MachineGraph::new(machine);
    let numbers: BTreeSet<u32> = graph.gpus.iter().map(|gpu| gpu.dev).collect();
    let bus_ids: BTreeSet<_> = graph.gpus.iter().map(|gpu| gpu.bus_id).collect();
    assert_eq!(
        (numbers.len(), bus_ids.len()),
        (graph.gpus.len(), graph.gpus.len()),
        "{}",
        what()
    );
    let paths = Paths::new(&graph, &PeerAccess::Rule);
    assert_eq!(paths.count(), graph.gpus.len());
    if graph.gpus.is_empty() {
        return;
    }
    let prediction = predict(&graph, &paths);
    let [bound, best] =
        [prediction.bound, prediction.best()].map(|time| time.milliseconds(1 << 30));
    // Shares of rings are rounded to 40 bits.
    assert!(bound <= best * (1.0 + 1e-6), "{}: {bound} > {best}", what());
    let text = write_xml(machine);
    let read = read_xml(&text).unwrap_or_else(|error| panic!("{}: {error}\n{text}", what()));
    let [before, after] = [graph, MachineGraph::new(&read)].map(|graph| MachineGraph {
        defects: Vec::new(),
        ..graph
    });
    assert_eq!(before, after, "{}", what());
}

fn long_cases() -> u64 {
    test_number("CINCH_TEST_TOPOLOGY_INPUTS").unwrap_or(LONG_CASES)
}

/// Returns the peak of the process's memory in KiB.
pub fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmHWM:"))
        .unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn small_machines() -> Vec<Machine> {
    let [mut nvlink, mut xgmi] = ["G", "I"].map(|name| case(name).machine);
    nvlink.sockets.truncate(2);
    xgmi.sockets.truncate(2);
    assert_eq!(xgmi.version, XmlVersion::Rccl);
    vec![with_nics(1, 1), nvlink, xgmi]
}

/// Runs the cases `0..cases` on all cores, each core with seeds of its own.
fn on_all_cores(cases: u64, run: fn(Range<u64>)) {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    std::thread::scope(|scope| {
        for core in 0..cores {
            scope.spawn(move || run(cases * core / cores..cases * (core + 1) / cores));
        }
    });
}

fn read_hostile_xml(seeds: Range<u64>) {
    let cases = seeds.end - seeds.start;
    let files: Vec<Vec<u8>> = small_machines()
        .iter()
        .map(|m| write_xml(m).into_bytes())
        .collect();
    let (mut accepted, mut refused) = (0, 0);
    for seed in seeds {
        let mut random = Random::new(seed);
        let mut bytes = match random.below(16) {
            0 => rubbish(&mut random),
            _ => files[random.below(files.len())].clone(),
        };
        mutate(&mut bytes, &mut random);
        match read_xml(&String::from_utf8_lossy(&bytes)) {
            Ok(machine) => {
                check(&machine, &|| format!("seed {seed}"));
                accepted += 1;
            }
            Err(error) => {
                assert!(error.message().len() < 400, "seed {seed}: {error}");
                refused += 1;
            }
        }
    }
    println!("{accepted} accepted, {refused} refused");
    // If readers accepted nearly all or nearly no inputs, the changes would be too small or too large to test
    // anything.
    assert!(accepted > cases / 50 && refused > cases / 50);
}

/// A tree whose changes can be undone. A copy of the tree for each input would take longer than the reader.
struct ChangedTree {
    files: MemoryFiles,
    /// Entries before each change, oldest first.
    before: Vec<(String, Option<MemoryEntry>)>,
}

impl ChangedTree {
    fn set(&mut self, path: String, entry: Option<MemoryEntry>) {
        let old = match entry {
            Some(entry) => self.files.entries.insert(path.clone(), entry),
            None => self.files.entries.remove(&path),
        };
        self.before.push((path, old));
    }

    fn restore(&mut self) {
        while let Some((path, entry)) = self.before.pop() {
            match entry {
                Some(entry) => self.files.entries.insert(path, entry),
                None => self.files.entries.remove(&path),
            };
        }
    }

    /// Returns the path of an entry.
    fn pick(&self, random: &mut Random) -> String {
        let at = random.below(self.files.entries.len().max(1));
        let picked = self.files.entries.keys().nth(at);
        picked.cloned().unwrap_or_else(|| "class/net/eth0".into())
    }

    /// Changes an entry or a directory.
    fn mutate(&mut self, random: &mut Random) {
        let path = self.pick(random);
        match random.below(8) {
            0 => self.set(path, None),
            1 => {
                let target = self.pick(random);
                let target = match random.below(3) {
                    0 => target,
                    1 => format!("../../../{target}"),
                    _ => target.replace('/', "/../"),
                };
                self.set(path, Some(MemoryEntry::Link(target)));
            }
            2 => {
                // A directory is copied below another directory, perhaps below itself.
                let from: String = path
                    .split_inclusive('/')
                    .take(1 + random.below(5))
                    .collect();
                let other = self.pick(random);
                let to: String = other
                    .split_inclusive('/')
                    .take(1 + random.below(5))
                    .collect();
                let inside = self.files.entries.range(from.clone()..);
                let inside = inside
                    .take_while(|(path, _)| path.starts_with(&from))
                    .take(50);
                let copies: Vec<_> = inside
                    .map(|(path, entry)| (format!("{to}{}", &path[from.len()..]), entry.clone()))
                    .collect();
                for (path, entry) in copies {
                    self.set(path, Some(entry));
                }
            }
            3 => {
                let mut name = path.clone().into_bytes();
                mutate(&mut name, random);
                let entry = self.files.entries.get(&path).cloned();
                self.set(path, None);
                self.set(String::from_utf8_lossy(&name).into_owned(), entry);
            }
            _ => {
                let content = match self.files.entries.get(&path) {
                    Some(MemoryEntry::File(content)) if random.below(2) == 0 => {
                        let mut content = content.clone();
                        mutate(&mut content, random);
                        content
                    }
                    _ => rubbish(random),
                };
                self.set(path, Some(MemoryEntry::File(content)));
            }
        }
    }
}

fn read_hostile_trees(seeds: Range<u64>) {
    let cases = seeds.end - seeds.start;
    let fakes: Vec<FakeSys> = small_machines().iter().map(FakeSys::new).collect();
    let nvml: Vec<Vec<NvmlGpu>> = fakes.iter().map(FakeSys::gpus).collect();
    let trees = fakes
        .iter()
        .map(|fake| fake.files.clone())
        .chain([MemoryFiles::default()]);
    let mut trees: Vec<_> = trees
        .map(|files| ChangedTree {
            files,
            before: Vec::new(),
        })
        .collect();
    let (mut refused, mut with_defects) = (0, 0);
    for seed in seeds {
        let mut random = Random::new(seed);
        let at = random.below(fakes.len());
        let tree = match random.below(16) {
            0 => trees.len() - 1,
            _ => at,
        };
        let tree = &mut trees[tree];
        for _ in 0..1 + random.below(6) {
            tree.mutate(&mut random);
        }
        let nvml = if random.below(4) == 0 {
            &[][..]
        } else {
            &nvml[at]
        };
        match detect_in(&tree.files, &fakes[at].sources(nvml)) {
            Ok(machine) => {
                check(&machine, &|| format!("seed {seed}"));
                with_defects += u64::from(!machine.defects.is_empty());
            }
            Err(_) => refused += 1,
        }
        tree.restore();
    }
    println!("{refused} refused, {with_defects} with defects");
    assert_eq!(trees[0].files, fakes[0].files);
    assert!(with_defects > cases / 50);
}

#[test]
fn hostile_xml_is_refused_or_read() {
    read_hostile_xml(0..CASES);
}

#[test]
fn hostile_trees_are_refused_or_read() {
    read_hostile_trees(0..CASES);
}

#[test]
#[ignore = "ten million inputs take long"]
fn ten_million_hostile_xml_files_are_refused_or_read() {
    on_all_cores(long_cases(), read_hostile_xml);
    println!("peak memory: {} KiB", peak_kib());
    assert!(peak_kib() < MOST_KIB, "{} KiB", peak_kib());
}

#[test]
#[ignore = "ten million inputs take long"]
fn ten_million_hostile_trees_are_refused_or_read() {
    on_all_cores(long_cases(), read_hostile_trees);
    println!("peak memory: {} KiB", peak_kib());
    assert!(peak_kib() < MOST_KIB, "{} KiB", peak_kib());
}
