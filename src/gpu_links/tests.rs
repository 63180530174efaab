//! Connects ranks on a simulated machine, with faults that real machines have.

mod machine;

use super::connect::connect_with;
use super::path_probe::PathProbe;
use super::paths::GPUS_THAT_KEEP_LINES_WHOLE;
use super::{GpuLinks, LinkClass, PeerPath};
use crate::config::{Config, EmulatedMachine};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::abi::{MAX_CHANNELS, MAX_RANKS, Protocol, TROUBLE_COMPLETE};
use crate::gpu::probe::probe_word;
use crate::gpu::{Context, Device, Driver};
use crate::sync::Fault;
use crate::transport::ConnectContext;
use crate::transport::conformance::world::World;
use crate::types::TransportKind;
use machine::{Machine, Process};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A path probe on heap memory. It damages the data of chosen pairs of GPUs; a pair names the
/// writing GPU first.
struct HeapProbe {
    machine: Arc<Machine>,
    own: usize,
    garbled: HashSet<(usize, usize)>,
}

impl PathProbe for HeapProbe {
    unsafe fn write(&self, address: u64, words: u64, seed: u64) -> Result<()> {
        let to = self.machine.owner(address).expect("no memory of a GPU");
        for word in 0..words {
            let lost = self.garbled.contains(&(self.own, to)) && word % 1000 == 999;
            let value = if lost { 0 } else { probe_word(seed, word) };
            // SAFETY: the caller guarantees that the words are mapped, and `Machine` keeps its heap memory.
            unsafe {
                (address as *mut u64)
                    .add(word as usize)
                    .write_volatile(value)
            };
        }
        Ok(())
    }

    unsafe fn count_wrong(&self, address: u64, words: u64, seed: u64) -> Result<u32> {
        let wrong = |&word: &u64| {
            // SAFETY: the caller guarantees that the words are mapped, and `Machine` keeps its heap memory.
            let found = unsafe { (address as *const u64).add(word as usize).read_volatile() };
            found != probe_word(seed, word)
        };
        Ok((0..words).filter(wrong).count() as u32)
    }
}

/// The process of a rank, and the ordinal of the rank's GPU in that process.
type RankGpu = (u8, u32);

/// Ranks that a test connects, and their settings.
struct Job {
    machine: Arc<Machine>,
    /// GPUs that each process sees; a process without an entry sees all.
    visible: BTreeMap<u8, Vec<usize>>,
    garbled: HashSet<(usize, usize)>,
    config: Config,
    /// Settings of ranks that differ from `config`.
    configs: BTreeMap<usize, Config>,
    /// Host of each rank; empty if all ranks share one host.
    hosts: Vec<u8>,
}

impl Job {
    fn on(machine: Machine) -> Job {
        Job {
            machine: Arc::new(machine),
            visible: BTreeMap::new(),
            garbled: HashSet::new(),
            config: Config {
                buffer_bytes: 4 << 20,
                ..Config::default()
            },
            configs: BTreeMap::new(),
            hosts: Vec::new(),
        }
    }

    /// Connects the ranks, and returns the links or the error of each rank.
    fn connect(&self, gpus: &[RankGpu]) -> Vec<Result<GpuLinks>> {
        let mut drivers: BTreeMap<u8, Arc<Driver>> = BTreeMap::new();
        for &(process, _) in gpus {
            drivers.entry(process).or_insert_with(|| {
                let all = (0..self.machine.devices).collect();
                Driver::with(Box::new(Process {
                    machine: self.machine.clone(),
                    visible: self.visible.get(&process).cloned().unwrap_or(all),
                }))
                .unwrap()
            });
        }
        let host = |rank: usize| self.hosts.get(rank).copied().unwrap_or(1);
        let places: Vec<(u8, u8)> = gpus
            .iter()
            .enumerate()
            .map(|(rank, (process, _))| (host(rank), *process))
            .collect();
        let world = World::with(&places);
        std::thread::scope(|scope| {
            let rank = |(rank, &(process, ordinal)): (usize, &RankGpu)| {
                let (world, driver) = (world.clone(), drivers[&process].clone());
                scope.spawn(move || {
                    let exchange = world.exchange(rank);
                    let device = Device::at(&driver, ordinal).unwrap();
                    let gpu = Context::primary(&device).unwrap();
                    let context = ConnectContext {
                        exchange: &*exchange,
                        config: self.configs.get(&rank).unwrap_or(&self.config),
                        fault: &Fault::new(),
                        deadline: Instant::now() + Duration::from_secs(60),
                        place: crate::topology::RankPlace::Unknown,
                        sys: std::path::Path::new(crate::sys::numa::SYS),
                        verbs: None,
                    };
                    let own = usize::from(device.uuid[0]) - 1;
                    let probe = || -> Result<Box<dyn PathProbe>> {
                        Ok(Box::new(HeapProbe {
                            machine: self.machine.clone(),
                            own,
                            garbled: self.garbled.clone(),
                        }))
                    };
                    connect_with(&context, &gpu, &probe)
                        .inspect_err(|error| exchange.announce(error))
                })
            };
            let threads: Vec<_> = gpus.iter().enumerate().map(rank).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| thread.join().unwrap();
            threads.into_iter().map(join).collect()
        })
    }

    fn links(&self, gpus: &[RankGpu]) -> Vec<GpuLinks> {
        let links = self.connect(gpus).into_iter();
        links.map(|links| links.unwrap()).collect()
    }

    /// Connects the ranks, calls `check` with their links, and drops the links. Then checks that no
    /// memory, mapping or other driver object is left.
    fn check(&self, gpus: &[RankGpu], check: impl FnOnce(&[GpuLinks])) {
        let links = self.links(gpus);
        every_peer_buffer_has_its_own_memory(&links);
        check(&links);
        drop(links);
        assert_eq!(self.machine.left(), [0; 5], "something is left");
    }
}

/// Writes every word of every outbox. Checks that the word appears in the reader's inbox for this
/// writer, and in no other inbox.
fn every_peer_buffer_has_its_own_memory(links: &[GpuLinks]) {
    let nranks = links.len();
    let words = links[0].shape.bytes() as u64 / 8;
    let word = |base: u64, at: u64| (base + 8 * at) as *mut u64;
    for one in links {
        assert_eq!((one.nranks(), one.shape), (nranks, links[0].shape));
        for peer in 0..nranks {
            let there = peer != one.rank;
            assert_eq!(one.inbox[peer] != 0, there);
            assert_eq!(one.outbox[peer] != 0, there);
            if peer < nranks {
                assert_eq!(one.paths[peer].is_some(), there);
            }
        }
        let private = (one.cursors(), one.epochs()[1] + 16 - one.cursors());
        for at in 0..private.1 / 8 {
            // SAFETY: `links` own heap memory of that size.
            assert_eq!(unsafe { *word(private.0, at) }, 0);
        }
    }
    let value = |from: usize, to: usize, at: u64| probe_word((from * 32 + to) as u64, at);
    for from in links {
        for to in (0..nranks).filter(|&to| to != from.rank) {
            for at in 0..words {
                let place = word(from.outbox[to], at);
                // SAFETY: `links` own heap memory of that size if peer buffers are laid out right.
                unsafe {
                    assert_eq!(*place, 0, "word {at} of buffer {} -> {to}", from.rank);
                    *place = value(from.rank, to, at);
                }
            }
        }
    }
    for to in links {
        for from in (0..nranks).filter(|&from| from != to.rank) {
            for at in 0..words {
                // SAFETY: `links` own heap memory of that size if peer buffers are laid out right.
                let found = unsafe { *word(to.inbox[from], at) };
                assert_eq!(found, value(from, to.rank, at), "word {at} of {from}");
            }
        }
    }
}

fn host_reason(links: &GpuLinks, peer: usize) -> &str {
    match &links.paths[peer] {
        Some(PeerPath::PinnedHost { reason }) => reason,
        other => panic!("rank {} reaches {peer} by {other:?}", links.rank),
    }
}

#[test]
fn ranks_of_threads_processes_and_one_gpu_have_peer_access() {
    for gpus in [
        &[(1, 0)][..],
        &[(1, 0), (1, 0)],
        &[(1, 0), (1, 1)],
        &[(1, 0), (2, 0)],
        &[(1, 0), (2, 1)],
        &[(1, 0), (1, 1), (2, 1), (2, 0), (3, 2)],
    ] {
        let job = Job::on(Machine::new(3));
        job.check(gpus, |links| {
            for one in links {
                for (peer, path) in one.paths.iter().enumerate() {
                    let expected = match gpus[peer].1 == gpus[one.rank].1 {
                        _ if peer == one.rank => None,
                        true => Some(PeerPath::SameDevice),
                        false => Some(PeerPath::Peer {
                            class: LinkClass::NvLink,
                            performance_rank: Some(3),
                        }),
                    };
                    assert_eq!(*path, expected);
                }
                assert!(one.device_bytes <= job.config.buffer_bytes);
                assert_eq!(one.pinned_bytes, 256);
                assert!(one.lines_arrive_whole());
                assert_eq!(one.slowest, links[0].slowest);
            }
        });
    }
}

/// Pairs of one host have peer access. Pairs of different hosts have peer buffers in memory of both hosts, and
/// a connection for each channel.
#[test]
fn ranks_of_several_hosts_have_peer_buffers_on_both_hosts() {
    let mut job = Job::on(Machine::new(3));
    job.config.buffer_bytes = 32 << 20;
    job.hosts = vec![1, 1, 2, 2, 3];
    let gpus = [(1, 0), (1, 1), (2, 1), (3, 2), (3, 0)];
    let links = job.links(&gpus);
    let channels = links[0].shape.fifo(Protocol::Simple).channels as usize;
    assert_eq!(channels, Config::GPU_CHANNELS_BETWEEN_HOSTS);
    let (mut addresses, mut most) = (HashSet::new(), 0);
    for one in &links {
        let network = one.take_network().expect("a network");
        assert!(one.take_network().is_none(), "taken twice");
        assert_eq!(network.links.channels, channels);
        assert_eq!(network.transport(), TransportKind::Tcp);
        let slot = one.shape.fifo(Protocol::Simple).slot_bytes as usize;
        assert_eq!(network.links.slot_bytes, slot);
        let mut remote = 0;
        for (peer, path) in one.paths.iter().enumerate() {
            let other_host = job.hosts[peer] != job.hosts[one.rank];
            let expected = (other_host && peer != one.rank).then_some(PeerPath::Network {
                transport: TransportKind::Tcp,
            });
            match &expected {
                Some(_) => assert_eq!(*path, expected),
                None => assert_eq!(path.is_some(), peer != one.rank),
            }
            for channel in 0..channels {
                let index = channel * gpus.len() + peer;
                assert_eq!(network.links.sends[index].is_some(), other_host);
                assert_eq!(network.links.recvs[index].is_some(), other_host);
            }
            assert_eq!(network.staging[peer].is_some(), other_host);
            if other_host {
                remote += 1;
                for place in [one.inbox[peer], one.outbox[peer]] {
                    assert_eq!(job.machine.owner(place), None, "host memory");
                    assert!(addresses.insert(place), "a peer buffer of its own");
                }
            }
        }
        assert_eq!(one.pinned_bytes, 256 + 2 * remote * one.shape.bytes());
        // Each channel has two slots in each of its two directions.
        assert_eq!(one.connection_bytes, network.links.buffer_bytes);
        assert_eq!(
            one.connection_bytes,
            remote * channels * 2 * 2 * (slot + 64)
        );
        let taken = one.device_bytes + one.pinned_bytes - 256 + one.connection_bytes;
        assert!(taken <= job.config.buffer_bytes);
        most = most.max(taken);
        assert_eq!(one.slowest, LinkClass::NvLink, "inside hosts");
    }
    assert!(most > job.config.buffer_bytes / 2, "{most} bytes");
    drop(links);
    assert_eq!(job.machine.left(), [0; 5], "something is left");

    job.config.transport = Some(TransportKind::Shm);
    for error in job.connect(&gpus) {
        let error = error.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("CINCH_TRANSPORT=shm"), "{error}");
    }
    assert_eq!(job.machine.left(), [0; 5], "something is left");
}

#[test]
fn ranks_of_one_gpu_beyond_the_maximum_are_unsupported() {
    let mut job = Job::on(Machine::new(1));
    job.config.buffer_bytes = 8 << 20;
    job.check(&[(1, 0); 34], |links| {
        assert!(links.iter().all(|one| one.slowest == LinkClass::SameDevice));
    });
    let error = job
        .connect(&[(1, 0); MAX_RANKS + 1])
        .remove(32)
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("257 ranks"), "{error}");
}

#[test]
fn only_a_refused_pair_has_pinned_host_memory() {
    let mut machine = Machine::new(3);
    // The driver refuses access in one direction only, which is enough to rule out peer access of
    // the pair.
    machine.refused.insert((2, 0));
    let job = Job::on(machine);
    for gpus in [[(1, 0), (1, 1), (1, 2)], [(1, 0), (2, 1), (3, 2)]] {
        job.check(&gpus, |links| {
            for (one, other) in [(0, 2), (2, 0)] {
                let reason = host_reason(&links[one], other);
                assert!(reason.contains("from GPU 2"), "{reason}");
                assert!(links[one].pinned_bytes >= links[one].shape.bytes());
                // The refused pair's slots lie in pinned memory, so the inbox in device memory is
                // smaller.
                assert!(links[one].device_bytes < 2 * links[one].shape.bytes());
            }
            assert_eq!(
                links[1].paths[0].as_ref().unwrap().class(),
                LinkClass::NvLink
            );
            for one in links {
                assert_eq!(one.slowest, LinkClass::Host);
                assert!(!one.lines_arrive_whole());
            }
        });
    }
}

/// A single pair of four ranks has no peer access. All other pairs keep peer memory and whole lines.
#[test]
fn other_pairs_keep_peer_memory_and_whole_lines() {
    let mut refusing = Machine::new(4);
    refusing.refused.insert((1, 2));
    let job = Job::on(refusing);
    for gpus in [
        [(1, 0), (1, 1), (1, 2), (1, 3)],
        [(1, 0), (2, 1), (3, 2), (4, 3)],
    ] {
        job.check(&gpus, |links| {
            for one in links {
                assert_eq!(one.pair_links(), links[0].pair_links());
                for (peer, path) in one.paths.iter().enumerate().filter(|(p, _)| *p != one.rank) {
                    let is_refused = [(1, 2), (2, 1)].contains(&(one.rank, peer));
                    let class = path.as_ref().unwrap().class();
                    let expected = match is_refused {
                        true => LinkClass::Host,
                        false => LinkClass::NvLink,
                    };
                    assert_eq!(class, expected, "{} to {peer}", one.rank);
                    assert_eq!(one.pair_links().splits_lines(one.rank, peer), is_refused);
                }
            }
        });
    }
    // GPUs of another model split the lines of their own pairs only.
    let mut mixed = Machine::new(3);
    mixed.capabilities = (0..).zip([(9, 0), (9, 0), (8, 6)]).collect();
    Job::on(mixed).check(&[(1, 0), (1, 1), (1, 2)], |links| {
        let pairs = links[2].pair_links();
        assert_eq!(
            [
                pairs.splits_lines(0, 1),
                pairs.splits_lines(0, 2),
                pairs.splits_lines(2, 1)
            ],
            [false, true, true]
        );
    });
}

#[test]
fn a_mapping_that_fails_falls_back_to_pinned_host_memory() {
    let mut machine = Machine::new(2);
    machine.enabling_fails = true;
    Job::on(machine).check(&[(1, 0), (1, 1)], |links| {
        assert!(host_reason(&links[0], 1).contains("refused"));
        assert!(links[0].pinned_bytes > links[0].shape.bytes());
    });
    let mut machine = Machine::new(2);
    machine.ipc_fails = true;
    Job::on(machine).check(&[(1, 0), (1, 1), (2, 1)], |links| {
        assert!(host_reason(&links[0], 2).contains("cuIpcOpenMemHandle"));
        assert_eq!(host_reason(&links[0], 2), host_reason(&links[2], 0));
        assert_eq!(
            links[0].paths[1].as_ref().unwrap().class(),
            LinkClass::NvLink
        );
    });
    let mut machine = Machine::new(2);
    machine.export_fails = true;
    Job::on(machine).check(&[(1, 0), (1, 1), (2, 1)], |links| {
        let reason = host_reason(&links[0], 2);
        assert!(
            reason.contains("cannot map the memory of rank 2"),
            "{reason}"
        );
        assert!(reason.contains("cuIpcGetMemHandle"), "{reason}");
        assert_eq!(reason, host_reason(&links[2], 0));
        assert_eq!(
            links[0].paths[1].as_ref().unwrap().class(),
            LinkClass::NvLink
        );
    });
}

#[test]
fn a_path_that_garbles_data_falls_back_to_pinned_host_memory() {
    for gpus in [[(1, 0), (1, 1), (1, 2)], [(1, 0), (2, 1), (3, 2)]] {
        let mut job = Job::on(Machine::new(3));
        job.garbled.insert((1, 2));
        job.check(&gpus, |links| {
            let reason = host_reason(&links[1], 2);
            for part in ["words", "rank 1 (host", "arrived wrong at rank 2 (host"] {
                assert!(reason.contains(part), "{reason}");
            }
            assert_eq!(reason, host_reason(&links[2], 1));
            for peer in [1, 2] {
                let path = links[0].paths[peer].as_ref().unwrap();
                assert_eq!(path.class(), LinkClass::NvLink);
            }
        });
    }
}

#[test]
fn p2p_disable_on_one_rank_pins_its_pairs() {
    let mut job = Job::on(Machine::new(2));
    let off = Config {
        p2p_disable: true,
        ..job.config.clone()
    };
    job.configs.insert(1, off);
    for gpus in [[(1, 0), (1, 0), (1, 1)], [(1, 0), (2, 0), (3, 1)]] {
        job.check(&gpus, |links| {
            let reason = host_reason(&links[0], 1);
            assert_eq!(reason, "CINCH_P2P_DISABLE=1 on rank 1");
            assert_eq!(host_reason(&links[2], 1), reason);
            assert!(matches!(links[0].paths[2], Some(PeerPath::Peer { .. })));
        });
    }
}

/// On one GPU, ranks that stand for GPUs of two switches have peer access inside the switches only.
#[test]
fn emulated_machine_pins_pairs_without_peer_access() {
    let mut job = Job::on(Machine::new(1));
    job.config.emulated = Some(EmulatedMachine {
        file: "A.xml".into(),
        xml: include_str!("../../tests/topology/A.xml").into(),
        scale: 1,
    });
    job.check(&[(1, 0); 6], |links| {
        for one in links {
            for peer in (0..6).filter(|peer| *peer != one.rank) {
                let class = one.paths[peer].as_ref().unwrap().class();
                let expected = match one.rank / 4 == peer / 4 {
                    true => LinkClass::SameDevice,
                    false => LinkClass::Host,
                };
                assert_eq!(class, expected, "{} to {peer}", one.rank);
            }
        }
        let reason = host_reason(&links[1], 5);
        assert_eq!(reason, "no peer access between ranks 1 and 5 in A.xml");
    });
}

#[test]
fn a_gpu_that_the_process_does_not_see_has_peer_access() {
    let mut job = Job::on(Machine::new(2));
    job.visible = [(1, vec![0]), (2, vec![1])].into();
    job.check(&[(1, 0), (2, 0)], |links| {
        let unknown = PeerPath::Peer {
            class: LinkClass::Pcie,
            performance_rank: None,
        };
        assert_eq!(links[0].paths[1], Some(unknown));
        assert!(!links[1].lines_arrive_whole());
    });
    // A pair of GPUs whose link has no native atomics counts as PCIe.
    let mut machine = Machine::new(2);
    machine.atomics = false;
    Job::on(machine).check(&[(1, 0), (1, 1)], |links| {
        assert_eq!(links[0].slowest, LinkClass::Pcie);
    });
}

#[test]
fn ll128_needs_equal_gpus_that_keep_lines_whole() {
    for (capabilities, whole) in [
        ([(9, 0), (9, 0)], true),
        ([(8, 0), (8, 0)], true),
        ([(8, 0), (9, 0)], false),
        ([(8, 6), (8, 6)], false),
        ([(12, 1), (12, 1)], false),
    ] {
        let mut machine = Machine::new(2);
        machine.capabilities = (0..).zip(capabilities).collect();
        let job = Job::on(machine);
        job.check(&[(1, 0), (2, 1)], |links| {
            assert!(links.iter().all(|one| one.lines_arrive_whole() == whole));
        });
        let alone = GPUS_THAT_KEEP_LINES_WHOLE
            .contains(&(capabilities[0].0 as u32, capabilities[0].1 as u32));
        job.check(&[(1, 0), (2, 0)], |links| {
            assert!(links.iter().all(|one| one.lines_arrive_whole() == alone));
        });
    }
}

#[test]
fn an_error_on_one_rank_reaches_all_ranks() {
    let mut machine = Machine::new(2);
    // Each GPU has device memory for one rank, but two ranks share GPU 1.
    machine.memory = 6 << 20;
    let job = Job::on(machine);
    let errors = errors(job.connect(&[(1, 0), (2, 1), (3, 1)]));
    assert!(errors.iter().any(|error| error.kind() == ErrorKind::System));
    for error in &errors {
        assert!(error.message().contains("bytes on GPU 1"), "{error}");
    }
    assert_eq!(errors[0].kind(), ErrorKind::Remote);
    assert!(
        errors[0].message().starts_with("rank 0 (host"),
        "{}",
        errors[0]
    );
    assert!(errors[0].message().contains("cannot connect its GPU"));
    assert_eq!(job.machine.left(), [0; 5]);

    let mut job = Job::on(Machine::new(2));
    let tcp = Config {
        transport: Some(TransportKind::Tcp),
        ..job.config.clone()
    };
    job.configs.insert(1, tcp);
    for error in self::errors(job.connect(&[(1, 0), (1, 1)])) {
        assert!(error.message().contains("CINCH_TRANSPORT=tcp"), "{error}");
    }
    assert_eq!(job.machine.left(), [0; 5]);
}

#[test]
fn a_view_has_the_addresses_and_the_timeout() {
    let job = Job::on(Machine::new(2));
    job.check(&[(1, 0), (1, 1)], |links| {
        let one = &links[1];
        let view = one.view(&[0, 1], Protocol::Ll, Duration::from_secs(3));
        assert_eq!(view.inbox[..3], [one.inbox[0], 0, 0]);
        assert_eq!(view.outbox[..3], [one.outbox[0], 0, 0]);
        assert_eq!((view.npeers, &view.ranks[..3]), (2, &[0, 1, 0][..]));
        assert_eq!((view.rank, view.nranks, view.protocol), (1, 2, 1));
        assert_eq!(view.timeout_ns, 3_000_000_000);
        assert_eq!(view.fifo, one.shape.fifo(Protocol::Ll));
        assert_eq!(
            one.epochs(),
            [0, 16].map(|at| view.cursors + (3 * MAX_CHANNELS * 2 * 16 + at) as u64)
        );
        let long = one.view(&[1], Protocol::Simple, Duration::MAX);
        assert_eq!(long.timeout_ns, u64::MAX);
        // Peer 0 is rank 1.
        assert_eq!((long.inbox[0], long.npeers), (one.inbox[1], 1));

        assert_eq!(one.control().trouble(), None);
        one.control().abort();
        let words = view.control as *mut u32;
        // SAFETY: `one` owns 256 bytes of control words. `state` is the first word of the second line, and
        // `peer` its third.
        unsafe {
            assert_eq!(*words, 1);
            *words.add(32 + 2) = 9;
            *words.add(32) = 1;
            assert_eq!(one.control().trouble(), None);
            *words.add(32) = TROUBLE_COMPLETE;
        }
        assert_eq!(one.control().trouble().unwrap().peer, 9);
    });
}

#[test]
fn unmap_closes_mappings_of_other_processes() {
    let job = Job::on(Machine::new(2));
    let links = job.links(&[(1, 0), (2, 1)]);
    assert_eq!(job.machine.left()[2], 2);
    for one in &links {
        one.unmap();
    }
    assert_eq!(job.machine.left()[2], 0);
}

/// Unmapping must not free a peer's memory: the driver would then wait for kernels of the peer's
/// GPU.
#[test]
fn unmap_local_peers_frees_no_memory() {
    let job = Job::on(Machine::new(2));
    let links = job.links(&[(1, 0), (1, 1), (2, 1)]);
    let mapped = |one: &GpuLinks| one.is_mapped_by_peers();
    assert_eq!(
        [0, 1, 2].map(|rank| mapped(&links[rank])),
        [true, true, false]
    );
    let before = job.machine.left();
    assert!(links[0].unmap_local_peers());
    assert_eq!([0, 1].map(|rank| mapped(&links[rank])), [true, false]);
    assert!(links[1].unmap_local_peers() && !links[1].unmap_local_peers());
    assert!(!links.iter().any(mapped));
    // Unmapping frees neither memory nor mappings of other processes.
    assert_eq!(job.machine.left(), before);
}

fn errors(outcomes: Vec<Result<GpuLinks>>) -> Vec<Error> {
    let error = |outcome: Result<GpuLinks>| outcome.expect_err("ranks were connected");
    outcomes.into_iter().map(error).collect()
}
