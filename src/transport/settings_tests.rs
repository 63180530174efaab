use super::*;
use crate::config::Origin;
use crate::transport::HostLoad;

fn peer(rank: usize, host: u8, process: u8) -> PeerInfo {
    PeerInfo {
        rank,
        pid: 100 + u32::from(process),
        uid: 0,
        host: format!("h{host}"),
        host_id: [host; 16],
        process_id: [process; 16],
        address: [127, 0, 0, 1].into(),
    }
}

/// Returns the last candidate among the transports to each rank, which never declines.
fn kinds(
    peers: &[PeerInfo],
    me: usize,
    transport: Option<TransportKind>,
    shm_disable: bool,
) -> Result<Vec<Option<TransportKind>>> {
    let config = Config {
        transport,
        shm_disable,
        ..Config::default()
    };
    let candidates = candidates(peers, me, &config)?.into_iter();
    let last = candidates.map(|candidates| candidates.last().map(|one| one.kind()));
    Ok(last.collect())
}

#[test]
fn pair_takes_the_best_transport_on_both_sides() {
    let peers = [peer(0, 1, 1), peer(1, 1, 1), peer(2, 1, 2), peer(3, 2, 3)];
    let table: Vec<_> = (0..4)
        .map(|me| kinds(&peers, me, None, false).unwrap())
        .collect();
    use TransportKind::{Loopback, Shm, Tcp};
    assert_eq!(table[0], [None, Some(Loopback), Some(Shm), Some(Tcp)]);
    for (one, row) in table.iter().enumerate() {
        for (two, kind) in row.iter().enumerate() {
            assert_eq!(*kind, table[two][one]);
        }
    }
    assert_eq!(
        kinds(&peers, 0, Some(Tcp), false).unwrap(),
        [None, Some(Tcp), Some(Tcp), Some(Tcp)]
    );
    let error = kinds(&peers, 0, Some(Shm), false).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    for part in ["shm", "rank 0 (host h1", "rank 3 (host h2", "namespace"] {
        assert!(error.message().contains(part), "{error}");
    }
    assert!(kinds(&peers, 1, Some(Loopback), false).is_err());
    let error = kinds(&peers, 1, Some(TransportKind::Cuda), false).unwrap_err();
    assert!(error.message().contains("memory of GPUs"), "{error}");
    let apart = kinds(&peers, 0, None, true).unwrap();
    assert_eq!(apart, [None, Some(Loopback), Some(Tcp), Some(Tcp)]);
    let error = kinds(&peers[1..3], 0, Some(Shm), true).unwrap_err();
    assert!(error.message().contains("CINCH_SHM_DISABLE=1"), "{error}");
}

#[test]
fn hosts_prefer_rdma_unless_a_transport_is_forced() {
    use TransportKind::{Rdma, Tcp};
    let peers = [peer(0, 1, 1), peer(1, 2, 2)];
    for (forced, expected) in [
        (None, vec![Rdma, Tcp]),
        (Some(Tcp), vec![Tcp]),
        (Some(Rdma), vec![Rdma]),
    ] {
        let config = Config {
            transport: forced,
            ..Config::default()
        };
        let found = candidates(&peers, 1, &config).unwrap();
        let found: Vec<_> = found[0].iter().map(|one| one.kind()).collect();
        assert_eq!(found, expected);
    }
}

#[test]
fn slots_shrink_to_the_budget() {
    let mut config = Config::default();
    assert_eq!(shape(&config, 2).unwrap().slot_bytes, 128 << 10);
    for nranks in [2, 8, 16, 32, 64, 100, 500] {
        let shape = shape(&config, nranks).unwrap();
        let total = |slot: usize| nranks * 2 * 4 * (slot + 64) * 2;
        assert!(total(shape.slot_bytes) <= config.buffer_bytes);
        assert!(shape.slot_bytes == 128 << 10 || total(2 * shape.slot_bytes) > config.buffer_bytes);
        assert!(shape.slot_bytes.is_multiple_of(64) && shape.slot_bytes >= 4096);
    }
    let error = shape(&config, 5000).unwrap_err();
    let need = (5000 * 2 * 4 * 2 * (4096 + 64)).to_string();
    assert!(error.message().contains(&need), "{error}");
    config
        .set("CINCH_BUFFER_BYTES", "1G", Origin::Program)
        .unwrap();
    assert!(shape(&config, 5000).is_ok());
    config.slot_bytes = 4096 + 8 * 64;
    config.buffer_bytes = 2 * 2 * 4 * 2 * (4096 + 64);
    assert_eq!(shape(&config, 2).unwrap().slot_bytes, 4096);
    config.slots = 3;
    assert!(shape(&config, 2).is_err());
}

#[test]
fn connect_info_survives_bytes_and_trouble_names_the_rank() {
    let info = ConnectInfo {
        cores: std::array::from_fn(|word| 1 << word),
        inbox_bytes: 1 << 40,
        group: GroupMemory {
            id: [3, 4],
            ..GroupMemory::default()
        },
        offers: vec![(0, vec![7; 8]), (4, Vec::new())],
        trouble: String::new(),
    };
    assert_eq!(info.offer(TransportKind::Loopback), [7; 8]);
    assert!(info.offer(TransportKind::Tcp).is_empty());
    let peers = [peer(0, 1, 1), peer(1, 1, 2)];
    let frames = |other: &ConnectInfo| vec![info.to_bytes(), other.to_bytes()];
    assert_eq!(compare(&frames(&info), &peers).unwrap()[1], info);

    let mut other = info.clone();
    other.trouble = "no sockets".into();
    let error = compare(&frames(&other), &peers).unwrap_err();
    assert!(
        error
            .message()
            .contains("rank 1 (host h1, pid 102) cannot connect: no sockets")
    );

    for cut in 0..info.to_bytes().len() {
        let short = vec![info.to_bytes(), info.to_bytes()[..cut].to_vec()];
        assert!(compare(&short, &peers).is_err());
    }
}

#[test]
fn inboxes_beyond_the_memory_of_a_control_group_fail_all_ranks_alike() {
    let info = |id: u64, inbox_bytes: u64, limit: u64, free: u64| ConnectInfo {
        inbox_bytes,
        group: GroupMemory {
            id: [1, id],
            limit,
            free,
        },
        ..ConnectInfo::default()
    };
    // Ranks 0, 1 and 3 are on one host; rank 2 has a group of equal number on another.
    let peers = [peer(0, 1, 1), peer(1, 1, 2), peer(2, 2, 3), peer(3, 1, 4)];
    let check = |infos: &[ConnectInfo]| check_memory(infos, &peers);
    let fits = [
        info(5, 40, 100, 80),
        info(5, 40, 100, 85),
        info(5, 80, 100, 80),
        info(6, 9, 9, 9),
    ];
    assert!(check(&fits).is_ok());
    let mut short = fits.clone();
    short[1].group.free = 79;
    let error = check(&short).unwrap_err();
    for part in ["2 ranks on host h1", "80 bytes", "79 bytes free of 100"] {
        assert!(error.message().contains(part), "{error}");
    }
    assert!(
        check(&[
            info(0, 1 << 50, 0, 0),
            fits[1].clone(),
            fits[2].clone(),
            fits[3].clone()
        ])
        .is_ok()
    );
    short = fits;
    short[2].inbox_bytes = 81;
    assert!(
        check(&short)
            .unwrap_err()
            .message()
            .contains("1 ranks on host h2")
    );
}

#[test]
fn cores_of_a_host_are_counted_once() {
    let info = |cores: u64| {
        let mut info = ConnectInfo::default();
        info.cores[1] = cores;
        info
    };
    let peers = [peer(0, 1, 1), peer(1, 1, 2), peer(2, 2, 3), peer(3, 1, 4)];
    let bound = [info(1), info(2), info(1), info(2)];
    let load = |infos: &[ConnectInfo], peer: usize| {
        let HostLoad { ranks, cores } = HostLoad::of_hosts(&peers, infos)[&peers[peer].host_id];
        (ranks, cores)
    };
    assert_eq!(load(&bound, 0), (3, 2));
    assert_eq!(load(&bound, 2), (1, 1));
    let free = [info(15), info(15), info(15), info(15)];
    assert_eq!(load(&free, 0), (3, 4));
}
