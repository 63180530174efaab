use super::*;
use crate::bootstrap::auth::Listener;
use crate::bootstrap::call_log::tests::call;
use crate::bootstrap::framed_stream::Body;
use crate::types::Collective;
use crate::wire::Wire;

fn config(timeout: f64) -> Config {
    Config {
        timeout: Duration::from_secs_f64(timeout),
        init_timeout: Duration::from_secs(20),
        heartbeat: Duration::from_millis(50),
        log_level: "none".into(),
        ..Config::default()
    }
}

struct World {
    faults: Vec<Arc<Fault>>,
    planes: Vec<Arc<ControlPlane>>,
}

/// Joins ranks as threads of this process, over real sockets.
fn world(nranks: usize, config: &Config) -> World {
    let id = UniqueId::create_for_one_host(config).unwrap();
    let faults: Vec<Arc<Fault>> = (0..nranks).map(|_| Fault::new()).collect();
    let joins = join_all(
        &id,
        &(0..nranks).map(|rank| (rank, nranks)).collect::<Vec<_>>(),
        &faults,
        config,
    );
    World {
        planes: joins.into_iter().map(Result::unwrap).collect(),
        faults,
    }
}

fn join_all(
    id: &UniqueId,
    claims: &[(usize, usize)],
    faults: &[Arc<Fault>],
    config: &Config,
) -> Vec<Result<Arc<ControlPlane>>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = claims
            .iter()
            .zip(faults)
            .map(|(&(rank, nranks), fault)| {
                scope.spawn(move || ControlPlane::join(id, rank, nranks, config, fault.clone()))
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

fn on_all<T: Send>(world: &World, act: impl Fn(&ControlPlane) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = world
            .planes
            .iter()
            .map(|control| scope.spawn(|| act(control)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

/// Waits until other threads have made `condition` true.
fn eventually(what: &str, condition: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < until, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn joined_ranks_know_each_other_and_gather_all_sizes() {
    let world = world(4, &config(60.0));
    for (rank, control) in world.planes.iter().enumerate() {
        assert_eq!((control.rank(), control.peers().len()), (rank, 4));
        assert!(
            control
                .peers()
                .iter()
                .enumerate()
                .all(|(at, peer)| peer.rank == at)
        );
        assert_eq!(control.peers()[0].process_id, control.peers()[3].process_id);
        assert!(control.peers()[2].address.is_loopback());
        assert_eq!(control.key("tcp"), world.planes[0].key("tcp"));
        assert_ne!(control.key("tcp"), control.key("shm"));
    }
    for size in [0usize, 1, 1000, frames::MAX_PIECE, 5 << 20] {
        let part = |rank: usize| -> Vec<u8> {
            let bytes = if rank == 2 { 0 } else { size + rank };
            (0..bytes).map(|at| (at * (rank + 3) % 253) as u8).collect()
        };
        for all in on_all(&world, |control| {
            control.all_gather(&part(control.rank())).unwrap()
        }) {
            assert!(
                all.iter()
                    .enumerate()
                    .all(|(rank, bytes)| *bytes == part(rank))
            );
        }
    }
    on_all(&world, |control| {
        (0..50).for_each(|_| control.barrier().unwrap())
    });
    let control = &world.planes[1];
    let big = control
        .all_gather(&vec![0; MAX_CONTRIBUTION + 1])
        .unwrap_err();
    assert_eq!(big.kind(), ErrorKind::InvalidArgument);
    on_all(&world, ControlPlane::leave);
    assert!(world.faults.iter().all(|fault| !fault.is_raised()));
}

#[test]
fn single_rank_needs_no_thread_and_ends_its_rendezvous() {
    let config = config(60.0);
    let id = UniqueId::create_for_one_host(&config).unwrap();
    let control = ControlPlane::join(&id, 0, 1, &config, Fault::new()).unwrap();
    assert_eq!(control.all_gather(b"me").unwrap(), [b"me".to_vec()]);
    control.barrier().unwrap();
    control.leave();
    eventually("the rendezvous ends", || {
        ControlPlane::join(&id, 0, 2, &config, Fault::new())
            .is_err_and(|error| error.message().contains("used up"))
    });
    for (rank, nranks) in [(1, 1), (0, 0), (0, MAX_RANKS + 1)] {
        let error = ControlPlane::join(&id, rank, nranks, &config, Fault::new()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }
}

#[test]
fn id_serves_one_communicator() {
    let config = config(60.0);
    let id = UniqueId::create_for_one_host(&config).unwrap();
    let faults = [Fault::new(), Fault::new()];
    let planes = join_all(&id, &[(0, 2), (1, 2)], &faults, &config);
    assert!(planes.iter().all(Result::is_ok));
    let error = ControlPlane::join(&id, 0, 2, &config, Fault::new()).unwrap_err();
    assert!(error.message().contains("used up"), "{error}");
}

#[test]
fn impossible_rendezvous_is_an_error_on_all_ranks() {
    let config = config(60.0);
    let me = std::process::id().to_string();
    for (claims, kind, words) in [
        (
            vec![(0, 3), (1, 3), (1, 3)],
            ErrorKind::InvalidArgument,
            vec!["rank 1", "more than once"],
        ),
        (
            vec![(0, 2), (1, 3)],
            ErrorKind::Mismatch,
            vec!["rank 0", "rank 1", "2", "3"],
        ),
        (
            vec![(0, 2), (5, 2)],
            ErrorKind::InvalidArgument,
            vec!["rank 5", "2 ranks"],
        ),
    ] {
        let id = UniqueId::create_for_one_host(&config).unwrap();
        let faults: Vec<_> = claims.iter().map(|_| Fault::new()).collect();
        for result in join_all(&id, &claims, &faults, &config) {
            let error = result.unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            for word in words.iter().chain([&me.as_str()]) {
                assert!(error.message().contains(word), "{error} lacks {word}");
            }
        }
    }
}

#[test]
fn missing_ranks_of_a_rendezvous_are_named() {
    let config = Config {
        init_timeout: Duration::from_secs(1),
        ..config(60.0)
    };
    let id = UniqueId::create_for_one_host(&config).unwrap();
    let faults = [Fault::new(), Fault::new()];
    for result in join_all(&id, &[(0, 4), (2, 4)], &faults, &config) {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(error.message().contains("ranks 1, 3 of 4"), "{error}");
    }
}

#[test]
fn rendezvous_without_ranks_reports_it_to_late_ranks() {
    let config = Config {
        init_timeout: Duration::from_millis(200),
        ..config(60.0)
    };
    let id = UniqueId::create_for_one_host(&config).unwrap();
    std::thread::sleep(Duration::from_millis(400));
    let patient = Config {
        init_timeout: Duration::from_secs(20),
        ..config
    };
    let error = ControlPlane::join(&id, 1, 2, &patient, Fault::new()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    let words = "no rank came to the rendezvous within 0.2 s (CINCH_INIT_TIMEOUT)";
    assert!(error.message().contains(words), "{error}");
}

#[test]
fn known_address_serves_several_communicators() {
    let config = config(60.0);
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let id = UniqueId::for_address("127.0.0.1", port, &config).unwrap();
    let mut keys = Vec::new();
    for _ in 0..2 {
        let faults = [Fault::new(), Fault::new(), Fault::new()];
        let planes = join_all(&id, &[(2, 3), (0, 3), (1, 3)], &faults, &config);
        let planes: Vec<_> = planes.into_iter().map(Result::unwrap).collect();
        keys.push(planes[0].key("tcp"));
        planes.iter().for_each(|control| control.leave());
    }
    assert_ne!(keys[0], keys[1], "each communicator has its own keys");
}

/// Ranks of several hosts resolve the name of rank 0's host to different addresses.
#[test]
fn ranks_with_different_addresses_of_rank_zero_join() {
    let config = config(60.0);
    let port = {
        let socket = std::net::TcpListener::bind("127.0.0.3:0").unwrap();
        socket.local_addr().unwrap().port()
    };
    let of = |ips: &[u8]| {
        let addresses = ips
            .iter()
            .map(|&last| SocketAddr::from(([127, 0, 0, last], port)));
        let addresses: Vec<SocketAddr> = addresses.collect();
        crate::bootstrap::id::assemble(1, &[5; 32], &[0; 16], &addresses)
    };
    let ids = [of(&[3, 2]), of(&[4, 2]), of(&[3])];
    let faults = [(); 3].map(|()| Fault::new());
    let planes: Vec<_> = std::thread::scope(|scope| {
        let config = &config;
        let threads: Vec<_> = ids
            .iter()
            .zip(&faults)
            .enumerate()
            .map(|(rank, (id, fault))| {
                scope.spawn(move || ControlPlane::join(id, rank, 3, config, fault.clone()).unwrap())
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    let worlds = World {
        faults: faults.into(),
        planes,
    };
    on_all(&worlds, |control| control.barrier().unwrap());
    worlds.planes.iter().for_each(|control| control.leave());
}

#[test]
fn announced_error_reaches_all_ranks_with_kind_and_reporter() {
    for reporter in [0, 2] {
        let world = world(3, &config(60.0));
        let waiting = std::thread::scope(|scope| {
            let other = &world.planes[1];
            let waiting = scope.spawn(|| other.barrier());
            let reason = Error::new(ErrorKind::Mismatch, "apples and pears");
            world.planes[reporter].announce(&reason);
            waiting.join().unwrap()
        });
        let reporter_name = world.planes[0].peers()[reporter].to_string();
        assert_eq!(waiting.unwrap_err().kind(), ErrorKind::Mismatch);
        eventually("all know", || {
            world.faults.iter().all(|fault| fault.is_raised())
        });
        for (rank, fault) in world.faults.iter().enumerate() {
            let reason = fault.reason().unwrap();
            assert_eq!(reason.kind(), ErrorKind::Mismatch);
            assert!(reason.message().ends_with("apples and pears"));
            let named = reason.message().starts_with(&reporter_name);
            assert_eq!(named, rank != reporter, "{reason}");
        }
    }
}

#[test]
fn leaving_in_any_order_is_no_failure() {
    for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2]] {
        let world = world(3, &config(60.0));
        on_all(&world, |control| control.barrier().unwrap());
        let mut planes: Vec<_> = world.planes.into_iter().map(Some).collect();
        let mut gone = Vec::new();
        for leaver in order {
            let control = planes[leaver].take().unwrap();
            control.leave();
            drop(control);
            gone.push(leaver);
            for control in planes.iter().flatten() {
                eventually("the leaving arrives", || {
                    gone.iter().all(|&rank| control.has_left(rank))
                });
                assert!(!control.has_left(control.rank()));
            }
        }
        assert!(world.faults.iter().all(|fault| !fault.is_raised()));
    }
}

#[test]
fn barrier_with_a_rank_that_left_is_an_error() {
    for leaver in [0, 1] {
        let world = world(3, &config(60.0));
        world.planes[leaver].leave();
        for control in world
            .planes
            .iter()
            .filter(|control| control.rank() != leaver)
        {
            let error = control.barrier().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Remote);
            assert!(
                error.message().contains(&format!("rank {leaver} (")),
                "{error}"
            );
        }
        let own = world.planes[leaver].barrier().unwrap_err();
        assert_eq!(own.kind(), ErrorKind::InvalidUsage);
        assert!(world.faults.iter().all(|fault| !fault.is_raised()));
    }
}

#[test]
fn drop_without_leaving_is_a_death() {
    for victim in [0, 1] {
        let World { faults, mut planes } = world(3, &config(60.0));
        let name = planes[0].peers()[victim].to_string();
        drop(planes.remove(victim));
        for fault in faults
            .iter()
            .enumerate()
            .filter(|(at, _)| *at != victim)
            .map(|(_, f)| f)
        {
            eventually("the loss is seen", || fault.is_raised());
            let reason = fault.reason().unwrap();
            assert_eq!(reason.kind(), ErrorKind::Remote);
            assert!(
                reason.message().starts_with(&format!("{name} died")),
                "{reason}"
            );
        }
        assert!(!faults[victim].is_raised());
    }
}

#[test]
fn root_that_has_left_still_reports_deaths() {
    let World { faults, mut planes } = world(3, &config(60.0));
    let root = planes.remove(0);
    root.leave();
    drop(root);
    drop(planes.remove(0));
    eventually("rank 2 learns of rank 1", || faults[2].is_raised());
    assert!(faults[2].reason().unwrap().message().contains("rank 1 ("));
    assert!(!faults[0].is_raised(), "rank 0 had left");
}

#[test]
fn different_calls_without_data_are_found() {
    for (a, b) in [(0, 2), (1, 2)] {
        let world = world(3, &config(60.0));
        for control in &world.planes {
            control.log_call(call(Collective::AllReduce, 0, 77));
            control.log_call(call(Collective::SendRecv, 1, control.rank() as u64));
        }
        std::thread::sleep(Duration::from_millis(200));
        assert!(world.faults.iter().all(|fault| !fault.is_raised()));
        world.planes[a].log_call(call(Collective::AllReduce, 1, 1000));
        world.planes[b].log_call(call(Collective::Broadcast, 1, 1024));
        eventually("all know", || {
            world.faults.iter().all(|fault| fault.is_raised())
        });
        for fault in &world.faults {
            let reason = fault.reason().unwrap();
            assert_eq!(reason.kind(), ErrorKind::Mismatch);
            let names = [format!("rank {a} ("), format!("rank {b} (")];
            for word in names
                .iter()
                .map(String::as_str)
                .chain(["all_reduce of 1000", "broadcast of 1024"])
            {
                assert!(reason.message().contains(word), "{reason} lacks {word}");
            }
        }
    }
}

#[test]
fn late_rank_is_named_on_all_ranks() {
    let world = world(3, &config(0.4));
    let results: Vec<_> = std::thread::scope(|scope| {
        let threads = [0, 1].map(|rank| {
            let control = &world.planes[rank];
            scope.spawn(|| control.barrier())
        });
        threads.map(|thread| thread.join().unwrap()).into()
    });
    for result in results {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(error.message().contains("rank 2 ("), "{error}");
    }
    assert!(
        world.planes[1]
            .barrier()
            .unwrap_err()
            .message()
            .contains("no longer agree on the order of exchanges")
    );
}

/// A member knows from the root's heartbeats alone which ranks have contributed.
#[test]
fn late_rank_is_not_guessed_before_a_heartbeat() {
    let config = Config {
        heartbeat: Duration::from_secs(5),
        ..config(0.2)
    };
    let world = world(3, &config);
    // The first heartbeat comes before the all-gather.
    std::thread::sleep(Duration::from_millis(100));
    // Rank 1 contributes before rank 0, and between two heartbeats.
    let [first, second] = [1, 0].map(|rank| world.planes[rank].barrier().unwrap_err());
    assert!(first.message().starts_with("rank 0 ("), "{first}");
    assert!(
        first
            .message()
            .contains(" has not reported which ranks came"),
        "{first}"
    );
    assert!(second.message().starts_with("rank 2 ("), "{second}");
}

#[test]
fn raised_fault_ends_a_barrier() {
    let world = world(2, &config(60.0));
    let error = std::thread::scope(|scope| {
        let control = &world.planes[1];
        let waiting = scope.spawn(|| control.barrier());
        world.faults[1].raise(Error::new(ErrorKind::Aborted, "enough"));
        waiting.join().unwrap().unwrap_err()
    });
    assert_eq!(error.message(), "enough");
}

#[test]
fn raised_fault_is_announced_with_the_next_heartbeat() {
    for victim in [0, 1] {
        let world = world(3, &config(60.0));
        world.faults[victim].raise(Error::new(ErrorKind::Internal, "enough"));
        let name = world.planes[0].peers()[victim].to_string();
        for (rank, fault) in world.faults.iter().enumerate() {
            eventually("all know", || fault.is_raised());
            let expected = if rank == victim {
                "enough".to_string()
            } else {
                format!("{name} reports: enough")
            };
            assert_eq!(fault.reason().unwrap().message(), expected);
        }
    }
}

/// The parent communicator of rank 0 has failed, and that of rank 2, which gives up without a word.
#[test]
fn raised_fault_explains_the_end_of_a_connection() {
    let mut config = config(60.0);
    config.heartbeat = Duration::from_secs(60);
    let World { faults, mut planes } = world(3, &config);
    let name = planes[0].peers()[0].to_string();
    faults[0].raise(Error::new(ErrorKind::Remote, "rank 9 died"));
    drop(planes.remove(2));
    eventually("the loss is seen", || faults[1].is_raised());
    let reason = faults[1].reason().unwrap().message();
    assert_eq!(reason, format!("{name} reports: rank 9 died"));
}

#[test]
fn sixty_four_ranks_join() {
    let world = world(64, &config(60.0));
    let all = on_all(&world, |control| {
        control.all_gather(&[control.rank() as u8]).unwrap()
    });
    let expected: Vec<Vec<u8>> = (0..64).map(|rank| vec![rank]).collect();
    assert!(all.iter().all(|one| *one == expected));
    on_all(&world, ControlPlane::leave);
}

/// Serves a rendezvous in a process that has no descriptors left for 600 ms.
#[test]
fn rendezvous_without_descriptors_waits_and_does_not_spin() {
    use crate::bootstrap::auth::tests::unauthenticated_peer;
    use crate::sys::fork::tests::{limit_descriptors, processor_time};
    assert!(crate::sys::fork::tests::in_child(|| {
        let config = config(60.0);
        let id = UniqueId::create_for_one_host(&config).unwrap();
        let connect = unauthenticated_peer(id.addresses()[0]);
        let limit = limit_descriptors(3);
        connect();
        let spent = processor_time(|| std::thread::sleep(Duration::from_millis(600)));
        limit_descriptors(limit);
        let faults = [Fault::new(), Fault::new()];
        let planes = join_all(&id, &[(0, 2), (1, 2)], &faults, &config);
        planes.iter().all(Result::is_ok) && spent < Duration::from_millis(200)
    }));
}

/// Rank 1 reaches the server but cannot register. Without its error, the other ranks would wait for
/// it for 20 s.
#[test]
fn rank_that_cannot_register_fails_all_ranks_at_once() {
    let good = config(60.0);
    let bad = Config {
        interface: Some("=no-such-interface".into()),
        ..config(60.0)
    };
    let join =
        |id, rank, config| ControlPlane::join(id, rank, 3, config, Fault::new()).unwrap_err();
    let check = |own: &Error, received: [Error; 2]| {
        assert_eq!(own.kind(), ErrorKind::InvalidArgument, "{own}");
        for error in received {
            let words = error.message();
            assert!(words.starts_with("rank 1 (host "), "{words}");
            assert!(words.ends_with(own.message()), "{words}");
        }
    };
    // Ranks join at the same time, then in turn.
    let id = UniqueId::create_for_one_host(&good).unwrap();
    let (join, good, id) = (&join, &good, &id);
    std::thread::scope(|scope| {
        let others = [0, 2].map(|rank| scope.spawn(move || join(id, rank, good)));
        let own = join(id, 1, &bad);
        check(&own, others.map(|thread| thread.join().unwrap()));
    });
    let id = &UniqueId::create_for_one_host(good).unwrap();
    let own = join(id, 1, &bad);
    check(&own, [join(id, 0, good), join(id, 2, good)]);
}

/// The server sends its refusal only after the deadline of a rank, as a server that waits for a
/// core would. The rank still receives it.
#[test]
fn late_refusal_is_received() {
    let deadline = Instant::now() + Duration::from_secs(5);
    let (mut listener, at) = Listener::bind(address::for_one_host()).unwrap();
    let id = crate::bootstrap::id::assemble(0, &[5; 32], &[1; 16], &[at]);
    let failure = Error::new(ErrorKind::Timeout, "rank 0 of 2 did not come");
    let received = std::thread::scope(|scope| {
        let joining = scope.spawn(|| {
            let fault = Fault::new();
            join::rendezvous(&id, 1, 2, &config(60.0), deadline, &fault).map(drop)
        });
        let handshake = rendezvous_server::handshake(&id, 0);
        let fault = Fault::new();
        let peer = listener.accept_until(&handshake, deadline, &fault).unwrap();
        let mut stream = FramedStream::new(peer.unwrap());
        stream.exchange(deadline, &fault).unwrap();
        std::thread::sleep(deadline - Instant::now() + Duration::from_millis(20));
        stream.queue(rendezvous_server::REFUSED, &Body::new(failure.to_bytes()));
        stream.flush();
        joining.join().unwrap()
    });
    assert_eq!(received.unwrap_err(), failure);
}

#[test]
fn closed_ranks_may_end_and_wait_for_each_other() {
    let mut world = world(4, &config(60.0));
    world.planes[2].close();
    let refused = world.planes[2].barrier();
    assert!(refused.is_err_and(|error| error.kind() == ErrorKind::InvalidUsage));
    eventually("the others know", || {
        world
            .planes
            .iter()
            .enumerate()
            .all(|(rank, control)| rank == 2 || control.has_left(2))
    });
    // The rank ends without leaving.
    drop(world.planes.remove(2));
    std::thread::sleep(Duration::from_millis(300));
    assert!(world.faults.iter().all(|fault| !fault.is_raised()));
    on_all(&world, |control| {
        control.close();
        control.wait_closed().unwrap();
    });
    drop(world.planes.remove(0));
    on_all(&world, ControlPlane::leave);
    assert!(world.faults.iter().all(|fault| !fault.is_raised()));
}

/// The root's process has ended, and its connections with it.
#[test]
fn close_without_a_root_returns_at_once() {
    let mut world = world(2, &config(60.0));
    let root = world.planes.remove(0);
    root.close();
    drop(root);
    let last = &world.planes[0];
    eventually("the other has left", || last.has_left(0));
    // Waits until the last rank has seen the end of the connection.
    std::thread::sleep(Duration::from_millis(300));
    let begin = Instant::now();
    last.close();
    let error = last.wait_closed().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Remote, "{error}");
    assert!(begin.elapsed() < Duration::from_secs(10));
}

/// The contribution of a closing rank is empty, and has the generation of the other contributions.
#[test]
fn closing_rank_fails_all_gathers_of_the_others() {
    for (gone, is_first) in [(0, true), (0, false), (1, true), (1, false)] {
        let world = world(3, &config(60.0));
        let exchanges = |control: &ControlPlane| {
            let error = control.all_gather(b"a part").unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Remote, "{error}");
            let who = format!("{} left", world.planes[gone].peers()[gone]);
            assert!(error.message().contains(&who), "{error}");
        };
        std::thread::scope(|scope| {
            let (leaver, others) = {
                let mut others: Vec<_> = world.planes.iter().collect();
                (others.remove(gone), others)
            };
            if is_first {
                leaver.close();
            }
            let exchanging = others
                .iter()
                .map(|control| scope.spawn(|| exchanges(control)));
            let exchanging: Vec<_> = exchanging.collect();
            if !is_first {
                let came = || {
                    let state = world.planes[0].shared.state();
                    let present = state.gather.as_ref().map(|gather| gather.present.clone());
                    present.is_some_and(|present| present.iter().filter(|&&here| here).count() == 2)
                };
                match gone {
                    // Only a root that waits for an all-gather knows which ranks have contributed.
                    0 => std::thread::sleep(Duration::from_millis(100)),
                    _ => eventually("the others exchange", came),
                }
                leaver.close();
            }
            for one in exchanging {
                one.join().unwrap();
            }
            let error = leaver.wait_closed().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Remote, "{error}");
        });
        assert!(world.faults.iter().all(|fault| !fault.is_raised()));
    }
}

#[test]
fn panic_of_the_control_thread_fails_all_ranks() {
    let world = world(3, &config(20.0));
    world.planes[1].shared.command(ControlCommand::Panic);
    let faults = &world.faults;
    eventually("all know", || faults.iter().all(|fault| fault.is_raised()));
    let reason = world.faults[1].reason().unwrap();
    assert_eq!(reason.kind(), ErrorKind::Internal, "{reason}");
    for other in [0, 2] {
        let reason = world.faults[other].reason().unwrap();
        assert!(reason.message().contains("rank 1 ("), "{reason}");
    }
    assert!(world.planes[1].barrier().is_err());
}
