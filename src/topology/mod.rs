//! The topology of a machine: GPUs, NICs, the PCIe switches and sockets between them, NVLink, and how fast
//! each link is.
//!
//! A [`Machine`] is a description as a file or the operating system gives it: sockets with trees of PCIe
//! devices. [`detect`] describes the machine at hand. A [`MachineGraph`] is derived from a description:
//! nodes, and links with a bandwidth in each direction and its source. [`MeasuredLimits`] replace bandwidths
//! of the graph by measured bandwidths, and add limits that no table has. Everything else is computed from
//! the graph:
//!
//! | file | computes |
//! | --- | --- |
//! | `paths` | the links that a message between two GPUs crosses, and the [`PathType`] |
//! | `nic_distance` | class and speed of the path from a rank's GPU or cores to each network device |
//! | `cuts` | links that divide the GPUs into two parts |
//! | `groups` | partitions of the GPUs into groups behind one way out |
//! | `flows` | bytes per link of a schedule; the fullest link gives the time |
//! | `rates` | the bandwidth of flows that run at once |
//! | `rings` | the best ring, and the best set of rings |
//! | `whole_rings` | sets of rings with equal parts of the message, as schedules run them |
//! | `hierarchy` | the best schedule on nested groups |
//! | `bound` | a time that no schedule can beat |
//! | `fragment` | the part of a machine that a rank knows, and the fusion of the parts of all ranks |
//! | `rank_topology` | ring and groups of a communicator's ranks, and the time of its messages |
//! | `probe` | patterns to measure, and the limits that their rates show |
//! | `simulate` | the time of a schedule on a cluster of equal hosts, by flows or by messages |
//!
//! Results are equal on all ranks: bandwidths are integers, ties go to the lower number, and searches end
//! after a fixed number of steps, never after a time.

mod assumed;
mod bound;
mod cuts;
mod defect;
mod detect;
mod flows;
mod fragment;
mod graph;
mod groups;
mod hierarchy;
mod limits;
mod machine;
mod measured;
mod nic_distance;
mod packing;
mod paths;
mod predict;
pub mod probe;
mod processor;
mod rank_topology;
mod rates;
mod rings;
mod simulate;
mod speed;
mod whole_rings;
mod xml;

#[cfg(test)]
mod tests;

pub use crate::sys::pci::BusId;
pub use defect::Defect;
pub use detect::{DetectSources, DriverGpu, detect, detect_in};
pub use flows::{Bottleneck, LinkTime, Loads};
pub use fragment::{fragment, fuse};
pub use graph::{
    Bandwidth, BandwidthOrigin, GpuFacts, GraphLink, GraphNode, LinkId, LinkKind, MachineGraph,
    NodeId, NodeKind,
};
pub use groups::Partition;
pub use hierarchy::{Hierarchy, LevelExchange};
pub use limits::{FanCap, LinkPool};
pub use machine::{
    CpuSocket, Gpu, GpuLink, GpuLinkKind, Machine, Nic, PciDevice, PciLink, XmlVersion,
};
pub use measured::{MeasuredLimit, MeasuredLimits};
pub use nic_distance::{
    InterfaceDistance, NicDistance, RankPlace, interface_distances, is_too_slow, nic_distances,
    nic_distances_on, path_number, path_of_number,
};
pub use paths::{PathType, Paths, PeerAccess};
pub use predict::{AllReducePrediction, predict};
pub use processor::ProcessorFacts;
pub use rank_topology::RankTopology;
pub use rates::concurrent_rates;
pub use rings::{RingOrder, RingSet};
pub use simulate::{Cluster, ClusterPort, MessageSettings, simulate_messages};
pub use xml::{file_text as xml_file_text, read as read_xml, write as write_xml};
