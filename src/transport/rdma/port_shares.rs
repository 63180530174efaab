//! Shares the RDMA ports of a host out between its ranks, by distance.
//!
//! A rank uses the ports nearest to its GPU, or to its cores on host memory, unless another port is nearly twice as fast
//! ([`is_too_slow`]). Ports that are equally near to several ranks are shared out, so that two ranks share a port only if
//! no other port is as near. Ports of one adapter share a PCIe link, so ranks take ports of different adapters first.
//!
//! All ranks know the ports and distances of all ranks, and compute all shares alike.

use crate::topology::{PathType, is_too_slow, path_number, path_of_number};
use crate::wire::{Damaged, Reader, Wire, WireResult, Writer};
use std::fmt;

/// A port, as all ranks know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PortFacts {
    /// Name of the device.
    pub device: String,
    /// Number of the port of the device.
    pub number: u8,
    /// Identifier of the adapter, equal for all its ports; 0 if unknown.
    pub adapter: u64,
    /// Kinds of its addresses, as a set.
    pub kinds: u8,
    /// Class of the path from the rank; `None` if it is unknown.
    pub path: Option<PathType>,
    /// MB/s of the slowest link from the rank into the network; 0 if it is unknown.
    pub mb_s: u32,
}

impl Wire for PortFacts {
    fn write(&self, writer: &mut Writer) {
        writer.text(&self.device).u8(self.number);
        writer.u64(self.adapter).u8(self.kinds);
        writer.u32(self.mb_s).u8(path_number(self.path));
    }

    fn read(reader: &mut Reader<'_>) -> WireResult<PortFacts> {
        Ok(PortFacts {
            device: reader.text()?,
            number: reader.u8()?,
            adapter: reader.u64()?,
            kinds: reader.u8()?,
            mb_s: reader.u32()?,
            path: path_of_number(reader.u8()?).ok_or(Damaged)?,
        })
    }
}

impl fmt::Display for PortFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PortFacts { device, number, .. } = self;
        match self.path {
            Some(path) => write!(f, "{device}:{number} ({path})"),
            None => write!(f, "{device}:{number}"),
        }
    }
}

/// Returns for each rank of a host the indices of its ports in use, in the order in which channels take them. `ports`
/// has the ports of each rank. A rank that knows no distance uses all its ports.
pub(super) fn shares(ports: &[Vec<&PortFacts>]) -> Vec<Vec<usize>> {
    let mut sharing = PortSharing::default();
    let nearest = ports.iter().map(|own| nearest(own));
    let nearest: Vec<Vec<usize>> = nearest.collect();
    for (own, near) in ports.iter().zip(&nearest) {
        let places = near.iter().map(|&index| sharing.place_of(own[index]));
        let places = places.collect();
        sharing.wanted.push(places);
    }
    let mut shares = vec![Vec::new(); ports.len()];
    // In the first round every rank takes a port. In later rounds ranks share out the ports that are left.
    let mut may_share = true;
    while sharing.take_round(may_share) {
        for (rank, place) in sharing.taken.iter().enumerate() {
            let index = sharing.wanted[rank]
                .iter()
                .position(|one| Some(*one) == *place);
            shares[rank].extend(index.map(|index| nearest[rank][index]));
        }
        may_share = false;
    }
    for (share, own) in shares.iter_mut().zip(ports) {
        if share.is_empty() {
            *share = (0..own.len()).collect();
        }
    }
    shares
}

/// Returns the indices of the nearest ports that are fast enough; none if no distance is known. A port of unknown speed
/// is fast enough, and makes no other port too slow.
fn nearest(ports: &[&PortFacts]) -> Vec<usize> {
    let known = ports.iter().filter(|port| port.path.is_some());
    let fastest = known.map(|port| port.mb_s).max().unwrap_or(0);
    let is_fast = |port: &PortFacts| port.mb_s == 0 || !is_too_slow(port.mb_s, fastest);
    let fast = || ports.iter().enumerate().filter(|(_, port)| is_fast(port));
    let Some(least) = fast().filter_map(|(_, port)| port.path).min() else {
        return Vec::new();
    };
    let near = fast().filter(|(_, port)| port.path == Some(least));
    near.map(|(index, _)| index).collect()
}

/// Ports of a host, and the ranks that take them in the present round.
#[derive(Default)]
struct PortSharing<'a> {
    /// Device and number of each port.
    ports: Vec<(&'a str, u8)>,
    /// For each port, the index of its adapter.
    adapters: Vec<usize>,
    /// Identifier of each adapter, or the name of a device whose adapter is unknown.
    known_adapters: Vec<(u64, &'a str)>,
    /// For each rank, its nearest ports.
    wanted: Vec<Vec<usize>>,
    /// For each rank, the port of this round.
    taken: Vec<Option<usize>>,
    /// For each port, the number of ranks that use it.
    ranks_of_port: Vec<usize>,
    /// For each adapter, the number of ranks that use one of its ports, counted once for each port.
    ranks_of_adapter: Vec<usize>,
}

impl<'a> PortSharing<'a> {
    /// Returns the index of a port, and adds it if it is new. Ranks of a host may see different ports.
    fn place_of(&mut self, port: &'a PortFacts) -> usize {
        let key = (port.device.as_str(), port.number);
        if let Some(place) = self.ports.iter().position(|known| *known == key) {
            return place;
        }
        let adapter = match port.adapter {
            0 => (0, port.device.as_str()),
            guid => (guid, ""),
        };
        let known = self.known_adapters.iter().position(|one| *one == adapter);
        let adapter = known.unwrap_or_else(|| {
            self.known_adapters.push(adapter);
            self.ranks_of_adapter.push(0);
            self.known_adapters.len() - 1
        });
        self.ports.push(key);
        self.adapters.push(adapter);
        self.ranks_of_port.push(0);
        self.ports.len() - 1
    }

    /// Gives each rank one more port, if it has one to take. Returns whether any rank took a port.
    fn take_round(&mut self, may_share: bool) -> bool {
        let used: Vec<bool> = self.ranks_of_port.iter().map(|ranks| *ranks > 0).collect();
        self.taken = vec![None; self.wanted.len()];
        for rank in 0..self.wanted.len() {
            self.take(rank, &used, may_share);
        }
        // A rank that came early may stand at a port that later ranks made crowded.
        for rank in 0..self.wanted.len() {
            if let Some(place) = self.taken[rank].take() {
                self.ranks_of_port[place] -= 1;
                self.ranks_of_adapter[self.adapters[place]] -= 1;
                self.take(rank, &used, may_share);
            }
        }
        self.taken.iter().any(Option::is_some)
    }

    /// Gives `rank` a port. If all its ports are taken, ranks at these ports move on to other ports that are as near,
    /// so that the port with the fewest ranks gets one more. A port that was `used` in an earlier round is left to its
    /// ranks.
    fn take(&mut self, rank: usize, used: &[bool], may_share: bool) {
        // For each port that was reached, the rank that would move there.
        let mut mover: Vec<Option<usize>> = vec![None; self.ports.len()];
        let mut reached = Vec::new();
        let mut ranks = vec![rank];
        while !ranks.is_empty() {
            let first_new = reached.len();
            for &rank in &ranks {
                for &place in &self.wanted[rank] {
                    if mover[place].is_none() && !used[place] {
                        mover[place] = Some(rank);
                        reached.push(place);
                    }
                }
            }
            let new = &reached[first_new..];
            let holds = |rank: &usize| self.taken[*rank].is_some_and(|place| new.contains(&place));
            ranks = (0..self.taken.len()).filter(holds).collect();
        }
        let load = |place: &usize| {
            let adapter = self.adapters[*place];
            (self.ranks_of_port[*place], self.ranks_of_adapter[adapter])
        };
        let open = reached
            .iter()
            .filter(|place| may_share || load(place).0 == 0);
        // If several are as good, the first wins, so that no rank moves without need.
        let Some(&last) = open.min_by_key(|place| load(place)) else {
            return;
        };
        self.ranks_of_port[last] += 1;
        self.ranks_of_adapter[self.adapters[last]] += 1;
        let mut next = Some(last);
        while let Some(place) = next {
            let Some(moved) = mover[place] else { break };
            next = self.taken[moved].replace(place);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::topology::{MachineGraph, NicDistance, RankPlace, nic_distances_on, read_xml};
    use PathType::{Phb, Pix, Sys};

    fn port(device: &str, number: u8, adapter: u64, path: Option<PathType>) -> PortFacts {
        PortFacts {
            device: device.into(),
            number,
            adapter,
            kinds: 2,
            path,
            mb_s: 0,
        }
    }

    /// Returns the shares of ranks with these distances to the ports `(adapter, ...)`.
    fn of(adapters: &[u64], distances: &[Vec<Option<PathType>>]) -> Vec<Vec<usize>> {
        let rank = |paths: &Vec<Option<PathType>>| -> Vec<PortFacts> {
            let each = adapters.iter().zip(paths).enumerate();
            each.map(|(index, (&adapter, &path))| port(&format!("m{index}"), 1, adapter, path))
                .collect()
        };
        let ranks: Vec<Vec<PortFacts>> = distances.iter().map(rank).collect();
        let ranks: Vec<Vec<&PortFacts>> = ranks.iter().map(|own| own.iter().collect()).collect();
        shares(&ranks)
    }

    #[test]
    fn each_rank_takes_its_nearest_ports() {
        let near_0 = vec![Some(Pix), Some(Sys), None];
        let near_1 = vec![Some(Phb), Some(Sys), Some(Sys)];
        let near_2 = vec![None, Some(Sys), Some(Phb)];
        assert_eq!(
            of(&[1, 2, 3], &[near_2, near_0, near_1]),
            [vec![2], vec![0], vec![0]]
        );
    }

    /// Returns the share of a rank with ports of these distances and MB/s.
    fn of_speeds(ports: &[(Option<PathType>, u32)]) -> Vec<usize> {
        let each = ports.iter().enumerate();
        let ports: Vec<PortFacts> = each
            .map(|(index, &(path, mb_s))| PortFacts {
                mb_s,
                ..port(&format!("m{index}"), 1, index as u64 + 1, path)
            })
            .collect();
        shares(&[ports.iter().collect()]).remove(0)
    }

    #[test]
    fn a_port_of_twice_the_speed_wins_one_class_further() {
        let [near, far] = [Some(Pix), Some(Phb)];
        assert_eq!(of_speeds(&[(near, 12_500), (far, 25_000)]), [1]);
        // The PCIe link of the faster device has 24 GB/s in the table.
        assert_eq!(of_speeds(&[(near, 12_500), (far, 24_000)]), [1]);
        assert_eq!(of_speeds(&[(near, 12_500), (far, 20_000)]), [0]);
        assert_eq!(of_speeds(&[(near, 24_000), (far, 25_000)]), [0]);
        // The nearest of all fast ports win, and equally near ports are all used.
        let three = [(near, 1000), (Some(Sys), 25_000), (far, 24_000)];
        assert_eq!(of_speeds(&three), [2]);
        let four = [(near, 1000), (far, 25_000), (far, 24_000), (far, 1000)];
        assert_eq!(of_speeds(&four), [1, 2]);
        // Unknown figures decide nothing.
        assert_eq!(of_speeds(&[(near, 0), (far, 25_000)]), [0]);
        assert_eq!(of_speeds(&[(near, 1000), (far, 0)]), [0]);
        assert_eq!(of_speeds(&[(near, 1000), (None, 25_000)]), [0]);
    }

    #[test]
    fn unknown_distances_leave_all_ports() {
        assert_eq!(of(&[1, 2], &[vec![None; 2], vec![None; 2]]), [[0, 1]; 2]);
    }

    #[test]
    fn equally_near_ports_are_shared_out_by_adapter() {
        let tie = |ports: usize, ranks: usize| vec![vec![Some(Phb); ports]; ranks];
        assert_eq!(of(&[1, 1, 2, 2], &tie(4, 2)), [[0, 1], [2, 3]]);
        assert_eq!(of(&[1, 1, 2, 2], &tie(4, 4)), [[0], [2], [1], [3]]);
        // Adapter 1 has three ports, which are free while the port of adapter 2 is taken.
        assert_eq!(of(&[1, 1, 1, 2], &tie(4, 4)), [[0], [3], [1], [2]]);
        assert_eq!(of(&[1, 2], &tie(2, 4)), [[0], [1], [0], [1]]);
        assert_eq!(of(&[0, 0, 0, 0], &tie(4, 1)), [[0, 1, 2, 3]]);
    }

    #[test]
    fn rank_with_a_choice_leaves_the_port_to_a_rank_without() {
        let choice = vec![Some(Pix), Some(Pix), Some(Sys)];
        let only_0 = vec![Some(Pix), Some(Phb), Some(Sys)];
        assert_eq!(
            of(&[1, 2, 3], &[choice.clone(), only_0.clone()]),
            [[1], [0]]
        );
        assert_eq!(
            of(&[1, 2, 3], &[choice.clone(), only_0.clone(), choice]),
            [[1], [0], [0]],
            "two ports for three ranks"
        );
        let chain = [
            vec![Some(Pix), Some(Pix), Some(Phb)],
            vec![Some(Phb), Some(Pix), Some(Pix)],
            only_0,
        ];
        assert_eq!(of(&[1, 2, 3], &chain), [[1], [2], [0]]);
    }

    /// Returns the machine of a file, and for each of its GPUs the network devices with their distances.
    fn machine(file: &str) -> Vec<Vec<PortFacts>> {
        let path = format!("{}/tests/topology/{file}", env!("CARGO_MANIFEST_DIR"));
        let machine = read_xml(&std::fs::read_to_string(path).unwrap()).unwrap();
        let graph = MachineGraph::new(&machine);
        let gpus = graph
            .by_rank()
            .into_iter()
            .map(|gpu| graph.gpus[gpu].bus_id);
        let facts = |gpu| {
            let nics = nic_distances_on(&machine, RankPlace::Gpu(gpu));
            let nics = nics.into_iter();
            let fact = |nic: NicDistance| PortFacts {
                mb_s: nic.mb_s.unwrap_or(0),
                ..port(&nic.name, 1, nic.adapter, nic.path)
            };
            nics.map(fact).collect()
        };
        gpus.map(facts).collect()
    }

    #[test]
    fn gpus_take_the_ports_beside_them() {
        // Columns: file, class of port n mod ports for rank n, ports of each rank.
        let sys = |ranks| vec![Sys; ranks];
        for (file, by_number, own_ports) in [
            (
                "nics-two-port.xml",
                [vec![Pix], vec![Phb; 3], sys(4)].concat(),
                2,
            ),
            ("nics-reversed.xml", sys(8), 1),
        ] {
            let ranks = machine(file);
            let borrowed: Vec<Vec<&PortFacts>> =
                ranks.iter().map(|own| own.iter().collect()).collect();
            let shares = shares(&borrowed);
            let mut used: Vec<usize> = shares.concat();
            used.sort_unstable();
            let all: Vec<usize> = (0..8 * own_ports).collect();
            assert_eq!(used, all, "{file}: each port belongs to one rank");
            for (rank, (own, share)) in ranks.iter().zip(&shares).enumerate() {
                assert_eq!(share.len(), own_ports, "{file}: rank {rank}");
                for &port in share {
                    assert_eq!(own[port].path, Some(Pix), "{file}: rank {rank}");
                }
            }
            let taken = ranks.iter().enumerate();
            let taken = taken.map(|(rank, own)| own[rank % own.len()].path.unwrap());
            assert_eq!(taken.collect::<Vec<_>>(), by_number, "{file}: by number");
        }
    }

    #[test]
    fn facts_survive_bytes_and_damage_is_detected() {
        let facts = port("mlx5_3", 2, 77, Some(Sys));
        let bytes = facts.to_bytes();
        assert_eq!(PortFacts::from_bytes(&bytes).unwrap(), facts);
        assert_eq!(facts.to_string(), "mlx5_3:2 (SYS)");
        let unknown = port("mlx5_3", 2, 77, None);
        assert_eq!(PortFacts::from_bytes(&unknown.to_bytes()).unwrap(), unknown);
        let mut damaged = bytes;
        *damaged.last_mut().unwrap() = 5;
        assert!(PortFacts::from_bytes(&damaged).is_err());
    }
}
