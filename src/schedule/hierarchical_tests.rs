//! Verifies hierarchical schedules on even and uneven hosts, with ranks in any order.

use super::*;
use crate::types::{Algorithm, Collective, Level};

/// The lower bound of `CINCH_SLOTS`.
const SLOTS: usize = 2;

/// SplitMix64 generator, which shuffles ranks.
pub(super) struct Rng(pub u64);

impl Rng {
    /// Returns a number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % end as u64) as usize
    }

    /// Puts `items` into a random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

/// Returns hosts of the given sizes, with their ranks in random order.
fn shuffled(sizes: &[usize], rng: &mut Rng) -> Groups {
    let mut of: Vec<usize> = Vec::new();
    for (host, &size) in sizes.iter().enumerate() {
        of.extend(std::iter::repeat_n(host, size));
    }
    rng.shuffle(&mut of);
    Groups::of_hosts(of)
}

/// Returns every hierarchical pattern on `hosts` for each root in `roots`.
pub(super) fn patterns(hosts: &Groups, roots: &[usize]) -> Vec<SchedulePattern> {
    let nranks = hosts.nranks().unwrap();
    let mut patterns = Vec::new();
    for collective in Collective::ALL {
        for &between in SchedulePattern::between_groups(collective) {
            for &root in if collective.has_root() { roots } else { &[0] } {
                patterns.push(SchedulePattern {
                    root,
                    between,
                    groups: hosts.clone(),
                    ..SchedulePattern::flat(collective, Algorithm::Hierarchical, nranks)
                });
            }
        }
    }
    patterns
}

fn schedules(pattern: &SchedulePattern) -> Vec<Schedule> {
    let ranks = 0..pattern.nranks;
    ranks.map(|rank| pattern.schedule(rank).unwrap()).collect()
}

fn prove(pattern: &SchedulePattern, passes: usize) -> (Proof, Vec<Schedule>) {
    let schedules = schedules(pattern);
    conformance::check_roles(pattern, &schedules);
    let limits = VerifyLimits {
        slots: SLOTS,
        passes,
    };
    let proof =
        verify(pattern, &schedules, limits).unwrap_or_else(|error| panic!("{pattern:?}: {error}"));
    (proof, schedules)
}

fn overlapping(pattern: &SchedulePattern) -> usize {
    pattern.schedule(0).unwrap().stages + 2
}

#[test]
fn even_hosts_in_any_order_are_right() {
    let mut rng = Rng(7);
    for hosts in 2..=9 {
        for ranks in [2, 3, 4, 9] {
            let nranks = hosts * ranks;
            let maps = [
                Groups::even_hosts(hosts, ranks),
                Groups::of_hosts((0..nranks).map(|rank| rank % hosts)),
                shuffled(&vec![ranks; hosts], &mut rng),
            ];
            for hosts in maps {
                let roots = [0, 1, nranks / 2, nranks - 1];
                for pattern in patterns(&hosts, &roots) {
                    let (proof, _) = prove(&pattern, overlapping(&pattern));
                    assert_eq!(proof.hops, pattern.hops().total(), "{pattern:?}");
                    prove(&pattern, 1);
                }
            }
        }
    }
}

#[test]
fn uneven_hosts_in_any_order_are_right() {
    let mut rng = Rng(8);
    let mut sizes: Vec<Vec<usize>> = vec![
        vec![1, 2],
        vec![2, 1],
        vec![8, 1, 1],
        vec![1, 1, 1, 12],
        vec![3, 2, 3, 2, 2],
        vec![20, 3],
        vec![4, 4, 4, 3],
    ];
    for _ in 0..60 {
        let hosts = 2 + rng.below(6);
        let mut of: Vec<usize> = (0..hosts).map(|_| 1 + rng.below(9)).collect();
        of[0] += 1;
        sizes.push(of);
    }
    for sizes in sizes {
        let hosts = shuffled(&sizes, &mut rng);
        let nranks = hosts.nranks().unwrap();
        let roots = [0, rng.below(nranks), nranks - 1];
        for pattern in patterns(&hosts, &roots) {
            let (proof, schedules) = prove(&pattern, overlapping(&pattern));
            assert!(proof.hops <= pattern.hops().total(), "{pattern:?}");
            let messages: usize = schedules
                .iter()
                .map(|schedule| cost_counts(schedule, &hosts).sends)
                .sum();
            assert_eq!(proof.messages, messages);
            verify(
                &pattern,
                &schedules,
                VerifyLimits {
                    slots: 8,
                    passes: 20,
                },
            )
            .unwrap_or_else(|error| panic!("{pattern:?}: {error}"));
        }
    }
}

/// A host sends to other hosts as many chunks as the table in `hierarchical/mod.rs` states.
#[test]
fn what_crosses_between_hosts_crosses_once() {
    for (count, ranks) in [(2, 2), (4, 2), (5, 3), (8, 8)] {
        for hosts in [
            Groups::even_hosts(count, ranks),
            Groups::of_hosts((0..count * ranks).map(|rank| rank % count)),
        ] {
            for pattern in patterns(&hosts, &[0]) {
                let schedules = schedules(&pattern);
                let crossing = |host: usize| {
                    let ranks = hosts.ranks(host).iter();
                    let counts = ranks.map(|&rank| cost_counts(&schedules[rank as usize], &hosts));
                    counts.map(|counts| counts.crossing[0]).sum::<usize>()
                };
                let sent: Vec<usize> = (0..count).map(crossing).collect();
                let (all, parts) = (sent.iter().sum::<usize>(), pattern.parts());
                match (pattern.collective, pattern.between) {
                    // Each host sends 2 S (H-1)/H chunks, where S is the number of chunks and H the
                    // number of hosts.
                    (Collective::AllReduce, Algorithm::Ring | Algorithm::Direct) => {
                        let each = 2 * parts * (count - 1) / count;
                        assert!(sent.iter().all(|&sent| sent == each), "{pattern:?}");
                    }
                    (Collective::AllReduce, _) => assert_eq!(all, 2 * parts * (count - 1)),
                    (Collective::Broadcast | Collective::Reduce, _) => {
                        assert_eq!(all, parts * (count - 1));
                    }
                    _ => {
                        let each = ranks * (count - 1);
                        assert!(sent.iter().all(|&sent| sent == each), "{pattern:?}");
                    }
                }
            }
        }
    }
}

/// Only contributions inside a host use the codec of [`Level::Intra`]; no message that leaves a
/// host does.
#[test]
fn levels_are_those_of_the_links() {
    let mut rng = Rng(9);
    for hosts in [
        Groups::even_hosts(4, 2),
        shuffled(&[3, 1, 5], &mut rng),
        shuffled(&[2, 9], &mut rng),
    ] {
        for pattern in patterns(&hosts, &[1]) {
            let mut intra = 0;
            for schedule in schedules(&pattern) {
                for step in &schedule.steps {
                    let at_home = |peers: &StepPeers| {
                        let shares = |peer: &u32| hosts.share(schedule.rank, *peer as usize);
                        peers.iter().all(shares)
                    };
                    if step.gives == Level::Intra {
                        assert!(at_home(&step.send_to), "{pattern:?}: {step:?}");
                        intra += step.send_to.len();
                    }
                    if step.takes == Level::Intra {
                        assert!(at_home(&step.recv_from), "{pattern:?}: {step:?}");
                    }
                }
            }
            assert_eq!(intra > 0, pattern.collective.reduces(), "{pattern:?}");
        }
    }
}

#[test]
fn a_wrong_level_is_named() {
    let hosts = Groups::even_hosts(3, 2);
    let pattern = &patterns(&hosts, &[0])[0];
    let limits = VerifyLimits {
        slots: SLOTS,
        passes: 3,
    };
    let mut broken = schedules(pattern);
    let at = broken[0]
        .steps
        .iter()
        .position(|step| step.gives == Level::Intra)
        .unwrap();
    broken[0].steps[at].gives = Level::Inter;
    let error = verify(pattern, &broken, limits).unwrap_err();
    assert!(
        error.message().contains("has encoded it for inter"),
        "{error}"
    );
    let mut broken = schedules(pattern);
    let at = broken[0]
        .steps
        .iter()
        .position(|step| step.op == Op::RecvCopySend)
        .unwrap();
    broken[0].steps[at].gives = Level::Intra;
    let error = verify(pattern, &broken, limits).unwrap_err();
    assert!(
        error.message().contains("cannot change their level"),
        "{error}"
    );
}

/// The verifier detects the removal of any single send, receive or contribution.
#[test]
fn no_part_of_a_step_can_be_missing() {
    let mut rng = Rng(10);
    let mut damaged = 0;
    for sizes in [&[2, 2][..], &[2, 3, 1], &[3, 3, 3]] {
        for pattern in patterns(&shuffled(sizes, &mut rng), &[0, 1]) {
            let whole = schedules(&pattern);
            let limits = VerifyLimits {
                slots: SLOTS,
                passes: overlapping(&pattern),
            };
            for (rank, schedule) in whole.iter().enumerate() {
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
                    if step.op.receives() {
                        let other = [Level::Inter, Level::Intra][step.takes as usize];
                        let received = !step.recv_from.is_empty();
                        broken.extend(received.then_some(Some(step.takes(other))));
                    }
                    for broken in broken {
                        damaged += 1;
                        let mut schedules = whole.clone();
                        match broken {
                            Some(step) => schedules[rank].steps[index] = step,
                            None => drop(schedules[rank].steps.remove(index)),
                        }
                        assert!(
                            verify(&pattern, &schedules, limits).is_err(),
                            "{pattern:?}, rank {rank}: {step:?} became {broken:?}"
                        );
                    }
                }
            }
        }
    }
    assert!(damaged > 1_000, "only {damaged} were tried");
}

fn without(peers: &StepPeers, index: usize) -> Vec<usize> {
    let mut peers: Vec<_> = peers.iter().map(|&rank| rank as usize).collect();
    peers.remove(index);
    peers
}

/// Verifies all 32,768 ranks on 4,096 hosts, for schedules with trees between hosts.
#[test]
fn trees_of_4096_hosts_are_right() {
    let hosts = Groups::even_hosts(4096, 8);
    for pattern in patterns(&hosts, &[20_001]) {
        if pattern.between == Algorithm::Tree {
            let (proof, _) = prove(&pattern, 3);
            assert_eq!(proof.hops, pattern.hops().total());
        }
    }
}

/// Rings and pairwise exchanges have a chunk per rank, so all ranks are verified on 64 hosts only. On 4,096
/// hosts the steps of one rank are generated.
#[test]
fn rings_and_exchanges_of_many_hosts_are_right() {
    for pattern in patterns(&Groups::even_hosts(64, 8), &[0]) {
        prove(&pattern, 2);
    }
    for pattern in patterns(&Groups::even_hosts(4096, 8), &[0]) {
        let schedule = pattern.schedule(12_345).unwrap();
        let counts = cost_counts(&schedule, &pattern.groups);
        assert!(counts.sends > 0 && counts.recvs > 0, "{pattern:?}");
    }
}

#[test]
fn what_does_not_exist_is_said() {
    let of = |collective, between, groups: Groups, nranks| {
        let pattern = SchedulePattern {
            between,
            groups,
            ..SchedulePattern::flat(collective, Algorithm::Hierarchical, nranks)
        };
        pattern.schedule(0).unwrap_err().message().to_string()
    };
    let sum = Collective::AllReduce;
    for (found, part) in [
        (
            of(
                Collective::AllToAll,
                Algorithm::Direct,
                Groups::even_hosts(2, 2),
                4,
            ),
            "every block is for one rank alone",
        ),
        (of(sum, Algorithm::Ring, Groups::ONE, 4), "on one host"),
        (
            of(sum, Algorithm::Ring, Groups::even_hosts(4, 1), 4),
            "each of the 4 hosts has one rank",
        ),
        (
            of(sum, Algorithm::OneShot, Groups::even_hosts(2, 2), 4),
            "no algorithm oneshot between hosts; it has ring, tree, direct",
        ),
        (
            of(sum, Algorithm::Ring, Groups::even_hosts(2, 2), 5),
            "a map of 2 hosts of 2 ranks for 5 ranks",
        ),
    ] {
        assert!(found.contains(part), "{found}");
    }
}
