//! Fragments of a machine: the part that a rank knows best, and their fusion to one machine.
//!
//! Ranks of one host may see different parts of it, because containers hide devices. Each rank sends its GPU,
//! with the devices between the GPU and its socket. All ranks fuse the same fragments in the same order, so
//! that all get the same machine.

use super::BusId;
use super::machine::{CpuSocket, Machine, PciDevice};
use crate::error::{Error, ErrorKind, Result};
use std::collections::HashMap;

/// Returns the part of `machine` that holds the GPU at `gpu` and the devices between it and its socket; `None` if the
/// machine has no such GPU.
pub fn fragment(machine: &Machine, gpu: BusId) -> Option<Machine> {
    let socket = machine.sockets.iter().find_map(|socket| {
        let device = socket
            .devices
            .iter()
            .find_map(|device| way_to(device, gpu))?;
        Some(CpuSocket {
            devices: vec![device],
            nics: Vec::new(),
            ..socket.clone()
        })
    })?;
    Some(Machine {
        sockets: vec![socket],
        version: machine.version,
        defects: Vec::new(),
    })
}

/// Returns `device` with only those devices behind it that lead to `gpu`. Readers limit the depth.
fn way_to(device: &PciDevice, gpu: BusId) -> Option<PciDevice> {
    if device.bus_id == gpu && device.gpu.is_some() {
        return Some(PciDevice {
            devices: Vec::new(),
            nics: Vec::new(),
            ..device.clone()
        });
    }
    let next = device.devices.iter().find_map(|child| way_to(child, gpu))?;
    Some(PciDevice {
        devices: vec![next],
        nics: Vec::new(),
        ..device.clone()
    })
}

/// Fuses fragments, each with the name of the rank that sent it, to one machine. GPUs are numbered by address.
///
/// # Errors
/// Mismatch, naming two ranks and both values, if two fragments describe a device or socket differently, or place a GPU
/// behind different devices.
pub fn fuse(fragments: &[(String, Machine)]) -> Result<Machine> {
    let mut fusion = Fusion::default();
    for (rank, fragment) in fragments {
        fusion.machine.version = fragment.version;
        for socket in &fragment.sockets {
            fusion.socket(rank, socket)?;
        }
    }
    let mut machine = fusion.machine;
    let mut addresses: Vec<BusId> = machine
        .pci_devices()
        .iter()
        .filter(|device| device.gpu.is_some())
        .map(|d| d.bus_id)
        .collect();
    addresses.sort_unstable();
    addresses.dedup();
    let devices = machine
        .sockets
        .iter_mut()
        .flat_map(|socket| &mut socket.devices);
    devices.for_each(|device| number(device, &addresses));
    Ok(machine)
}

/// Numbers each GPU by the index of its address in `addresses`, and removes its rank.
fn number(device: &mut PciDevice, addresses: &[BusId]) {
    if let Some(gpu) = &mut device.gpu {
        gpu.dev = addresses.binary_search(&device.bus_id).unwrap_or(0) as u32;
        gpu.rank = None;
    }
    device
        .devices
        .iter_mut()
        .for_each(|child| number(child, addresses));
}

#[derive(Default)]
struct Fusion<'a> {
    machine: Machine,
    /// For each GPU, the addresses of the devices between its socket and the GPU, and the rank that sent
    /// these addresses.
    ways: HashMap<BusId, (Vec<BusId>, &'a str)>,
    /// For each socket or device, the first rank that sent it. The key is the NUMA node, and the addresses
    /// from the socket down to the device.
    senders: HashMap<(i32, Vec<BusId>), &'a str>,
}

impl<'a> Fusion<'a> {
    fn socket(&mut self, rank: &'a str, socket: &CpuSocket) -> Result<()> {
        let place = (socket.numa, Vec::new());
        let first = *self.senders.entry(place).or_insert(rank);
        let bare = |socket: &CpuSocket| CpuSocket {
            devices: Vec::new(),
            nics: Vec::new(),
            ..socket.clone()
        };
        let known = self
            .machine
            .sockets
            .iter()
            .position(|known| known.numa == socket.numa);
        let at = match known {
            Some(at) => {
                let known = bare(&self.machine.sockets[at]);
                if known != bare(socket) {
                    let text = |s: &CpuSocket| format!("{} {} {:?}", s.arch, s.vendor, s.model);
                    let what = format!("NUMA node {}", socket.numa);
                    return Err(differ(&what, [first, rank], [text(&known), text(socket)]));
                }
                at
            }
            None => {
                self.machine.sockets.push(bare(socket));
                self.machine.sockets.len() - 1
            }
        };
        for device in &socket.devices {
            let mut devices = std::mem::take(&mut self.machine.sockets[at].devices);
            let done = self.device(rank, (socket.numa, &mut Vec::new()), &mut devices, device);
            self.machine.sockets[at].devices = devices;
            done?;
        }
        Ok(())
    }

    /// Adds `device` and all devices behind it to `devices`. The addresses in `above` lead from the socket to
    /// `devices`.
    fn device(
        &mut self,
        rank: &'a str,
        (numa, above): (i32, &mut Vec<BusId>),
        devices: &mut Vec<PciDevice>,
        device: &PciDevice,
    ) -> Result<()> {
        if device.gpu.is_some() {
            let (way, first) = self
                .ways
                .entry(device.bus_id)
                .or_insert((above.clone(), rank));
            if way != above {
                let text = |way: &[BusId]| match way.last() {
                    Some(parent) => format!("behind {parent}"),
                    None => "at a root port".into(),
                };
                let what = format!("GPU {}", device.bus_id);
                return Err(differ(&what, [*first, rank], [text(way), text(above)]));
            }
        }
        above.push(device.bus_id);
        let first = *self.senders.entry((numa, above.clone())).or_insert(rank);
        let known = devices
            .iter()
            .position(|known| known.bus_id == device.bus_id);
        let at = match known {
            Some(at) => {
                let known = &devices[at];
                if (known.link, known.ids, &known.gpu) != (device.link, device.ids, &device.gpu) {
                    let text = |d: &PciDevice| format!("{:?} {:?} {:?}", d.link, d.ids, d.gpu);
                    let what = format!("device {}", device.bus_id);
                    return Err(differ(&what, [first, rank], [text(known), text(device)]));
                }
                at
            }
            None => {
                devices.push(PciDevice {
                    devices: Vec::new(),
                    ..device.clone()
                });
                devices.len() - 1
            }
        };
        for child in &device.devices {
            self.device(rank, (numa, above), &mut devices[at].devices, child)?;
        }
        above.pop();
        Ok(())
    }
}

fn differ(what: &str, ranks: [&str; 2], values: [String; 2]) -> Error {
    Error::new(
        ErrorKind::Mismatch,
        format!(
            "{what} is {} on {} and {} on {}: the ranks see different machines; CINCH_TOPO=off or a file on \
             all ranks helps",
            values[0], ranks[0], values[1], ranks[1]
        ),
    )
}
