//! Tests failures of RDMA devices and ports, which the conformance suite does not cover.

use super::super::conformance::world::{World, config, recv, send, wait};
use crate::config::Config;
use crate::error::{Error, ErrorKind};
use crate::mem::Header;
use crate::sys::ibverbs::fake::{Fabric, FakeDevice};
use crate::sys::ibverbs::*;
use crate::sys::pci::memory_files::MemoryFiles;
use crate::topology::{BusId, RankPlace};
use crate::transport::Links;
use crate::types::TransportKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn rdma() -> Config {
    config(TransportKind::Rdma)
}

fn header(bytes: usize) -> Header {
    Header {
        bytes: bytes as u32,
        ..Header::default()
    }
}

/// Waits until the sending or receiving end of `peer` fails.
fn error_of(links: &mut Links, peer: usize, sends: bool) -> Error {
    let until = Instant::now() + Duration::from_secs(20);
    let mut scans = 5000;
    loop {
        let ready = match sends {
            true => links.sends[peer].as_mut().unwrap().ready(),
            false => links.recvs[peer].as_mut().unwrap().ready(),
        };
        match ready {
            Err(error) => return error,
            Ok(ready) => assert!(sends || !ready),
        }
        links.waiter.idle(scans, Duration::from_millis(10)).unwrap();
        scans += 1;
        assert!(Instant::now() < until, "no end failed");
    }
}

fn world(devices: Vec<FakeDevice>) -> (Arc<World>, Arc<Fabric>) {
    let fabric = Fabric::new(devices);
    (World::over(&[(1, 1), (2, 2)], fabric.clone()), fabric)
}

fn two() -> Vec<FakeDevice> {
    vec![FakeDevice::roce("r0", 1), FakeDevice::roce("r1", 2)]
}

/// Returns the errors of two ranks with these devices, which cannot connect after `spoil` has
/// changed the fabric.
fn refusals(devices: Vec<FakeDevice>, spoil: impl FnOnce(&Fabric), config: &Config) -> Vec<String> {
    let (world, fabric) = world(devices);
    spoil(&fabric);
    let errors = world.errors(&[config.clone(), config.clone()]);
    assert_eq!(fabric.leftovers(), [""; 0]);
    errors.iter().map(Error::to_string).collect()
}

#[test]
fn channels_alternate_between_ports_and_leave_nothing() {
    let (world, fabric) = world(two());
    let mut config = rdma();
    config.ib_qps = 2;
    world.run(&config, |mut links, exchange| {
        exchange.barrier().unwrap();
        assert_eq!(
            fabric.pairs().len(),
            2 * 2 * 2,
            "2 ranks, 2 channels, 2 pairs"
        );
        assert_eq!(fabric.devices_in_use(), [0, 1]);
        for channel in 0..2 {
            for bytes in [0, 64, 4096] {
                let peer = 1 - links.rank;
                send(&mut links, peer, channel, header(bytes), |slot| {
                    slot.fill(7)
                });
                recv(&mut links, peer, channel, |end| {
                    assert_eq!(end.payload(), vec![7; bytes]);
                });
            }
        }
        exchange.barrier().unwrap();
    });
    assert_eq!(fabric.leftovers(), [""; 0]);
}

#[test]
fn large_messages_travel_in_two_writes() {
    let (world, _) = world(two());
    let mut config = rdma();
    config.slot_bytes = 64 << 10;
    world.run(&config, |mut links, exchange| {
        let peer = 1 - links.rank;
        for round in 0..40_u8 {
            let bytes = 8192 - 20 + usize::from(round);
            send(&mut links, peer, 0, header(bytes), |slot| slot.fill(round));
            send(&mut links, peer, 0, header(60_000), |slot| {
                slot.fill(round + 1)
            });
            recv(&mut links, peer, 0, |end| {
                assert_eq!(end.payload(), vec![round; bytes])
            });
            recv(&mut links, peer, 0, |end| {
                assert_eq!(end.payload(), vec![round + 1; 60_000])
            });
        }
        wait(&mut links, |links| {
            links.sends[peer].as_mut().unwrap().flushed().unwrap()
        });
        exchange.barrier().unwrap();
    });
}

#[test]
fn infiniband_addresses_by_lid() {
    let devices = vec![
        FakeDevice::infiniband("i0", 7),
        FakeDevice::infiniband("i1", 8),
    ];
    let (world, fabric) = world(devices);
    world.run(&rdma(), |mut links, exchange| {
        let peer = 1 - links.rank;
        send(&mut links, peer, 0, header(9), |slot| slot.fill(1));
        recv(&mut links, peer, 0, |end| assert_eq!(end.payload(), [1; 9]));
        exchange.barrier().unwrap();
        for attributes in fabric.attributes() {
            assert_eq!(attributes.ah_attr.is_global, 0);
            assert!([7, 8].contains(&attributes.ah_attr.dlid));
        }
        exchange.barrier().unwrap();
    });
}

#[test]
fn settings_reach_the_queue_pairs() {
    let (mut config, mut devices) = (rdma(), two());
    (config.ib_timeout, config.ib_retry) = (18, 5);
    (config.ib_traffic_class, config.ib_service_level) = (106, 3);
    devices[0].port.active_mtu = IBV_MTU_4096;
    let (world, fabric) = world(devices);
    let of_device = |name: &str| Config {
        ib_hca: Some(name.into()),
        ..config.clone()
    };
    world.run_each(&[of_device("r0"), of_device("r1")], |_, exchange| {
        exchange.barrier().unwrap();
        for attributes in fabric.attributes() {
            let (retries, rnr) = (attributes.retry_cnt, attributes.rnr_retry);
            assert_eq!((attributes.timeout, retries, rnr), (18, 5, 5));
            assert_eq!(attributes.path_mtu, IBV_MTU_1024, "the smaller of both");
            let route = attributes.ah_attr.grh;
            assert_eq!((route.traffic_class, attributes.ah_attr.sl), (106, 3));
            // RoCE v2 over IPv4 is the fourth entry of the GID table.
            assert_eq!((route.sgid_index, attributes.ah_attr.is_global), (3, 1));
        }
        exchange.barrier().unwrap();
    });
}

#[test]
fn dead_peer_is_named_by_its_sender_and_its_receiver() {
    for sends in [true, false] {
        let (world, fabric) = world(two());
        world.run(&rdma(), |mut links, exchange| {
            exchange.barrier().unwrap();
            if links.rank == 1 {
                fabric.kill();
                exchange.barrier().unwrap();
                // A dead rank closes nothing while the other looks.
                exchange.barrier().unwrap();
                drop(links);
                return;
            }
            exchange.barrier().unwrap();
            let start = Instant::now();
            if sends {
                let end = links.sends[1].as_mut().unwrap();
                assert!(end.ready().unwrap());
                end.publish(header(64));
                wait(&mut links, |links| {
                    links.sends[1].as_mut().unwrap().flushed().is_err()
                });
            }
            let error = error_of(&mut links, 1, sends);
            assert_eq!(error.kind(), ErrorKind::Remote);
            for part in [
                "rank 1 (host host2",
                "status 12",
                "within 1.1 s",
                "CINCH_IB_RETRY=3",
            ] {
                assert!(error.message().contains(part), "{error}");
            }
            // The device's own timeout, not the caller's, ends the wait for an acknowledgement.
            assert!(start.elapsed() < Duration::from_secs(10));
            exchange.barrier().unwrap();
        });
    }
}

#[test]
fn failed_work_is_an_error_with_cause_and_next_step() {
    for (status, part, kind) in [
        (IBV_WC_REM_ACCESS_ERR, "the peer's log", ErrorKind::Remote),
        (IBV_WC_GENERAL_ERR, "kernel's log", ErrorKind::System),
        (IBV_WC_RNR_RETRY_EXC_ERR, "no room", ErrorKind::Remote),
        (
            IBV_WC_LOC_PROT_ERR,
            "could not read our memory",
            ErrorKind::System,
        ),
    ] {
        let (world, fabric) = world(two());
        world.run(&rdma(), |mut links, exchange| {
            if links.rank == 0 {
                fabric.fail_work(0, status);
                links.sends[1].as_mut().unwrap().publish(header(0));
                let error = error_of(&mut links, 1, true);
                assert_eq!(error.kind(), kind);
                for part in [part, "rank 1", "r0:1", &format!("status {status}")] {
                    assert!(error.message().contains(part), "{error}");
                }
            }
            exchange.barrier().unwrap();
        });
        assert_eq!(fabric.leftovers(), [""; 0]);
    }
}

#[test]
fn port_that_goes_down_is_named() {
    let (world, fabric) = world(two());
    world.run(&rdma(), |mut links, exchange| {
        exchange.barrier().unwrap();
        if links.rank == 0 {
            fabric.set_port(0, false);
            // The device's event ends the sleep.
            for scans in 9000..9004 {
                links.waiter.idle(scans, Duration::from_millis(20)).unwrap();
            }
            let error = error_of(&mut links, 1, false);
            assert!(error.message().contains("our port r0:1 is down"), "{error}");
        }
        exchange.barrier().unwrap();
    });
}

#[test]
fn failed_device_breaks_its_connections_only() {
    let (world, fabric) = world(two());
    world.run(&rdma(), |mut links, exchange| {
        exchange.barrier().unwrap();
        if links.rank == 0 {
            // Channel 0 of rank 0 goes through the first device, channel 1 through the second.
            fabric.raise_event(0, IBV_EVENT_DEVICE_FATAL);
            let error = error_of(&mut links, 1, false);
            assert_eq!(error.kind(), ErrorKind::System);
            assert!(
                error.message().contains("r0:1: the device has failed"),
                "{error}"
            );
            assert!(
                !links.recvs[links.nranks + 1]
                    .as_mut()
                    .unwrap()
                    .ready()
                    .unwrap()
            );
        }
        exchange.barrier().unwrap();
    });
}

#[test]
fn failed_device_breaks_the_connections_of_all_its_ports() {
    let mut device = FakeDevice::roce("m0", 1);
    device.attributes.phys_port_cnt = 2;
    let (world, fabric) = world(vec![device]);
    world.run(&rdma(), |mut links, exchange| {
        exchange.barrier().unwrap();
        if links.rank == 0 {
            // Channel 0 goes through the first port, channel 1 through the second.
            fabric.raise_event(0, IBV_EVENT_DEVICE_FATAL);
            for (index, port) in [(1, "m0:1"), (links.nranks + 1, "m0:2")] {
                let error = error_of(&mut links, index, false);
                let expected = format!("{port}: the device has failed");
                assert!(error.message().contains(&expected), "{error}");
            }
        }
        exchange.barrier().unwrap();
    });
}

#[test]
fn failed_registration_is_an_error_with_the_limit() {
    let spoil = |fabric: &Fabric| fabric.fail("reg_mr", 0, usize::MAX, libc::ENOMEM);
    for message in refusals(two(), spoil, &rdma()) {
        for part in [
            "registering",
            "bytes with r",
            "may lock",
            "ulimit -l",
            "CINCH_BUFFER_BYTES",
        ] {
            assert!(message.contains(part), "{message}");
        }
    }
    // Without a setting that forces RDMA, all ranks use TCP.
    let (world, fabric) = world(two());
    fabric.fail("reg_mr", 1, 1, libc::ENOMEM);
    let config = Config {
        transport: None,
        ..rdma()
    };
    world.run(&config, |mut links, _| {
        let peer = 1 - links.rank;
        assert_eq!(links.kinds[peer], Some(TransportKind::Tcp));
        send(&mut links, peer, 0, header(9), |slot| slot.fill(1));
        recv(&mut links, peer, 0, |end| assert_eq!(end.payload(), [1; 9]));
    });
    assert_eq!(fabric.leftovers(), [""; 0]);
}

/// Connecting queue pairs fails if active ports do not reach each other.
#[test]
fn unreachable_ports_fall_back_to_tcp() {
    let unreachable = |fabric: &Fabric| {
        // The injected failure is in the second transition of the queue pairs: the first has 2
        // ranks * 2 channels calls.
        fabric.fail("modify_qp", 4, 1, libc::ENETUNREACH);
    };
    for message in refusals(two(), unreachable, &rdma()) {
        assert!(message.contains("Network is unreachable"), "{message}");
    }
    let (world, fabric) = world(two());
    unreachable(&fabric);
    let config = Config {
        transport: None,
        ..rdma()
    };
    world.run(&config, |mut links, exchange| {
        let peer = 1 - links.rank;
        assert_eq!(links.kinds[peer], Some(TransportKind::Tcp));
        send(&mut links, peer, 0, header(9), |slot| slot.fill(1));
        recv(&mut links, peer, 0, |end| assert_eq!(end.payload(), [1; 9]));
        exchange.barrier().unwrap();
    });
    assert_eq!(fabric.leftovers(), [""; 0]);
}

/// Queue pairs connect even on separate networks; only the first packet of one rank or of both fails.
#[test]
fn silent_ports_fall_back_to_tcp() {
    for failures in [1, 4] {
        let silent = |fabric: &Fabric| {
            (0..failures).for_each(|_| fabric.fail_work(0, IBV_WC_RETRY_EXC_ERR));
        };
        for message in refusals(two(), silent, &rdma()) {
            assert!(message.contains("retries exceeded"), "{message}");
            assert!(message.contains("through r"), "{message}");
        }
        let (world, fabric) = world(two());
        silent(&fabric);
        let config = Config {
            transport: None,
            ..rdma()
        };
        world.run(&config, |mut links, exchange| {
            let peer = 1 - links.rank;
            assert_eq!(links.kinds[peer], Some(TransportKind::Tcp));
            send(&mut links, peer, 0, header(9), |slot| slot.fill(1));
            recv(&mut links, peer, 0, |end| assert_eq!(end.payload(), [1; 9]));
            exchange.barrier().unwrap();
        });
        assert_eq!(fabric.leftovers(), [""; 0]);
    }
}

/// Ports with different indices may be on separate networks.
#[test]
fn both_ends_use_ports_of_the_same_index() {
    let fabric = Fabric::new(two());
    let world = World::over(&[(1, 1), (1, 2), (2, 3), (2, 4)], fabric.clone());
    world.run(&rdma(), |_, exchange| {
        exchange.barrier().unwrap();
        let ends = fabric.ends();
        assert_eq!(ends.len(), 4 * 3 * 2, "4 ranks, 3 peers, 2 channels");
        assert!(ends.iter().all(|(one, other)| one == other), "{ends:?}");
        let on_first = ends.iter().filter(|(device, _)| *device == 0).count();
        assert_eq!(on_first, ends.len() / 2, "channels take turns");
        exchange.barrier().unwrap();
    });
}

#[test]
fn short_queue_is_an_error_with_the_numbers() {
    let mut devices = two();
    for device in &mut devices {
        device.attributes.max_qp_wr = 20;
    }
    for message in refusals(devices, |_| {}, &rdma()) {
        for part in [
            "4 slots need queues of 24 works",
            "at most 20",
            "CINCH_SLOTS",
        ] {
            assert!(message.contains(part), "{message}");
        }
    }
    let mut devices = two();
    for device in &mut devices {
        device.attributes.max_cqe = 8;
    }
    for message in refusals(devices, |_| {}, &rdma()) {
        assert!(message.contains("at most 8"), "{message}");
    }
}

#[test]
fn failed_step_of_connecting_leaves_nothing() {
    for function in [
        "open_device",
        "query_device",
        "query_port",
        "alloc_pd",
        "create_comp_channel",
        "create_cq",
        "create_qp",
        "modify_qp",
        "post_recv",
    ] {
        let spoil = |fabric: &Fabric| fabric.fail(function, 0, usize::MAX, libc::EIO);
        for message in refusals(two(), spoil, &rdma()) {
            assert!(
                message.contains("Input/output error"),
                "{function}: {message}"
            );
        }
    }
}

#[test]
fn rank_without_port_falls_back_to_tcp() {
    let mut down = two();
    for device in &mut down {
        device.port.state = IBV_PORT_DOWN;
    }
    for message in refusals(down.clone(), |_| {}, &rdma()) {
        assert!(message.contains("r0:1 is down, r1:1 is down"), "{message}");
    }
    for devices in [vec![], down] {
        let (world, _) = world(devices);
        let config = Config {
            transport: None,
            ..rdma()
        };
        world.run(&config, |links, _| {
            assert_eq!(links.kinds[1 - links.rank], Some(TransportKind::Tcp));
        });
    }
}

/// A device without room for inline data fetches lines and credits from memory.
#[test]
fn device_without_inline_data_connects() {
    let mut devices = two();
    for device in &mut devices {
        device.max_inline = 0;
    }
    let (world, _) = world(devices);
    world.run(&rdma(), |mut links, exchange| {
        let peer = 1 - links.rank;
        for round in 0..100_u8 {
            send(&mut links, peer, 0, header(50), |slot| slot.fill(round));
            recv(&mut links, peer, 0, |end| {
                assert_eq!(end.payload(), [round; 50])
            });
        }
        exchange.barrier().unwrap();
    });
}

/// Returns a /sys with one socket and two switches: the GPU at 50:00.0 is beside r1, the GPU at 51:00.0 beside r0.
fn two_switches() -> MemoryFiles {
    let mut sys = MemoryFiles::default();
    for (at, device) in ["r1", "r0"].into_iter().enumerate() {
        let switch = format!("devices/pci0000:00/0000:00:0{at}.0/0000:4{at}:00.0");
        let functions = [
            (switch.clone(), "0x060400", "0x1000"),
            (format!("{switch}/0000:4{at}:01.0"), "0x060400", "0x1000"),
            (
                format!("{switch}/0000:4{at}:01.0/0000:5{at}:00.0"),
                "0x030200",
                "0x10de",
            ),
            (format!("{switch}/0000:4{at}:02.0"), "0x060400", "0x1000"),
            (
                format!("{switch}/0000:4{at}:02.0/0000:6{at}:00.0"),
                "0x020700",
                "0x15b3",
            ),
        ];
        for (path, class, vendor) in &functions {
            sys.file(&format!("{path}/class"), class);
            sys.file(&format!("{path}/vendor"), vendor);
            sys.file(&format!("{path}/numa_node"), "0");
            let address = path.rsplit('/').next().unwrap();
            sys.link_to(&format!("bus/pci/devices/{address}"), path);
        }
        let adapter = &functions[4].0;
        let entry = format!("{adapter}/infiniband/{device}");
        sys.link_to(&format!("{entry}/device"), adapter);
        sys.file(&format!("{entry}/ports/1/state"), "4: ACTIVE");
        sys.link_to(&format!("class/infiniband/{device}"), &entry);
    }
    sys
}

#[test]
fn ranks_use_the_ports_nearest_to_their_gpus() {
    let root = std::env::temp_dir().join(format!("cinch-rdma-near-{}", std::process::id()));
    two_switches().write_to(&root);
    let gpu = |at: u8| RankPlace::Gpu(BusId::new(0, 0x50 + at, 0, 0));
    // Columns: places of the ranks on two hosts, devices in use.
    for (places, in_use) in [
        ([gpu(0), gpu(0)], vec![1]),
        ([gpu(1), gpu(1)], vec![0]),
        ([gpu(0), gpu(1)], vec![0, 1]),
        // Both adapters are as near to the cores of node 0.
        ([RankPlace::Node(0), RankPlace::Node(0)], vec![0, 1]),
        ([RankPlace::Node(1), RankPlace::Unknown], vec![0, 1]),
    ] {
        let fabric = Fabric::new(two());
        let hosts = [(1, 1), (2, 2)];
        let world = World::placed(&hosts, fabric.clone(), places.to_vec(), &root);
        world.run(&rdma(), |mut links, exchange| {
            exchange.barrier().unwrap();
            assert_eq!(fabric.devices_in_use(), in_use, "{places:?}");
            let peer = 1 - links.rank;
            for channel in 0..2 {
                send(&mut links, peer, channel, header(9), |slot| slot.fill(1));
                recv(&mut links, peer, channel, |end| {
                    assert_eq!(end.payload(), [1; 9])
                });
            }
            exchange.barrier().unwrap();
        });
        assert_eq!(fabric.leftovers(), [""; 0]);
    }
    std::fs::remove_dir_all(&root).unwrap();
}

#[test]
fn all_ports_are_used_if_the_nearest_do_not_reach_each_other() {
    let root = std::env::temp_dir().join(format!("cinch-rdma-far-{}", std::process::id()));
    two_switches().write_to(&root);
    let fabric = Fabric::new(two());
    let near_r1 = RankPlace::Gpu(BusId::new(0, 0x50, 0, 0));
    let world = World::placed(&[(1, 1), (2, 2)], fabric.clone(), vec![near_r1; 2], &root);
    // A queue pair is modified twice before it is connected.
    fabric.fail("modify_qp", 4, 1, libc::ENETUNREACH);
    world.run(&rdma(), |mut links, exchange| {
        exchange.barrier().unwrap();
        assert_eq!(fabric.devices_in_use(), [0, 1]);
        let peer = 1 - links.rank;
        send(&mut links, peer, 1, header(9), |slot| slot.fill(1));
        recv(&mut links, peer, 1, |end| assert_eq!(end.payload(), [1; 9]));
        exchange.barrier().unwrap();
    });
    assert_eq!(fabric.leftovers(), [""; 0]);
    std::fs::remove_dir_all(&root).unwrap();
}
