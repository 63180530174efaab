//! Verifies hierarchical schedules on groups inside a host, whose ranks share one way out.

use super::hierarchical_tests::{Rng, patterns};
use super::*;
use crate::types::Collective;
use std::collections::{BTreeMap, HashMap};

/// Sizes of groups: equal, unequal, and with single ranks.
const SIZES: &[&[usize]] = &[
    &[1, 2],
    &[3, 1],
    &[4, 4],
    &[8, 8],
    &[2, 2, 2, 2],
    &[3, 3, 2],
    &[1, 1, 2],
    &[4, 4, 1, 1],
    &[2, 7, 3],
    &[5, 1, 1, 5, 2],
];

/// Returns groups of the given sizes, whose members and whose ranks are in random order.
fn shuffled(unit: GroupUnit, sizes: &[usize], rng: &mut Rng) -> Groups {
    let mut ranks: Vec<usize> = (0..sizes.iter().sum()).collect();
    rng.shuffle(&mut ranks);
    let mut members: Vec<Vec<usize>> = Vec::new();
    for &size in sizes {
        members.push(ranks.split_off(ranks.len() - size));
    }
    rng.shuffle(&mut members);
    Groups::of_members(unit, &members).unwrap()
}

fn schedules(pattern: &SchedulePattern) -> Vec<Schedule> {
    let ranks = 0..pattern.nranks;
    ranks.map(|rank| pattern.schedule(rank).unwrap()).collect()
}

/// Verifies a pattern at its declared number of slots, and at more.
fn prove(pattern: &SchedulePattern) {
    let schedules = schedules(pattern);
    conformance::check_roles(pattern, &schedules);
    let overlapping = schedules[0].stages + 2;
    let declared = pattern.slots();
    for (slots, passes) in [(declared, overlapping), (declared, 1), (declared + 6, 20)] {
        let proof = verify(pattern, &schedules, VerifyLimits { slots, passes })
            .unwrap_or_else(|error| panic!("{pattern:?}: {error}"));
        let is_even = pattern.nranks == pattern.groups.rails() * pattern.groups.count();
        match is_even {
            true => assert_eq!(proof.hops, pattern.hops().total(), "{pattern:?}"),
            false => assert!(proof.hops <= pattern.hops().total(), "{pattern:?}"),
        }
        let sends = schedules
            .iter()
            .map(|schedule| cost_counts(schedule, &pattern.groups).sends);
        assert_eq!(proof.messages, sends.sum::<usize>());
    }
}

#[test]
fn groups_of_listed_sizes_verify() {
    let mut rng = Rng(11);
    for sizes in SIZES {
        for unit in [GroupUnit::Switch, GroupUnit::Socket] {
            let groups = shuffled(unit, sizes, &mut rng);
            let nranks = groups.nranks().unwrap();
            let roots: Vec<usize> = (0..nranks).collect();
            for pattern in patterns(&groups, &roots) {
                prove(&pattern);
            }
        }
    }
}

#[test]
fn groups_of_up_to_17_ranks_verify() {
    let mut rng = Rng(12);
    for nranks in 3..=17 {
        for _ in 0..4 {
            let mut sizes = vec![1; 2 + rng.below((nranks - 1).min(6) - 1)];
            while sizes.iter().sum::<usize>() < nranks {
                let at = rng.below(sizes.len());
                sizes[at] += 1;
            }
            let groups = shuffled(GroupUnit::Switch, &sizes, &mut rng);
            for pattern in patterns(&groups, &[0, rng.below(nranks)]) {
                prove(&pattern);
            }
        }
    }
}

/// Rails that share a connection need the declared slots: with fewer, ranks wait for each other.
#[test]
fn shared_rails_with_one_slot_less_deadlock() {
    let members = [vec![0, 1], vec![2, 3], vec![4, 5, 6, 7], vec![8, 9, 10, 11]];
    let groups = Groups::of_members(GroupUnit::Socket, &members).unwrap();
    for pattern in patterns(&groups, &[0]) {
        let slots = pattern.slots();
        if pattern.collective == Collective::AllReduce {
            assert_eq!(slots, 4);
            let limits = VerifyLimits {
                slots: slots - 1,
                passes: 20,
            };
            let error = verify(&pattern, &schedules(&pattern), limits).unwrap_err();
            assert!(error.message().contains("deadlock"), "{error}");
        }
    }
}

/// Runs `passes` passes of all ranks. Of the ranks that can run a step, the first in `priority` does; slots
/// never run out. Returns the groups to which each group sent, in the order in which it sent: by group, pass
/// and stage.
fn destinations(
    pattern: &SchedulePattern,
    priority: &[usize],
    passes: usize,
) -> BTreeMap<(usize, usize, u32), Vec<usize>> {
    let schedules = schedules(pattern);
    let group = |rank: usize| pattern.groups.of(rank).0;
    let mut walks: Vec<_> = schedules.iter().map(|one| walk(one, passes)).collect();
    let mut next: Vec<_> = walks.iter_mut().map(Iterator::next).collect();
    let mut messages: HashMap<(usize, usize), usize> = HashMap::new();
    let mut sent: BTreeMap<_, Vec<usize>> = BTreeMap::new();
    let ready = |next: &[Option<Visit>], messages: &HashMap<(usize, usize), usize>| {
        let is_ready = |rank: usize| {
            let visit = next[rank]?;
            let mut from = schedules[rank].steps[visit.step].recv_from.iter();
            from.all(|&from| messages.get(&(from as usize, rank)).is_some_and(|&n| n > 0))
                .then_some((rank, visit))
        };
        priority.iter().find_map(|&rank| is_ready(rank))
    };
    while let Some((rank, visit)) = ready(&next, &messages) {
        let step = &schedules[rank].steps[visit.step];
        // Only the last step of a forwarding chain releases its message.
        if !(step.more && step.op == Op::RecvCopySend) {
            for &from in step.recv_from.iter() {
                *messages.get_mut(&(from as usize, rank)).unwrap() -= 1;
            }
        }
        for to in step.send_to.iter().map(|&to| to as usize) {
            *messages.entry((rank, to)).or_default() += 1;
            if group(to) != group(rank) {
                let place = (group(rank), visit.pass, step.stage);
                sent.entry(place).or_default().push(group(to));
            }
        }
        next[rank] = walks[rank].next();
    }
    assert!(next.iter().all(Option::is_none), "{pattern:?}: deadlock");
    sent
}

/// Orders of ranks of which each has another rank first, and random ones.
fn priorities(nranks: usize, rng: &mut Rng) -> Vec<Vec<usize>> {
    let mut orders: Vec<Vec<usize>> = (0..nranks)
        .map(|first| (0..nranks).map(|at| (first + at) % nranks).collect())
        .collect();
    for _ in 0..4 {
        let mut order: Vec<usize> = (0..nranks).collect();
        rng.shuffle(&mut order);
        orders.push(order);
    }
    orders
}

/// Returns the largest number of groups to which a group sends in one stage, and whether a group ever sends
/// to a group again after it sent to another.
fn most_destinations(pattern: &SchedulePattern, rng: &mut Rng) -> (usize, bool) {
    let (mut most, mut returns) = (0, false);
    for priority in priorities(pattern.nranks, rng) {
        for (_, mut sent) in destinations(pattern, &priority, 2) {
            sent.dedup();
            let runs = sent.len();
            sent.sort_unstable();
            sent.dedup();
            most = most.max(sent.len());
            returns |= runs > sent.len();
        }
    }
    (most, returns)
}

#[test]
fn a_group_sends_to_one_other_group_at_a_time() {
    let mut rng = Rng(13);
    for sizes in SIZES {
        let groups = shuffled(GroupUnit::Switch, sizes, &mut rng);
        for pattern in patterns(&groups, &[1]) {
            let (most, returns) = most_destinations(&pattern, &mut rng);
            assert!(!returns, "{pattern:?}");
            let reduces_to_owners = match pattern.collective {
                Collective::AllReduce => pattern.between == Algorithm::Direct,
                collective => collective == Collective::ReduceScatter,
            };
            // Sums go to their owners in one stage, to one group after the other.
            let expected = if reduces_to_owners {
                groups.count() - 1
            } else {
                1
            };
            assert_eq!(most, expected, "{pattern:?}");
        }
    }
}

/// Hosts have a NIC for each rail, so their two-shot sends to all other hosts at once.
#[test]
fn a_host_sends_to_several_hosts_at_a_time() {
    let mut rng = Rng(14);
    let hosts = shuffled(GroupUnit::Host, &[2, 2, 2], &mut rng);
    let patterns = patterns(&hosts, &[0]);
    let direct = |pattern: &&SchedulePattern| {
        (pattern.collective, pattern.between) == (Collective::AllReduce, Algorithm::Direct)
    };
    let (most, returns) = most_destinations(patterns.iter().find(direct).unwrap(), &mut rng);
    assert_eq!((most, returns), (2, true));
}

/// Every rail carries equally many chunks out of a group, and only between the ranks on it.
#[test]
fn rails_of_a_group_are_loaded_equally() {
    let mut rng = Rng(15);
    for sizes in SIZES {
        let groups = shuffled(GroupUnit::Switch, sizes, &mut rng);
        let rails = *sizes.iter().max().unwrap();
        assert_eq!(groups.rails(), rails);
        let of_rails = |pattern: &SchedulePattern| {
            !matches!(
                pattern.collective,
                Collective::AllGather | Collective::ReduceScatter
            )
        };
        for pattern in patterns(&groups, &[0]).into_iter().filter(of_rails) {
            let chunks_of_rail = pattern.parts() / rails;
            let mut sent = vec![vec![0; rails]; groups.count()];
            for schedule in schedules(&pattern) {
                let (from, _) = groups.of(schedule.rank);
                for step in &schedule.steps {
                    let rail = step.chunk as usize / chunks_of_rail;
                    let on_rail = |group: usize| {
                        let ranks = groups.ranks(group);
                        ranks[rail % ranks.len()] as usize
                    };
                    for to in step.send_to.iter().map(|&to| to as usize) {
                        let (group, _) = groups.of(to);
                        if group != from {
                            let ends = (on_rail(from), on_rail(group));
                            assert_eq!((schedule.rank, to), ends, "{pattern:?}");
                            sent[from][rail] += 1;
                        }
                    }
                }
            }
            for of_group in &sent {
                assert!(of_group.iter().all(|&n| n == of_group[0]), "{pattern:?}");
            }
            let round = 2 * (groups.count() - 1);
            match (pattern.collective, pattern.between) {
                (Collective::AllReduce, Algorithm::Ring | Algorithm::Direct) => {
                    assert!(sent.iter().all(|of_group| of_group[0] == round));
                }
                _ => assert!(sent.iter().all(|of_group| of_group[0] <= 2)),
            }
        }
    }
}

/// A ring between groups goes in the order in which the groups were given.
#[test]
fn rails_go_round_the_groups_in_their_order() {
    let members = [[5, 1], [0, 4], [7, 6], [3, 2]];
    let groups = Groups::of_members(GroupUnit::Switch, &members).unwrap();
    let patterns = patterns(&groups, &[0]);
    let ring = |pattern: &&SchedulePattern| pattern.between == Algorithm::Ring;
    for schedule in schedules(patterns.iter().find(ring).unwrap()) {
        let (group, place) = groups.of(schedule.rank);
        let next = members[(group + 1) % 4][place];
        let mut to = schedule.steps.iter().flat_map(|step| step.send_to.iter());
        assert!(to.all(|&to| groups.share(to as usize, schedule.rank) || to as usize == next));
    }
}

#[test]
fn refusals_name_the_unit() {
    let groups = Groups::of_members(GroupUnit::Switch, &[[0], [1]]).unwrap();
    let pattern = SchedulePattern {
        groups,
        between: Algorithm::Ring,
        ..SchedulePattern::flat(Collective::AllReduce, Algorithm::Hierarchical, 2)
    };
    let error = pattern.schedule(0).unwrap_err();
    assert!(
        error.message().contains(
            "needs several switches with several ranks: each of the 2 switches has one rank"
        ),
        "{error}"
    );
}
