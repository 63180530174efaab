//! Maps ranks to hosts, for schedules with two levels.

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::sync::Arc;

/// Maps each rank to its host; equal on all ranks. Hosts are numbered by their lowest rank. A rank's place is
/// its index among the ranks of its host, in rank order.
///
/// Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct Hosts(Option<Arc<Map>>);

#[derive(PartialEq, Eq, Hash)]
struct Map {
    /// Host of each rank, and the rank's place on it.
    of: Vec<(u32, u32)>,
    /// All ranks, grouped by host.
    ranks: Vec<u32>,
    /// Index in `ranks` where each host begins; the last element is the end of the last host.
    begin: Vec<u32>,
    /// Numbers of ranks of the smallest and of the largest host.
    least: usize,
    most: usize,
}

impl Hosts {
    /// All ranks on one host.
    pub const ONE: Hosts = Hosts(None);

    /// Groups ranks into hosts by name; `names` yields the host name of each rank, in rank order.
    pub fn new<Name: Eq + Hash>(names: impl IntoIterator<Item = Name>) -> Hosts {
        let mut numbers = HashMap::new();
        let mut members: Vec<Vec<u32>> = Vec::new();
        let mut of = Vec::new();
        for (rank, name) in names.into_iter().enumerate() {
            let host = *numbers.entry(name).or_insert(members.len());
            if host == members.len() {
                members.push(Vec::new());
            }
            of.push((host as u32, members[host].len() as u32));
            members[host].push(rank as u32);
        }
        if members.len() < 2 {
            return Hosts::ONE;
        }
        let mut begin = vec![0];
        for host in &members {
            begin.push(begin[begin.len() - 1] + host.len() as u32);
        }
        let sizes = || members.iter().map(Vec::len);
        Hosts(Some(Arc::new(Map {
            least: sizes().min().unwrap_or(0),
            most: sizes().max().unwrap_or(0),
            ranks: members.concat(),
            begin,
            of,
        })))
    }

    /// Creates `hosts` hosts of `ranks` consecutive ranks each.
    pub fn even(hosts: usize, ranks: usize) -> Hosts {
        Hosts::new((0..hosts * ranks).map(|rank| rank / ranks.max(1)))
    }

    /// Returns the number of hosts.
    pub fn count(&self) -> usize {
        self.0.as_ref().map_or(1, |map| map.begin.len() - 1)
    }

    /// Returns whether two ranks share a host.
    pub fn share(&self, one: usize, other: usize) -> bool {
        self.of(one).0 == self.of(other).0
    }

    /// Returns the host of a rank, and the rank's place on it.
    ///
    /// # Panics
    /// If there are several hosts and the rank is on none of them.
    pub fn of(&self, rank: usize) -> (usize, usize) {
        match &self.0 {
            None => (0, rank),
            Some(map) => (map.of[rank].0 as usize, map.of[rank].1 as usize),
        }
    }

    /// Returns the ranks of a host, in order. If there is only one host, the slice is empty.
    ///
    /// # Panics
    /// If there is no such host.
    pub fn ranks(&self, host: usize) -> &[u32] {
        match &self.0 {
            None => &[],
            Some(map) => &map.ranks[map.begin[host] as usize..map.begin[host + 1] as usize],
        }
    }

    /// Returns the number of rails, which are parallel connections between hosts: as many as the smallest
    /// host has ranks. The rank at place p of each host is on rail p. More rails would not be faster, because
    /// the smallest host has to carry as many bytes as the others.
    pub fn rails(&self) -> usize {
        self.0.as_ref().map_or(1, |map| map.least)
    }

    /// Returns why a hierarchical schedule gains nothing on these hosts, as the end of a sentence; `None` if
    /// it may gain.
    pub fn single_level_reason(&self) -> Option<String> {
        match &self.0 {
            None => Some("all ranks are on one host".into()),
            Some(map) if map.most == 1 => {
                Some(format!("each of the {} hosts has one rank", self.count()))
            }
            Some(_) => None,
        }
    }

    /// Returns the number of ranks; `None` if all share one host.
    pub fn nranks(&self) -> Option<usize> {
        self.0.as_ref().map(|map| map.of.len())
    }
}

impl fmt::Display for Hosts {
    /// Prints `1 host`, `4 hosts of 2 ranks`, `3 hosts of 1 to 8 ranks`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            None => f.write_str("1 host"),
            Some(map) if map.least == map.most => {
                write!(f, "{} hosts of {} ranks", self.count(), map.least)
            }
            Some(map) => write!(
                f,
                "{} hosts of {} to {} ranks",
                self.count(),
                map.least,
                map.most
            ),
        }
    }
}

impl fmt::Debug for Hosts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            None => f.write_str("Hosts(1)"),
            Some(map) if map.of.len() > 64 => write!(f, "Hosts({self})"),
            Some(map) => f
                .debug_tuple("Hosts")
                .field(&map.of.iter().map(|(host, _)| host).collect::<Vec<_>>())
                .finish(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_numbered_by_their_lowest_rank() {
        let hosts = Hosts::new(["b", "a", "b", "c", "a", "b"]);
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
        for one in [Hosts::ONE, Hosts::new([7, 7, 7]), Hosts::even(1, 9)] {
            assert_eq!(one, Hosts::ONE);
            assert_eq!((one.count(), one.of(5), one.nranks()), (1, (0, 5), None));
            assert!(one.single_level_reason().unwrap().contains("one host"));
        }
        let thin = Hosts::even(4, 1);
        assert!(
            thin.single_level_reason()
                .unwrap()
                .contains("4 hosts has one rank")
        );
        let even = Hosts::even(4, 2);
        assert_eq!((even.of(5), even.rails()), ((2, 1), 2));
        assert_eq!(even.to_string(), "4 hosts of 2 ranks");
    }
}
