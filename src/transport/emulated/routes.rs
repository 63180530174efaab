//! The links between ranks, from the description of the machine.

use crate::config::EmulatedMachine;
use crate::error::{Error, Result};
use crate::topology::{MachineGraph, Paths, PeerAccess, read_xml};

/// A link of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RouteLink {
    /// Index of the link in the machine's graph.
    pub link: usize,
    /// Bandwidth in MB/s, before it is divided by `scale`.
    pub mb_s: u32,
    /// Divisor of the bandwidth.
    pub scale: u32,
}

impl RouteLink {
    /// Returns the nanoseconds that a message of `bytes` bytes occupies the link.
    pub fn nanoseconds(&self, bytes: u32) -> u64 {
        // 1 MB/s is one byte in 1,000 ns. Rounded up, no link carries more than its bandwidth.
        (u64::from(bytes) * 1000 * u64::from(self.scale)).div_ceil(self.mb_s.into())
    }
}

/// The links that messages between ranks cross.
#[derive(Debug)]
pub(super) struct Routes {
    nranks: usize,
    /// Number of links of the machine.
    links: usize,
    /// Route of each pair, by `from * nranks + to`.
    routes: Vec<Vec<RouteLink>>,
}

impl Routes {
    /// Finds the routes between the first `nranks` ranks of `machine`. Rank r stands for the GPU with rank r, or for
    /// the r-th by number (`dev`) if not all GPUs have ranks. With `p2p_disable` all routes lead through sockets.
    ///
    /// # Errors
    /// Invalid argument if the file is malformed, has no GPU for a rank, or has no path between two; if the scale
    /// is 0.
    pub fn new(machine: &EmulatedMachine, nranks: usize, p2p_disable: bool) -> Result<Routes> {
        if machine.scale == 0 {
            return Err(Error::invalid_argument("the scale is 0; valid: 1 or more"));
        }
        let graph = MachineGraph::new(&read_xml(&machine.xml)?);
        let access = match p2p_disable {
            true => PeerAccess::Never,
            false => PeerAccess::Rule,
        };
        let paths = Paths::new(&graph, &access);
        let gpus = (0..nranks).map(|rank| gpu_of(&graph, rank, nranks));
        let gpus = gpus.collect::<Result<Vec<usize>>>()?;
        let mut routes = Vec::with_capacity(nranks * nranks);
        for from in 0..nranks {
            for to in 0..nranks {
                let links = &paths.get(gpus[from], gpus[to]).links;
                if links.is_empty() && from != to {
                    return Err(Error::invalid_argument(format!(
                        "the file has no path from the GPU of rank {from} to the GPU of rank {to}"
                    )));
                }
                let route = links.iter().map(|&link| RouteLink {
                    link,
                    mb_s: graph.links[link].bandwidth.mb_s,
                    scale: machine.scale,
                });
                routes.push(route.collect());
            }
        }
        Ok(Routes {
            nranks,
            links: graph.links.len(),
            routes,
        })
    }

    /// Returns the number of links of the machine.
    pub const fn links(&self) -> usize {
        self.links
    }

    /// Returns the links from rank `from` to rank `to`.
    pub fn route(&self, from: usize, to: usize) -> &[RouteLink] {
        &self.routes[from * self.nranks + to]
    }
}

/// Returns the index of a rank's GPU.
fn gpu_of(graph: &MachineGraph, rank: usize, nranks: usize) -> Result<usize> {
    let mut gpus = graph.gpus.iter();
    let found = match graph.gpus.iter().all(|gpu| gpu.rank.is_some()) {
        true => gpus.position(|gpu| gpu.rank.map(|rank| rank as usize) == Some(rank)),
        false => (rank < graph.gpus.len()).then_some(rank),
    };
    found.ok_or_else(|| {
        let count = graph.gpus.len();
        Error::invalid_argument(format!(
            "the file has no GPU of rank {rank}: it has {count} GPUs, and the communicator {nranks} ranks"
        ))
    })
}
