//! Descriptions of the machines that the tests use.

use crate::topology::machine::{
    CpuSocket, Gpu, GpuLink, GpuLinkKind, Machine, Nic, PciDevice, PciLink, XmlVersion,
};
use crate::topology::{BusId, PeerAccess};

/// A machine with its rule of peer access.
pub struct Case {
    pub machine: Machine,
    pub access: PeerAccess,
}

/// Returns `count` sockets with a processor model whose socket links have `between` GB/s.
fn sockets(count: usize, between: u32) -> Vec<CpuSocket> {
    let (vendor, family, model) = match between {
        10 => ("GenuineIntel", 6, 0x55),
        16 => ("AuthenticAMD", 143, 49),
        _ => panic!("no processor has {between} GB/s between sockets"),
    };
    (0..count)
        .map(|numa| CpuSocket {
            numa: numa as i32,
            arch: "x86_64".into(),
            vendor: vendor.into(),
            family: Some(family),
            model: Some(model),
            affinity: format!("{:x}", 0xff_u64 << (8 * numa)),
            ..CpuSocket::default()
        })
        .collect()
}

/// A PCIe link of 16 lanes with `gb_s`: 12, 24 or 48.
fn link(gb_s: u32) -> PciLink {
    PciLink {
        speed: Some(gb_s * 80 / 12),
        width: Some(16),
    }
}

fn bus(gpu: usize) -> BusId {
    BusId::new((gpu / 0xf0) as u32, 0x10 + (gpu % 0xf0) as u8, 0, 0)
}

fn gpu(number: usize, gb_s: u32) -> PciDevice {
    PciDevice {
        class: Some(0x03_0200),
        link: link(gb_s),
        gpu: Some(Gpu {
            dev: number as u32,
            rank: Some(number as u32),
            sm: Some(70),
            gdr: true,
            ..Gpu::default()
        }),
        ..PciDevice::new(bus(number))
    }
}

/// A switch with the GPUs `numbers` behind it.
fn switch(numbers: std::ops::Range<usize>, gb_s: u32) -> PciDevice {
    let (domain, number) = (numbers.start / 0x80, numbers.start % 0x80);
    let bus_id = BusId::new(domain as u32, 0x80 + number as u8, 0, 0);
    PciDevice {
        class: Some(0x06_0400),
        link: link(gb_s),
        devices: numbers.map(|number| gpu(number, gb_s)).collect(),
        ..PciDevice::new(bus_id)
    }
}

fn machine(sockets: Vec<CpuSocket>) -> Machine {
    Machine {
        sockets,
        ..Machine::default()
    }
}

/// Returns a machine with `per_switch` GPUs behind each of `switches` switches of each socket.
pub fn switched(
    sockets_count: usize,
    between: u32,
    switches: usize,
    per_switch: usize,
    gb_s: u32,
) -> Machine {
    let mut sockets = sockets(sockets_count, between);
    for (at, socket) in sockets.iter_mut().enumerate() {
        socket.devices = (0..switches)
            .map(|number| {
                let first = (at * switches + number) * per_switch;
                switch(first..first + per_switch, gb_s)
            })
            .collect();
    }
    machine(sockets)
}

/// Returns a machine with GPUs at the root ports of each socket.
fn flat(of_sockets: &[std::ops::Range<usize>], between: u32, gb_s: u32) -> Machine {
    let mut sockets = sockets(of_sockets.len(), between);
    for (socket, numbers) in sockets.iter_mut().zip(of_sockets) {
        socket.devices = numbers.clone().map(|number| gpu(number, gb_s)).collect();
    }
    machine(sockets)
}

/// Returns a machine of two sockets with `switches` switches each, and behind each switch `per_switch` GPUs and as
/// many ports of 400 Gbit/s, two to an adapter.
pub fn with_nics(switches: usize, per_switch: usize) -> Machine {
    let mut machine = switched(2, 10, switches, per_switch, 48);
    let mut dev = 0;
    for switch in machine
        .sockets
        .iter_mut()
        .flat_map(|socket| &mut socket.devices)
    {
        for _ in 0..per_switch {
            let nic = Nic {
                name: format!("mlx5_{dev}"),
                dev,
                speed: Some(400_000),
                port: 1,
                guid: 0x9803_9b03_0000_0000 + u64::from(dev / 2),
                gdr: true,
            };
            switch.devices.push(PciDevice {
                class: Some(0x02_0700),
                link: link(48),
                nics: vec![nic],
                ..PciDevice::new(BusId::new(0, 0xc0 + (dev / 2) as u8, 0, (dev % 2) as u8))
            });
            dev += 1;
        }
    }
    machine
}

/// Calls `change` with each GPU of the machine.
pub fn each_gpu(machine: &mut Machine, change: &mut dyn FnMut(&mut Gpu)) {
    fn visit(device: &mut PciDevice, change: &mut dyn FnMut(&mut Gpu)) {
        device.gpu.iter_mut().for_each(&mut *change);
        device
            .devices
            .iter_mut()
            .for_each(|device| visit(device, change));
    }
    for device in machine
        .sockets
        .iter_mut()
        .flat_map(|socket| &mut socket.devices)
    {
        visit(device, change);
    }
}

/// Connects pairs of GPUs by `count` links each.
pub fn connect(machine: &mut Machine, kind: GpuLinkKind, pairs: &[(usize, usize, u32)]) {
    for &(a, b, count) in pairs {
        for (from, to) in [(a, b), (b, a)] {
            each_gpu(machine, &mut |gpu| {
                if gpu.dev == from as u32 {
                    let (target, target_class) = (Some(bus(to)), Some(0x03_0200));
                    gpu.links.push(GpuLink {
                        kind,
                        target,
                        target_class,
                        count,
                        bandwidth: None,
                    });
                }
            });
        }
    }
}

/// Returns the machine of `name`, with ranks in the order of `dev`.
pub fn case(name: &'static str) -> Case {
    let mut access = PeerAccess::Rule;
    let machine = match name {
        "A" => switched(1, 10, 2, 4, 12),
        "B" => switched(2, 10, 2, 2, 12),
        "C" => switched(2, 16, 2, 2, 48),
        "D" => switched(1, 10, 4, 4, 48),
        "E" => {
            access = PeerAccess::Never;
            switched(2, 10, 1, 4, 24)
        }
        "F" => flat(&[0..4, 4..8], 16, 24),
        "G" => {
            let mut machine = flat(&[0..1, 1..2, 2..3, 3..4], 16, 12);
            connect(&mut machine, GpuLinkKind::NvLink, &[(0, 1, 12), (2, 3, 12)]);
            machine
        }
        "H" => {
            let mut machine = flat(&[0..4, 4..8], 10, 24);
            let bricks = [
                (0, 1, 2),
                (0, 2, 1),
                (0, 3, 1),
                (0, 4, 2),
                (1, 2, 1),
                (1, 3, 2),
                (1, 5, 1),
                (2, 3, 2),
                (2, 6, 2),
                (3, 7, 1),
                (4, 5, 2),
                (4, 6, 1),
                (4, 7, 1),
                (5, 6, 1),
                (5, 7, 2),
                (6, 7, 2),
            ];
            connect(&mut machine, GpuLinkKind::NvLink, &bricks);
            machine
        }
        "I" => {
            let mut sockets = sockets(4, 16);
            for (socket, numbers) in sockets.iter_mut().zip([0..1, 1..4, 4..6, 6..8]) {
                socket.devices = numbers
                    .map(|number| switch(number..number + 1, 24))
                    .collect();
            }
            let mut machine = machine(sockets);
            machine.version = XmlVersion::Rccl;
            let inside = |first: usize| {
                (first..first + 4).flat_map(move |a| (a + 1..first + 4).map(move |b| (a, b, 1)))
            };
            let pairs: Vec<_> = inside(0).chain(inside(4)).collect();
            connect(&mut machine, GpuLinkKind::Xgmi, &pairs);
            machine
        }
        "K" => {
            let mut machine = flat(&[0..4, 4..8], 10, 24);
            for device in machine
                .sockets
                .iter_mut()
                .flat_map(|socket| &mut socket.devices)
            {
                device.link = PciLink::default();
            }
            each_gpu(&mut machine, &mut |gpu| {
                gpu.sm = Some(90);
                gpu.links.push(GpuLink {
                    kind: GpuLinkKind::NvLink,
                    target: Some(BusId::new(0x0fff_ffff, 0xff, 0xff, 0)),
                    target_class: Some(0x06_8000),
                    count: 18,
                    bandwidth: None,
                });
            });
            machine
        }
        _ => panic!("no machine {name}"),
    };
    Case { machine, access }
}

/// Numbers the ranks so that consecutive ranks are in different groups of `groups`, in turn.
pub fn dealt(machine: &mut Machine, groups: &[Vec<usize>]) {
    let mut rank = 0;
    let most = groups.iter().map(Vec::len).max().unwrap_or(0);
    for place in 0..most {
        for group in groups.iter().filter(|group| place < group.len()) {
            let dev = group[place] as u32;
            each_gpu(machine, &mut |gpu| {
                if gpu.dev == dev {
                    gpu.rank = Some(rank);
                }
            });
            rank += 1;
        }
    }
}
