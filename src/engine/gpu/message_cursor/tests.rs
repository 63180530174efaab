//! Compares [`MessageSizesCache`] with a walk in the kernels' order, message by message.

use super::super::pack::{Addresses, WorkBuffer, work};
use super::super::tests::interpreter::order;
use super::*;
use crate::cpu::Isa;
use crate::gpu::abi::MAX_PEERS;
use crate::mem::PeerBufferLayout;
use crate::plan::{GpuLimits, Limits, MachineFacts, Resident};
use crate::schedule::{self, Groups};
use crate::transport::HostLoad;
use crate::types::{Algorithm, CallTuning, CodecSpec, Collective, DType, Fused, TransportKind};

fn limits(hosts: &Groups, nranks: usize, channels: usize) -> Limits {
    let budget = (2 << 20) * nranks.div_ceil(8);
    let shape = PeerBufferLayout::new(nranks, budget, channels).unwrap();
    let gpu = GpuLimits::new(&shape, Resident::both(16), channels);
    Limits {
        nranks,
        slot_bytes: gpu.fifos[0].0,
        slots: 2,
        channels: gpu.fifos[0].1,
        algorithm: None,
        machine: MachineFacts {
            transport: TransportKind::Tcp,
            inside: TransportKind::Cuda,
            load: HostLoad::LIGHT,
            measured: None,
        },
        hosts: hosts.clone(),
        topology: None,
        gpu: Some(gpu),
    }
}

fn request(collective: Collective, algorithm: Algorithm, count: usize, codec: &str) -> Request {
    Request {
        collective,
        dtype: DType::F32,
        op: ReduceOp::Avg,
        count,
        root: usize::from(collective.has_root()),
        peer: 2 * usize::from(collective == Collective::SendRecv),
        codec: codec.parse().unwrap(),
        algorithm: Some(algorithm),
        tuning: CallTuning::AUTO,
        tensor: None,
        feedback: None,
        fused: Fused::ALONE,
    }
}

/// Returns the bytes of each message that a kernel sends and receives, by direction, channel and peer.
fn walked(plan: &Plan, nranks: usize, channels: usize) -> [Vec<Vec<Vec<usize>>>; 2] {
    let [mut sent, mut taken] = [(); 2].map(|()| vec![vec![Vec::new(); nranks]; channels]);
    for packed in PackedSchedule::launches(&plan.schedule, &plan.pattern).unwrap() {
        let mut work_buffer = WorkBuffer::default();
        let at = Addresses::default();
        work_buffer
            .add(&packed, work(plan, ReduceOp::Avg, at).unwrap())
            .unwrap();
        add_walked(plan, &work_buffer, &mut sent, &mut taken);
    }
    [sent, taken]
}

/// Bytes of messages by channel and peer.
type Bytes = [Vec<Vec<usize>>];

/// Adds the messages of one launch.
fn add_walked(plan: &Plan, work_buffer: &WorkBuffer, sent: &mut Bytes, taken: &mut Bytes) {
    let work = work_buffer.works[0];
    let rank = |peer: u8| usize::from(work_buffer.ranks[usize::from(peer)]);
    for channel in 0..usize::from(work.channels) {
        for (pass, first, len) in order(&work, &work_buffer.steps, channel as u64) {
            for step in &work_buffer.steps[first..first + len] {
                let start = (pass * u64::from(work.parts) + u64::from(step.part)) * work.chunk;
                let n = (work.count - start.min(work.count)).min(work.chunk);
                let bytes = plan.wire_bytes(n as usize);
                let first = usize::from(step.peers);
                let sends = first + usize::from(step.nrecv);
                for &peer in &work_buffer.peers[first..sends] {
                    taken[channel][rank(peer)].push(bytes);
                }
                for &peer in &work_buffer.peers[sends..sends + usize::from(step.nsend)] {
                    sent[channel][rank(peer)].push(bytes);
                }
            }
        }
    }
}

#[test]
fn message_sizes_match_the_kernels_walk() {
    let worlds = [
        Groups::even_hosts(2, 1),
        Groups::even_hosts(2, 2),
        Groups::even_hosts(3, 2),
        Groups::of_hosts([0, 1, 0, 1, 1, 2, 1]),
        Groups::even_hosts(2, 4),
        // All_to_alls take several launches.
        Groups::even_hosts(5, 8),
    ];
    let mut messages = 0;
    for hosts in worlds {
        let nranks = hosts.nranks().unwrap();
        let few = nranks <= MAX_PEERS;
        for rank in (0..nranks).step_by(if few { 1 } else { 13 }) {
            let limits = limits(&hosts, nranks, 4);
            let mut message_sizes =
                MessageSizesCache::new(Planner::new(limits.clone(), rank, Isa::Scalar));
            let mut planner = Planner::new(limits, rank, Isa::Scalar);
            for collective in Collective::ALL {
                if collective == Collective::SendRecv && nranks < 3 {
                    continue;
                }
                let mut algorithms = schedule::algorithms(collective).to_vec();
                if schedule::SchedulePattern::no_hierarchy(collective, &hosts).is_none() {
                    algorithms.push(Algorithm::Hierarchical);
                }
                for algorithm in algorithms {
                    for (count, codec) in [(1, "raw"), (70_001, "raw"), (200_003, "linear8")] {
                        if codec != "raw" && !collective.reduces() {
                            continue;
                        }
                        let request = request(collective, algorithm, count, codec);
                        let plan = match planner.plan(&request) {
                            Ok(plan) => plan,
                            Err(error) => {
                                assert!(!few && error.kind() == ErrorKind::Unsupported, "{error}");
                                continue;
                            }
                        };
                        let what = format!("{collective} by {algorithm}, {count} on {hosts}");
                        let words = plan
                            .decided(&request)
                            .signature(plan.algorithm, plan.specs.intra, 77)
                            .words();
                        let found = walked(&plan, nranks, 4);
                        for (way, channels) in
                            [MessageDirection::ToPeer, MessageDirection::FromPeer]
                                .into_iter()
                                .zip(found)
                        {
                            for (channel, peers) in channels.iter().enumerate() {
                                for (peer, bytes) in peers.iter().enumerate() {
                                    let cursor = MessageCursor::new(way, peer, channel);
                                    let what =
                                        format!("{what}, {way:?} {peer} on channel {channel}");
                                    follow(cursor, bytes, words, &mut message_sizes, &what);
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

/// A proxy knows a call by its signature alone, and must plan it on as many channels as the engine.
#[test]
fn bound_of_channels_is_in_the_signature() {
    let limits = limits(&Groups::even_hosts(2, 2), 4, 4);
    let mut message_sizes = MessageSizesCache::new(Planner::new(limits.clone(), 0, Isa::Scalar));
    let mut planner = Planner::new(limits, 0, Isa::Scalar);
    for most in 0..=4 {
        let mut request = request(Collective::AllReduce, Algorithm::Ring, 700_001, "raw");
        request.tuning.max_channels = std::num::NonZeroU8::new(most);
        let plan = planner.plan(&request).unwrap();
        let words = plan
            .decided(&request)
            .signature(plan.algorithm, plan.specs.intra, 77)
            .words();
        let found = message_sizes.get(&words).unwrap();
        assert_eq!(found.plan.channels, plan.channels);
        assert_eq!(found.plan.geometry, plan.geometry);
        assert_eq!(plan.channels, if most == 0 { 4 } else { most.into() });
    }
}

/// Checks that `cursor` yields these message lengths, for two calls in a row.
fn follow(
    mut cursor: MessageCursor,
    lengths: &[usize],
    words: [u64; SIGNATURE_WORDS],
    message_sizes: &mut MessageSizesCache,
    what: &str,
) {
    // The second call begins at the position where the first call ended.
    for _ in 0..2 {
        assert_eq!(cursor.next(), None);
        for (index, &bytes) in lengths.iter().enumerate() {
            let found = match (index, cursor.direction) {
                (_, MessageDirection::FromPeer) => cursor.expect(words, message_sizes).unwrap(),
                (0, MessageDirection::ToPeer) => cursor.begin(words, message_sizes).unwrap(),
                (_, MessageDirection::ToPeer) => cursor.next().expect(what),
            };
            assert_eq!(found, bytes, "{what}: message {index}");
        }
    }
    assert_eq!(cursor.next(), None, "{what}");
    if lengths.is_empty() {
        let error = cursor.begin(words, message_sizes).unwrap_err();
        let kind = match cursor.direction {
            MessageDirection::ToPeer => ErrorKind::Internal,
            MessageDirection::FromPeer => ErrorKind::Mismatch,
        };
        assert_eq!(error.kind(), kind);
        assert!(error.message().contains("not in its schedule"), "{error}");
    }
}

#[test]
fn unknown_signature_is_an_error_and_is_not_cached() {
    let limits = limits(&Groups::even_hosts(2, 1), 2, 4);
    let mut message_sizes = MessageSizesCache::new(Planner::new(limits, 0, Isa::Scalar));
    for words in [[0; 5], [u64::MAX; 5]] {
        assert!(message_sizes.get(&words).is_err());
        for (way, who) in [
            (MessageDirection::ToPeer, "a kernel has sent rank 1"),
            (MessageDirection::FromPeer, "rank 1 sent"),
        ] {
            let error = MessageCursor::new(way, 1, 0)
                .begin(words, &mut message_sizes)
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
    assert!(message_sizes.get(&signature(1).words()).is_ok());
    assert!(message_sizes.get(&signature(2).words()).is_err());
    assert_eq!(message_sizes.known.len(), 1);
    // Calls that differ in the sequence number alone share one cache entry.
    let mut words = signature(1).words();
    words[3] = 99;
    assert!(message_sizes.get(&words).is_ok());
    assert_eq!(message_sizes.known.len(), 1);
}
