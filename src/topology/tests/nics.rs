//! Tests of distances to network devices, on a directory that looks like /sys.

use super::fake_sys::FakeSys;
use crate::topology::{
    Machine, MachineGraph, NicDistance, PathType, RankPlace, nic_distances, nic_distances_on,
    read_xml,
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
            let found = nic_distances(&sys.files, place).unwrap();
            assert_eq!(found, nic_distances_on(&machine, place), "{file}");
            let near = found.iter().filter(|nic| nic.path == Some(PathType::Pix));
            assert_eq!(
                near.count(),
                found.len() / 8,
                "{file}: beside GPU {}",
                gpu.dev
            );
        }
        let of_node_1 = paths(&nic_distances(&sys.files, RankPlace::Node(1)).unwrap());
        let near = of_node_1
            .iter()
            .filter(|path| **path == Some(PathType::Phb));
        assert_eq!(near.count(), of_node_1.len() / 2, "{file}");
        assert!(
            nic_distances(&sys.files, RankPlace::Unknown)
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
