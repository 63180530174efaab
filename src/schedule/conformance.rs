//! Verifies the schedules of every generator, and checks that the verifier detects broken
//! schedules.

use super::hierarchical_tests::Rng;
use super::*;
use crate::error::Error;
use crate::types::{Algorithm, Collective};
use std::collections::{HashMap, HashSet};

/// The lower bound of `CINCH_SLOTS`.
const SLOTS: usize = 2;

fn schedules(pattern: &SchedulePattern) -> Vec<Schedule> {
    let ranks = 0..pattern.nranks;
    ranks.map(|rank| pattern.schedule(rank).unwrap()).collect()
}

fn pattern(collective: Collective, algorithm: Algorithm, nranks: usize) -> SchedulePattern {
    SchedulePattern {
        peer: nranks - 1,
        ..SchedulePattern::flat(collective, algorithm, nranks)
    }
}

/// Returns a pattern for each supported pair of collective and algorithm, with each of the given
/// roots.
fn patterns(nranks: usize, roots: &[usize]) -> Vec<SchedulePattern> {
    let mut patterns = Vec::new();
    for collective in Collective::ALL {
        for &algorithm in algorithms(collective) {
            let of = pattern(collective, algorithm, nranks);
            if collective == Collective::SendRecv {
                for (&root, &peer) in roots.iter().flat_map(|r| roots.iter().map(move |p| (r, p))) {
                    let of = of.clone();
                    patterns.push(SchedulePattern { root, peer, ..of });
                }
            } else if collective.has_root() {
                let with = |&root| SchedulePattern { root, ..of.clone() };
                patterns.extend(roots.iter().map(with));
            } else {
                patterns.push(of);
            }
        }
    }
    patterns
}

fn cost_counts(schedule: &Schedule) -> CostCounts {
    super::cost_counts(schedule, &Groups::ONE)
}

/// Checks that no rank encodes a chunk both before and after its sum is finished. The encoding error of each
/// element then has a single source; residuals of `engine::gpu` rely on it.
pub(super) fn check_roles(pattern: &SchedulePattern, schedules: &[Schedule]) {
    if !pattern.collective.reduces() {
        return;
    }
    for schedule in schedules {
        let mut owned = HashSet::new();
        let mut passed_on = HashSet::new();
        for step in &schedule.steps {
            match step.op {
                Op::RecvReduceCopySend | Op::RecvReduceFinishSend => owned.insert(step.chunk),
                Op::Send | Op::RecvReduceSend => passed_on.insert(step.chunk),
                _ => false,
            };
        }
        let both: Vec<_> = owned.intersection(&passed_on).collect();
        assert!(
            both.is_empty(),
            "{pattern:?}: rank {} encodes {both:?} as both",
            schedule.rank
        );
    }
}

fn prove(pattern: &SchedulePattern, passes: usize) {
    let schedules = schedules(pattern);
    check_roles(pattern, &schedules);
    assert!(pattern.slots() == SLOTS || pattern.rings > 1, "{pattern:?}");
    let limits = VerifyLimits {
        slots: pattern.slots(),
        passes,
    };
    let proof =
        verify(pattern, &schedules, limits).unwrap_or_else(|error| panic!("{pattern:?}: {error}"));
    let counts: Vec<_> = schedules.iter().map(cost_counts).collect();
    let sends: usize = counts.iter().map(|counts| counts.sends).sum();
    let recvs: usize = counts.iter().map(|counts| counts.recvs).sum();
    assert_eq!((sends, recvs), (proof.messages, proof.messages));
    let to_itself = pattern.collective == Collective::SendRecv && pattern.root == pattern.peer;
    let expected = if to_itself { 0 } else { pattern.hops().total() };
    assert_eq!(proof.hops, expected, "{pattern:?}");
}

fn overlapping(pattern: &SchedulePattern) -> usize {
    pattern.schedule(0).unwrap().stages + 2
}

#[test]
fn all_small_schedules_are_right() {
    for nranks in 1..=17 {
        let roots: Vec<_> = match nranks {
            1..=8 => (0..nranks).collect(),
            _ => vec![0, 1, nranks / 2, nranks - 1],
        };
        for pattern in patterns(nranks, &roots) {
            prove(&pattern, overlapping(&pattern));
            // Verifies a single pass, then many passes with more slots per connection.
            prove(&pattern, 1);
            let limits = VerifyLimits {
                slots: 8,
                passes: 20,
            };
            verify(&pattern, &schedules(&pattern), limits).unwrap();
        }
    }
}

#[test]
fn several_rings_per_channel_verify() {
    for nranks in 2..=17 {
        for rings in 2..=5 {
            let all = patterns(nranks, &[0, nranks / 2]).into_iter();
            for pattern in all.filter(|pattern| pattern.algorithm == Algorithm::Ring) {
                let pattern = SchedulePattern { rings, ..pattern };
                if pattern.collective == Collective::AllReduce {
                    let steps = pattern.schedule(0).unwrap().steps.len();
                    assert_eq!(steps, rings * ring_steps(nranks));
                }
                prove(&pattern, 3);
                prove(&pattern, 1);
            }
        }
    }
}

/// Rings and chains in any order give each rank what they give in rank order, and send to neighbours only.
#[test]
fn rings_in_any_order_verify() {
    let mut rng = Rng(21);
    for nranks in 1..=17 {
        for rings in [1, 2, 5] {
            let mut ranks: Vec<usize> = (0..nranks).collect();
            rng.shuffle(&mut ranks);
            let order = RankOrder::of_ring(&ranks).unwrap();
            let roots: Vec<usize> = (0..nranks).collect();
            let all = patterns(nranks, &roots).into_iter();
            for pattern in all.filter(|pattern| pattern.algorithm == Algorithm::Ring) {
                let pattern = SchedulePattern {
                    rings,
                    orders: order.clone().into(),
                    ..pattern
                };
                prove(&pattern, 3);
                prove(&pattern, 1);
                check_neighbours(&pattern, &[&ranks]);
            }
        }
    }
}

/// Rings whose pairs have different orders give each rank what they give in one order, and have the slots of the busiest
/// connection.
#[test]
fn rings_in_several_orders_verify() {
    let mut rng = Rng(27);
    for nranks in 2..=17 {
        for (orders, rings) in [(2, 4), (2, 3), (3, 6), (3, 12), (5, 10), (4, 7)] {
            let lists: Vec<Vec<usize>> = (0..orders)
                .map(|_| {
                    let mut ranks: Vec<usize> = (0..nranks).collect();
                    rng.shuffle(&mut ranks);
                    ranks
                })
                .collect();
            let orders = lists.iter().map(|ranks| RankOrder::of_ring(ranks).unwrap());
            let orders = RingOrders::of_pairs(orders.collect());
            let all = patterns(nranks, &[0, nranks / 2]).into_iter();
            for pattern in all.filter(|pattern| pattern.algorithm == Algorithm::Ring) {
                let orders = orders.clone();
                let pattern = SchedulePattern {
                    rings,
                    orders,
                    ..pattern
                };
                prove(&pattern, 3);
                prove(&pattern, 1);
                let lists: Vec<&[usize]> = lists.iter().map(Vec::as_slice).collect();
                check_neighbours(&pattern, &lists);
                check_slots(&pattern);
            }
        }
    }
}

/// Checks that connections have one slot more than the rings of the busiest connection, by the steps of all ranks.
fn check_slots(pattern: &SchedulePattern) {
    let mut rings: HashMap<(usize, u32), HashSet<usize>> = HashMap::new();
    for schedule in schedules(pattern) {
        for step in &schedule.steps {
            let ring = step.chunk as usize % pattern.ring_count();
            for &to in step.send_to.iter() {
                rings.entry((schedule.rank, to)).or_default().insert(ring);
            }
        }
    }
    let most = rings.values().map(HashSet::len).max().unwrap();
    assert_eq!(pattern.slots(), most + 1, "{pattern:?}");
}

/// Checks that rings 2 i and 2 i + 1 send along list i, modulo the number of lists: even rings forwards, and odd rings
/// backwards.
fn check_neighbours(pattern: &SchedulePattern, lists: &[&[usize]]) {
    let (nranks, rings) = (pattern.nranks, pattern.ring_count());
    for rank in 0..nranks {
        for step in pattern.schedule(rank).unwrap().steps {
            let ring = step.chunk as usize % rings;
            let ranks = lists[ring / 2 % lists.len()];
            let place = ranks.iter().position(|&one| one == rank).unwrap();
            let ahead = if ring % 2 == 1 { nranks - 1 } else { 1 };
            let next = ranks[(place + ahead) % nranks];
            let before = ranks[(place + nranks - ahead) % nranks];
            assert!(
                step.send_to.iter().all(|&to| to as usize == next),
                "{pattern:?}"
            );
            assert!(
                step.recv_from.iter().all(|&from| from as usize == before),
                "{pattern:?}"
            );
        }
    }
}

#[test]
fn orders_of_another_number_of_ranks_are_refused() {
    let pattern = SchedulePattern {
        orders: RingOrders::of_pairs(vec![
            RankOrder::BY_RANK,
            RankOrder::of_ring(&[0, 2, 1]).unwrap(),
        ]),
        ..pattern(Collective::AllReduce, Algorithm::Ring, 4)
    };
    let error = pattern.schedule(0).unwrap_err();
    assert!(
        error.message().contains("an order of 3 ranks for 4 ranks"),
        "{error}"
    );
}

/// Ranks with four rings per channel deadlock if connections have a slot less than
/// [`SchedulePattern::slots`].
#[test]
fn several_rings_with_one_slot_less_deadlock() {
    let pattern = SchedulePattern {
        rings: 4,
        ..pattern(Collective::AllReduce, Algorithm::Ring, 5)
    };
    assert_eq!(pattern.slots(), 3);
    let limits = VerifyLimits {
        slots: 2,
        passes: 2,
    };
    assert!(verify(&pattern, &schedules(&pattern), limits).is_err());
}

#[test]
fn schedules_of_64_ranks_are_right() {
    for pattern in patterns(64, &[0, 41]) {
        prove(&pattern, overlapping(&pattern));
    }
}

fn prove_1024(algorithm: Algorithm, collectives: &[Collective], passes: Option<usize>) {
    for &collective in collectives {
        let pattern = SchedulePattern {
            root: 700,
            ..pattern(collective, algorithm, 1024)
        };
        prove(&pattern, passes.unwrap_or(overlapping(&pattern)));
    }
}

#[test]
fn rings_of_1024_ranks_are_right() {
    let whole = [
        Collective::AllReduce,
        Collective::AllGather,
        Collective::ReduceScatter,
    ];
    prove_1024(Algorithm::Ring, &whole, Some(2));
    let chains = [Collective::Broadcast, Collective::Reduce];
    prove_1024(Algorithm::Ring, &chains, None);
}

#[test]
fn sums_of_1024_ranks_are_right() {
    let rooted = [Collective::Broadcast, Collective::Reduce];
    prove_1024(Algorithm::OneShot, &rooted, None);
    prove_1024(Algorithm::OneShot, &[Collective::AllReduce], Some(2));
    prove_1024(Algorithm::FlatTree, &[Collective::AllReduce], Some(2));
    prove_1024(
        Algorithm::Direct,
        &[Collective::AllReduce, Collective::ReduceScatter],
        Some(2),
    );
    prove_1024(Algorithm::Direct, &rooted, Some(2));
}

#[test]
fn exchanges_of_1024_ranks_are_right() {
    let pairs = [Collective::AllGather, Collective::AllToAll];
    prove_1024(Algorithm::Direct, &pairs, Some(2));
    let rooted = [
        Collective::Gather,
        Collective::Scatter,
        Collective::SendRecv,
    ];
    prove_1024(Algorithm::Direct, &rooted, None);
}

#[test]
fn trees_of_1024_and_65536_ranks_are_right() {
    let collectives = [
        Collective::AllReduce,
        Collective::Broadcast,
        Collective::Reduce,
    ];
    prove_1024(Algorithm::Tree, &collectives, None);
    for collective in collectives {
        let pattern = pattern(collective, Algorithm::Tree, 65_536);
        prove(&pattern, overlapping(&pattern));
    }
}

#[test]
fn rooted_exchanges_of_65536_ranks_are_right() {
    for collective in [Collective::Gather, Collective::Scatter] {
        let pattern = pattern(collective, Algorithm::Direct, 65_536);
        prove(&pattern, overlapping(&pattern));
    }
    for collective in [Collective::Broadcast, Collective::Reduce] {
        let pattern = pattern(collective, Algorithm::OneShot, 65_536);
        prove(&pattern, overlapping(&pattern));
    }
}

/// Each algorithm spreads the work over the ranks: no rank has many more steps than others.
#[test]
fn load_is_spread() {
    let all_reduce = |algorithm, nranks| pattern(Collective::AllReduce, algorithm, nranks);
    for nranks in [3, 8, 17, 100] {
        let tree = schedules(&all_reduce(Algorithm::Tree, nranks));
        for schedule in &tree {
            // A rank is an inner node in at most one of the two trees, so it sends and receives at
            // most four times.
            assert!(cost_counts(schedule).sends <= 4);
            assert!(cost_counts(schedule).recvs <= 4);
        }
        let ring = schedules(&all_reduce(Algorithm::Ring, nranks));
        assert!(ring.iter().all(|s| cost_counts(s) == cost_counts(&ring[0])));
    }
    let counts =
        |algorithm, nranks: usize| cost_counts(&all_reduce(algorithm, nranks).schedule(1).unwrap());
    let ring = CostCounts {
        sends: 14,
        recvs: 14,
        encodes: 8,
        decodes: 15,
        reduces: 7,
        coded: 0,
        connections: 2,
        ..CostCounts::default()
    };
    assert_eq!(counts(Algorithm::Ring, 8), ring);
    // Direct moves as many bytes as a ring, but uses more connections.
    let spread = CostCounts {
        connections: 14,
        ..ring
    };
    assert_eq!(counts(Algorithm::Direct, 8), spread);
    let one_shot = CostCounts {
        sends: 7,
        recvs: 7,
        encodes: 2,
        decodes: 8,
        reduces: 7,
        coded: 1,
        connections: 14,
        ..CostCounts::default()
    };
    assert_eq!(counts(Algorithm::OneShot, 8), one_shot);
    // With 31 ranks a sum takes a chain of several steps, but counts as one sum with one encoding.
    let direct = CostCounts {
        sends: 60,
        recvs: 60,
        encodes: 31,
        decodes: 61,
        reduces: 30,
        coded: 0,
        connections: 60,
        ..CostCounts::default()
    };
    assert_eq!(counts(Algorithm::Direct, 31), direct);
}

/// Returns the verifier's error for the schedules of `pattern` after `damage` changed them.
fn verdict(
    pattern: &SchedulePattern,
    damage: impl FnOnce(&mut Vec<Schedule>),
) -> Result<Proof, Error> {
    let mut schedules = schedules(pattern);
    damage(&mut schedules);
    let limits = VerifyLimits {
        slots: SLOTS,
        passes: overlapping(pattern),
    };
    verify(pattern, &schedules, limits)
}

#[track_caller]
fn caught(pattern: &SchedulePattern, sentence: &str, damage: impl FnOnce(&mut Vec<Schedule>)) {
    let error = verdict(pattern, damage).unwrap_err();
    assert!(error.message().contains(sentence), "{error}");
}

#[test]
fn defects_are_named() {
    let ring = pattern(Collective::AllReduce, Algorithm::Ring, 4);
    let shot = pattern(Collective::AllReduce, Algorithm::OneShot, 4);
    let direct = pattern(Collective::AllReduce, Algorithm::Direct, 12);
    let gather = pattern(Collective::AllGather, Algorithm::Direct, 4);
    let swap = pattern(Collective::AllToAll, Algorithm::Direct, 2);

    // Swaps two steps.
    caught(&ring, "rank 0's next message is chunk 3 of pass 0", |s| {
        s[1].steps.swap(1, 2);
    });
    // Expects a message from a rank that does not send it.
    caught(&ring, "rank 2 never sends to rank 1", |s| {
        s[1].steps[1].recv_from = StepPeers::one(2);
    });
    // Removes steps.
    caught(&ring, "rank 2's next message is chunk 0 of pass 0", |s| {
        s[2].steps.remove(0);
    });
    caught(&direct, "rank 2's next message is chunk 2 of pass 0", |s| {
        s[2].steps.retain(|step| step.op != Op::Send);
    });
    caught(&gather, "output chunk 3 is never written", |s| {
        for schedule in s.iter_mut() {
            let mine = schedule.rank == 2;
            schedule.steps.retain(|step| !(mine && step.chunk == 3));
        }
        s[3].steps[0].send_to = [0, 1].into_iter().collect();
    });
    // Makes a sum with a contribution missing, doubled, or replaced by another rank's.
    caught(
        &ring,
        "holds 3 contributions instead of 4: rank 1's is missing",
        |s| {
            s[1].steps[1].own = Own::Absent;
        },
    );
    caught(
        &shot,
        "holds 5 contributions instead of 4: rank 2's is there once too often",
        |s| {
            // Rank 2 sends its own input twice, and rank 0 adds it twice.
            let again = s[2].steps[0].to([0]);
            s[2].steps.insert(1, again);
            let sum = s[0].steps.pop().unwrap();
            let first = Step { more: true, ..sum };
            s[0].steps.extend([first, sum.from([2]).own(Own::Absent)]);
        },
    );
    caught(
        &shot,
        "rank 1's is missing and rank 2's is there instead",
        |s| {
            let sum = s[0].steps.pop().unwrap();
            let first = Step {
                more: true,
                ..sum.from([2, 3])
            };
            s[0].steps.extend([first, sum.from([2]).own(Own::Absent)]);
            let again = s[2].steps[0].to([0]);
            s[2].steps.insert(1, again);
            s[1].steps[0] = s[1].steps[0].to([2, 3]);
        },
    );
    // Completes the sums, but on some ranks in another order or encoded otherwise, so that results
    // differ between ranks.
    caught(&shot, "is not the same expression as on rank", |s| {
        let sum = s[1].steps.last_mut().unwrap();
        sum.recv_from = [2, 0, 3].into_iter().collect();
    });
    caught(&shot, "is not the same expression as on rank", |s| {
        s[1].steps.last_mut().unwrap().own = Own::Exact { after: 1 };
    });
    caught(&gather, "is not the same expression as on rank", |s| {
        // The owner keeps its exact block, while the other ranks get the decoded block.
        let last = s[1].steps.iter().position(|step| step.writes()).unwrap();
        s[1].steps[last].op = Op::Send;
        s[1].steps[last].own = Own::Absent;
        s[1].steps.insert(last + 1, Step::new(0, Op::Copy, 1));
    });
    // Leaves an average undivided, or divides it before the sum is complete.
    caught(&direct, "an average would not be divided", |s| {
        for step in s.iter_mut().flat_map(|s| s.steps.iter_mut()) {
            if step.op == Op::RecvReduceCopySend {
                step.op = Op::RecvReduceSend;
            }
        }
    });
    caught(&ring, "it adds what is already divided", |s| {
        s[1].steps[1].op = Op::RecvReduceCopySend;
    });
    // Overwrites, in place, input that a later step sends.
    caught(
        &swap,
        "it reads input that an earlier step overwrites",
        |s| {
            s[1].steps.reverse();
            for step in &mut s[1].steps {
                step.stage = 2;
            }
        },
    );
    // Breaks the rules of chains.
    caught(
        &direct,
        "it adds to a sum that the chain has already sent",
        |s| {
            let chain = s[0].steps.iter().position(|step| step.more).unwrap();
            s[0].steps[chain].send_to = StepPeers::one(5);
        },
    );
    caught(&direct, "it does not continue the chain", |s| {
        let chain = s[0].steps.iter().position(|step| step.more).unwrap();
        s[0].steps.drain(chain + 1..chain + 3);
    });
    // Sends a message that no step receives. Over many passes such messages fill the slots and
    // block the sender.
    let message = pattern(Collective::SendRecv, Algorithm::Direct, 4);
    let mut twice = schedules(&message);
    let step = twice[0].steps[0];
    twice[0].steps.push(step.to([1]));
    let passes = |passes| VerifyLimits {
        slots: SLOTS,
        passes,
    };
    let error = verify(&message, &twice, passes(1)).unwrap_err();
    let sentence = "rank 1 never receives chunk 0 of pass 0 from rank 0";
    assert!(error.message().contains(sentence), "{error}");
    let error = verify(&message, &twice, passes(9)).unwrap_err();
    let sentence = "waits for a slot to rank 1";
    assert!(error.message().contains(sentence), "{error}");
    // Writes an output on a rank that has none.
    let reduce = pattern(Collective::Reduce, Algorithm::Tree, 6);
    caught(&reduce, "the rank has no such output", |s| {
        let sum = s[2].steps.iter_mut().find(|step| step.op.sums()).unwrap();
        sum.op = Op::RecvReduceCopySend;
    });
}

/// A ring with one slot deadlocks, because all ranks send before they receive.
#[test]
fn deadlock_is_seen() {
    let ring = pattern(Collective::AllReduce, Algorithm::Ring, 3);
    let limits = VerifyLimits {
        slots: 1,
        passes: 3,
    };
    let error = verify(&ring, &schedules(&ring), limits).unwrap_err();
    let sentence = "deadlock of 3 ranks with 1 slots a connection: rank 0, pass 0, step 1 \
                    (RecvReduceSend of chunk 1, stage 0): waits for a slot to rank 1";
    assert!(error.message().contains(sentence), "{error}");
}

/// The verifier detects the removal of any single send, receive or contribution.
#[test]
fn no_part_of_a_step_can_be_missing() {
    let mut damaged = 0;
    for nranks in [2, 3, 5, 12] {
        for pattern in patterns(nranks, &[0, 1]) {
            for (rank, schedule) in schedules(&pattern).iter().enumerate() {
                for (index, step) in schedule.steps.iter().enumerate() {
                    let mut broken = vec![None];
                    for peer in 0..step.recv_from.len() {
                        broken.push(Some(step.from(without(&step.recv_from, peer))));
                    }
                    for peer in 0..step.send_to.len() {
                        broken.push(Some(step.to(without(&step.send_to, peer))));
                    }
                    if step.own != Own::Absent && step.op.sums() {
                        broken.push(Some(step.own(Own::Absent)));
                    }
                    let chunk = (step.chunk + 1) % schedule.chunks as u32;
                    if chunk != step.chunk {
                        broken.push(Some(Step { chunk, ..*step }));
                    }
                    for broken in broken {
                        damaged += 1;
                        let verdict = verdict(&pattern, |s| match broken {
                            Some(step) => s[rank].steps[index] = step,
                            None => drop(s[rank].steps.remove(index)),
                        });
                        assert!(
                            verdict.is_err(),
                            "{pattern:?}, rank {rank}: {step:?} became {broken:?}"
                        );
                    }
                }
            }
        }
    }
    assert!(damaged > 9_000, "only {damaged} were tried");
}

fn without(peers: &StepPeers, index: usize) -> Vec<usize> {
    let mut peers: Vec<_> = peers.iter().map(|&rank| rank as usize).collect();
    peers.remove(index);
    peers
}
