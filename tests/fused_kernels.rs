//! The fused kernels, run on the host with all ranks side by side: what they give, and that it stays right
//! where the number of the call, of which packets carry 20 bits, comes round, where some ranks are calls
//! ahead of others, and where one makes another call.
#![allow(unsafe_code)]

mod common;
#[path = "cuda/fused.rs"]
mod fused;
#[path = "cuda/fused_coded.rs"]
mod fused_coded;
#[path = "cuda/fused_work.rs"]
mod fused_work;
#[path = "cuda/library.rs"]
mod library;

use common::Rng;
use fused::{World, kernels};
use fused_work::{ALL, By, Does, Work, any};

#[test]
fn calls_give_the_reference_wherever_their_number_stands() {
    let Some(kernels) = kernels() else { return };
    let mut rng = Rng(common::seed());
    // More ranks than are polled at once, too.
    for ranks in [2, 3, 9] {
        let mut world = World::new(*kernels, ranks, Rng(rng.next()));
        // From the beginning, where every packet is sent anew, across the numbers whose 20 bits are 0.
        for begin in [0, (1 << 18) - 6, (1 << 20) - 6] {
            world.jump(begin);
            for call in 0..22 {
                let by = [By::Packets, By::Lines][call % 2];
                let blocks = 1 + rng.below(2);
                world.call(&any(&mut rng, by, ranks, blocks));
            }
        }
    }
}

/// Through codecs, by whose scalar specification they are judged; beside calls without one, with which they
/// share an area and the number of the call.
#[test]
fn calls_through_codecs_give_what_the_specification_says() {
    let Some(kernels) = kernels() else { return };
    let mut rng = Rng(common::seed());
    for (ranks, calls) in [(2, 24), (3, 24), (5, 24), (9, 18), (18, 3)] {
        let mut world = World::with(*kernels, ranks, fused_coded::half(ranks), Rng(rng.next()));
        for call in 0..calls {
            let blocks = 1 + rng.below(2);
            world.call(&match call % 6 {
                5 => any(&mut rng, By::Lines, ranks, blocks),
                _ => fused_coded::any(&mut rng, ranks, blocks),
            });
        }
    }
}

/// Makes calls to which one rank comes late, or in which it is slow.
fn all_with_one_behind(
    world: &mut World,
    works: &[Work],
    ranks: usize,
    slow: usize,
    comes_late: bool,
    rng: &mut Rng,
) {
    let pauses = (0..works.len() * ranks).map(|at| match at % ranks == slow {
        true if comes_late => 60 + rng.below(120) as u32,
        _ => 0,
    });
    let pauses: Vec<u32> = pauses.collect();
    let in_calls = (!comes_late).then_some(slow);
    let right = world.are_right(works, &pauses, in_calls);
    assert!(right, "rank {slow} of {ranks}: {works:?}, {pauses:?}");
}

/// The same where one rank comes late to calls, or is slow in them.
#[test]
fn images_of_calls_to_come_do_not_overtake_others() {
    let Some(kernels) = kernels() else { return };
    let mut rng = Rng(common::seed());
    for ranks in [2, 3] {
        let mut world = World::with(*kernels, ranks, fused_coded::half(ranks), Rng(rng.next()));
        for round in 0..6 {
            let slow = round % ranks;
            let mut works: Vec<Work> = (0..4)
                .map(|_| fused_coded::any(&mut rng, ranks, 1))
                .collect();
            works.push(any(&mut rng, By::Lines, ranks, 1));
            all_with_one_behind(&mut world, &works, ranks, slow, round % 2 == 0, &mut rng);
        }
    }
}

/// A rank may be calls ahead of others: what it sends must not go where they still read.
#[test]
fn halves_are_not_used_anew_before_everyone_is_through_with_them() {
    let Some(kernels) = kernels() else { return };
    let mut rng = Rng(common::seed());
    for ranks in [2, 3] {
        let mut world = World::new(*kernels, ranks, Rng(rng.next()));
        // Calls of one kind, and of all kinds; one rank comes late to them, or is slow in them.
        for round in 0..2 * (ALL.len() + 2) {
            let does = ALL.get(round / 2);
            let slow = (round + 1) % ranks;
            let works = (0..6).map(|call| {
                loop {
                    let by = rng.pick(&[By::Lines, By::Lines, By::Packets]);
                    let mut work = any(&mut rng, by, ranks, 1);
                    if does.is_none_or(|&does| work.does == does) {
                        // The others in turn: between two calls of one of them the slow rank has no part.
                        work.root = (slow + 1 + call % 2) % ranks;
                        break work;
                    }
                }
            });
            let works: Vec<Work> = works.collect();
            all_with_one_behind(&mut world, &works, ranks, slow, round % 2 == 0, &mut rng);
        }
    }
}

/// A packet that only long messages have keeps its flag from the last of them. When the flags have come
/// round, it must not pass for one of a new message: every 2^18 calls all packets are sent anew.
#[test]
fn packets_of_long_ago_are_not_taken_for_new_ones() {
    let Some(kernels) = kernels() else { return };
    let mut rng = Rng(common::seed());
    for (short, long) in [
        (Does::AllReduce, Does::AllReduce),
        (Does::AllReduceTwice, Does::AllReduceTwice),
        (Does::AllGather, Does::AllToAll),
        (Does::AllReduceTwice, Does::ReduceScatter),
        (Does::AllReduce, Does::AllReduceTwice),
    ] {
        const ROUND: u64 = 1 << 20;
        let short = Work::new(short, By::Packets, 1, 1);
        let mut long = Work::new(long, By::Packets, 1, 1);
        long.count = long.most(3);
        for refreshes in [true, false] {
            let mut world = World::new(*kernels, 3, Rng(rng.next()));
            world.jump(1000);
            world.call(&long);
            if refreshes {
                world.jump((1 << 18) - 3);
                for _ in 0..8 {
                    world.call(&short);
                }
            }
            world.jump(1000 + ROUND);
            // Else the ranks take what is left of the message of a round ago.
            assert_eq!(world.is_right(&long), refreshes, "{short:?}, {long:?}");
        }
    }
}

/// What a rank sends in another call than the others make is not taken for what they wait for: they say so
/// after a while, and so does it, and the next call that all make is right.
#[test]
fn messages_of_another_call_are_not_understood() {
    let Some(kernels) = kernels() else { return };
    let mut rng = Rng(common::seed());
    for ranks in [2, 3] {
        for by in [By::Packets, By::Lines] {
            let mut world = World::new(*kernels, ranks, Rng(rng.next()));
            for stranger in 0..ranks {
                let work = Work::new(Does::AllReduce, by, 1, 1);
                world.call(&work);
                world.stranger = Some(stranger);
                assert!(!world.is_right(&work), "{work:?} over {ranks}");
                assert_eq!(world.troubled(), ranks, "{work:?} over {ranks}");
                world.stranger = None;
            }
        }
    }
}
