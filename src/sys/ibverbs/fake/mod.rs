//! Simulated RDMA devices, connected by a network between threads of this process, for tests
//! without hardware.
//!
//! A [`Fabric`] is an [`Api`](super::Api). Its objects are C structs with the header's layout, and
//! posting and polling call the operations of its contexts, as with a real provider. Writes take
//! effect in the order in which they are posted, either immediately or when a test ends a hold
//! ([`Fabric::hold_work`]). Nothing is lost unless a test requests it.
//!
//! The simulation is stricter than a device. These are errors: a state transition without a
//! required attribute, a full queue, unregistered memory, and the destruction of an object before
//! its users.

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

/// Simulated devices and the network between them.
pub struct Fabric {
    state: Mutex<State>,
}

impl std::fmt::Debug for Fabric {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Fabric")
    }
}

/// Properties of a simulated device.
#[derive(Clone)]
pub struct FakeDevice {
    /// Name of the device.
    pub name: &'static str,
    /// Limits of the device.
    pub attributes: IbvDeviceAttr,
    /// Attributes of each port.
    pub port: IbvPortAttr,
    /// Addresses of each port.
    pub gids: Vec<IbvGidEntry>,
    /// Largest number of bytes that can be sent inline.
    pub max_inline: u32,
}

impl FakeDevice {
    /// Makes a RoCE device. Its addresses, in this order: the link-local address in both RoCE
    /// versions, and `10.0.0.LAST` in both.
    pub fn roce(name: &'static str, last: u8) -> FakeDevice {
        // SAFETY: both structs consist of numbers, for which zero is valid.
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

    /// Makes an InfiniBand device.
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
    /// Makes a network with these devices.
    pub fn new(devices: Vec<FakeDevice>) -> Arc<Fabric> {
        Arc::new(Fabric {
            state: Mutex::new(State::new(devices)),
        })
    }

    /// Makes `function` (a method's name) fail `times` times with `error`, after `skip` calls that
    /// succeed.
    pub fn fail(&self, function: &'static str, skip: usize, times: usize, error: c_int) {
        self.lock().failures.insert(function, (skip, times, error));
    }

    /// Makes a work request complete with `status`, after `skip` requests that succeed. The queue
    /// pair of that request then enters the error state, as on a device.
    pub fn fail_work(&self, skip: usize, status: c_uint) {
        self.lock().work_failures.push((skip, status));
    }

    /// Sets whether posted work is held back. Turning this off performs the work held so far.
    pub fn hold_work(&self, holds_work: bool) {
        let mut state = self.lock();
        state.holds_work = holds_work;
        if !holds_work {
            work::run_all(&mut state);
        }
    }

    /// Sets the fork support that the library reports; `None` is a library too old to report it.
    pub fn set_fork_support(&self, answer: Option<c_uint>) {
        self.lock().fork = answer;
    }

    /// Takes a device's port up or down, and raises the corresponding asynchronous event.
    pub fn set_port(&self, device: usize, up: bool) {
        let mut state = self.lock();
        state.devices[device].port.state = if up { IBV_PORT_ACTIVE } else { IBV_PORT_DOWN };
        let event = if up {
            IBV_EVENT_PORT_ACTIVE
        } else {
            IBV_EVENT_PORT_ERR
        };
        state.raise_event(device, event, 1);
    }

    /// Raises an event on every context of a device.
    pub fn raise_event(&self, device: usize, event: c_uint) {
        self.lock().raise_event(device, event, 0);
    }

    /// Ends the queue pairs that the calling thread has made, as the kernel does for a killed
    /// process. Peers get no acknowledgement.
    pub fn kill(&self) {
        let me = std::thread::current().id();
        let mut state = self.lock();
        for pair in state.pairs.values_mut().filter(|pair| pair.creator == me) {
            pair.state = IBV_QPS_RESET;
        }
    }

    /// Returns the numbers of all queue pairs.
    pub fn pairs(&self) -> Vec<u32> {
        self.lock().pairs.keys().copied().collect()
    }

    /// Returns the attributes of all queue pairs.
    pub fn attributes(&self) -> Vec<IbvQpAttr> {
        let state = self.lock();
        state.pairs.values().map(|pair| pair.attributes).collect()
    }

    /// Returns the devices that have queue pairs, in order.
    pub fn devices_in_use(&self) -> Vec<usize> {
        let state = self.lock();
        let devices: BTreeSet<usize> = state.pairs.values().map(|pair| pair.device).collect();
        devices.into_iter().collect()
    }

    /// Returns, for each connected queue pair, the devices at its two ends.
    pub fn ends(&self) -> Vec<(usize, usize)> {
        let state = self.lock();
        let pairs = state.pairs.values();
        pairs
            .filter_map(|pair| Some((pair.device, state.pairs.get(&pair.peer)?.device)))
            .collect()
    }

    /// Returns the number of calls of `function`.
    pub fn calls(&self, function: &'static str) -> usize {
        self.lock().calls.get(function).copied().unwrap_or(0)
    }

    /// Returns a line for each kind of object that was not destroyed.
    pub fn leftovers(&self) -> Vec<String> {
        self.lock().leftovers()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
