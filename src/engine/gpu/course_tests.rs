//! Courses against the walk of the kernels, message by message.

use super::super::interpreter::order;
use super::super::pack::{Addresses, Blob, work};
use super::*;
use crate::mem::BoxShape;
use crate::plan::{GpuLimits, Limits, Machine, Resident};
use crate::schedule::{self, Hosts};
use crate::simd::Isa;
use crate::types::{Algorithm, CodecSpec, Collective, DType, Fused, TransportKind};

fn limits(hosts: &Hosts, nranks: usize, lanes: usize) -> Limits {
    let shape = BoxShape::new(nranks, 2 << 20, lanes).unwrap();
    let gpu = GpuLimits::new(&shape, Resident::both(16), lanes);
    Limits {
        nranks,
        slot_bytes: gpu.fifos[0].0,
        slots: 2,
        channels: gpu.fifos[0].1,
        algorithm: None,
        machine: Machine {
            transport: TransportKind::Tcp,
            inside: TransportKind::Cuda,
            oversubscribed: false,
            measured: None,
        },
        hosts: hosts.clone(),
        gpu: Some(gpu),
    }
}

fn request(collective: Collective, algorithm: Algorithm, count: usize, codec: &str) -> Request {
    let codec: CodecSpec = codec.parse().unwrap();
    Request {
        collective,
        dtype: DType::F32,
        op: ReduceOp::Avg,
        count,
        root: usize::from(collective.has_root()),
        peer: 2 * usize::from(collective == Collective::SendRecv),
        codec,
        auto: false,
        intra: codec,
        algorithm: Some(algorithm),
        tensor: None,
        feedback: None,
        fused: Fused::ALONE,
    }
}

/// By direction, lane and peer: bytes of each message, as a kernel sends and takes them.
fn walked(plan: &Plan, nranks: usize, lanes: usize) -> [Vec<Vec<Vec<usize>>>; 2] {
    let packed = PackedSchedule::new(&plan.schedule, &plan.pattern).unwrap();
    let mut blob = Blob::default();
    let at = Addresses::default();
    blob.add(&packed, work(plan, ReduceOp::Avg, at).unwrap())
        .unwrap();
    let work = blob.works[0];
    let [mut sent, mut taken] = [(); 2].map(|()| vec![vec![Vec::new(); nranks]; lanes]);
    for lane in 0..usize::from(work.channels) {
        for (pass, first, len) in order(&work, &blob.steps, lane as u64) {
            for step in &blob.steps[first..first + len] {
                let start = (pass * u64::from(work.parts) + u64::from(step.part)) * work.chunk;
                let n = (work.count - start.min(work.count)).min(work.chunk);
                let bytes = plan.wire_bytes(n as usize);
                let first = usize::from(step.peers);
                let sends = first + usize::from(step.nrecv);
                for &peer in &blob.peers[first..sends] {
                    taken[lane][usize::from(peer)].push(bytes);
                }
                for &peer in &blob.peers[sends..sends + usize::from(step.nsend)] {
                    sent[lane][usize::from(peer)].push(bytes);
                }
            }
        }
    }
    [sent, taken]
}

#[test]
fn courses_are_what_kernels_walk() {
    let worlds = [
        Hosts::even(2, 1),
        Hosts::even(2, 2),
        Hosts::even(3, 2),
        Hosts::new([0, 1, 0, 1, 1, 2, 1]),
        Hosts::even(2, 4),
    ];
    let mut messages = 0;
    for hosts in worlds {
        let nranks = hosts.nranks().unwrap();
        for rank in 0..nranks {
            let limits = limits(&hosts, nranks, 4);
            let mut courses = Courses::new(Planner::new(limits.clone(), rank, Isa::Scalar));
            let mut planner = Planner::new(limits, rank, Isa::Scalar);
            for collective in Collective::ALL {
                if collective == Collective::SendRecv && nranks < 3 {
                    continue;
                }
                let mut algorithms = schedule::algorithms(collective).to_vec();
                if schedule::Pattern::no_hierarchy(collective, &hosts).is_none() {
                    algorithms.push(Algorithm::Hierarchical);
                }
                for algorithm in algorithms {
                    for (count, codec) in [(1, "raw"), (70_001, "raw"), (200_003, "linear8")] {
                        if codec != "raw" && !collective.reduces() {
                            continue;
                        }
                        let request = request(collective, algorithm, count, codec);
                        let plan = planner.plan(&request).unwrap();
                        let what = format!("{collective} by {algorithm}, {count} on {hosts}");
                        let words = plan
                            .decided(&request)
                            .signature(plan.algorithm, plan.intra_spec, 77)
                            .words();
                        let found = walked(&plan, nranks, 4);
                        for (way, lanes) in [Way::ToPeer, Way::FromPeer].into_iter().zip(found) {
                            for (lane, peers) in lanes.iter().enumerate() {
                                for (peer, bytes) in peers.iter().enumerate() {
                                    let follower = Follower::new(way, peer, lane);
                                    let what = format!("{what}, {way:?} {peer} on lane {lane}");
                                    follow(follower, bytes, words, &mut courses, &what);
                                    messages += bytes.len();
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    assert!(messages > 80_000, "{messages}");
}

/// A follower finds these lengths.
fn follow(
    mut follower: Follower,
    lengths: &[usize],
    words: [u64; SIGNATURE_WORDS],
    courses: &mut Courses,
    what: &str,
) {
    // Twice: the end of a call is the beginning of the next.
    for _ in 0..2 {
        assert_eq!(follower.next(), None);
        for (index, &bytes) in lengths.iter().enumerate() {
            let found = match (index, follower.way) {
                (_, Way::FromPeer) => follower.expect(words, courses).unwrap(),
                (0, Way::ToPeer) => follower.begin(words, courses).unwrap(),
                (_, Way::ToPeer) => follower.next().expect(what),
            };
            assert_eq!(found, bytes, "{what}: message {index}");
        }
    }
    assert_eq!(follower.next(), None, "{what}");
    if lengths.is_empty() {
        let error = follower.begin(words, courses).unwrap_err();
        let kind = match follower.way {
            Way::ToPeer => ErrorKind::Internal,
            Way::FromPeer => ErrorKind::Mismatch,
        };
        assert_eq!(error.kind(), kind);
        assert!(error.message().contains("not in its schedule"), "{error}");
    }
}

#[test]
fn what_is_no_call_is_an_error_and_not_kept() {
    let limits = limits(&Hosts::even(2, 1), 2, 4);
    let mut courses = Courses::new(Planner::new(limits, 0, Isa::Scalar));
    for words in [[0; 5], [u64::MAX; 5]] {
        assert!(courses.of(&words).is_err());
        for (way, who) in [
            (Way::ToPeer, "a kernel has sent rank 1"),
            (Way::FromPeer, "rank 1 sent"),
        ] {
            let error = Follower::new(way, 1, 0)
                .begin(words, &mut courses)
                .unwrap_err();
            let parts = [who, "of no call"];
            assert!(
                parts.iter().all(|part| error.message().contains(part)),
                "{error}"
            );
        }
    }
    let request = request(Collective::Broadcast, Algorithm::Tree, 10, "raw");
    let signature =
        |root| Request { root, ..request }.signature(Algorithm::Tree, CodecSpec::RAW, 0);
    assert!(courses.of(&signature(1).words()).is_ok());
    assert!(courses.of(&signature(2).words()).is_err());
    assert_eq!(courses.known.len(), 1);
    // The number of a call makes no other.
    let mut words = signature(1).words();
    words[3] = 99;
    assert!(courses.of(&words).is_ok());
    assert_eq!(courses.known.len(), 1);
}
