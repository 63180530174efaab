//! Tests zero-copy messages, and messages through slots on transports without zero-copy ends.

use super::world::{World, config, configs, wait};
use super::{byte, check, header, sizes};
use crate::transport::{Header, Links};
use crate::types::TransportKind;

/// Sends one message: from memory of the test if `lent` is set and the transport has zero-copy
/// ends, else through a slot.
fn send(links: &mut Links, to: usize, channel: usize, message: (usize, u64), lent: bool) {
    let (bytes, seed) = message;
    let index = channel * links.nranks + to;
    let payload: Vec<u8> = (0..bytes).map(|at| byte(seed, at)).collect();
    let header = header(bytes, seed);
    let lent = lent && links.sends[index].as_mut().unwrap().zero_copy().is_some();
    wait(links, |links| {
        let end = links.sends[index].as_mut().unwrap();
        if lent {
            let end = end.zero_copy().unwrap();
            return end.send_from(header, &payload).unwrap();
        }
        if !end.ready().unwrap() {
            return false;
        }
        end.slot()[..bytes].copy_from_slice(&payload);
        end.publish(header);
        true
    });
}

/// Receives one message: into memory of the test if `lent` is set and the transport has zero-copy
/// ends, else through a slot.
fn recv(links: &mut Links, from: usize, channel: usize, message: (usize, u64), lent: bool) {
    let (bytes, seed) = message;
    let index = channel * links.nranks + from;
    let lent = lent && links.recvs[index].as_mut().unwrap().zero_copy().is_some();
    let mut place = Vec::new();
    let mut found: Option<Header> = None;
    wait(links, |links| {
        let end = links.recvs[index].as_mut().unwrap();
        if lent {
            let end = end.zero_copy().unwrap();
            let Some(header) = end.expect().unwrap() else {
                return false;
            };
            assert_eq!(*found.get_or_insert(header), header);
            place.resize(header.bytes as usize, 0);
            return end.recv_into(&mut place).unwrap();
        }
        if !end.ready().unwrap() {
            return false;
        }
        check(&**end, bytes, seed);
        end.release();
        true
    });
    if lent {
        assert_eq!(found, Some(header(bytes, seed)));
        let wrong = (0..bytes).find(|&at| place[at] != byte(seed, at));
        assert_eq!(wrong, None, "byte of message {seed} of {bytes} bytes");
    }
}

#[test]
fn zero_copy_and_slots_combine_on_both_sides() {
    for config in configs() {
        for sockets in [1, 3] {
            let mut config = config.clone();
            (config.tcp_sockets, config.ib_qps) = (sockets, sockets);
            World::new(2).run(&config, |mut links, _| {
                let (peer, slot_bytes) = (1 - links.rank, links.slot_bytes);
                for channel in 0..links.channels {
                    for (seed, bytes) in sizes(slot_bytes).enumerate() {
                        // Covers all combinations of zero-copy messages and slots at sender and
                        // receiver, in both directions.
                        let (out, back) = (seed % 4, seed % 7 % 4);
                        let (first, second) = match links.rank {
                            0 => (out, back),
                            _ => (back, out),
                        };
                        let seed = seed as u64;
                        send(&mut links, peer, channel, (bytes, seed), first & 1 == 0);
                        recv(&mut links, peer, channel, (bytes, seed), second & 2 == 0);
                    }
                }
            });
        }
    }
}

/// A sender completes as many messages as its receiver has slots before the receiver calls anything. Over TCP
/// they exceed the socket buffers, so a waiting sender must also receive the messages of others.
#[test]
fn messages_up_to_the_slots_leave_without_their_receiver() {
    for config in configs() {
        let mut config = config;
        let slot_bytes = match config.transport {
            Some(TransportKind::Tcp) => 4 << 20,
            _ => 64 << 10,
        };
        (config.slot_bytes, config.buffer_bytes, config.channels) = (slot_bytes, 1 << 30, 1);
        World::new(3).run(&config, |mut links, exchange| {
            let (rank, bytes) = (links.rank, links.slot_bytes);
            for round in 0..2 {
                let seeds = (0..links.slots as u64).map(|number| 100 * round + number);
                for to in (0..3).filter(|&to| to != rank) {
                    for seed in seeds.clone() {
                        send(&mut links, to, 0, (bytes, seed), true);
                    }
                }
                for from in (0..3).filter(|&from| from != rank) {
                    for seed in seeds.clone() {
                        recv(&mut links, from, 0, (bytes, seed), (seed + round) % 3 > 0);
                    }
                }
            }
            exchange.barrier().unwrap();
        });
    }
}

/// A message that exceeds the socket buffers leaves in parts; `ready` returns false meanwhile.
#[test]
fn late_receiver_holds_a_zero_copy_message_back() {
    let mut config = config(TransportKind::Tcp);
    (config.slot_bytes, config.slots, config.buffer_bytes) = (8 << 20, 2, 1 << 30);
    (config.channels, config.tcp_sockets) = (1, 2);
    World::new(2).run(&config, |mut links, exchange| {
        const MESSAGES: u64 = 9;
        let bytes = links.slot_bytes;
        if links.rank == 1 {
            exchange.barrier().unwrap();
            for seed in 0..MESSAGES {
                recv(&mut links, 0, 0, (bytes, seed), seed % 4 != 3);
            }
            return;
        }
        let payload = |seed| -> Vec<u8> { (0..bytes).map(|at| byte(seed, at)).collect() };
        let mut sent = 0;
        let end = links.sends[1].as_mut().unwrap().zero_copy().unwrap();
        // The receiver does not poll, so not even its slots fill.
        while end.send_from(header(bytes, sent), &payload(sent)).unwrap() {
            sent += 1;
            assert!(sent < MESSAGES, "sockets hold everything");
        }
        assert!(!links.sends[1].as_mut().unwrap().ready().unwrap());
        exchange.barrier().unwrap();
        for seed in sent..MESSAGES {
            send(&mut links, 1, 0, (bytes, seed), true);
        }
        wait(&mut links, |links| {
            links.sends[1].as_mut().unwrap().flushed().unwrap()
        });
    });
}
