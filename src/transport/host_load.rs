//! How many ranks share the cores of a host.

use super::settings::ConnectInfo;
use crate::bootstrap::PeerInfo;
use crate::sys::cpu::{self, CoreSet};
use std::collections::HashMap;

/// The ranks of a host and the cores on which they may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostLoad {
    /// Number of ranks of the host.
    pub ranks: usize,
    /// Number of cores that any of these ranks may run on, at least 1. Launchers often bind each rank to a core of its
    /// own.
    pub cores: usize,
}

impl HostLoad {
    /// A host whose ranks have a core each.
    pub const LIGHT: HostLoad = HostLoad { ranks: 1, cores: 1 };

    /// Returns the load of each host, by the identifier of the host.
    pub(super) fn of_hosts(
        peers: &[PeerInfo],
        infos: &[ConnectInfo],
    ) -> HashMap<[u8; 16], HostLoad> {
        let mut hosts: HashMap<[u8; 16], (usize, CoreSet)> = HashMap::new();
        for (peer, info) in peers.iter().zip(infos) {
            let (ranks, all) = hosts.entry(peer.host_id).or_default();
            *ranks += 1;
            for (all, word) in all.iter_mut().zip(info.cores) {
                *all |= word;
            }
        }
        let load = |(id, (ranks, all))| {
            let cores = cpu::count(&all).max(1);
            (id, HostLoad { ranks, cores })
        };
        hosts.into_iter().map(load).collect()
    }

    /// Returns whether ranks share cores.
    pub fn is_crowded(self) -> bool {
        self.ranks > self.cores
    }

    /// Returns the number of ranks for each core.
    pub fn ranks_per_core(self) -> f64 {
        self.ranks as f64 / self.cores as f64
    }

    /// Returns the load with more ranks for each core.
    #[must_use]
    pub fn max(self, other: HostLoad) -> HostLoad {
        match self.ranks * other.cores < other.ranks * self.cores {
            true => other,
            false => self,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_is_that_of_ranks_for_each_core() {
        let load = |ranks, cores| HostLoad { ranks, cores };
        assert!(!load(4, 4).is_crowded() && load(5, 4).is_crowded());
        assert_eq!(load(5, 2).ranks_per_core(), 2.5);
        assert_eq!(load(6, 4).max(load(4, 2)), load(4, 2));
        assert_eq!(load(8, 2).max(HostLoad::LIGHT), load(8, 2));
    }
}
