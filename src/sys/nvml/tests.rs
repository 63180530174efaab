//! Tests of the queries on the mock, and of the system's library where there is one.

use super::mock::{MockGpu, MockLink, MockNvml};
use super::*;
use crate::error::ErrorKind;
use crate::sys::pci::BusId;

fn gpu(bus: u8, links: Vec<MockLink>) -> MockGpu {
    MockGpu {
        bus_id: BusId::new(0, bus, 0, 0),
        sm: 90,
        pcie: Some((5, 16)),
        mig: false,
        links,
    }
}

fn link(remote: &str, kind: u32) -> MockLink {
    MockLink {
        remote: remote.into(),
        kind,
        is_up: true,
        p2p: true,
    }
}

#[test]
fn missing_library_is_an_error_that_names_it() {
    let error = Loaded::open(c"libcinch-no-such.so.7").err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(
        error.message().contains("no libcinch-no-such.so.7"),
        "{error}"
    );
}

#[test]
fn library_without_functions_is_an_error_that_names_them() {
    let error = Loaded::open(c"libc.so.6").err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    for word in ["libc.so.6", "nvmlInit_v2"] {
        assert!(error.message().contains(word), "{word}: {error}");
    }
}

#[test]
fn system_library_lists_gpus_with_addresses() {
    let gpus = match Nvml::open().and_then(|nvml| nvml.gpus()) {
        Ok(gpus) => gpus,
        Err(error) => return println!("SKIPPED: {error}"),
    };
    println!("{gpus:#?}");
    assert!(gpus.iter().all(|gpu| gpu.sm.is_some_and(|sm| sm >= 50)));
    assert!(gpus.iter().all(|gpu| gpu.uuid.starts_with("GPU-")));
}

#[test]
fn gpus_have_links_that_are_up_and_the_fastest_pcie_link() {
    let down = MockLink {
        is_up: false,
        ..link("0000:03:00.0", NVML_REMOTE_GPU)
    };
    let other_use = MockLink {
        p2p: false,
        ..link("0000:03:00.0", NVML_REMOTE_GPU)
    };
    let links = vec![
        link("0000:02:00.0", NVML_REMOTE_GPU),
        down,
        link("ffffffff:ff:ff.0", NVML_REMOTE_SWITCH),
        other_use,
        link("\u{1}garbage", 255),
    ];
    let mock = MockNvml::new(vec![gpu(1, links), gpu(2, vec![])]);
    let nvml = Nvml::new(mock.clone()).unwrap();
    let gpus = nvml.gpus().unwrap();
    assert_eq!([0, 1].map(|gpu: usize| gpus[gpu].index), [0, 1]);
    assert_eq!(gpus[0].bus_id, BusId::new(0, 1, 0, 0));
    assert_eq!(
        (gpus[0].sm, gpus[0].mig, gpus[0].uuid.as_str()),
        (Some(90), false, "GPU-00000000")
    );
    assert_eq!(
        gpus[0].max_link,
        NvmlPcieLink {
            generation: Some(5),
            width: Some(16)
        }
    );
    assert_eq!(gpus[0].current_link.generation, Some(1));
    let of = |remote, kind| NvmlLink { remote, kind };
    let expected = [
        of(Some(BusId::new(0, 2, 0, 0)), NvmlRemote::Gpu),
        of(
            Some(BusId::new(0xffff_ffff, 0xff, 0xff, 0)),
            NvmlRemote::Switch,
        ),
        of(None, NvmlRemote::Unknown),
    ];
    assert_eq!(gpus[0].links, expected);
    for gpu in &gpus {
        assert_eq!(nvml.gpu_at(gpu.bus_id).unwrap().as_ref(), Some(gpu));
    }
    assert_eq!(nvml.gpu_at(BusId::new(0, 9, 0, 0)), Ok(None));
    drop(nvml);
    assert_eq!(mock.users(), 0);
}

#[test]
fn failing_functions_leave_values_unknown_or_are_errors() {
    let mock = MockNvml::new(vec![
        gpu(1, vec![link("0000:02:00.0", 0)]),
        gpu(2, vec![]),
        gpu(3, vec![]),
    ]);
    let nvml = Nvml::new(mock.clone()).unwrap();
    for function in [
        "compute_capability",
        "max_link_generation",
        "current_link_width",
        "mig_mode",
        "nvlink_remote_type",
        "nvlink_remote_pci_info",
        "uuid",
    ] {
        mock.fail(function, 0, NvmlResult::NOT_SUPPORTED);
    }
    mock.fail("device_by_index", 1, NvmlResult::GPU_IS_LOST);
    let gpus = nvml.gpus().unwrap();
    assert_eq!(gpus.iter().map(|gpu| gpu.index).collect::<Vec<_>>(), [0, 2]);
    let first = &gpus[0];
    assert_eq!(
        (
            first.sm,
            first.max_link.generation,
            first.current_link.width
        ),
        (None, None, None)
    );
    assert_eq!((first.mig, first.uuid.as_str()), (false, ""));
    assert_eq!(
        first.links,
        [NvmlLink {
            remote: None,
            kind: NvmlRemote::Unknown
        }]
    );
    for (function, gpu) in [("device_count", 0), ("device_by_index", 0), ("pci_info", 2)] {
        let mock = MockNvml::new(vec![
            gpu_without_links(1),
            gpu_without_links(2),
            gpu_without_links(3),
        ]);
        let nvml = Nvml::new(mock.clone()).unwrap();
        mock.fail(function, gpu, NvmlResult(999));
        let error = nvml.gpus().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::System);
        assert!(error.message().contains("error 999"), "{error}");
    }
}

fn gpu_without_links(bus: u8) -> MockGpu {
    gpu(bus, vec![])
}

#[test]
fn library_without_a_driver_is_an_error() {
    for (code, kind) in [
        (NvmlResult::DRIVER_NOT_LOADED, ErrorKind::Unsupported),
        (NvmlResult(999), ErrorKind::System),
    ] {
        let mock = MockNvml::new(vec![]);
        mock.fail("init", 0, code);
        let error = Nvml::new(mock.clone()).err().unwrap();
        assert_eq!(error.kind(), kind);
        assert_eq!(mock.users(), 0);
    }
}

#[test]
fn peer_access_is_reported_for_each_direction() {
    let mock = MockNvml::new(vec![gpu(1, vec![]), gpu(2, vec![])]);
    mock.refuse_peers(0, 1);
    let nvml = Nvml::new(mock).unwrap();
    let [a, b, missing] = [1, 2, 3].map(|bus| BusId::new(0, bus, 0, 0));
    assert_eq!(nvml.can_access_peer(a, b), Some(false));
    assert_eq!(nvml.can_access_peer(b, a), Some(true));
    assert_eq!(nvml.can_access_peer(a, missing), None);
}
