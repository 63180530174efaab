//! Simulated devices on a network between threads of one process, for tests without hardware.
//!
//! A [`Fabric`] is an [`Api`](super::Api): its objects are C structs as the header lays them out, and posting
//! and polling go through the operations of its contexts, as with a real provider. Writes happen
//! at once, in the order in which they are posted, or when they are let go; nothing is lost unless a
//! test says so. It is stricter than a device: a state machine step that leaves out an attribute,
//! a full queue, memory that is not registered, and an object that is destroyed before those that
//! need it are errors.

mod calls;
mod state;
#[cfg(all(test, not(loom)))]
mod tests;
mod work;

use super::types::*;
use state::State;
use std::collections::BTreeSet;
use std::ffi::{c_int, c_uint};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Devices and the network between them.
pub struct Fabric {
    state: Mutex<State>,
}

impl std::fmt::Debug for Fabric {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Fabric")
    }
}

/// What a device of a fabric is like.
#[derive(Clone)]
pub struct FakeDevice {
    /// Its name.
    pub name: &'static str,
    /// What it can do.
    pub attributes: IbvDeviceAttr,
    /// Each of its ports.
    pub port: IbvPortAttr,
    /// The addresses of each port.
    pub gids: Vec<IbvGidEntry>,
    /// The most that is sent inline.
    pub max_inline: u32,
}

impl FakeDevice {
    /// A RoCE device whose addresses are, in this order: the link-local one of both versions, and
    /// `10.0.0.LAST` of both.
    pub fn roce(name: &'static str, last: u8) -> FakeDevice {
        // SAFETY: plain numbers, for which zero is a value.
        let (mut attributes, mut port): (IbvDeviceAttr, IbvPortAttr) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        attributes.phys_port_cnt = 1;
        attributes.max_qp_wr = 1024;
        attributes.max_cqe = 32767;
        attributes.max_mr_size = 1 << 40;
        port.state = IBV_PORT_ACTIVE;
        port.phys_state = 5;
        port.active_mtu = IBV_MTU_1024;
        port.max_mtu = IBV_MTU_4096;
        port.link_layer = IBV_LINK_LAYER_ETHERNET;
        let mut local = [0; 16];
        local[..2].copy_from_slice(&[0xfe, 0x80]);
        local[15] = last;
        let mut mapped = [0; 16];
        mapped[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, last]);
        let types = [IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2];
        let gids = [local, mapped]
            .into_iter()
            .flat_map(|raw| types.map(|gid_type| (raw, gid_type)));
        let gids: Vec<_> = gids
            .enumerate()
            .map(|(index, (raw, gid_type))| IbvGidEntry {
                gid: IbvGid { raw },
                gid_index: index as u32,
                port_num: 1,
                gid_type,
                ndev_ifindex: 1,
            })
            .collect();
        port.gid_tbl_len = gids.len() as c_int + 2;
        FakeDevice {
            name,
            attributes,
            port,
            gids,
            max_inline: 256,
        }
    }

    /// An InfiniBand device.
    pub fn infiniband(name: &'static str, lid: u16) -> FakeDevice {
        let mut device = FakeDevice::roce(name, 1);
        device.port.link_layer = IBV_LINK_LAYER_INFINIBAND;
        device.port.lid = lid;
        device.gids.truncate(1);
        device.gids[0].gid_type = IBV_GID_TYPE_IB;
        device.port.gid_tbl_len = 1;
        device
    }
}

impl Fabric {
    /// A network with these devices.
    pub fn new(devices: Vec<FakeDevice>) -> Arc<Fabric> {
        Arc::new(Fabric {
            state: Mutex::new(State::new(devices)),
        })
    }

    /// Has `function` (a method's name) fail with error number `error`, `times` times, after `skip`
    /// more calls that do not.
    pub fn fail(&self, function: &'static str, skip: usize, times: usize, error: c_int) {
        self.lock().failures.insert(function, (skip, times, error));
    }

    /// Has a piece of work complete with `status`, after `skip` more that do not fail; its queue pair
    /// is then broken, as a device would leave it.
    pub fn fail_work(&self, skip: usize, status: c_uint) {
        self.lock().work_failures.push((skip, status));
    }

    /// Whether posted work stays where it is; what was kept back goes on when that ends.
    pub fn hold(&self, holds: bool) {
        let mut state = self.lock();
        state.holds = holds;
        if !holds {
            work::run_all(&mut state);
        }
    }

    /// Has the library say this of forks; `None`: it is too old to know.
    pub fn fork(&self, answer: Option<c_uint>) {
        self.lock().fork = answer;
    }

    /// Takes a device's port down or up, with the event that tells of it.
    pub fn port(&self, device: usize, up: bool) {
        let mut state = self.lock();
        state.devices[device].port.state = if up { IBV_PORT_ACTIVE } else { IBV_PORT_DOWN };
        let event = if up {
            IBV_EVENT_PORT_ACTIVE
        } else {
            IBV_EVENT_PORT_ERR
        };
        state.tell(device, event, 1);
    }

    /// Tells every context of a device of an event.
    pub fn tell(&self, device: usize, event: c_uint) {
        self.lock().tell(device, event, 0);
    }

    /// Does to every queue pair that the calling thread has made what the kernel does when its
    /// process is killed: nobody answers its peers.
    pub fn kill(&self) {
        let me = std::thread::current().id();
        let mut state = self.lock();
        for pair in state.pairs.values_mut().filter(|pair| pair.maker == me) {
            pair.state = IBV_QPS_RESET;
        }
    }

    /// Numbers of the queue pairs that there are.
    pub fn pairs(&self) -> Vec<u32> {
        self.lock().pairs.keys().copied().collect()
    }

    /// What the queue pairs were told.
    pub fn attributes(&self) -> Vec<IbvQpAttr> {
        let state = self.lock();
        state.pairs.values().map(|pair| pair.attributes).collect()
    }

    /// Devices that have queue pairs, in order.
    pub fn devices_in_use(&self) -> Vec<usize> {
        let state = self.lock();
        let devices: BTreeSet<usize> = state.pairs.values().map(|pair| pair.device).collect();
        devices.into_iter().collect()
    }

    /// The devices at both ends of each queue pair that is connected.
    pub fn ends(&self) -> Vec<(usize, usize)> {
        let state = self.lock();
        let pairs = state.pairs.values();
        pairs
            .filter_map(|pair| Some((pair.device, state.pairs.get(&pair.peer)?.device)))
            .collect()
    }

    /// How often `function` was called.
    pub fn calls(&self, function: &'static str) -> usize {
        self.lock().calls.get(function).copied().unwrap_or(0)
    }

    /// What has not been given back.
    pub fn leftovers(&self) -> Vec<String> {
        self.lock().leftovers()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
