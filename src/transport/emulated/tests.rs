//! Tests emulated links: shares of bandwidth in simulated time, and real ends, which are never faster than their links.

use super::*;
use crate::config::EmulatedMachine;
use crate::transport::conformance::world::{World, config, recv, send, wait};
use crate::transport::{Header, Links};
use crate::types::{SIGNATURE_WORDS, TransportKind};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A machine of two switches with four GPUs each at one socket; all links have 12 GB/s.
const A: &str = include_str!("../../../tests/topology/A.xml");

/// Two sockets, two switches of two GPUs on each; all PCIe links have 12 GB/s.
const B: &str = include_str!("../../../tests/topology/B.xml");

fn machine(xml: &str, scale: u32) -> EmulatedMachine {
    EmulatedMachine {
        file: "machine.xml".into(),
        xml: xml.into(),
        scale,
    }
}

fn emulated(kind: TransportKind, xml: &str, scale: u32) -> Config {
    Config {
        emulated: Some(machine(xml, scale)),
        ..config(kind)
    }
}

/// Returns MB/s of each flow, a pair of ranks, if all send at once for a simulated second. A flow keeps 8 messages of
/// 128 KiB under way, as two channels with four slots do.
fn rates(xml: &str, flows: &[(usize, usize)]) -> Vec<f64> {
    const BYTES: u32 = 128 << 10;
    const SECOND: u64 = 1_000_000_000;
    let routes = Routes::new(&machine(xml, 100), 8, false).unwrap();
    let clocks = LinkClocks::new(Region::heap(routes.links() * WORD_BYTES).unwrap(), 0);
    let publish =
        |&(from, to): &(usize, usize), now| clocks.reserve(routes.route(from, to), BYTES, now);
    let mut under_way = vec![VecDeque::new(); flows.len()];
    for _ in 0..8 {
        for (flow, arrivals) in flows.iter().zip(&mut under_way) {
            arrivals.push_back(publish(flow, 0));
        }
    }
    let mut delivered = vec![0_u64; flows.len()];
    loop {
        let next = (0..flows.len()).min_by_key(|&flow| under_way[flow][0]);
        let next = next.unwrap();
        let now = under_way[next].pop_front().unwrap();
        if now > SECOND {
            break;
        }
        delivered[next] += u64::from(BYTES);
        under_way[next].push_back(publish(&flows[next], now));
    }
    delivered.iter().map(|&bytes| bytes as f64 / 1e6).collect()
}

fn assert_rates(xml: &str, flows: &[(usize, usize)], expected: &[f64]) {
    let rates = rates(xml, flows);
    for (rate, expected) in rates.iter().zip(expected) {
        let error = (rate / expected - 1.0).abs();
        assert!(error < 0.05, "{flows:?}: {rates:?}, expected {expected}");
    }
}

#[test]
fn one_flow_gets_the_bandwidth_over_the_scale() {
    assert_rates(A, &[(0, 1)], &[120.0]);
    assert_rates(A, &[(0, 4)], &[120.0]);
    // The link between the sockets has 10 GB/s.
    assert_rates(B, &[(0, 4)], &[100.0]);
}

#[test]
fn flows_over_one_way_out_share_it() {
    assert_rates(A, &[(0, 4), (1, 5)], &[60.0, 60.0]);
    assert_rates(
        A,
        &[(0, 4), (1, 5), (2, 6), (3, 7)],
        &[30.0, 30.0, 30.0, 30.0],
    );
    assert_rates(B, &[(0, 4), (1, 5), (2, 6)], &[33.3, 33.3, 33.3]);
}

#[test]
fn directions_of_a_link_do_not_share() {
    assert_rates(A, &[(0, 4), (4, 0)], &[120.0, 120.0]);
}

#[test]
fn flow_inside_a_switch_is_not_slowed_by_flows_across() {
    assert_rates(A, &[(0, 1), (2, 4), (3, 5)], &[120.0, 60.0, 60.0]);
}

/// Sends `count` messages of whole slots from the first half of the ranks to the second half, each rank to one, and
/// returns the time until the last has arrived.
fn stream(links: &mut Links, count: u64) -> Duration {
    let half = links.nranks / 2;
    let bytes = links.slot_bytes;
    let start = Instant::now();
    for number in 0..count {
        let header = Header {
            bytes: bytes as u32,
            signature: [number; SIGNATURE_WORDS],
            crc: 0,
        };
        match links.rank < half {
            true => send(links, links.rank + half, 0, header, |slot| {
                slot.fill(number as u8);
            }),
            false => recv(links, links.rank - half, 0, |end| {
                assert_eq!(end.header(), header);
                assert!(end.payload().iter().all(|&byte| byte == number as u8));
            }),
        }
    }
    wait(links, |links| {
        let mut ends = links.sends.iter_mut().flatten();
        ends.all(|end| end.flushed().unwrap())
    });
    start.elapsed()
}

/// At scale 300, a message of 4 KiB occupies a link of 12 GB/s for 102.4 us.
const MESSAGE: Duration = Duration::from_nanos(102_400);

#[test]
fn messages_take_at_least_the_time_of_their_links() {
    for kind in [TransportKind::Loopback, TransportKind::Shm] {
        World::new(2).run(&emulated(kind, A, 300), |mut links, exchange| {
            let elapsed = stream(&mut links, 200);
            // The receiver may start after the first message has arrived.
            if links.rank == 0 {
                assert!(elapsed >= 200 * MESSAGE, "{kind:?}: {elapsed:?}");
            }
            exchange.barrier().unwrap();
        });
        // Ranks 0 and 1 share the way out of their switch.
        World::new(4).run(&emulated(kind, B, 300), |mut links, exchange| {
            let start = Instant::now();
            exchange.barrier().unwrap();
            stream(&mut links, 100);
            exchange.barrier().unwrap();
            let elapsed = start.elapsed();
            assert!(elapsed >= 200 * MESSAGE, "{kind:?}: {elapsed:?}");
        });
    }
}

/// The message arrives half a second after its publication, without a ring.
#[test]
fn arrival_ends_a_sleep_and_a_flush() {
    let long = Duration::from_secs(100);
    let late = Duration::from_millis(500);
    for kind in [TransportKind::Loopback, TransportKind::Shm] {
        let config = emulated(kind, A, 1_464_844);
        World::new(2).run_crowded(&config, |mut links, exchange| {
            exchange.barrier().unwrap();
            let start = Instant::now();
            let header = Header {
                bytes: 4096,
                ..Header::default()
            };
            if links.rank == 0 {
                send(&mut links, 1, 0, header, |_| {});
                assert!(!links.sends[1].as_mut().unwrap().flushed().unwrap());
            }
            let is_done = |links: &mut Links| match links.rank {
                0 => links.sends[1].as_mut().unwrap().flushed().unwrap(),
                _ => links.recvs[0].as_mut().unwrap().ready().unwrap(),
            };
            let mut scans = 5000;
            while !is_done(&mut links) {
                links.waiter.idle(scans, long).unwrap();
                scans += 1;
            }
            if links.rank == 0 {
                assert!(start.elapsed() >= late);
            }
            assert!(start.elapsed() < long, "{kind:?} slept on");
            exchange.barrier().unwrap();
        });
    }
}

#[test]
fn ranks_that_cannot_be_emulated_are_refused() {
    let errors = |config: Config, nranks| World::new(nranks).errors(&vec![config; nranks]);
    let nine = emulated(TransportKind::Loopback, A, 100);
    for error in errors(nine, 9) {
        let text = error.message();
        assert!(
            text.contains("--emulate machine.xml") && text.contains("no GPU of rank 8"),
            "{error}"
        );
    }
    for error in errors(emulated(TransportKind::Tcp, A, 100), 2) {
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("--emulate needs"), "{error}");
    }
    for (xml, scale, what) in [("<system/>", 100, "no version"), (A, 0, "scale is 0")] {
        for error in errors(emulated(TransportKind::Loopback, xml, scale), 2) {
            assert!(error.message().contains(what), "{error}");
        }
    }
}

/// Rank numbers of the file, not the order of its GPUs, decide which GPU a rank stands for.
#[test]
fn rank_stands_for_the_gpu_with_its_number() {
    let swapped = A
        .replace("rank=\"1\"", "rank=\"x\"")
        .replace("rank=\"4\"", "rank=\"1\"")
        .replace("rank=\"x\"", "rank=\"4\"");
    let hops = |xml: &str, to| {
        let routes = Routes::new(&machine(xml, 1), 8, false).unwrap();
        routes.route(0, to).len()
    };
    assert_eq!([hops(A, 1), hops(A, 4)], [2, 4]);
    assert_eq!([hops(&swapped, 1), hops(&swapped, 4)], [4, 2]);
}
