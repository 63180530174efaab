//! Tests of distances to network devices, on a directory that looks like /sys.

use super::fake_sys::FakeSys;
use crate::topology::{
    LinkKind, Machine, MachineGraph, NicDistance, PathType, RankPlace, interface_distances,
    nic_distances, nic_distances_on, read_xml,
};

fn machine(file: &str) -> Machine {
    let path = format!("{}/tests/topology/{file}", env!("CARGO_MANIFEST_DIR"));
    read_xml(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn paths(distances: &[NicDistance]) -> Vec<Option<PathType>> {
    distances.iter().map(|nic| nic.path).collect()
}

#[test]
fn fake_sys_gives_the_distances_of_the_file() {
    for file in ["nics-two-port.xml", "nics-reversed.xml"] {
        let machine = machine(file);
        let sys = FakeSys::new(&machine);
        for gpu in MachineGraph::new(&machine).gpus {
            let place = RankPlace::Gpu(gpu.bus_id);
            let found = nic_distances(&sys.files, sys.processor.clone(), place).unwrap();
            assert_eq!(found, nic_distances_on(&machine, place), "{file}");
            let near = found.iter().filter(|nic| nic.path == Some(PathType::Pix));
            assert_eq!(
                near.count(),
                found.len() / 8,
                "{file}: beside GPU {}",
                gpu.dev
            );
        }
        let of_node_1 =
            paths(&nic_distances(&sys.files, sys.processor.clone(), RankPlace::Node(1)).unwrap());
        let near = of_node_1
            .iter()
            .filter(|path| **path == Some(PathType::Phb));
        assert_eq!(near.count(), of_node_1.len() / 2, "{file}");
        assert!(
            nic_distances(&sys.files, sys.processor.clone(), RankPlace::Unknown)
                .unwrap()
                .is_empty()
        );
    }
}

#[test]
fn unknown_nodes_leave_only_paths_below_switches() {
    let mut machine = machine("nics-reversed.xml");
    machine.sockets[1].numa = -1;
    let gpu = MachineGraph::new(&machine).gpus[0].bus_id;
    let found = paths(&nic_distances_on(&machine, RankPlace::Gpu(gpu)));
    let mut expected = vec![None; 8];
    expected[7] = Some(PathType::Pix);
    assert_eq!(found, expected);
    let found = paths(&nic_distances_on(&machine, RankPlace::Node(0)));
    assert_eq!(found, [None; 8]);
}

/// Devices 7 to 4 are beside GPUs 0 to 3 on one socket.
#[test]
fn the_slowest_known_link_is_the_speed_of_a_path() {
    let mut machine = machine("nics-reversed.xml");
    let beside_gpu_0 = &mut machine.sockets[0].devices[0].devices[1];
    beside_gpu_0.nics[0].speed = Some(100_000);
    let beside_gpu_1 = &mut machine.sockets[0].devices[1].devices[1];
    beside_gpu_1.nics[0].speed = None;
    let sys = FakeSys::new(&machine);
    let graph = MachineGraph::new(&machine);
    let between = graph
        .links
        .iter()
        .find(|link| link.class == LinkKind::Socket);
    let far = Some(between.unwrap().bandwidth.mb_s.min(48_000));
    let near = Some(48_000);
    let expected = [far, far, far, far, near, near, None, Some(12_500)];
    for place in [
        RankPlace::Gpu(graph.gpus[0].bus_id),
        // From memory of the socket.
        RankPlace::Node(0),
    ] {
        let found = nic_distances(&sys.files, sys.processor.clone(), place).unwrap();
        let speeds: Vec<_> = found.iter().map(|nic| nic.mb_s).collect();
        assert_eq!(speeds, expected, "{place:?}");
    }
    let interfaces =
        interface_distances(&sys.files, sys.processor.clone(), RankPlace::Node(0)).unwrap();
    assert!(
        interfaces
            .iter()
            .all(|one| one.speed.is_none_or(|speed| speed <= 8 * 48_000))
    );
}
