//! Defects of a machine's description that do not prevent its use.

use super::BusId;
use std::fmt;

/// A defect of a description. Equal defects are reported once, as a warning; the rest of the description is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Defect {
    /// A GPU lists a link to itself, which is left out.
    LinkToItself(BusId),
    /// A GPU lists a link to a device that the description lacks, which is left out.
    LinkToNowhere(BusId, BusId),
    /// A GPU lists no links, or more links than a chip can have, to one device. They are left out.
    LinkCount(BusId, u32),
    /// Two GPUs list different numbers of links to each other. The larger number is used both ways.
    UnequalLinks(BusId, BusId, [u32; 2]),
    /// Several bridges have one address. The bridges are kept apart by their places in the tree.
    RepeatedBridge(BusId, usize),
    /// A device has no class, so its contents (GPU, network devices, devices behind it) decide what it is.
    NoClass(BusId),
    /// A link's speed or width is missing, zero or unknown. The link counts as unknown.
    UnknownSpeed(BusId, String),
    /// The fastest speed of a link is unknown. The speed at which the link runs now is used.
    TrainedSpeed(BusId, String),
    /// A bridge of a virtual machine claims a link far slower than the devices behind it. The link counts as
    /// unknown.
    VirtualBridge(BusId, String),
    /// A socket's NUMA node is unknown.
    NoNuma,
    /// The system lists no PCI devices.
    NoPciBus,
    /// The system lists no PCI device with the address of a GPU, whose place is unknown.
    UnlistedGpu(BusId),
}

impl fmt::Display for Defect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Defect::LinkToItself(gpu) => {
                write!(f, "GPU {gpu} lists a link to itself; the link is ignored")
            }
            Defect::LinkToNowhere(gpu, target) => write!(
                f,
                "GPU {gpu} lists a link to {target}, which is not in the description; the link is ignored"
            ),
            Defect::LinkCount(gpu, count) => write!(
                f,
                "GPU {gpu} lists {count} links to one device, which is no possible number; they are ignored"
            ),
            Defect::UnequalLinks(a, b, [there, back]) => write!(
                f,
                "GPU {a} lists {there} links to {b}, which lists {back} back; {} are used both ways",
                there.max(back)
            ),
            Defect::RepeatedBridge(bus_id, times) => write!(
                f,
                "{times} bridges have the address {bus_id}; they are told apart by what is behind them"
            ),
            Defect::NoClass(bus_id) => {
                write!(
                    f,
                    "device {bus_id} has no class; its contents tell what it is"
                )
            }
            Defect::UnknownSpeed(bus_id, text) => write!(
                f,
                "the PCIe link of {bus_id} has no usable speed ({text}); its bandwidth is unknown"
            ),
            Defect::TrainedSpeed(bus_id, text) => write!(
                f,
                "the system does not report the fastest speed (max_link_speed) of {bus_id}; its link counts as {text}, \
                 which may be a speed to save power"
            ),
            Defect::VirtualBridge(bus_id, text) => write!(
                f,
                "bridge {bus_id} claims {text}, but devices behind it have faster links; its bandwidth is \
                 unknown"
            ),
            Defect::NoPciBus => f.write_str(
                "the system lists no PCI devices (bus/pci/devices below /sys); GPUs are not grouped",
            ),
            Defect::UnlistedGpu(gpu) => write!(
                f,
                "the system lists no PCI device {gpu}, which is a GPU; its place is unknown"
            ),
            Defect::NoNuma => {
                f.write_str("a socket has no NUMA node; GPUs below it are not grouped by socket")
            }
        }
    }
}
