//! Runs the fused kernels on the host, all ranks side by side, and compares results with a
//! reference. In some tests the call's sequence number wraps around, because ll packets carry only
//! 20 bits of it. In other tests some ranks are several calls ahead, or a rank makes a different
//! call.

use super::fused::{World, kernels};
use super::fused_coded;
use super::fused_work::{ALL, Does, Protocol, Work, any, half};
use crate::support::{self, Rng};
use cinch::codec::FUSED_CODECS;
use cinch::types::CodecSpec;

#[test]
fn calls_at_any_sequence_number_give_the_reference() {
    let Some(kernels) = kernels() else { return };
    let mut rng = Rng(support::seed());
    // With 9 ranks a thread has several peers to poll.
    for ranks in [2, 3, 9] {
        let mut world = World::new(*kernels, ranks, Rng(rng.next()));
        // Each series starts at a sequence number. The first starts where kernels rewrite all
        // packets; the others cross a later rewrite and the wrap of the 20-bit flags.
        for begin in [0, (1 << 18) - 6, (1 << 20) - 6] {
            world.jump(begin);
            for call in 0..22 {
                let protocol = [Protocol::Ll, Protocol::Ll128][call % 2];
                let blocks = 1 + rng.below(2);
                world.call(&any(&mut rng, protocol, ranks, blocks));
            }
        }
    }
}

/// Compares the results of compressed calls with the scalar codec. Calls without a codec run in
/// between, because they share areas and the sequence number with compressed calls.
#[test]
fn calls_through_codecs_equal_the_scalar_codec() {
    for kind in FUSED_CODECS {
        let has = |spec: &&str| spec.parse().is_ok_and(|spec: CodecSpec| spec.kind == kind);
        assert!(fused_coded::SPECS.iter().any(has), "{}", kind.name());
    }
    let Some(kernels) = kernels() else { return };
    let mut rng = Rng(support::seed());
    for (ranks, calls) in [(2, 36), (3, 36), (5, 36), (9, 24), (18, 4)] {
        let mut world = World::with(*kernels, ranks, fused_coded::half(ranks), Rng(rng.next()));
        // The second half of the calls begins where packets are rewritten, and crosses the wrap of their flags.
        for call in 0..calls {
            if call == calls / 2 {
                world.jump((1 << 20) - 4);
            }
            let blocks = 1 + rng.below(2);
            let protocol = rng.pick(&[Protocol::Ll, Protocol::Ll128]);
            world.call(&match call % 6 {
                5 => any(&mut rng, protocol, ranks, blocks),
                _ => fused_coded::any(&mut rng, ranks, blocks),
            });
        }
    }
}

/// Makes several calls while one rank lags behind: it begins late, or polls slowly during the
/// calls.
fn calls_with_one_rank_behind(
    world: &mut World,
    works: &[Work],
    ranks: usize,
    slow: usize,
    is_late: bool,
    rng: &mut Rng,
) {
    let pauses = (0..works.len() * ranks).map(|at| match at % ranks == slow {
        true if is_late => 60 + rng.below(120) as u32,
        _ => 0,
    });
    let pauses: Vec<u32> = pauses.collect();
    let in_calls = (!is_late).then_some(slow);
    let right = world.are_correct(works, &pauses, in_calls);
    assert!(right, "rank {slow} of {ranks}: {works:?}, {pauses:?}");
}

/// A rank that is late or slow must not take the encoded tiles of a later call for those of its
/// call.
#[test]
fn coded_calls_with_one_rank_behind_give_the_reference() {
    let Some(kernels) = kernels() else { return };
    let mut rng = Rng(support::seed());
    for ranks in [2, 3] {
        let mut world = World::with(*kernels, ranks, fused_coded::half(ranks), Rng(rng.next()));
        for round in 0..6 {
            let slow = round % ranks;
            let mut works: Vec<Work> = (0..4)
                .map(|_| fused_coded::any(&mut rng, ranks, 1))
                .collect();
            let protocol = [Protocol::Ll, Protocol::Ll128][round / 2 % 2];
            works.push(any(&mut rng, protocol, ranks, 1));
            calls_with_one_rank_behind(&mut world, &works, ranks, slow, round % 2 == 0, &mut rng);
        }
    }
}

/// A rank may be several calls ahead of others. The data that it sends must not overwrite data that
/// the others still read.
#[test]
fn area_half_with_one_rank_behind_is_not_overwritten() {
    let Some(kernels) = kernels() else { return };
    let mut rng = Rng(support::seed());
    for ranks in [2, 3] {
        let mut world = World::new(*kernels, ranks, Rng(rng.next()));
        // Makes calls of one operation in some rounds, and of all operations in the others. One
        // rank begins late, or polls slowly.
        for round in 0..2 * (ALL.len() + 2) {
            let does = ALL.get(round / 2);
            let slow = (round + 1) % ranks;
            let works = (0..6).map(|call| {
                loop {
                    let protocol = rng.pick(&[Protocol::Ll128, Protocol::Ll128, Protocol::Ll]);
                    let mut work = any(&mut rng, protocol, ranks, 1);
                    if does.is_none_or(|&does| work.does == does) {
                        // The ranks other than the slow one are roots in turn, so the slow rank
                        // sends nothing between two calls with one root.
                        work.root = (slow + 1 + call % 2) % ranks;
                        break work;
                    }
                }
            });
            let works: Vec<Work> = works.collect();
            calls_with_one_rank_behind(&mut world, &works, ranks, slow, round % 2 == 0, &mut rng);
        }
    }
}

/// A packet that only long messages use keeps the flag of the last long message. Flags repeat after
/// 2^20 calls, and then the receiver must not take the old packet for new. So kernels rewrite all
/// packets every 2^18 calls.
#[test]
fn packets_after_the_flags_wrap_are_refreshed() {
    let Some(kernels) = kernels() else { return };
    let mut rng = Rng(support::seed());
    let coded: CodecSpec = "linear8".parse().unwrap();
    for ([short, long], codecs) in [
        ([Does::AllReduce; 2], [None; 2]),
        ([Does::TwoShotAllReduce; 2], [None; 2]),
        ([Does::AllGather, Does::AllToAll], [None; 2]),
        ([Does::TwoShotAllReduce, Does::ReduceScatter], [None; 2]),
        ([Does::AllReduce, Does::TwoShotAllReduce], [None; 2]),
        ([Does::AllReduce; 2], [Some(coded); 2]),
        ([Does::TwoShotAllReduce; 2], [Some(coded); 2]),
        ([Does::AllReduce, Does::TwoShotAllReduce], [Some(coded); 2]),
        ([Does::TwoShotAllReduce, Does::AllGather], [Some(coded); 2]),
        (
            [Does::TwoShotAllReduce, Does::AllReduce],
            [None, Some(coded)],
        ),
        (
            [Does::TwoShotAllReduce, Does::AllGather],
            [Some(coded), None],
        ),
    ] {
        const ROUND: u64 = 1 << 20;
        let [short, mut long] = [(short, codecs[0]), (long, codecs[1])].map(|(does, codec)| Work {
            codec,
            ..Work::new(does, Protocol::Ll, 1, 1)
        });
        long.count = match long.codec {
            None => long.most(3),
            Some(codec) => fused_coded::most(long.does, codec, Protocol::Ll, 3),
        };
        for refreshes in [true, false] {
            let half = match codecs {
                [None, None] => half(3),
                _ => fused_coded::half(3),
            };
            let mut world = World::with(*kernels, 3, half, Rng(rng.next()));
            world.jump(1000);
            world.call(&long);
            if refreshes {
                world.jump((1 << 18) - 3);
                for _ in 0..8 {
                    world.call(&short);
                }
            }
            world.jump(1000 + ROUND);
            // Without the rewrite, ranks accept packets that were sent 2^20 calls earlier, here in place of those of the
            // last rank, which is late.
            let pauses = [0, 0, 200, 0, 0, 0];
            let right = world.are_correct(&[long, short], &pauses, None);
            assert_eq!(right, refreshes, "{short:?}, {long:?}");
        }
    }
}

/// Ranks reject messages of a call with another signature. All ranks report a timeout, and the next
/// call that all ranks make has the right result.
#[test]
fn message_of_another_call_is_reported_by_all_ranks() {
    let Some(kernels) = kernels() else { return };
    let mut rng = Rng(support::seed());
    for ranks in [2, 3] {
        for (protocol, codec) in [
            (Protocol::Ll, None),
            (Protocol::Ll128, None),
            (Protocol::Ll, "linear8".parse().ok()),
            (Protocol::Ll128, "linear8".parse().ok()),
        ] {
            let mut world = World::with(*kernels, ranks, fused_coded::half(ranks), Rng(rng.next()));
            for other in 0..ranks {
                let work = Work {
                    codec,
                    ..Work::new(Does::AllReduce, protocol, 1, 1)
                };
                world.call(&work);
                world.other_call = Some(other);
                assert!(!world.is_correct(&work), "{work:?} over {ranks}");
                assert_eq!(world.failures(), ranks, "{work:?} over {ranks}");
                world.other_call = None;
            }
        }
    }
}
