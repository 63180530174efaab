//! Maps ranks to groups, for schedules that exchange data inside groups and between groups. A group is the
//! ranks of a host, or of a part of a host.

use crate::error::{Error, Result};
use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::sync::Arc;

/// The unit whose ranks form a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupUnit {
    /// A host.
    Host,
    /// A CPU socket of one host.
    Socket,
    /// A port of a socket's PCIe root, which leads to one or more switches.
    RootPort,
    /// A PCIe switch.
    Switch,
    /// GPUs that NVLinks connect with each other.
    NvlinkIsland,
}

impl GroupUnit {
    /// Returns the noun for one group.
    pub const fn noun(self) -> &'static str {
        match self {
            GroupUnit::Host => "host",
            GroupUnit::Socket => "socket",
            GroupUnit::RootPort => "root port",
            GroupUnit::Switch => "switch",
            GroupUnit::NvlinkIsland => "NVLink island",
        }
    }

    /// Returns the noun for several groups.
    pub const fn plural(self) -> &'static str {
        match self {
            GroupUnit::Host => "hosts",
            GroupUnit::Socket => "sockets",
            GroupUnit::RootPort => "root ports",
            GroupUnit::Switch => "switches",
            GroupUnit::NvlinkIsland => "NVLink islands",
        }
    }
}

/// Maps each rank to its group; equal on all ranks. A rank's place is its index among the members of its
/// group.
///
/// Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct Groups(Option<Arc<Map>>);

#[derive(PartialEq, Eq, Hash)]
struct Map {
    unit: GroupUnit,
    /// Group of each rank, and the rank's place in it.
    of: Vec<(u32, u32)>,
    /// All ranks, group by group, in the order of their places.
    ranks: Vec<u32>,
    /// Index in `ranks` where each group begins; the last element is the end of the last group.
    begin: Vec<u32>,
    /// Numbers of ranks of the smallest and of the largest group.
    least: usize,
    most: usize,
    /// See [`Groups::rails_per_connection`].
    shared: usize,
}

impl Groups {
    /// All ranks in one group, which is a host.
    pub const ONE: Groups = Groups(None);

    /// Groups ranks into hosts by name; `names` yields the host name of each rank, in rank order. Hosts are
    /// numbered by their lowest rank, and places are in rank order.
    pub fn of_hosts<Name: Eq + Hash>(names: impl IntoIterator<Item = Name>) -> Groups {
        let mut numbers = HashMap::new();
        let mut members: Vec<Vec<usize>> = Vec::new();
        for (rank, name) in names.into_iter().enumerate() {
            let host = *numbers.entry(name).or_insert(members.len());
            if host == members.len() {
                members.push(Vec::new());
            }
            members[host].push(rank);
        }
        Groups::of_partition(GroupUnit::Host, &members)
    }

    /// Creates `hosts` hosts of `ranks` consecutive ranks each.
    pub fn even_hosts(hosts: usize, ranks: usize) -> Groups {
        Groups::of_hosts((0..hosts * ranks).map(|rank| rank / ranks.max(1)))
    }

    /// Creates groups of the given members. The order of `members` numbers the groups, so it is the order of
    /// rings between groups. The order in each group gives the places, and so the rails.
    ///
    /// # Errors
    /// Internal if a group is empty, or if the members are not each rank exactly once.
    pub fn of_members<Members: AsRef<[usize]>>(
        unit: GroupUnit,
        members: &[Members],
    ) -> Result<Groups> {
        let lists = || members.iter().map(AsRef::as_ref);
        let nranks: usize = lists().map(<[usize]>::len).sum();
        let mut seen = vec![false; nranks];
        for &rank in lists().flatten() {
            match seen.get_mut(rank) {
                Some(seen) if !*seen => *seen = true,
                found => {
                    let why = found.map_or("does not exist", |_| "is in two places");
                    return Err(Error::internal(format!(
                        "{} of {nranks} ranks: rank {rank} {why}",
                        unit.plural()
                    )));
                }
            }
        }
        if lists().any(<[usize]>::is_empty) {
            return Err(Error::internal(format!(
                "a {} without ranks among {nranks}",
                unit.noun()
            )));
        }
        Ok(Groups::of_partition(unit, members))
    }

    /// Creates groups whose members are each rank exactly once; no group is empty.
    fn of_partition<Members: AsRef<[usize]>>(unit: GroupUnit, members: &[Members]) -> Groups {
        if members.len() < 2 {
            return Groups::ONE;
        }
        let mut sizes: Vec<usize> = members.iter().map(|group| group.as_ref().len()).collect();
        let mut of = vec![(0, 0); sizes.iter().sum()];
        let mut ranks = Vec::with_capacity(of.len());
        let mut begin = vec![0];
        for (group, members) in members.iter().enumerate() {
            for (place, &rank) in members.as_ref().iter().enumerate() {
                of[rank] = (group as u32, place as u32);
                ranks.push(rank as u32);
            }
            begin.push(ranks.len() as u32);
        }
        sizes.sort_unstable();
        let (least, most) = (sizes[0], sizes[sizes.len() - 1]);
        Groups(Some(Arc::new(Map {
            unit,
            of,
            ranks,
            begin,
            least,
            most,
            shared: match unit {
                GroupUnit::Host => 1,
                // All rails of a single rank lead to different ranks of other groups.
                _ if least == 1 => most.div_ceil(sizes[1]),
                _ => most.div_ceil(least),
            },
        })))
    }

    /// Returns the unit whose ranks form a group.
    pub fn unit(&self) -> GroupUnit {
        self.0.as_ref().map_or(GroupUnit::Host, |map| map.unit)
    }

    /// Returns whether there are several groups, all inside one host. Their schedules let a group send to
    /// one other group at a time, because its ranks share one way out.
    pub fn are_inside_host(&self) -> bool {
        self.unit() != GroupUnit::Host
    }

    /// Returns the number of groups.
    pub fn count(&self) -> usize {
        self.0.as_ref().map_or(1, |map| map.begin.len() - 1)
    }

    /// Returns whether two ranks share a group.
    pub fn share(&self, one: usize, other: usize) -> bool {
        self.of(one).0 == self.of(other).0
    }

    /// Returns the group of a rank, and the rank's place in it.
    ///
    /// # Panics
    /// If there are several groups and the rank is in none of them.
    pub fn of(&self, rank: usize) -> (usize, usize) {
        match &self.0 {
            None => (0, rank),
            Some(map) => (map.of[rank].0 as usize, map.of[rank].1 as usize),
        }
    }

    /// Returns the ranks of a group, in the order of their places. If there is only one group, the slice is
    /// empty.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn ranks(&self, group: usize) -> &[u32] {
        match &self.0 {
            None => &[],
            Some(map) => &map.ranks[map.begin[group] as usize..map.begin[group + 1] as usize],
        }
    }

    /// Returns the number of rails, which are parallel connections between groups. Rail r leads to the rank
    /// at place r of each group, modulo the group's number of ranks.
    ///
    /// Hosts have as many rails as the smallest host has ranks: with a NIC for each rank, the smallest host
    /// has to carry as many bytes as the others, so more rails would not be faster. Groups inside a host have
    /// as many rails as the largest group has ranks: the way out of a group carries equally many bytes with
    /// any number of rails, and the link of each rank carries fewest bytes with most rails.
    pub fn rails(&self) -> usize {
        match &self.0 {
            None => 1,
            Some(map) if map.unit == GroupUnit::Host => map.least,
            Some(map) => map.most,
        }
    }

    /// Returns the largest number of rails that share a connection: inside a group, the rails of one rank;
    /// between groups, the rails that lead to the same two ranks. 1 for hosts.
    pub fn rails_per_connection(&self) -> usize {
        self.0.as_ref().map_or(1, |map| map.shared)
    }

    /// Returns why a hierarchical schedule gains nothing on these groups, as the end of a sentence; `None`
    /// if it may gain.
    pub fn single_level_reason(&self) -> Option<String> {
        match &self.0 {
            None => Some("all ranks are on one host".into()),
            Some(map) if map.most == 1 => Some(format!(
                "each of the {} {} has one rank",
                self.count(),
                map.unit.plural()
            )),
            Some(_) => None,
        }
    }

    /// Returns the number of ranks; `None` if all share one group.
    pub fn nranks(&self) -> Option<usize> {
        self.0.as_ref().map(|map| map.of.len())
    }
}

impl fmt::Display for Groups {
    /// Prints `1 host`, `4 hosts of 2 ranks`, `3 switches of 1 to 8 ranks`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(map) = &self.0 else {
            return f.write_str("1 host");
        };
        write!(f, "{} {} of {}", self.count(), map.unit.plural(), map.least)?;
        if map.most > map.least {
            write!(f, " to {}", map.most)?;
        }
        f.write_str(" ranks")
    }
}

impl fmt::Debug for Groups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            None => f.write_str("Groups(1)"),
            Some(map) if map.of.len() > 64 => write!(f, "Groups({self})"),
            Some(map) => {
                let ranks = (0..self.count()).map(|group| self.ranks(group));
                f.debug_tuple("Groups")
                    .field(&map.unit)
                    .field(&ranks.collect::<Vec<_>>())
                    .finish()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_numbered_by_their_lowest_rank() {
        let hosts = Groups::of_hosts(["b", "a", "b", "c", "a", "b"]);
        assert_eq!(hosts.count(), 3);
        let found: Vec<_> = (0..6).map(|rank| hosts.of(rank)).collect();
        assert_eq!(found, [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2)]);
        assert_eq!(hosts.ranks(0), [0, 2, 5]);
        assert_eq!(hosts.ranks(2), [3]);
        assert_eq!((hosts.rails(), hosts.nranks()), (1, Some(6)));
        assert!(hosts.share(0, 5) && !hosts.share(0, 1));
        assert_eq!(hosts.to_string(), "3 hosts of 1 to 3 ranks");
        assert_eq!(hosts.single_level_reason(), None);
    }

    #[test]
    fn where_two_levels_make_no_sense() {
        for one in [
            Groups::ONE,
            Groups::of_hosts([7, 7, 7]),
            Groups::even_hosts(1, 9),
        ] {
            assert_eq!(one, Groups::ONE);
            assert_eq!((one.count(), one.of(5), one.nranks()), (1, (0, 5), None));
            assert!(one.single_level_reason().unwrap().contains("one host"));
        }
        let thin = Groups::even_hosts(4, 1);
        assert!(
            thin.single_level_reason()
                .unwrap()
                .contains("4 hosts has one rank")
        );
        let even = Groups::even_hosts(4, 2);
        assert_eq!((even.of(5), even.rails()), ((2, 1), 2));
        assert_eq!(even.to_string(), "4 hosts of 2 ranks");
    }

    #[test]
    fn groups_inside_a_host_keep_the_given_order() {
        let members = [vec![5, 1], vec![0, 4, 2], vec![3]];
        let groups = Groups::of_members(GroupUnit::Switch, &members).unwrap();
        assert_eq!(groups.ranks(0), [5, 1]);
        assert_eq!(groups.ranks(1), [0, 4, 2]);
        let found: Vec<_> = (0..6).map(|rank| groups.of(rank)).collect();
        assert_eq!(found, [(1, 0), (0, 1), (1, 2), (2, 0), (1, 1), (0, 0)]);
        assert!(groups.are_inside_host());
        assert_eq!(groups.to_string(), "3 switches of 1 to 3 ranks");
        let one = Groups::of_members(GroupUnit::Socket, &[[1, 0]]).unwrap();
        assert_eq!(one, Groups::ONE);
        let thin = Groups::of_members(GroupUnit::RootPort, &[[1], [0]]).unwrap();
        let reason = thin.single_level_reason().unwrap();
        assert_eq!(reason, "each of the 2 root ports has one rank");
    }

    #[test]
    fn groups_of_equal_ranks_differ_by_unit_and_order() {
        let of = |unit, members: [[usize; 2]; 2]| Groups::of_members(unit, &members).unwrap();
        let hosts = of(GroupUnit::Host, [[0, 1], [2, 3]]);
        assert_eq!(hosts, Groups::even_hosts(2, 2));
        assert_ne!(hosts, of(GroupUnit::Socket, [[0, 1], [2, 3]]));
        assert_ne!(hosts, of(GroupUnit::Host, [[0, 1], [3, 2]]));
    }

    #[test]
    fn rails_of_unequal_groups() {
        for (sizes, hosts, inside) in [
            (&[1, 2][..], (1, 1), (2, 1)),
            (&[3, 1], (1, 1), (3, 1)),
            (&[4, 4], (4, 1), (4, 1)),
            (&[3, 3, 2], (2, 1), (3, 2)),
            (&[1, 8, 1], (1, 1), (8, 8)),
            (&[8, 1, 3], (1, 1), (8, 3)),
        ] {
            let mut next = 0..sizes.iter().sum();
            let members: Vec<Vec<usize>> = sizes
                .iter()
                .map(|&n| next.by_ref().take(n).collect())
                .collect();
            for (unit, expected) in [(GroupUnit::Host, hosts), (GroupUnit::Socket, inside)] {
                let groups = Groups::of_members(unit, &members).unwrap();
                let found = (groups.rails(), groups.rails_per_connection());
                assert_eq!(found, expected, "{groups}");
            }
        }
    }

    #[test]
    fn members_that_are_not_each_rank_once_are_refused() {
        for (members, part) in [
            (vec![vec![0, 1], vec![1, 2]], "rank 1 is in two places"),
            (vec![vec![0, 1], vec![3]], "rank 3 does not exist"),
            (vec![vec![0, 1], vec![]], "a switch without ranks"),
        ] {
            let error = Groups::of_members(GroupUnit::Switch, &members).unwrap_err();
            assert!(error.message().contains(part), "{error}");
        }
    }
}
