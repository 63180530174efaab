//! Limits that single links do not show: pools, which several links share, and fans, which slow a link down when
//! several GPUs send through it to several root ports at once.
//!
//! No table has these limits; measurements do. See `measured`.

use std::collections::BTreeMap;

/// Links that share a bandwidth, such as both directions between two sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkPool {
    /// Links that share the bandwidth, by index in `MachineGraph::links`.
    pub links: Vec<usize>,
    /// MB/s of all links together; at least 1.
    pub mb_s: u32,
}

/// A bandwidth that a link falls to while many GPUs send through it to many root ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FanCap {
    /// Link from a switch towards its socket, by index in `MachineGraph::links`.
    pub link: usize,
    /// Least number of sending GPUs at which the cap holds.
    pub sources: u32,
    /// Least number of root ports, to which these GPUs send at once, at which the cap holds.
    pub ports: u32,
    /// MB/s of the link while the cap holds; at least 1.
    pub mb_s: u32,
}

/// Counts the GPUs that send through the fans of a graph at one time, and their root ports.
#[derive(Clone, Debug, Default)]
pub(super) struct FanFlows {
    fans: Vec<FanCount>,
}

#[derive(Clone, Debug)]
struct FanCount {
    cap: FanCap,
    /// Number of flows through the link from each sending GPU (`sources`) and to each root port (`ports`).
    sources: BTreeMap<usize, u32>,
    ports: BTreeMap<usize, u32>,
}

impl FanFlows {
    pub fn new(fans: &[FanCap]) -> FanFlows {
        let count = |&cap: &FanCap| FanCount {
            cap,
            sources: BTreeMap::new(),
            ports: BTreeMap::new(),
        };
        FanFlows {
            fans: fans.iter().map(count).collect(),
        }
    }

    /// Adds a flow from GPU `from` on `links` that goes down through `root_port`, or removes it. A flow without
    /// a root port counts for no fan.
    pub fn count(&mut self, from: usize, links: &[usize], root_port: Option<usize>, add: bool) {
        let Some(port) = root_port else { return };
        for fan in &mut self.fans {
            if links.contains(&fan.cap.link) {
                change(&mut fan.sources, from, add);
                change(&mut fan.ports, port, add);
            }
        }
    }

    /// Returns the fans whose cap holds. If several fans of one link hold, the lowest cap applies.
    pub fn holding(&self) -> impl Iterator<Item = FanCap> + '_ {
        let holds = |fan: &&FanCount| {
            fan.sources.len() >= fan.cap.sources as usize
                && fan.ports.len() >= fan.cap.ports as usize
        };
        self.fans.iter().filter(holds).map(|fan| fan.cap)
    }

    /// Returns the lowest cap that holds for `link`; `None` if none holds.
    pub fn cap(&self, link: usize) -> Option<u32> {
        let caps = self.holding().filter(|fan| fan.link == link);
        caps.map(|fan| fan.mb_s).min()
    }

    pub fn is_empty(&self) -> bool {
        self.fans.is_empty()
    }

    pub fn clear(&mut self) {
        for fan in &mut self.fans {
            fan.sources.clear();
            fan.ports.clear();
        }
    }
}

fn change(counts: &mut BTreeMap<usize, u32>, key: usize, add: bool) {
    let count = counts.entry(key).or_default();
    *count = if add {
        *count + 1
    } else {
        count.saturating_sub(1)
    };
    if *count == 0 {
        counts.remove(&key);
    }
}
