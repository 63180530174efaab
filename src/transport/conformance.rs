//! Tests the contract of every transport, on ranks that are threads and on ranks that are
//! processes.

mod processes;
mod references;
pub(crate) mod world;

use super::*;
use crate::error::{Error, ErrorKind};
use crate::sys::numa;
use std::time::{Duration, Instant};
use world::{PATIENCE, World, config, configs, recv, send, wait};

/// Returns payload sizes at the edges of lines and slots, then some in between.
fn sizes(slot_bytes: usize) -> impl Iterator<Item = usize> {
    let edges = [0, 1, 63, 64, 65, slot_bytes - 1, slot_bytes];
    edges.into_iter().chain((0..=slot_bytes).step_by(97))
}

fn header(bytes: usize, seed: u64) -> Header {
    Header {
        bytes: bytes as u32,
        signature: std::array::from_fn(|word| {
            (seed + 1)
                .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                .rotate_left(13 * word as u32)
        }),
        crc: 0,
    }
}

fn byte(seed: u64, at: usize) -> u8 {
    (seed as usize * 31 + at * 7 + (at >> 8)) as u8
}

fn fill(slot: &mut [u8], seed: u64) {
    for (at, place) in slot.iter_mut().enumerate() {
        *place = byte(seed, at);
    }
}

fn check(end: &dyn RecvEnd, bytes: usize, seed: u64) {
    assert_eq!(end.header(), header(bytes, seed));
    assert_eq!(end.payload().len(), bytes);
    assert_eq!(end.payload().as_ptr() as usize % 64, 0);
    let wrong = (0..bytes).find(|&at| end.payload()[at] != byte(seed, at));
    assert_eq!(wrong, None, "byte of message {seed} of {bytes} bytes");
}

#[test]
fn message_of_any_size_arrives_whole_and_in_order() {
    for config in configs() {
        let mut config = config;
        (config.tcp_sockets, config.ib_qps) = (3, 3);
        World::new(2).run(&config, |mut links, _| {
            let slot_bytes = links.slot_bytes;
            assert_eq!(links.kinds[1 - links.rank], config.transport);
            assert!(links.buffer_bytes > 0 && links.buffer_bytes <= config.buffer_bytes);
            for channel in 0..links.channels {
                for (seed, bytes) in sizes(slot_bytes).enumerate() {
                    let seed = seed as u64 * 3 + channel as u64;
                    if links.rank == 0 {
                        send(&mut links, 1, channel, header(bytes, seed), |slot| {
                            assert_eq!(slot.len(), slot_bytes);
                            assert_eq!(slot.as_ptr() as usize % 64, 0);
                            fill(&mut slot[..bytes], seed);
                        });
                    } else {
                        recv(&mut links, 0, channel, |end| check(end, bytes, seed));
                    }
                }
            }
        });
    }
}

#[test]
fn counters_pass_sixteen_bits() {
    for config in configs() {
        World::new(2).run(&config, |mut links, _| {
            for number in 0..70_000_u64 {
                if links.rank == 0 {
                    send(&mut links, 1, 0, header(8, number), |slot| {
                        slot[..8].copy_from_slice(&number.to_le_bytes());
                    });
                } else {
                    recv(&mut links, 0, 0, |end| {
                        assert_eq!(end.payload(), number.to_le_bytes());
                        assert_eq!(end.header(), header(8, number));
                    });
                }
            }
        });
    }
}

#[test]
fn slow_receiver_holds_the_sender_back_and_loses_nothing() {
    for config in configs() {
        let world = World::new(2);
        world.run(&config, |mut links, exchange| {
            let mut sent = 0_u64;
            if links.rank == 0 {
                let mut quiet = 0;
                while quiet < 3 {
                    let end = links.sends[1].as_mut().unwrap();
                    if end.ready().unwrap() {
                        fill(end.slot(), sent);
                        let header = header(end.written().len(), sent);
                        end.publish(header);
                        sent += 1;
                        quiet = 0;
                        assert!(
                            sent < 1 << 16,
                            "{} does not hold back",
                            config.transport.unwrap()
                        );
                    } else {
                        links.waiter.idle(9999, Duration::from_millis(10)).unwrap();
                        quiet += 1;
                        // Socket buffers grow, so a full socket may accept more a moment later.
                        let end = links.sends[1].as_mut().unwrap();
                        if end.zero_copy().is_some() && end.flushed().unwrap() {
                            quiet = 0;
                        }
                    }
                }
                // Only sockets hold messages in addition to the slots, and only sockets have
                // zero-copy ends.
                let end = links.sends[1].as_mut().unwrap();
                if end.zero_copy().is_none() {
                    assert_eq!(sent, links.slots as u64);
                }
            }
            let all = exchange.all_gather(&sent.to_le_bytes()).unwrap();
            if links.rank == 1 {
                let total = u64::from_le_bytes(all[0][..].try_into().unwrap());
                for seed in 0..total {
                    let slot_bytes = links.slot_bytes;
                    recv(&mut links, 0, 0, |end| check(end, slot_bytes, seed));
                }
                assert!(!links.recvs[0].as_mut().unwrap().ready().unwrap());
            } else {
                wait(&mut links, |links| {
                    links.sends[1].as_mut().unwrap().flushed().unwrap()
                });
            }
            exchange.barrier().unwrap();
        });
    }
}

/// Each rank fills the buffers of all pairs and channels before it receives.
#[test]
fn full_buffers_in_both_directions_do_not_deadlock() {
    const MESSAGES: u64 = 300;
    for config in configs() {
        World::new(3).run(&config, |mut links, exchange| {
            let ends = links.channels * links.nranks;
            let mut sent = vec![0_u64; ends];
            let mut seen = vec![0_u64; ends];
            let mut quiet = 0;
            let until = Instant::now() + PATIENCE;
            let peers: Vec<usize> = (0..ends)
                .filter(|end| end % links.nranks != links.rank)
                .collect();
            let bytes = links.slot_bytes;
            let mut reading = false;
            while peers
                .iter()
                .any(|&end| sent[end] < MESSAGES || seen[end] < MESSAGES)
            {
                let mut moved = false;
                for &end in &peers {
                    let to = links.sends[end].as_mut().unwrap();
                    if sent[end] < MESSAGES && to.ready().unwrap() {
                        to.slot()[..8].copy_from_slice(&sent[end].to_le_bytes());
                        to.publish(header(bytes, sent[end]));
                        sent[end] += 1;
                        moved = true;
                    }
                    let from = links.recvs[end].as_mut().unwrap();
                    if reading && seen[end] < MESSAGES && from.ready().unwrap() {
                        assert_eq!(from.header(), header(bytes, seen[end]));
                        assert_eq!(from.payload()[..8], seen[end].to_le_bytes());
                        from.release();
                        seen[end] += 1;
                        moved = true;
                    }
                }
                quiet = if moved { 0 } else { quiet + 1 };
                // By now no buffer accepts more, so receiving may begin.
                reading |= quiet > 50;
                links.waiter.idle(quiet, Duration::from_millis(1)).unwrap();
                assert!(
                    Instant::now() < until,
                    "{}: {sent:?} {seen:?}",
                    config.transport.unwrap()
                );
            }
            wait(&mut links, |links| {
                let flushed = |&end: &usize| links.sends[end].as_mut().unwrap().flushed().unwrap();
                peers.iter().all(flushed)
            });
            exchange.barrier().unwrap();
        });
    }
}

/// Rank 0 has filled its buffers to rank 1 and waits for rank 2, which waits for rank 1. Rank 1 waits for
/// messages that only the waiter of rank 0 can move.
#[test]
fn wait_for_one_peer_moves_messages_to_another() {
    for config in configs() {
        World::new(3).run(&config, |mut links, exchange| {
            let mut sent = 0_u64;
            if links.rank == 0 {
                let full = links.slot_bytes;
                let end = links.sends[1].as_mut().unwrap();
                while end.ready().unwrap() {
                    end.publish(header(full, sent));
                    sent += 1;
                }
            }
            let all = exchange.all_gather(&sent.to_le_bytes()).unwrap();
            let total = u64::from_le_bytes(all[0][..].try_into().unwrap());
            let full = links.slot_bytes;
            match links.rank {
                0 => recv(&mut links, 2, 0, |end| check(end, 9, 9)),
                1 => {
                    for seed in 0..total {
                        recv(&mut links, 0, 0, |end| {
                            assert_eq!(end.header(), header(full, seed))
                        });
                    }
                    send(&mut links, 2, 0, header(0, 0), |_| {});
                }
                _ => {
                    recv(&mut links, 1, 0, |end| check(end, 0, 0));
                    send(&mut links, 0, 0, header(9, 9), |slot| fill(slot, 9));
                }
            }
            exchange.barrier().unwrap();
        });
    }
}

/// A rank may compute, or be stopped, for longer than the timeout for dead hosts.
#[test]
fn late_receiver_is_not_reported_as_dead() {
    World::new(2).run(&config(TransportKind::Tcp), |mut links, exchange| {
        let mut sent = 0_u64;
        if links.rank == 0 {
            let until = Instant::now() + Duration::from_millis(4500);
            while Instant::now() < until {
                let end = links.sends[1].as_mut().unwrap();
                if end.ready().unwrap() {
                    fill(end.slot(), sent);
                    let header = header(end.written().len(), sent);
                    end.publish(header);
                    sent += 1;
                } else {
                    links.waiter.idle(9999, Duration::from_millis(10)).unwrap();
                }
            }
        }
        let all = exchange.all_gather(&sent.to_le_bytes()).unwrap();
        let total = u64::from_le_bytes(all[0][..].try_into().unwrap());
        let slot_bytes = links.slot_bytes;
        if links.rank == 1 {
            (0..total).for_each(|seed| recv(&mut links, 0, 0, |end| check(end, slot_bytes, seed)));
        } else {
            wait(&mut links, |links| {
                links.sends[1].as_mut().unwrap().flushed().unwrap()
            });
        }
        exchange.barrier().unwrap();
    });
}

#[test]
fn message_wakes_a_sleeping_receiver() {
    // A lost wake-up would show as a wait far beyond the duration of the test.
    let long = Duration::from_secs(100);
    for config in configs() {
        World::new(2).run_crowded(&config, |mut links, exchange| {
            let (me, peer) = (links.rank, 1 - links.rank);
            let start = Instant::now();
            for round in 0..200_u64 {
                if me == 0 {
                    // The delays vary, so that messages arrive at different points of the
                    // receiver's way to sleep.
                    std::thread::sleep(Duration::from_micros(round * 3 % 100));
                    send(&mut links, peer, 0, header(0, round), |_| {});
                }
                let mut scans = 5000;
                while !links.recvs[peer].as_mut().unwrap().ready().unwrap() {
                    links.waiter.idle(scans, long).unwrap();
                    assert!(
                        start.elapsed() < long,
                        "{}: a wake was lost",
                        config.transport.unwrap()
                    );
                    scans += 1;
                }
                let end = links.recvs[peer].as_mut().unwrap();
                assert_eq!(end.header(), header(0, round));
                end.release();
                if me == 1 {
                    send(&mut links, peer, 0, header(0, round), |_| {});
                }
            }
            assert!(
                start.elapsed() < long,
                "{}: a wake was lost",
                config.transport.unwrap()
            );
            exchange.barrier().unwrap();
        });
    }
}

#[test]
fn free_slot_wakes_a_sleeping_sender() {
    let long = Duration::from_secs(100);
    for config in configs() {
        World::new(2).run_crowded(&config, |mut links, exchange| {
            let peer = 1 - links.rank;
            let start = Instant::now();
            let whole = links.slot_bytes;
            for seed in 0..200 {
                if links.rank == 1 {
                    // Some pauses are long enough for the slots to fill and the sender to sleep.
                    std::thread::sleep(Duration::from_micros(seed % 8 * 100));
                    recv(&mut links, peer, 0, |end| check(end, whole, seed));
                    continue;
                }
                let mut scans = 5000;
                while !links.sends[peer].as_mut().unwrap().ready().unwrap() {
                    links.waiter.idle(scans, long).unwrap();
                    assert!(
                        start.elapsed() < long,
                        "{}: a wake was lost",
                        config.transport.unwrap()
                    );
                    scans += 1;
                }
                let end = links.sends[peer].as_mut().unwrap();
                fill(end.slot(), seed);
                end.publish(header(whole, seed));
            }
            assert!(
                start.elapsed() < long,
                "{}: a wake was lost",
                config.transport.unwrap()
            );
            wait(&mut links, |links| {
                links.sends[peer].as_mut().unwrap().flushed().unwrap()
            });
            exchange.barrier().unwrap();
        });
    }
}

#[test]
fn data_of_a_closed_peer_arrives() {
    for config in configs() {
        World::new(3).run(&config, |mut links, exchange| {
            if links.rank == 0 {
                for seed in 0..3 {
                    send(&mut links, 1, 0, header(100, seed), |slot| fill(slot, seed));
                }
                wait(&mut links, |links| {
                    links.sends[1].as_mut().unwrap().flushed().unwrap()
                });
                drop(links);
                exchange.barrier().unwrap();
                return;
            }
            exchange.barrier().unwrap();
            if links.rank == 1 {
                for seed in 0..3 {
                    recv(&mut links, 0, 0, |end| check(end, 100, seed));
                }
                if !caps(config.transport.unwrap()).unwrap().shares_memory() {
                    let until = Instant::now() + PATIENCE;
                    let error = loop {
                        match links.recvs[0].as_mut().unwrap().ready() {
                            Ok(found) => assert!(!found && Instant::now() < until),
                            Err(error) => break error,
                        }
                        links.waiter.idle(0, Duration::from_millis(1)).unwrap();
                    };
                    assert_eq!(error.kind(), ErrorKind::Remote);
                    for part in ["rank 0 (host", "closed its connection"] {
                        assert!(error.message().contains(part), "{error}");
                    }
                    let error = links.sends[0].as_mut().unwrap().ready().unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Remote);
                } else {
                    assert!(!links.recvs[0].as_mut().unwrap().ready().unwrap());
                }
            }
            // The other two ranks continue; the closed rank does not fail their waits.
            let peer = 3 - links.rank;
            for seed in 0..50 {
                send(&mut links, peer, 1, header(64, seed), |slot| {
                    fill(slot, seed)
                });
                recv(&mut links, peer, 1, |end| check(end, 64, seed));
                links
                    .waiter
                    .idle(seed as u32 * 500, Duration::from_millis(1))
                    .unwrap();
            }
        });
    }
}

#[test]
fn pairs_of_a_world_use_different_transports() {
    [false, true].into_iter().for_each(different_pairs);
}

/// Tests a world whose hosts use RDMA, or TCP if `disabled`.
fn different_pairs(disabled: bool) {
    // Ranks 0 and 1 are threads of one process; rank 2 is another process; rank 3 is on another
    // host.
    let world = World::with(&[(1, 1), (1, 1), (1, 2), (2, 3)]);
    let mut config = config(TransportKind::Tcp);
    (config.transport, config.ib_disable) = (None, disabled);
    world.run(&config, |mut links, exchange| {
        use TransportKind::{Loopback, Shm};
        let far = if disabled {
            TransportKind::Tcp
        } else {
            TransportKind::Rdma
        };
        let expected = [
            [None, Some(Loopback), Some(Shm), Some(far)],
            [Some(Loopback), None, Some(Shm), Some(far)],
            [Some(Shm), Some(Shm), None, Some(far)],
            [Some(far), Some(far), Some(far), None],
        ];
        assert_eq!(links.kinds, expected[links.rank]);
        let peers: Vec<usize> = (0..4).filter(|&peer| peer != links.rank).collect();
        for round in 0..100 {
            for &peer in &peers {
                send(&mut links, peer, 0, header(500, round), |slot| {
                    fill(slot, round)
                });
            }
            for &peer in &peers {
                recv(&mut links, peer, 0, |end| check(end, 500, round));
            }
        }
        exchange.barrier().unwrap();
    });
}

#[test]
fn impossible_setting_is_an_error_on_all_ranks() {
    let mut one = config(TransportKind::Shm);
    one.buffer_bytes = 1000;
    for error in World::new(2).errors(&[one.clone(), one]) {
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.message().contains("need 133120 bytes"), "{error}");
    }
    let apart = World::with(&[(1, 1), (2, 2)]);
    for error in apart.errors(&[config(TransportKind::Shm), config(TransportKind::Shm)]) {
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(
            error
                .message()
                .contains("CINCH_TRANSPORT=shm cannot connect rank")
        );
    }
}

#[test]
fn single_rank_needs_no_buffers() {
    World::new(1).run(&config(TransportKind::Shm), |mut links, _| {
        assert_eq!((links.nranks, links.rank, links.buffer_bytes), (1, 0, 0));
        assert_eq!(links.kinds, [None]);
        assert_eq!((links.sends.len(), links.recvs.len()), (2, 2));
        links
            .waiter
            .idle(100_000, Duration::from_millis(1))
            .unwrap();
    });
}

#[test]
fn fault_ends_connecting() {
    let world = World::new(2);
    let exchange = world.exchange(0);
    let fault = Fault::new();
    fault.raise(Error::new(ErrorKind::Aborted, "enough"));
    world
        .exchange(0)
        .announce(&Error::new(ErrorKind::Aborted, "enough"));
    let error = connect_all(&ConnectContext {
        exchange: &*exchange,
        config: &config(TransportKind::Tcp),
        fault: &fault,
        deadline: Instant::now() + PATIENCE,
        place: RankPlace::Unknown,
        sys: Path::new(numa::SYS),
        verbs: None,
    })
    .unwrap_err();
    assert_eq!(error.message(), "enough");
}
